"""Trees with one *sampled* child beside the deterministic ones, opt-in, for high temperature.

At a row with deterministic children D, one more child y is drawn from q', the draft's q restricted to the
tokens outside D and normalised. The row's draw is then coupled to y (`specplug.rejection`): y with
probability min(1, p(y) / q'(y)), else a token of the normalised positive part of p - q'. Its law is p, so the
ordinary walk applies: it descends into y, or into a deterministic child when the residual lands on one (q' is
zero on D, so D keeps all of p there). The residual never lands on a rejected y, where p(y) < q'(y). So

    P(descend) = p(D) + sum over the rest of min(p, q')

against p(D) + p(c) with one more deterministic child c: the sum gains where p is flat outside D.

What must hold, or the law is biased: whether a row is verified with its sampled child must not depend on that
child's own draw, nor on anything below it. Here the score of a sampled child is log a(parent) + log(q outside
D), the acceptance expected before y is drawn, and the nodes below never score above it. So every prefix of
the node list, and every budget ranked by scores, is admissible. Ranking sampled children by q(y) is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specplug.candidates import top_tokens
from specplug.order import by_score
from specplug.rejection import Draw, coupled, draw
from specplug.tree import DraftTree


@dataclass(frozen=True)
class HybridTree:
    """Draft trees and the S window rows of each request that have a sampled child."""

    tree: DraftTree
    rows: torch.Tensor  # [R, S] int64, window rows (0 root, j + 1 node j); any row where `live` is false
    live: torch.Tensor  # [R, S] bool
    proposal: Draw  # tokens [R, S] int64, probabilities [R, S, V]: q', all zero where not live

    def __post_init__(self) -> None:
        shapes = {
            "live": tuple(self.live.shape),
            "proposal.tokens": tuple(self.proposal.tokens.shape),
            "proposal.probabilities": tuple(self.proposal.probabilities.shape[:2]),
        }
        for name, got in shapes.items():
            if got != tuple(self.rows.shape):
                raise ValueError(f"HybridTree.{name}: expected [R, S] = {tuple(self.rows.shape)}, got {got}")

    @classmethod
    def of(cls, tree: DraftTree, vocabulary: int) -> HybridTree:
        """A tree without sampled children (S = 0)."""
        requests, device = tree.tokens.shape[0], tree.tokens.device
        none = torch.zeros(requests, 0, dtype=torch.int64, device=device)
        law = torch.zeros(requests, 0, vocabulary, device=device)
        return cls(tree, none, none.bool(), Draw(none, law))

    @property
    def sampled_rows(self) -> torch.Tensor:
        """[R, S] int64, the window rows of the sampled children; -1 where there is none, or no longer."""
        tree = self.tree
        node = torch.arange(tree.budget, device=self.rows.device)
        child = (tree.parents[:, None, :] == self.rows[:, :, None] - 1) & (node < tree.counts[:, None, None])
        child &= (tree.tokens[:, None, :] == self.proposal.tokens[:, :, None]) & self.live[:, :, None]
        row = torch.where(child, node + 1, 0).amax(2) if tree.budget else torch.zeros_like(self.rows)
        return torch.where(row > 0, row, -1)


def outside(
    probabilities: torch.Tensor,  # [..., V] fp32 or fp64, q
    taken: torch.Tensor,  # [..., V] bool, D
) -> tuple[torch.Tensor, torch.Tensor]:
    """q' [..., V], q restricted to the tokens outside D and normalised, and q's mass there [...].

    Where q has no mass outside D both are zero: nothing can be drawn.
    """
    rest = probabilities.masked_fill(taken, 0.0)
    mass = rest.sum(-1)
    return torch.where(mass[..., None] > 0, rest / mass[..., None], 0.0), mass


def expand(
    hybrid: HybridTree,
    probabilities: torch.Tensor,  # [R, T, V] fp32 or fp64, the draft's q at the rows `at`
    *,
    at: torch.Tensor,  # [R, T] int64 window rows, -1 = none
    children: int,
) -> HybridTree:
    """Give each row of ``at`` its best ``children`` further *deterministic* children.

    Fewer where q has no more mass. A row that has its sampled child already gets none (draw last), nor does a
    repeated row or one past the count. The tree grows by T * children nodes of width.
    """
    live = _may_grow(hybrid, at)
    rest = probabilities.masked_fill(_children(hybrid.tree, at, probabilities), 0.0)
    best = top_tokens(rest.float().log(), children)
    width = best.tokens.shape[2]  # no more than V
    rows, live = at.repeat_interleave(width, 1), live.repeat_interleave(width, 1)
    return _append(hybrid, rows, best.tokens.flatten(1), best.values.flatten(1), live)


def attach(
    hybrid: HybridTree,
    probabilities: torch.Tensor,  # [R, T, V] fp32 or fp64, the draft's q at the rows `at`
    *,
    at: torch.Tensor,  # [R, T] int64 window rows, -1 = none
    uniform: torch.Tensor,  # [R, T] fp64 in [0, 1)
) -> HybridTree:
    """Draw one child outside the present children at each row of ``at`` and put it into the tree.

    ``at`` must be chosen without a look at ``uniform``. A row that has its sampled child already, a row that
    stands in ``at`` twice, a row past the count, and a row whose q has no mass outside its children get none:
    their width is padding. The tree grows by T nodes and is put into score order again; for deeper nodes call
    ``expand`` and ``attach`` again with ``sampled_rows``. Memory: a few tensors of R * T * V; R * S * V stay
    for the acceptance.
    """
    live = _may_grow(hybrid, at)
    law, mass = outside(probabilities, _children(hybrid.tree, at, probabilities))
    live = live & (mass > 0)
    law = law * live[..., None]
    drawn = draw(law, uniform)
    before = hybrid.proposal
    proposal = Draw(
        torch.cat([before.tokens, drawn], 1),
        torch.cat([before.probabilities.to(law.dtype), law], 1),
    )
    slots = HybridTree(
        hybrid.tree,
        rows=torch.cat([hybrid.rows, at.clamp_min(0)], 1),
        live=torch.cat([hybrid.live, live], 1),
        proposal=proposal,
    )
    return _append(slots, at, drawn, mass.float().log().clamp_max(0), live)


def couple(
    hybrid: HybridTree,
    sampled: torch.Tensor,  # [R, W] int64, the target's own draw at every window row
    target: torch.Tensor,  # [R, W, V] fp32 or fp64, p at every window row
    *,
    accept_uniform: torch.Tensor,  # [R, S] fp64 in [0, 1)
    residual_uniform: torch.Tensor,  # [R, S] fp64 in [0, 1)
) -> torch.Tensor:
    """The draws to walk with, [R, W] int64: coupled at rows with a sampled child, the target's elsewhere.

    Also right for a shorter prefix of the tree: keep every row's coupling, walk with the smaller count.
    """
    index = hybrid.rows[..., None].expand(-1, -1, target.shape[2])
    drawn = coupled(
        target.gather(1, index),
        hybrid.proposal,
        accept_uniform=accept_uniform,
        residual_uniform=residual_uniform,
    )
    # Dead slots name some row too and must not write there: they go to a column of their own.
    spare = sampled.shape[1]
    wide = torch.nn.functional.pad(sampled, (0, 1))
    return wide.scatter(1, torch.where(hybrid.live, hybrid.rows, spare), drawn)[:, :spare]


def _may_grow(
    hybrid: HybridTree,
    at: torch.Tensor,  # [R, T] int64
) -> torch.Tensor:
    """[R, T] bool: rows that exist, have no sampled child, and do not stand further left in ``at``."""
    earlier = torch.ones(at.shape[1], at.shape[1], dtype=torch.bool, device=at.device).tril(-1)
    repeated = ((at[:, :, None] == at[:, None, :]) & earlier).any(2)
    served = ((at[:, :, None] == hybrid.rows[:, None, :]) & hybrid.live[:, None, :]).any(2)
    return (at >= 0) & (at <= hybrid.tree.counts[:, None]) & ~repeated & ~served


def _children(
    tree: DraftTree,
    at: torch.Tensor,  # [R, T] int64
    probabilities: torch.Tensor,  # [R, T, V], for its shape
) -> torch.Tensor:
    """[R, T, V] bool: tokens that are children of each row."""
    node = torch.arange(tree.budget, device=at.device)
    child = (tree.parents[:, None, :] == at[:, :, None] - 1) & (node < tree.counts[:, None, None])
    taken = torch.zeros(probabilities.shape, dtype=torch.int32, device=at.device)
    return taken.scatter_add(2, tree.tokens[:, None, :].expand_as(child), child.int()) > 0


def _append(
    hybrid: HybridTree,
    at: torch.Tensor,  # [R, T] int64 window rows
    tokens: torch.Tensor,  # [R, T] int64
    gains: torch.Tensor,  # [R, T] fp32 <= 0, log a(node) - log a(parent)
    live: torch.Tensor,  # [R, T] bool
) -> HybridTree:
    """The tree with T nodes more, in score order, and the slots at their new rows."""
    tree, row = hybrid.tree, at.clamp(0, hybrid.tree.budget)
    scores = torch.nn.functional.pad(tree.scores, (1, 0)).gather(1, row)
    scores = torch.where(live, scores + gains, float("-inf"))
    depths = torch.nn.functional.pad(tree.depths, (1, 0)).gather(1, row) + 1
    wide = DraftTree(
        tokens=torch.cat([tree.tokens, tokens], 1),
        parents=torch.cat([tree.parents, (row - 1).int()], 1),
        depths=torch.cat([tree.depths, depths], 1),
        scores=torch.cat([tree.scores, scores], 1),
        counts=torch.full_like(tree.counts, tree.budget + at.shape[1]),  # padding scores -inf and drops out
    )
    moved = by_score(wide, wide.scores)
    place = torch.nn.functional.pad(moved.place + 1, (1, 0))  # new window row of each old one; the root stays
    return HybridTree(moved.tree, place.gather(1, hybrid.rows), hybrid.live, hybrid.proposal)
