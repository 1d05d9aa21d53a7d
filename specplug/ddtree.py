"""DDTree: the B most probable prefixes of a block draft, for a whole batch at once.

A step costs ``round(-log_prob * 2^28)``, at most 64 nats, and a path the exact integer sum: unlike a sum of
floats it does not depend on the order of adding, so ties are ties everywhere. A node is a rank path: rank r
is the (r + 1)-th best child of its parent, by (cost, token id). Nodes are taken by (path cost,
lexicographically smaller rank path first, a prefix before its extension). So a parent precedes its children,
and the best-n tree is the first n nodes of the best-(n + 1) tree. -inf and NaN entries never become nodes.
``grow_reference`` is the published heap; ``grow`` gives the same nodes without a loop over nodes.

How ``grow`` works. Going down depth by depth it keeps the best B nodes so far, in order: any of the final B
is among them, and so is its parent. Children enter through one ``topk`` over int64 keys

    path cost | place of the parent in lexicographic order | rank + 1, or 0 for a node that was there already

which has no ties among live nodes and holds the whole order. The j-th of the deepest nodes needs its child of
rank r only if (j + 1) + (r + 1) <= B, and without a Markov head only if (j + 1) (r + 2) <= B, since all nodes
(j' <= j) and children (j' <= j, r' <= r) come no later: about B ln B pairs a depth. Shapes depend on (R,
gamma, P, C, B) alone and nothing is read on the host; the pair lists are made once a shape and device.
"""

from __future__ import annotations

import functools
import heapq
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
    return _grow(tokens, costs[:, :, None], None, budget)


def grow(table: TransitionTable, budget: int) -> DraftTree:
    """Best trees of ``budget`` nodes (root not counted) over a transition table: fields [R, budget].

    Raises ValueError for a negative budget, or where gamma, budget and candidates together leave the keys too
    few bits.
    """
    _check_budget(budget)
    costs, columns = _rank_children(table)
    return _grow(table.tokens, costs, columns, budget)


def greedy_chain(table: TransitionTable) -> DraftTree:
    """The chain of best children: fields [R, gamma], parents i - 1, ended where no live child follows."""
    requests, gamma, width = table.tokens.shape
    if not width:
        return DraftTree.empty(requests, gamma, table.tokens.device)
    costs, columns = (x[..., 0] for x in _rank_children(table))  # [R, gamma, P]: best child of each parent
    row = torch.zeros(requests, 1, dtype=torch.int64, device=costs.device)
    steps, chosen = [], []
    for depth in range(gamma):
        steps.append(costs[:, depth].gather(1, row))
        chosen.append(columns[:, depth].gather(1, row))
        row = chosen[-1] if costs.shape[2] > 1 else row
    if not gamma:
        return DraftTree.empty(requests, 0, table.tokens.device)
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
    digits: list[torch.Tensor]  # rank + 1 of a node born here; 0: an older node, or none
    rows: list[torch.Tensor]  # row of the parent in the transition table


def _grow(
    tokens: torch.Tensor,  # [R, gamma, C] int64
    costs: torch.Tensor,  # [R, gamma, P, C] int64 step costs by rank, DEAD = no such child
    columns: torch.Tensor | None,  # [R, gamma, P, C] int64, column in `tokens` by rank; None: the rank itself
    budget: int,
) -> DraftTree:
    requests, gamma, parent_rows, width = costs.shape
    device = costs.device
    ranks = min(width, budget)
    if not gamma or not ranks:
        return DraftTree.empty(requests, budget, device)
    rank_bits, lex_bits = _key_bits(gamma, budget, ranks)
    dead = (KEY_LIMIT - 1) >> lex_bits << lex_bits
    steps = torch.where(costs < DEAD, (costs << lex_bits) + torch.arange(1, width + 1, device=device), dead)
    pair_slot, pair_rank = _pairs(budget, ranks, parent_rows > 1, device)
    node = torch.arange(budget, device=device).expand(requests, -1)
    places = node << rank_bits
    no_rows = torch.zeros(requests, budget + 1, dtype=torch.int64, device=device)
    no_keys = no_rows + dead

    # The root's children come sorted, in lexicographic order too.
    keys = torch.nn.functional.pad(steps[:, 0, 0, :ranks], (0, budget - ranks), value=dead)
    names, order, place = node, node, places
    births = _Births([node], [torch.where(keys < dead, node + 1, 0)], [torch.zeros_like(node)])
    for depth in range(1, gamma):
        digit, row = births.digits[-1], births.rows[-1]
        keys = (keys >> lex_bits << lex_bits) + place
        fresh = digit > 0
        # The j-th of the deepest nodes goes to slot j + 1; slot 0 is never read.
        slot = fresh.cumsum(1) * fresh
        parent_keys = no_keys.scatter(1, slot, keys)
        if columns is None or parent_rows == 1:
            step = steps[:, depth, 0].index_select(1, pair_rank)
        else:
            column = columns[:, depth - 1].flatten(1).gather(1, row * width + (digit - 1).clamp_min(0))
            parent_row = no_rows.scatter(1, slot, column).index_select(1, pair_slot)
            step = steps[:, depth].flatten(1).gather(1, parent_row * width + pair_rank)
        children = parent_keys.index_select(1, pair_slot) + step
        keys = torch.cat((keys, children), 1).topk(budget, largest=False).values.clamp_max(dead)
        lex = keys & ((1 << lex_bits) - 1)
        # Position before this depth: an old node's own, a new node's parent's.
        source = order.gather(1, lex >> rank_bits)
        births.parent_names.append(names.gather(1, source))
        births.digits.append(lex & ((1 << rank_bits) - 1))
        births.rows.append(row if columns is None or parent_rows == 1 else column.gather(1, source))
        names = torch.where(births.digits[-1] > 0, depth * budget + node, births.parent_names[-1])
        order = lex.argsort(1)
        place = places.scatter(1, order, places)
    return _collect(tokens, columns, births, names, torch.where(keys < dead, keys >> lex_bits, DEAD * gamma))


def _collect(
    tokens: torch.Tensor,  # [R, gamma, C] int64
    columns: torch.Tensor | None,  # [R, gamma, P, C] int64
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
    if columns is not None:
        row = depth * columns.shape[2] + torch.cat(births.rows, 1).gather(1, names)
        column = columns.flatten(1).gather(1, row * width + column)
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


def _rank_children(table: TransitionTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Step costs [R, gamma, P, C] of each parent's children by rank, and their columns in the table."""
    if table.log_probs.shape[2] not in (1, table.tokens.shape[2]):
        raise ValueError(
            f"TransitionTable.log_probs: expected [R, gamma, P, C] with P = 1 or C, "
            f"got {tuple(table.log_probs.shape)}"
        )
    costs = step_costs(table.log_probs)
    columns = ((costs << 22) + table.tokens[:, :, None]).argsort(-1)  # DEAD << 22 is 2^62
    return costs.gather(-1, columns), columns


def _key_bits(gamma: int, budget: int, ranks: int) -> tuple[int, int]:
    """Bits of rank + 1, and of (place, rank + 1) together. ValueError where path costs do not fit above."""
    rank_bits = ranks.bit_length()
    lex_bits = rank_bits + (budget - 1).bit_length()
    if (gamma * STEP_NATS << FRACTION_BITS + lex_bits) >= KEY_LIMIT - (1 << lex_bits):
        raise ValueError(
            f"budget {budget} with {ranks} candidates and depth {gamma}: expected "
            f"depth * budget * candidates below 2^28, got more; lower the budget or the candidates"
        )
    return rank_bits, lex_bits


@functools.cache
def _pairs(
    budget: int, ranks: int, conditioned: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot of the parent, rank of the child) of every pair that can still be among the best B."""

    def fits(j: int, rank: int) -> bool:
        return j + rank + 2 <= budget if conditioned else (j + 1) * (rank + 2) <= budget

    pairs = [(j + 1, rank) for j in range(budget) for rank in range(ranks) if fits(j, rank)]
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
