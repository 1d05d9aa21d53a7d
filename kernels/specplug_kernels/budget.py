"""How many of its first nodes each request keeps when the batch's best are taken.

No sort: fp32 values map to integers of the same order, and the largest threshold that at least ``nodes``
values reach is found bit by bit, a count of the whole batch a bit. Values above it are taken, and those equal
to it in order of request and node while there is room:

    t = max {t: #{key >= t} >= nodes},   kept[r] = #{key[r] > t} + min(ties[r], room left to request r)

Reference: specplug.ragged.admit.

Bytes: R * (B * 4 + 8), plus 8 a request where the rows are given by index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specplug_kernels.contract import check

MAX_CELLS = 16384  # R * B, each rounded up to a power of two: one program holds them all, 64 a thread
INTEGERS = (torch.int32, torch.int64)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["nodes", "requests", "budget", "survival_stride"])
def _admit_kernel(
    survival_ptr,  # [S, B] fp32
    rows_ptr,  # [R] row of survival that a request owns, or None: its own number
    capacities_ptr,  # [R]
    nodes,  # a number, or the address of one
    admitted_ptr,  # [R] int32, may be capacities_ptr
    requests,
    budget,
    survival_stride,
    NODES_ON_DEVICE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    request = tl.arange(0, BLOCK_R)
    place = tl.arange(0, BLOCK_B)
    exists = request < requests
    capacity = tl.load(capacities_ptr + request, mask=exists, other=0).to(tl.int32)
    capacity = tl.minimum(tl.maximum(capacity, 0), budget)
    row = request if rows_ptr is None else tl.load(rows_ptr + request, mask=exists, other=0).to(tl.int32)
    wanted = tl.load(nodes).to(tl.int32) if NODES_ON_DEVICE else nodes

    live = place[None, :] < capacity[:, None]
    cell = survival_ptr + row[:, None] * survival_stride + place[None, :]
    value = tl.load(cell, mask=live, other=0.0)
    value = tl.where(value == value, value, 0.0)  # NaN counts as 0
    value = tl.where(value == 0.0, 0.0, value)  # -0 is 0
    largest = 3.4028234663852886e38
    value = tl.minimum(tl.maximum(value, -largest), largest)
    # Rounding may lift a child above its parent by an ulp: a row is made non-increasing first.
    bits = tl.associative_scan(value, 1, _smaller).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    lowest = -2147483648  # below the key of any number
    key = tl.where(live, key, lowest)

    above_zero = tl.sum((key >= 0).to(tl.int32))
    threshold = tl.where(above_zero >= wanted, 0, lowest)
    for i in range(31):
        higher = threshold + (1 << (30 - i))
        reached = tl.sum((key >= higher).to(tl.int32))
        threshold = tl.where(reached >= wanted, higher, threshold)

    kept = tl.sum((key > threshold).to(tl.int32), 1)
    ties = tl.minimum(tl.sum((key >= threshold).to(tl.int32), 1), capacity) - kept
    room = wanted - tl.sum(kept) - (tl.cumsum(ties, 0) - ties)
    kept += tl.minimum(ties, tl.maximum(room, 0))
    tl.store(admitted_ptr + request, kept, mask=exists)


def admit(
    survival: torch.Tensor,  # [R, B] fp32, a(v) of each request's nodes in order; with rows: [S, B]
    capacities: torch.Tensor,  # [R] int32 or int64, nodes of each request that may be taken
    nodes: int | torch.Tensor,  # nodes of the batch; [1] int32 where only the device knows
    *,
    rows: torch.Tensor | None = None,  # [R] int32 or int64, the row of survival that each request owns
    out: torch.Tensor | None = None,  # [R] int32, may be capacities itself
) -> torch.Tensor:
    """How many of its first nodes each request keeps: [R] int32, as specplug.ragged.admit.

    Equal survivals go to the lower request, then to the lower node. NaN counts as 0. Where ``nodes`` is more
    than the capacities hold, every request keeps its capacity.

    Raises:
        ValueError: A dtype, shape, stride or device that the kernel does not take, or a batch above
            ``MAX_CELLS``.
    """
    check("survival", survival, torch.float32, (None, None), dense_from=1)
    check("capacities", capacities, INTEGERS, (None,), like=survival)
    requests, budget = capacities.shape[0], survival.shape[1]
    if rows is not None:
        check("rows", rows, INTEGERS, (requests,), like=survival)
        if requests and not survival.shape[0]:
            raise ValueError(
                f"survival: expected a row for each of rows, got none for {requests} requests; give them all"
            )
    else:
        check("survival", survival, torch.float32, (requests, budget), dense_from=1)
    if survival.shape[0] * survival.stride(0) >= 2**31:
        raise ValueError(
            f"survival: expected fewer than 2^31 elements of memory, got {survival.shape[0]} rows of "
            f"{survival.stride(0)}; call contiguous() or use the torch reference"
        )
    if isinstance(nodes, torch.Tensor):
        check("nodes", nodes, torch.int32, (1,), like=survival)
    elif nodes < 0:
        raise ValueError(f"nodes: expected at least 0, got {nodes}; give what the batch may draft")
    if out is None:
        out = torch.empty(requests, dtype=torch.int32, device=survival.device)
    check("out", out, torch.int32, (requests,), like=survival)
    block_r, block_b = triton.next_power_of_2(max(requests, 1)), triton.next_power_of_2(max(budget, 1))
    if block_r * block_b > MAX_CELLS:
        raise ValueError(
            f"survival: expected at most {MAX_CELLS} cells, requests and nodes each rounded up to a power of "
            f"two, got {block_r} x {block_b}; use the torch reference"
        )
    if requests:
        _admit_kernel[(1,)](
            survival,
            rows,
            capacities,
            nodes,
            out,
            requests,
            budget,
            survival.stride(0),
            NODES_ON_DEVICE=isinstance(nodes, torch.Tensor),
            BLOCK_R=block_r,
            BLOCK_B=block_b,
            num_warps=max(1, block_r * block_b // 2048),
        )
    return out
