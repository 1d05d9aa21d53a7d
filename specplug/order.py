"""Node order of trees: sibling ranks, and the order after scores have changed.

Budgets cut trees to a prefix of their node list, so the list has to stand in score order. Whoever changes
scores (calibration) or adds nodes (sampled children) sorts again here. A child must not score above its
parent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specplug.tree import PADDING, DraftTree


class Reordered(NamedTuple):
    """A tree in its new order."""

    tree: DraftTree
    order: torch.Tensor  # [R, B] int64, old node at each new place
    place: torch.Tensor  # [R, B] int64, new place of each old node


def by_score(
    tree: DraftTree,
    scores: torch.Tensor,  # [R, B] fp32, log a(v), no child above its parent; -inf drops the node
) -> Reordered:
    """The same trees with new scores, nodes by (score descending, old place).

    Parents stay before their children. Nodes that score -inf or NaN and padding become padding. A dropped
    node's children must be dropped too.
    """
    budget = tree.budget
    node = torch.arange(budget, device=tree.tokens.device)
    live = (node < tree.counts[:, None]) & (scores > float("-inf"))
    scores = torch.where(live, scores, float("-inf"))
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(1, order, node.expand_as(order))
    live = live.gather(1, order)
    parents = tree.parents.gather(1, order).long()
    moved = place.gather(1, parents.clamp_min(0)) if budget else parents
    parents = torch.where(parents >= 0, moved, -1).int()
    return Reordered(
        DraftTree(
            tokens=torch.where(live, tree.tokens.gather(1, order), PADDING["tokens"]),
            parents=torch.where(live, parents, PADDING["parents"]),
            depths=torch.where(live, tree.depths.gather(1, order), PADDING["depths"]),
            scores=scores.float(),
            counts=live.sum(1, dtype=torch.int32),
        ),
        order,
        place,
    )


def sibling_ranks(tree: DraftTree) -> torch.Tensor:
    """How many siblings stand before each node, [R, B] int64; 0 for padding.

    In a tree grown best first this is the node's rank among its parent's children. Memory: R * B^2 bytes.
    """
    node = torch.arange(tree.budget, device=tree.tokens.device)
    live = node < tree.counts[:, None]
    same = tree.parents[:, :, None] == tree.parents[:, None, :]
    before = node < node[:, None]
    return torch.where(live, (same & before & live[:, None, :]).sum(2), 0)
