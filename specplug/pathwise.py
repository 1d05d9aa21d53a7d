"""Trees of drafts whose bias depends on the whole path (rnn Markov heads): the state travels with the node.

A transition table has one row a parent *token*; here the same token on two paths has two states, so a row is
a parent *node*. Going down depth by depth the B best nodes so far are kept, in the order of specplug.ddtree:
(path cost, lexicographically smaller rank path, a prefix before its extension), path costs being exact
integer sums. Any of the final B best prefixes is among them at its depth, and so is its parent, so only nodes
that were kept at the depth above need a state and children: R x B states of r floats, R x B x C scores.

Candidates of a depth are the C best of the logits mixed over those nodes, by the reach of each, and every
node scores them with its own bias and a corrected normaliser (specplug.markov). C = V_draft is exact and
gives the nodes of ``grow_pathwise_reference``, the published heap over the full vocabulary.

Vanilla and gated heads work here too and give the tree of their table up to the mixture: the table mixes over
all candidates above, this over the nodes kept.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import torch

from specplug.candidates import DEAD, FRACTION_BITS, STEP_NATS, step_costs
from specplug.heads import MarkovHead
from specplug.markov import check_inputs, score_candidates
from specplug.tree import DraftTree
from specplug.vocabulary import DraftVocabulary

TOKEN_BITS = 22  # ids below 2^22, as in TransitionTable: (cost, id) then fits int64


class _Pool(NamedTuple):
    """The best nodes so far, in order; dead ones last. Before the first depth: the root alone."""

    cost: torch.Tensor  # [R, N] int64 path cost; the dead cost where there is no node
    place: torch.Tensor  # [R, N] int64 place in lexicographic order of rank paths
    fresh: torch.Tensor  # [R, N] bool, born at the depth above: may have children
    token: torch.Tensor  # [R, N] int64 target id
    depth: torch.Tensor  # [R, N] int64, 1..gamma
    name: torch.Tensor  # [R, N] int64, unique for good
    parent: torch.Tensor  # [R, N] int64 name of the parent; -1 = root
    state: torch.Tensor | None  # [R, N, r] fp32, the head's state *before* the node's own token


def grow_pathwise(
    logits: torch.Tensor,  # [R, gamma, V_draft] any float dtype, without the bias
    head: MarkovHead,
    anchors: torch.Tensor,  # [R] int64, last committed token, target vocabulary
    budget: int,
    *,
    candidates: int,
    hidden: torch.Tensor | None = None,  # [R, gamma, H], what the logits were made from
    vocabulary: DraftVocabulary | None = None,  # None: draft ids are target ids
) -> DraftTree:
    """Best trees of ``budget`` nodes (root not counted) under path-dependent scores: fields [R, budget].

    Fixed shapes, nothing is read on the host, the loop is over depth. A depth whose logits hold a NaN has no
    node, nor has any below it. Raises ValueError for a negative budget, shapes that do not belong together
    and sizes beyond what the int64 keys hold.
    """
    check_inputs(logits, head, anchors, hidden=hidden, vocabulary=vocabulary)
    if budget < 0:
        raise ValueError(f"budget: expected 0 or more nodes, got {budget}")
    requests, gamma, vocab = logits.shape
    candidates = min(candidates, vocab)
    if not budget or not gamma or not candidates:
        return DraftTree.empty(requests, budget, logits.device)
    rank_bits = candidates.bit_length()
    order_bits = rank_bits + (budget - 1).bit_length()
    dead = (gamma * STEP_NATS << FRACTION_BITS) + 1
    if dead << order_bits >= 1 << 63:
        raise ValueError(
            f"budget {budget} with {candidates} candidates and depth {gamma}: expected depth * budget * "
            "candidates below 2^28, got more; lower the budget or the candidates"
        )
    pool = _root(anchors)
    for depth in range(gamma):
        at_depth = None if hidden is None else hidden[:, depth, None]
        step = head.step(pool.token, at_depth, pool.state)
        reach = (pool.cost.double() * -(0.5**FRACTION_BITS)).float()
        reach = reach.masked_fill(~pool.fresh, float("-inf"))
        chosen, log_probs = score_candidates(logits[:, depth].float(), step.latent, reach, head, candidates)
        targets = chosen if vocabulary is None else vocabulary.to_target(chosen)
        steps = step_costs(log_probs.clamp_max(0.0)).masked_fill(~pool.fresh[:, :, None], DEAD)
        columns = ((steps << TOKEN_BITS) + targets[:, None]).argsort(-1)  # [R, N, C] children by rank
        steps = steps.gather(2, columns)
        children = torch.where(steps < DEAD, steps + pool.cost[:, :, None], dead)
        rank = torch.arange(1, candidates + 1, device=logits.device)
        keys = (children << order_bits) + (pool.place[:, :, None] << rank_bits) + rank
        keys = keys.flatten(1)
        if depth:  # the root is no node
            own = (pool.cost.clamp_max(dead) << order_bits) + (pool.place << rank_bits)
            keys = torch.cat((own, keys), 1)
        keys = torch.nn.functional.pad(keys, (0, max(0, budget - keys.shape[1])), value=dead << order_bits)
        best = keys.topk(budget, largest=False).values
        pool = _select(pool, best, order_bits, rank_bits, columns, targets, step.state, depth, dead)
    return _tree(pool, gamma, dead)


def _root(anchors: torch.Tensor) -> _Pool:
    zero = torch.zeros(anchors.shape[0], 1, dtype=torch.int64, device=anchors.device)
    return _Pool(
        cost=zero, place=zero, fresh=zero == 0, token=anchors.long()[:, None], depth=zero, name=zero - 1,
        parent=zero - 1, state=None,
    )  # fmt: skip


def _select(
    pool: _Pool,
    best: torch.Tensor,  # [R, B] int64 keys: path cost | place of node or parent | rank + 1, 0 = node itself
    order_bits: int,
    rank_bits: int,
    columns: torch.Tensor,  # [R, N, C] int64 column of each parent's child by rank
    targets: torch.Tensor,  # [R, C] int64 target id of each column
    state: torch.Tensor | None,  # [R, N, r] fp32 after each pool node's token
    depth: int,
    dead: int,
) -> _Pool:
    """The pool one depth further down."""
    budget = best.shape[1]
    cost = best >> order_bits
    order = best & ((1 << order_bits) - 1)
    at_place = pool.place.argsort(1)
    source = at_place.gather(1, (order >> rank_bits).clamp_max(at_place.shape[1] - 1))  # pool node or parent
    digit = order & ((1 << rank_bits) - 1)
    born = (digit > 0) & (cost < dead)
    width = columns.shape[2]
    column = columns.flatten(1).gather(1, source * width + (digit - 1).clamp_min(0))
    slot = torch.arange(budget, device=best.device).expand_as(best)
    lexicographic = order.argsort(dim=1, stable=True)
    return _Pool(
        cost=cost,
        place=torch.empty_like(slot).scatter(1, lexicographic, slot),
        fresh=born,
        token=torch.where(born, targets.gather(1, column), pool.token.gather(1, source)),
        depth=torch.where(born, depth + 1, pool.depth.gather(1, source)),
        name=torch.where(born, depth * budget + slot, pool.name.gather(1, source)),
        parent=torch.where(born, pool.name.gather(1, source), pool.parent.gather(1, source)),
        state=None if state is None else state.gather(1, source[:, :, None].expand(-1, -1, state.shape[2])),
    )


def _tree(pool: _Pool, gamma: int, dead: int) -> DraftTree:
    requests, budget = pool.cost.shape
    live = pool.cost < dead
    slot = torch.arange(budget, device=live.device).expand(requests, -1)
    position = torch.zeros(requests, gamma * budget + 1, dtype=torch.int64, device=live.device)
    position.scatter_(1, torch.where(live, pool.name, gamma * budget), slot)
    parent = position.gather(1, pool.parent.clamp_min(0))
    scores = (pool.cost.double() * -(0.5**FRACTION_BITS)).float()
    return DraftTree(
        tokens=torch.where(live, pool.token, 0),
        parents=torch.where(live & (pool.depth > 1), parent, -1).int(),
        depths=torch.where(live, pool.depth, 0).int(),
        scores=torch.where(live, scores, float("-inf")),
        counts=live.sum(1, dtype=torch.int32),
    )


def grow_pathwise_reference(
    logits: torch.Tensor,  # [R, gamma, V_draft]
    head: MarkovHead,
    anchors: torch.Tensor,  # [R] int64
    budget: int,
    *,
    hidden: torch.Tensor | None = None,  # [R, gamma, H]
    vocabulary: DraftVocabulary | None = None,
) -> DraftTree:
    """The published heap over the full vocabulary, one softmax a node; on the host, tiny sizes only."""
    requests, _, vocab = logits.shape
    targets = list(range(vocab)) if vocabulary is None else vocabulary.targets.tolist()
    trees = []
    for r in range(requests):
        rows = None if hidden is None else hidden[r]
        trees.append(_heap(logits[r], head, int(anchors[r]), budget, rows, targets))
    filled = [nodes + [(0, -1, 0, float("-inf"))] * (budget - len(nodes)) for nodes in trees]
    columns = [[[node[i] for node in tree] for tree in filled] for i in range(4)]
    return DraftTree(
        tokens=torch.tensor(columns[0], dtype=torch.int64).view(requests, budget),
        parents=torch.tensor(columns[1], dtype=torch.int32).view(requests, budget),
        depths=torch.tensor(columns[2], dtype=torch.int32).view(requests, budget),
        scores=torch.tensor(columns[3], dtype=torch.float32).view(requests, budget),
        counts=torch.tensor([len(nodes) for nodes in trees], dtype=torch.int32),
    )


def _heap(
    logits: torch.Tensor,  # [gamma, V_draft]
    head: MarkovHead,
    anchor: int,
    budget: int,
    hidden: torch.Tensor | None,  # [gamma, H]
    targets: list[int],  # of each draft id
) -> list[tuple[int, int, int, float]]:
    """One request's nodes in order: (token, parent, depth, score)."""
    gamma = logits.shape[0]
    # A family is one parent's (cost, ranked children, state); the heap: (cost, rank path, parent, family).
    families: list[tuple[int, list[tuple[int, int]], torch.Tensor | None]] = []
    heap: list[tuple[int, tuple[int, ...], int, int]] = []
    nodes: list[tuple[int, int, int, float]] = []

    def children(cost: int, depth: int, token: int, state: torch.Tensor | None) -> int:
        at_depth = None if hidden is None else hidden[depth]
        latent, after = head.step(torch.tensor(token), at_depth, state)
        biased = logits[depth].float() + head.scale * (head.w2.float() @ latent)
        ranked = sorted(
            (round(min(max(-p, 0.0), STEP_NATS) * 2**FRACTION_BITS), target)
            for p, target in zip(torch.log_softmax(biased, -1).tolist(), targets, strict=True)
            if p > float("-inf")
        )
        families.append((cost, ranked, after))
        return len(families) - 1

    offers: list[tuple[tuple[int, ...], int, int]] = []
    if gamma and budget:
        offers.append(((0,), -1, children(0, 0, anchor, None)))
    while len(nodes) < budget:
        for path, parent, family in offers:
            base, ranked, _ = families[family]
            if path[-1] < len(ranked):
                heapq.heappush(heap, (base + ranked[path[-1]][0], path, parent, family))
        if not heap:
            break
        cost, path, parent, family = heapq.heappop(heap)
        _, ranked, state = families[family]
        token = ranked[path[-1]][1]
        nodes.append((token, parent, len(path), -cost / 2**FRACTION_BITS))
        offers = [((*path[:-1], path[-1] + 1), parent, family)]
        if len(path) < gamma:
            offers.append(((*path, 0), len(nodes) - 1, children(cost, len(path), token, state)))
    return nodes
