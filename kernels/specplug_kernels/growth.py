"""DDTree on the device: best trees, greedy chains and ancestor words, one program (one warp) a request.

References: ``specplug.ddtree.grow``, ``specplug.ddtree.greedy_chain``, ``specplug.tree.ancestor_mask``;
equal bit for bit. Costs are theirs: a step is the integer ``round(-log_prob * 2^28)``, at most 64 nats, a
path their sum, and nodes are taken by (path cost, lexicographically smaller rank path).

``grow`` is the published best-first search. The frontier holds the root and every taken node, each with its
best child not yet taken, by (step cost, token id). Rank paths are never stored: the frontier stands in the
lexicographic order of its offers, ``place``. When an offer is taken, the parent's next one (same path, last
digit + 1) takes over its place and the new node's first offer (same path, digit 0 appended) goes right before
it; no other offer can lie between, as only taken nodes have offers. So one int64 minimum over
path cost | place picks the next node, and there is no limit on depth that matters.

Widths (R, gamma, P, C, B) are runtime values and blocks are always 64 wide: one binary a chip. The time is
the latency of B dependent steps (three reductions and two rows of the table each), not memory traffic.
Limits: B and C to 64, gamma to 65536 (chains: 64), token ids below 2^22 as in every transition table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specplug_kernels.contract import check

MAX_NODES = 64  # bits of an ancestor word
MAX_CANDIDATES = 64
MAX_DEPTH = 1 << 16  # path costs stay below 2^51 and links below 2^29

LANES = tl.constexpr(64)  # frontier slots, and candidates of a row
LANE_BITS = tl.constexpr(6)
ROOT = tl.constexpr(63)  # slot of the root; node 63 is the last one and never a parent
PLACE_BITS = tl.constexpr(7)
PLACE_MASK = tl.constexpr((1 << 7) - 1)
TOKEN_BITS = tl.constexpr(22)
TOKEN_MASK = tl.constexpr((1 << 22) - 1)
UNIT = tl.constexpr(2.0**28)  # costs are integers in units of NATS = 2^-28 nats
NATS = tl.constexpr(2.0**-28)
DEAREST = tl.constexpr(64 * 2.0**28)  # cost of the dearest step
FP32_INTEGERS = tl.constexpr(2.0**23)  # fp32 holds no fractions from here on
NONE = tl.constexpr((1 << 63) - 1)  # no child; above every key

_WIDTHS = ["gamma", "rows", "candidates", "budget"]


class Grown(NamedTuple):
    """Fields of ``specplug.tree.DraftTree``, padded like it, and ancestor words."""

    tokens: torch.Tensor  # [R, B] int64
    parents: torch.Tensor  # [R, B] int32, -1 = root
    depths: torch.Tensor  # [R, B] int32, 1..gamma
    scores: torch.Tensor  # [R, B] fp32, log-probability of the path
    counts: torch.Tensor  # [R] int32
    ancestors: torch.Tensor  # [R, B] int64, bit j = node j is an ancestor or the node itself; root implied


@triton.jit
def _next_child(
    tokens_ptr,  # [C] int64, tokens of a depth
    log_probs_ptr,  # [C] fp32, their log-probabilities after one parent
    candidates,
    after,  # key of the sibling taken last, or -1
    present,  # bool, whether the row exists
):
    """Key step cost | token | column of the best child beyond ``after``; NONE if there is none."""
    column = tl.arange(0, LANES)
    mask = (column < candidates) & present
    log_prob = tl.load(log_probs_ptr + column, mask=mask, other=float("-inf"))
    token = tl.load(tokens_ptr + column, mask=mask, other=0)
    live = log_prob > float("-inf")  # false for NaN
    cost = tl.where(live, log_prob, 0.0) * -UNIT
    cost = tl.minimum(tl.maximum(cost, 0.0), DEAREST)
    # Half to even: below 2^23 the sum has no room for a fraction.
    cost = tl.where(cost < FP32_INTEGERS, (cost + FP32_INTEGERS) - FP32_INTEGERS, cost)
    key = (((cost.to(tl.int64) << TOKEN_BITS) | token) << LANE_BITS) | column
    return tl.min(tl.where(live & (key > after), key, NONE), 0)


@triton.jit
def _step_cost(key):
    return key >> (TOKEN_BITS + LANE_BITS)


@triton.jit
def _token(key):
    return (key >> LANE_BITS) & TOKEN_MASK


@triton.jit
def _score(cost):
    """fp32 log-probability; one rounding, as the factor is a power of two."""
    return cost.to(tl.float32) * -NATS


@triton.jit
def _ancestor_words(
    parent,  # [64] int32, -1 = root
):
    """[64] int64 words by pointer doubling, 6 rounds for 64 levels; a child of the root points at itself."""
    node = tl.arange(0, LANES)
    word = tl.full([LANES], 1, tl.int64) << node
    above = tl.where(parent < 0, node, parent)
    for _ in tl.static_range(LANE_BITS):
        word |= tl.gather(word, above, 0)
        above = tl.gather(above, above, 0)
    return word


@triton.jit(do_not_specialize=_WIDTHS)
def grow_kernel(
    tokens_ptr,  # [R, gamma, C] int64
    log_probs_ptr,  # [R, gamma, P, C] fp32
    out_tokens_ptr,  # [R, B] int64
    out_parents_ptr,  # [R, B] int32
    out_depths_ptr,  # [R, B] int32
    out_scores_ptr,  # [R, B] fp32
    out_counts_ptr,  # [R] int32
    out_ancestors_ptr,  # [R, B] int64
    gamma,
    rows,
    candidates,
    budget,
):
    request = tl.program_id(0).to(tl.int64)
    tokens_ptr += request * gamma * candidates
    log_probs_ptr += request * gamma * rows * candidates
    slot = tl.arange(0, LANES)
    # Of slot j: node j, or the root. `offer` is the key of its best child not yet taken, `place` that child's
    # lexicographic place, `row` = depth * 64 + parent row of the table: where its children stand.
    first = _next_child(tokens_ptr, log_probs_ptr, candidates, -1, gamma > 0)
    offer = tl.where(slot == ROOT, first, NONE)
    cost = tl.zeros([LANES], tl.int64)
    place = tl.zeros([LANES], tl.int32)
    row = tl.zeros([LANES], tl.int32)
    token = tl.zeros([LANES], tl.int64)
    parent = tl.full([LANES], -1, tl.int32)
    count = 0
    for j in range(budget):
        key = ((cost + _step_cost(offer)) << PLACE_BITS) | place
        key = tl.where(offer < NONE, key, NONE)
        best = tl.min(key, 0)
        live = best < NONE
        chosen = (key == best) & live
        taken = tl.sum(tl.where(chosen, offer, 0), 0)
        link = tl.sum(tl.where(chosen, (row << LANE_BITS) | slot, 0), 0)
        source = link & (LANES - 1)
        table_row = (link >> LANE_BITS) & (LANES - 1)
        depth = link >> (2 * LANE_BITS)
        below = depth + 1
        row_below = tl.minimum((taken & (LANES - 1)).to(tl.int32), rows - 1)
        sibling = _next_child(
            tokens_ptr + depth * candidates,
            log_probs_ptr + (depth.to(tl.int64) * rows + table_row) * candidates,
            candidates,
            taken,
            live,
        )
        first = _next_child(
            tokens_ptr + below * candidates,
            log_probs_ptr + (below.to(tl.int64) * rows + row_below) * candidates,
            candidates,
            -1,
            live & (below < gamma),
        )
        new = (slot == j) & live
        at = (best & PLACE_MASK).to(tl.int32)
        place = tl.where(new, at, place + (place >= at).to(tl.int32))
        offer = tl.where(new, first, tl.where(chosen, sibling, offer))
        cost = tl.where(new, best >> PLACE_BITS, cost)
        row = tl.where(new, (below << LANE_BITS) | row_below, row)
        token = tl.where(new, _token(taken), token)
        parent = tl.where(new, tl.where(source == ROOT, -1, source), parent)
        count += live.to(tl.int32)
    exists = slot < count
    mask = slot < budget
    out = request * budget + slot
    tl.store(out_tokens_ptr + out, token, mask=mask)
    tl.store(out_parents_ptr + out, parent, mask=mask)
    tl.store(out_depths_ptr + out, tl.where(exists, row >> LANE_BITS, 0), mask=mask)
    tl.store(out_scores_ptr + out, tl.where(exists, _score(cost), float("-inf")), mask=mask)
    tl.store(out_ancestors_ptr + out, _ancestor_words(parent), mask=mask)
    tl.store(out_counts_ptr + request, count)


@triton.jit(do_not_specialize=_WIDTHS)
def chain_kernel(
    tokens_ptr,  # [R, gamma, C] int64
    log_probs_ptr,  # [R, gamma, P, C] fp32
    out_tokens_ptr,  # [R, gamma] int64
    out_parents_ptr,  # [R, gamma] int32
    out_depths_ptr,  # [R, gamma] int32
    out_scores_ptr,  # [R, gamma] fp32
    out_counts_ptr,  # [R] int32
    out_ancestors_ptr,  # [R, gamma] int64
    gamma,
    rows,
    candidates,
):
    request = tl.program_id(0).to(tl.int64)
    tokens_ptr += request * gamma * candidates
    log_probs_ptr += request * gamma * rows * candidates
    node = tl.arange(0, LANES)
    cost = tl.zeros([LANES], tl.int64)
    token = tl.zeros([LANES], tl.int64)
    path_cost = tl.zeros([], tl.int64)
    row = 0
    count = 0
    for depth in range(gamma):
        best = _next_child(
            tokens_ptr + depth * candidates,
            log_probs_ptr + (depth * rows + row) * candidates,
            candidates,
            -1,
            count == depth,
        )
        live = best < NONE
        path_cost += _step_cost(best)
        new = (node == depth) & live
        cost = tl.where(new, path_cost, cost)
        token = tl.where(new, _token(best), token)
        row = tl.minimum((best & (LANES - 1)).to(tl.int32), rows - 1)
        count += live.to(tl.int32)
    exists = node < count
    mask = node < gamma
    parent = tl.where(exists, node - 1, -1)
    out = request * gamma + node
    tl.store(out_tokens_ptr + out, token, mask=mask)
    tl.store(out_parents_ptr + out, parent, mask=mask)
    tl.store(out_depths_ptr + out, tl.where(exists, node + 1, 0), mask=mask)
    tl.store(out_scores_ptr + out, tl.where(exists, _score(cost), float("-inf")), mask=mask)
    tl.store(out_ancestors_ptr + out, _ancestor_words(parent), mask=mask)
    tl.store(out_counts_ptr + request, count)


@triton.jit(do_not_specialize=["budget"])
def ancestor_words_kernel(
    parents_ptr,  # [R, B] int32
    counts_ptr,  # [R] int32
    words_ptr,  # [R, B] int64
    budget,
):
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, LANES)
    mask = node < budget
    exists = mask & (node < tl.load(counts_ptr + request))
    parent = tl.load(parents_ptr + request * budget + node, mask=exists, other=-1)
    tl.store(words_ptr + request * budget + node, _ancestor_words(parent), mask=mask)


def grow(
    tokens: torch.Tensor,  # [R, gamma, C] int64 below 2^22, distinct among the live ones of a depth
    log_probs: torch.Tensor,  # [R, gamma, P, C] fp32 <= 0; P = C (row = candidate above) or 1
    budget: int,
    *,
    out: Grown | None = None,
) -> Grown:
    """Best trees of ``budget`` nodes (root not counted) over a transition table: ``specplug.ddtree.grow``.

    -inf and NaN entries never become nodes; positive entries count as 0. ``out`` is written and returned if
    given. One launch; nothing is read on the host. Raises ValueError for shapes, types and limits.
    Bytes: R (gamma C (8 + 4 P) + 28 B + 4) if every row of the table is needed.
    """
    if not 0 <= budget <= MAX_NODES:
        raise ValueError(f"budget: expected 0..{MAX_NODES} nodes, got {budget}; lower the budget")
    gamma, rows, candidates = _check_table(tokens, log_probs, MAX_DEPTH)
    out = _outputs(out, budget, tokens)
    if tokens.shape[0]:
        grow_kernel[(tokens.shape[0],)](tokens, log_probs, *out, gamma, rows, candidates, budget, num_warps=1)
    return out


def greedy_chain(
    tokens: torch.Tensor,  # [R, gamma, C] int64 below 2^22
    log_probs: torch.Tensor,  # [R, gamma, P, C] fp32 <= 0; P = C (row = candidate above) or 1
    *,
    out: Grown | None = None,
) -> Grown:
    """The chain of best children, fields [R, gamma]: ``specplug.ddtree.greedy_chain``; gamma to 64.

    Ended where no live child follows. ``out``, launches and errors as for ``grow``.
    Bytes: R (12 gamma C + 28 gamma + 4): one parent row a depth.
    """
    gamma, rows, candidates = _check_table(tokens, log_probs, MAX_NODES)
    out = _outputs(out, gamma, tokens)
    if tokens.shape[0]:
        chain_kernel[(tokens.shape[0],)](tokens, log_probs, *out, gamma, rows, candidates, num_warps=1)
    return out


def ancestor_words(
    parents: torch.Tensor,  # [R, B] int32, -1 = root, else parents[j] < j
    counts: torch.Tensor,  # [R] int32
    *,
    out: torch.Tensor | None = None,  # [R, B] int64
) -> torch.Tensor:
    """[R, B] int64 words of any trees: bit j is set at node j's descendants and itself; the root is implied.

    ``specplug.tree.ancestor_mask`` without its root row and column; a padding node sees itself. B to 64, any
    depth. Raises ValueError for shapes, types and limits. Bytes: R (12 B + 4).
    """
    check("parents", parents, torch.int32, (None, None))
    requests, budget = parents.shape
    if budget > MAX_NODES:
        raise ValueError(
            f"parents: expected at most {MAX_NODES} nodes a request, got {budget}; lower the budget"
        )
    check("counts", counts, torch.int32, (requests,), like=parents)
    if out is None:
        out = torch.empty(requests, budget, dtype=torch.int64, device=parents.device)
    check("out", out, torch.int64, (requests, budget), like=parents)
    if requests:
        ancestor_words_kernel[(requests,)](parents, counts, out, budget, num_warps=1)
    return out


def _check_table(tokens: torch.Tensor, log_probs: torch.Tensor, max_depth: int) -> tuple[int, int, int]:
    """(gamma, P, C). Raises ValueError for what the kernels do not assume."""
    check("tokens", tokens, torch.int64, (None, None, None))
    requests, gamma, candidates = tokens.shape
    check("log_probs", log_probs, torch.float32, (requests, gamma, None, candidates), like=tokens)
    rows = log_probs.shape[2]
    if rows not in (1, candidates):
        raise ValueError(
            f"log_probs: expected [R, gamma, P, C] with P = 1 or C = {candidates}, got P = {rows}; "
            f"give one parent row for independent depths, else one a candidate of the depth above"
        )
    if candidates > MAX_CANDIDATES:
        raise ValueError(f"tokens: expected at most {MAX_CANDIDATES} candidates, got {candidates}; use fewer")
    if gamma > max_depth:
        raise ValueError(f"tokens: expected at most {max_depth} depths, got {gamma}; cut the draft")
    return gamma, rows, candidates


def _outputs(out: Grown | None, budget: int, tokens: torch.Tensor) -> Grown:
    """``out``, checked, or new tensors of its kind. Raises ValueError."""
    requests = tokens.shape[0]
    nodes = (requests, budget)
    fields = {
        "tokens": (nodes, torch.int64),
        "parents": (nodes, torch.int32),
        "depths": (nodes, torch.int32),
        "scores": (nodes, torch.float32),
        "counts": ((requests,), torch.int32),
        "ancestors": (nodes, torch.int64),
    }
    if out is None:
        return Grown(*(torch.empty(s, dtype=t, device=tokens.device) for s, t in fields.values()))
    for name, (shape, dtype) in fields.items():
        check(f"out.{name}", getattr(out, name), dtype, shape, like=tokens)
    return out
