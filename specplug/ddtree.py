"""DDTree: the B most probable prefixes of a block draft, for a whole batch at once.

A step costs ``round(-log_prob * 2^28)``, at most 64 nats, and a path the exact integer sum: unlike a sum of
floats it does not depend on the order of adding, so ties are ties everywhere. A node is a rank path: rank r
is the (r + 1)-th best child of its parent, by (cost, token id). Nodes are taken by (path cost,
lexicographically smaller rank path first, a prefix before its extension). So a parent precedes its children,
and the best-n tree is the first n nodes of the best-(n + 1) tree. -inf and NaN entries never become nodes.
``grow_reference`` is the published heap; ``grow`` gives the same nodes without a loop over nodes.

How ``grow`` works. Going down depth by depth it keeps the best B nodes so far, in order: any of the final B
is among them, and so is its parent. Children enter through one ``topk`` over int64 keys

    path cost | place of the parent in lexicographic order | digit: which child, or 0 for a node there already

which has no ties among live nodes and holds the whole order, as digits order siblings of equal cost. Chosen
siblings therefore come out by rank, and a node before its children, so (place of the parent, position) is the
lexicographic order of the next depth.

Under a Markov head the children of a parent are not ranked at all: a digit counts the depth's tokens by id,
which is how siblings of equal cost are ranked, and all B C pairs of node and token are compared. Sorting the
gamma C rows of the table would cost more than that. Without a head every node has the same children, sorted
once; then a digit is a rank + 1, and the j-th of the deepest nodes needs its child of rank r only if
(j + 1) (r + 2) <= B, since all nodes (j' <= j) and children (j' <= j, r' <= r) come no later: about B ln B
pairs a depth.

Shapes depend on (R, gamma, P, C, B) alone and nothing is read on the host; the pair lists are made once a
shape and device. Memory: one int64 copy of the table, and R B (C + 1) keys (R B (2 + ln B) without a head).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from typing import NamedTuple

import torch

from specplug.candidates import (
    DEAD,
    FRACTION_BITS,
    STEP_NATS,
    TransitionTable,
    step_costs,
    tree_candidates,
)
from specplug.tree import DraftTree

KEY_LIMIT = 1 << 62  # the sum of two keys fits int64
TOKEN_ID_BITS = 22  # ids of a TransitionTable


def build_tree(
    log_probs: torch.Tensor,  # [R, gamma, V] fp32, log q of each depth (<= 0)
    budget: int,
) -> DraftTree:
    """Best trees of ``budget`` nodes (root not counted) over independent depths: fields [R, budget].

    Budget 0 and gamma 0 give the root alone. Positive entries count as 0. Raises ValueError for a negative
    budget, a dtype other than fp32, and sizes beyond what the int64 keys hold.
    """
    _check_budget(budget)
    if log_probs.dtype != torch.float32:
        raise ValueError(f"log_probs: expected float32, got {log_probs.dtype}; convert with .float()")
    if not budget or not log_probs.numel():
        return DraftTree.empty(log_probs.shape[0], budget, log_probs.device)
    tokens, costs = tree_candidates(log_probs, budget)
    return _grow_independent(tokens, costs, budget)


def grow(table: TransitionTable, budget: int) -> DraftTree:
    """Best trees of ``budget`` nodes (root not counted) over a transition table: fields [R, budget].

    Raises ValueError for a negative budget, or where gamma, budget and candidates together leave the keys too
    few bits.
    """
    _check_budget(budget)
    _check_rows(table)
    if not budget or not table.tokens.numel():
        return DraftTree.empty(table.tokens.shape[0], budget, table.tokens.device)
    if table.log_probs.shape[2] > 1:
        return _grow_conditioned(table, budget)
    costs = step_costs(table.log_probs[:, :, 0])
    columns = _sibling_keys(costs, table.tokens).argsort(-1)
    return _grow_independent(table.tokens.gather(2, columns), costs.gather(2, columns), budget)


def greedy_chain(table: TransitionTable) -> DraftTree:
    """The chain of best children: fields [R, gamma], parents i - 1, ended where no live child follows."""
    requests, gamma, width = table.tokens.shape
    _check_rows(table)
    if not gamma or not width:
        return DraftTree.empty(requests, gamma, table.tokens.device)
    # Best child of each parent, [R, gamma, P].
    keys, columns = _sibling_keys(step_costs(table.log_probs), table.tokens[:, :, None]).min(-1)
    costs = keys >> TOKEN_ID_BITS
    row = torch.zeros(requests, 1, dtype=torch.int64, device=costs.device)
    steps, chosen = [], []
    for depth in range(gamma):
        steps.append(costs[:, depth].gather(1, row))
        chosen.append(columns[:, depth].gather(1, row))
        row = chosen[-1] if costs.shape[2] > 1 else row
    cost, column = torch.cat(steps, 1), torch.cat(chosen, 1)
    live = (cost < DEAD).cumprod(1).bool()
    node = torch.arange(gamma, device=cost.device).expand(requests, -1)
    return DraftTree(
        tokens=torch.where(live, table.tokens.gather(2, column[:, :, None])[:, :, 0], 0),
        parents=torch.where(live, node - 1, -1).int(),
        depths=torch.where(live, node + 1, 0).int(),
        scores=_scores(cost.cumsum(1), live),
        counts=live.sum(1, dtype=torch.int32),
    )


class _Births(NamedTuple):
    """What was born at each depth, a [R, B] int64 tensor a depth. Node name: depth * B + birth position."""

    parent_names: list[torch.Tensor]
    digits: list[torch.Tensor]  # of a node born here; 0: an older node, or none


# (keys [R, B] of the nodes, their digits [R, B], depth) -> keys [R, >= B] of the nodes and their children.
_Extend = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def _grow_independent(
    tokens: torch.Tensor,  # [R, gamma, C] int64 by rank
    costs: torch.Tensor,  # [R, gamma, C] int64 step costs by rank, DEAD = no such child
    budget: int,
) -> DraftTree:
    requests, gamma, width = costs.shape
    device = costs.device
    ranks = min(width, budget)
    digit_bits, lex_bits = _key_bits(gamma, budget, ranks)
    dead = _dead_key(lex_bits)
    steps = torch.where(costs < DEAD, (costs << lex_bits) + torch.arange(1, width + 1, device=device), dead)
    pair_slot, pair_rank = _pairs(budget, ranks, device)
    no_keys = torch.full((requests, budget + 1), dead, device=device)

    def extend(keys: torch.Tensor, digits: torch.Tensor, depth: int) -> torch.Tensor:
        fresh = digits > 0
        # The j-th of the deepest nodes goes to slot j + 1; slot 0 is never read.
        parents = no_keys.scatter(1, fresh.cumsum(1) * fresh, keys)
        children = parents.index_select(1, pair_slot) + steps[:, depth].index_select(1, pair_rank)
        return torch.cat((keys, children), 1)

    return _grow(tokens, steps[:, 0, :ranks], extend, budget, digit_bits, lex_bits)


def _grow_conditioned(table: TransitionTable, budget: int) -> DraftTree:
    requests, gamma, width = table.tokens.shape
    device = table.tokens.device
    digit_bits, lex_bits = _key_bits(gamma, budget, width)
    # Column 0 is the node itself, digit 0; row 0 belongs to nodes of other depths, which have no children.
    pad = torch.nn.functional.pad
    tokens, columns = pad(table.tokens, (1, 0), value=-1).sort(-1)  # by digit
    digit = torch.arange(width + 1, device=device).expand_as(columns)
    digit_of = torch.empty_like(columns).scatter_(2, columns, digit)
    steps = step_costs(pad(table.log_probs, (1, 0, 1, 0), value=float("-inf")), KEY_LIMIT >> lex_bits)
    steps[..., 0] = 0
    steps.bitwise_left_shift_(lex_bits).add_(digit_of[:, :, None])
    rows = steps.flatten(0, 2)
    first = torch.arange(requests * gamma, device=device).view(requests, gamma, 1) + 1
    row_of = first * (width + 1) + columns  # row of a digit's children, at the depth below

    def extend(keys: torch.Tensor, digits: torch.Tensor, depth: int) -> torch.Tensor:
        row = row_of[:, depth - 1].gather(1, digits)
        children = rows.index_select(0, row.flatten()).view(requests, -1, width + 1)
        return children.add_(keys[:, :, None]).flatten(1)

    root = steps[:, 0, 1, 1:].topk(min(width, budget), largest=False).values
    return _grow(tokens[:, :, 1:], root, extend, budget, digit_bits, lex_bits)


def _grow(
    tokens: torch.Tensor,  # [R, gamma, C] int64 by digit - 1
    root: torch.Tensor,  # [R, <= B] int64 keys of the root's best children, sorted
    extend: _Extend,
    budget: int,
    digit_bits: int,
    lex_bits: int,
) -> DraftTree:
    requests, gamma, _ = tokens.shape
    dead = _dead_key(lex_bits)
    node = torch.arange(budget, device=tokens.device).expand(requests, -1)
    places = node << digit_bits
    keys = torch.nn.functional.pad(root, (0, budget - root.shape[1]), value=dead).clamp_max(dead)
    digits = keys & ((1 << digit_bits) - 1)
    names, order, place = node, node, places  # the root's children stand in lexicographic order too
    births = _Births([node], [digits])
    for depth in range(1, gamma):
        keys = (keys & (-1 << lex_bits)) + place
        keys = extend(keys, digits, depth).topk(budget, largest=False).values.clamp_max(dead)
        lex = keys & ((1 << lex_bits) - 1)
        digits = lex & ((1 << digit_bits) - 1)
        above = lex >> digit_bits  # place of the parent, or an older node's own
        parent_names = names.gather(1, order.gather(1, above))
        births.parent_names.append(parent_names)
        births.digits.append(digits)
        names = torch.where(digits > 0, node + depth * budget, parent_names)
        order = torch.add(node, above, alpha=budget).argsort(1)
        place = places.scatter(1, order, places)
    return _collect(tokens, births, names, torch.where(keys < dead, keys >> lex_bits, DEAD * gamma))


def _collect(
    tokens: torch.Tensor,  # [R, gamma, C] int64 by digit - 1
    births: _Births,
    names: torch.Tensor,  # [R, B] int64, the chosen nodes in final order
    costs: torch.Tensor,  # [R, B] int64 path costs, DEAD * gamma past the last live node
) -> DraftTree:
    requests, gamma, width = tokens.shape
    budget = names.shape[1]
    live = costs < DEAD * gamma
    node = torch.arange(budget, device=names.device).expand(requests, -1)
    position = torch.zeros(requests, gamma * budget + 1, dtype=torch.int64, device=names.device)
    position.scatter_(1, torch.where(live, names, gamma * budget), node)
    parent = position.gather(1, torch.cat(births.parent_names, 1).gather(1, names))
    depth = names // budget
    column = (torch.cat(births.digits, 1).gather(1, names) - 1).clamp_min(0)
    token = tokens.flatten(1).gather(1, depth * width + column)
    return DraftTree(
        tokens=torch.where(live, token, 0),
        parents=torch.where(live & (depth > 0), parent, -1).int(),
        depths=torch.where(live, depth + 1, 0).int(),
        scores=_scores(costs, live),
        counts=live.sum(1, dtype=torch.int32),
    )


def _check_budget(budget: int) -> None:
    if budget < 0:
        raise ValueError(f"budget: expected 0 or more nodes, got {budget}")


def _scores(costs: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """fp32 log-probabilities of integer path costs; rounding is monotone, so the order holds."""
    scores = (costs.double() * -(0.5**FRACTION_BITS)).float()
    return torch.where(live, scores, float("-inf"))


def _check_rows(table: TransitionTable) -> None:
    if table.log_probs.shape[2] not in (1, table.tokens.shape[2]):
        raise ValueError(
            f"TransitionTable.log_probs: expected [R, gamma, P, C] with P = 1 or C, "
            f"got {tuple(table.log_probs.shape)}"
        )


def _sibling_keys(costs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int64 keys that sort children of one parent by (cost, token id)."""
    return (costs << TOKEN_ID_BITS) + tokens  # DEAD << 22 is 2^62


def _key_bits(gamma: int, budget: int, digits: int) -> tuple[int, int]:
    """Bits of a digit, and of (place, digit) together. ValueError where path costs do not fit above."""
    digit_bits = digits.bit_length()
    lex_bits = digit_bits + (budget - 1).bit_length()
    if (gamma * STEP_NATS << FRACTION_BITS + lex_bits) >= KEY_LIMIT - (1 << lex_bits):
        raise ValueError(
            f"budget {budget} with {digits} candidates and depth {gamma}: expected "
            f"depth * budget * candidates below 2^28, got more; lower the budget or the candidates"
        )
    return digit_bits, lex_bits


def _dead_key(lex_bits: int) -> int:
    """Key of what must never become a node; larger ones are clamped to it."""
    return (KEY_LIMIT - 1) >> lex_bits << lex_bits


@functools.cache
def _pairs(budget: int, ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot of the parent, rank of the child) of every pair that can still be among the best B."""
    pairs = [(j + 1, r) for j in range(budget) for r in range(ranks) if (j + 1) * (r + 2) <= budget]
    index = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
    return index[:, 0].contiguous(), index[:, 1].contiguous()


def build_tree_reference(
    log_probs: torch.Tensor,  # [R, gamma, V] fp32
    budget: int,
) -> DraftTree:
    """``build_tree`` by a stable sort of the whole vocabulary and the heap; on the host."""
    log_probs = log_probs.cpu()
    costs = (log_probs * -(2.0**FRACTION_BITS)).round().clamp(0, STEP_NATS * 2.0**FRACTION_BITS)
    costs[~(log_probs > float("-inf"))] = float("inf")
    tokens = costs.sort(dim=-1, stable=True).indices[..., :budget]
    return grow_reference(TransitionTable(tokens, log_probs.gather(-1, tokens)[:, :, None]), budget)


def grow_reference(table: TransitionTable, budget: int) -> DraftTree:
    """``grow`` as published: a heap a request; a pop emits a node, offers its sibling and its first child."""
    gamma, conditioned = table.tokens.shape[1], table.log_probs.shape[2] > 1
    trees, counts = [], []
    for tokens, log_probs in zip(table.tokens.tolist(), table.log_probs.tolist(), strict=True):
        # Children of (depth, table row) as (step cost, token, column); heap of (cost, rank path, parent, its
        # cost, table row); nodes as (token, parent, depth, score).
        ranked: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        heap: list[tuple[int, tuple[int, ...], int, int, int]] = []
        offers: list[tuple[tuple[int, ...], int, int, int]] = [((0,), -1, 0, 0)] if gamma else []
        nodes: list[tuple[int, int, int, float]] = []
        while len(nodes) < budget:
            for path, parent, parent_cost, row in offers:
                depth, rank = len(path) - 1, path[-1]
                if (depth, row) not in ranked:
                    children = enumerate(zip(log_probs[depth][row], tokens[depth], strict=True))
                    ranked[depth, row] = sorted(
                        (round(min(max(-p, 0.0), STEP_NATS) * 2**FRACTION_BITS), token, column)
                        for column, (p, token) in children
                        if p > float("-inf")
                    )
                if rank < len(ranked[depth, row]):
                    cost = parent_cost + ranked[depth, row][rank][0]
                    heapq.heappush(heap, (cost, path, parent, parent_cost, row))
            if not heap:
                break
            cost, path, parent, parent_cost, row = heapq.heappop(heap)
            _, token, column = ranked[len(path) - 1, row][path[-1]]
            nodes.append((token, parent, len(path), -cost / 2**FRACTION_BITS))
            offers = [((*path[:-1], path[-1] + 1), parent, parent_cost, row)]
            if len(path) < gamma:
                offers.append(((*path, 0), len(nodes) - 1, cost, column if conditioned else 0))
        trees.append(nodes + [(0, -1, 0, float("-inf"))] * (budget - len(nodes)))
        counts.append(len(nodes))
    columns = [[[node[i] for node in tree] for tree in trees] for i in range(4)]
    shape = (len(trees), budget)
    return DraftTree(
        tokens=torch.tensor(columns[0], dtype=torch.int64).view(shape),
        parents=torch.tensor(columns[1], dtype=torch.int32).view(shape),
        depths=torch.tensor(columns[2], dtype=torch.int32).view(shape),
        scores=torch.tensor(columns[3], dtype=torch.float32).view(shape),
        counts=torch.tensor(counts, dtype=torch.int32),
    )
