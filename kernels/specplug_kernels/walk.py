"""The acceptance walk down ragged draft trees, and the row order after it.

From the root, descend while the token drawn at the current row is a child of it (the first such node where
siblings hold the same token). Every node looks at once whether the draw at its parent's row is its own token;
then the walk is one minimum over the nodes a level:

    taken[i] = token[i] == drawn[parent[i]] and i may be entered
    row 0 = root;  row k = 1 + min {i: taken[i], parent[i] = row k-1}

Reference: specplug.verify.walk and path_permutation.

Bytes: walk R * (B * (4 + 2 * token + draw) + (D + 1) * (16 + draw) + 8), token and draw in bytes each;
    path_permutation R * ((D + 1) * 8 + W * 8 + 4).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specplug.verify import Walk
from specplug_kernels.contract import check

MAX_BUDGET = 1024  # nodes of a tree: one program holds them all
ROWS_A_PROGRAM = 32  # of a permutation: each is compared with every step of the path
INTEGERS = (torch.int32, torch.int64)


# Chunks of a batch begin at any address and any stride: one binary serves them all.
@triton.jit(
    do_not_specialize=[
        "budget", "max_depth", "parents_stride", "tokens_stride", "sampled_stride", "blocked_stride"
    ],
    do_not_specialize_on_alignment=[
        "parents_ptr", "tokens_ptr", "sampled_ptr", "blocked_ptr", "counts_ptr", "starts_ptr",
        "emitted_ptr", "num_emitted_ptr", "path_ptr",
    ],
)  # fmt: skip
def _walk_kernel(
    parents_ptr,  # [R, B] int32
    tokens_ptr,  # [R, B], or flat [L] with the root's row first
    sampled_ptr,  # [R, B + 1], or flat [L]
    blocked_ptr,  # [R, B] uint8, or flat [L], or None
    counts_ptr,  # [R]
    starts_ptr,  # [R + 1] first flat row of each window, or None: rectangles
    emitted_ptr,  # [R, D + 1] int64
    num_emitted_ptr,  # [R] int32
    path_ptr,  # [R, D + 1] int64
    budget,
    max_depth,
    parents_stride,
    tokens_stride,
    sampled_stride,
    blocked_stride,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    if starts_ptr is None:
        rows = budget + 1
        tokens_row = tokens_ptr + request * tokens_stride
        sampled_row = sampled_ptr + request * sampled_stride
    else:
        start = tl.load(starts_ptr + request).to(tl.int64)
        rows = (tl.load(starts_ptr + request + 1).to(tl.int64) - start).to(tl.int32)
        tokens_row = tokens_ptr + start + 1
        sampled_row = sampled_ptr + start
    nodes = tl.minimum(tl.load(counts_ptr + request).to(tl.int32), tl.minimum(budget, rows - 1))

    node = tl.arange(0, BLOCK_B)
    exists = node < nodes
    parent = tl.load(parents_ptr + request * parents_stride + node, mask=exists, other=-1)
    exists = exists & (parent >= -1) & (parent < node)
    token = tl.load(tokens_row + node, mask=exists, other=0).to(tl.int64)
    drawn = tl.load(sampled_row + parent + 1, mask=exists, other=0).to(tl.int64)
    taken = exists & (token == drawn)
    if blocked_ptr is not None:
        if starts_ptr is None:
            blocked_row = blocked_ptr + request * blocked_stride
        else:
            blocked_row = blocked_ptr + start + 1
        taken = taken & (tl.load(blocked_row + node, mask=exists, other=1) == 0)

    step = tl.arange(0, BLOCK_D)
    path = tl.zeros([BLOCK_D], tl.int32)
    row = tl.where(rows > 0, 0, -1)  # -1: the walk is over (no node has the parent -2)
    num_emitted = row + 1
    for k in range(1, max_depth + 1):
        first = tl.min(tl.where(taken & (parent == row - 1), node, BLOCK_B), 0)
        row = tl.where(first < BLOCK_B, first + 1, -1)
        path = tl.where((step == k) & (row > 0), row, path)
        num_emitted += (row > 0).to(tl.int32)

    out = request * (max_depth + 1) + step
    emitted = tl.load(sampled_row + path, mask=step < num_emitted, other=-1).to(tl.int64)
    tl.store(emitted_ptr + out, emitted, mask=step <= max_depth)
    tl.store(path_ptr + out, path.to(tl.int64), mask=step <= max_depth)
    tl.store(num_emitted_ptr + request, num_emitted)


@triton.jit(do_not_specialize=["steps", "width", "path_stride"])
def _permutation_kernel(
    path_ptr,  # [R, steps] int64
    num_emitted_ptr,  # [R] int32
    order_ptr,  # [R, width] int64
    steps,
    width,
    path_stride,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    step = tl.arange(0, BLOCK_D)
    num_emitted = tl.minimum(tl.load(num_emitted_ptr + request), steps)
    walked = step < num_emitted
    path = tl.load(path_ptr + request * path_stride + step, mask=walked, other=width).to(tl.int32)
    here = path[None, :] == row[:, None]
    on_path = tl.max(here.to(tl.int32), 1) > 0
    place = tl.sum(tl.where(here, step[None, :], 0), 1)
    before = tl.sum((path[None, :] < row[:, None]).to(tl.int32), 1)
    place = tl.where(on_path, place, num_emitted + row - before)
    tl.store(order_ptr + request * width + place, row.to(tl.int64), mask=row < width)


def walk(
    parents: torch.Tensor,  # [R, B] int32, -1 = root
    tokens: torch.Tensor,  # [R, B] int32 or int64; with starts: flat [L]
    counts: torch.Tensor,  # [R] int32 or int64, nodes past it do not exist
    sampled: torch.Tensor,  # [R, B + 1] int32 or int64, the target's draw at every row; with starts: flat [L]
    *,
    max_depth: int,
    blocked: torch.Tensor | None = None,  # [R, B] bool, nodes that must not be entered; with starts: flat [L]
    starts: torch.Tensor | None = None,  # [R + 1] int32 or int64, first flat row of each window
    out: Walk | None = None,
) -> Walk:
    """Walk every request's tree down the target's draws, at most ``max_depth`` nodes deep.

    Rectangles as in specplug.verify.walk; or, with ``starts``, flat rows as an engine has them: request r
    owns the rows starts[r] .. starts[r + 1] - 1, first its root's row and then one row a node (a flat
    ``tokens`` holds the root's token too). A window without rows emits nothing. A node counts only where its
    window has a row for it. Rows of rectangles may have any stride.

    Args:
        out: Buffers to write, as returned: tokens [R, D + 1] int64, num_emitted [R] int32 and path [R, D + 1]
            int64, contiguous, D = max_depth.

    Raises:
        ValueError: A dtype, shape, stride or device that the kernel does not take, or a tree wider than
            ``MAX_BUDGET``.
    """
    check("parents", parents, torch.int32, (None, None), dense_from=1)
    requests, budget = parents.shape
    if budget > MAX_BUDGET:
        raise ValueError(
            f"parents: expected at most {MAX_BUDGET} nodes, got {budget}; lower tree_budget or use the "
            "torch reference"
        )
    if max_depth < 0:
        raise ValueError(f"max_depth: expected at least 0, got {max_depth}; give the depth of the trees")
    if max_depth > MAX_BUDGET:
        raise ValueError(
            f"max_depth: expected at most {MAX_BUDGET}, got {max_depth}; no tree is deeper than it has nodes"
        )
    flat = starts is not None
    rows = sampled.shape[0] if sampled.ndim else 0
    check(
        "tokens", tokens, INTEGERS, (rows,) if flat else (requests, budget), like=parents, dense_from=1 - flat
    )
    check("counts", counts, INTEGERS, (requests,), like=parents)
    check(
        "sampled",
        sampled,
        INTEGERS,
        (rows,) if flat else (requests, budget + 1),
        like=parents,
        dense_from=1 - flat,
    )
    if starts is not None:
        check("starts", starts, INTEGERS, (requests + 1,), like=parents)
    if blocked is not None:
        shape = (rows,) if flat else (requests, budget)
        check("blocked", blocked, torch.bool, shape, like=parents, dense_from=1 - flat)
        blocked = blocked.view(torch.uint8)
    if out is None:
        device = parents.device
        out = Walk(
            torch.empty(requests, max_depth + 1, dtype=torch.int64, device=device),
            torch.empty(requests, dtype=torch.int32, device=device),
            torch.empty(requests, max_depth + 1, dtype=torch.int64, device=device),
        )
    check("out.tokens", out.tokens, torch.int64, (requests, max_depth + 1), like=parents)
    check("out.num_emitted", out.num_emitted, torch.int32, (requests,), like=parents)
    check("out.path", out.path, torch.int64, (requests, max_depth + 1), like=parents)
    if requests:
        _walk_kernel[(requests,)](
            parents,
            tokens,
            sampled,
            blocked,
            counts,
            starts,
            *out,
            budget,
            max_depth,
            parents.stride(0),
            tokens.stride(0),
            sampled.stride(0),
            0 if blocked is None else blocked.stride(0),
            BLOCK_B=triton.next_power_of_2(max(budget, 1)),
            BLOCK_D=triton.next_power_of_2(max_depth + 1),
            num_warps=1,
        )
    return out


def path_permutation(
    path: torch.Tensor,  # [R, D + 1] int64 window rows, as in Walk
    num_emitted: torch.Tensor,  # [R] int32
    width: int,
    *,
    out: torch.Tensor | None = None,  # [R, width] int64 contiguous
) -> torch.Tensor:
    """Row order after acceptance: [R, width] int64, the path's rows first and the others in their old order.

    Raises ValueError as `walk`.
    """
    check("path", path, torch.int64, (None, None), dense_from=1)
    requests, steps = path.shape
    if not 1 <= width <= MAX_BUDGET + 1:
        raise ValueError(f"width: expected 1 to {MAX_BUDGET + 1}, got {width}; give the rows of a window")
    check("num_emitted", num_emitted, torch.int32, (requests,), like=path)
    if out is None:
        out = torch.empty(requests, width, dtype=torch.int64, device=path.device)
    check("out", out, torch.int64, (requests, width), like=path)
    if requests:
        block = min(ROWS_A_PROGRAM, triton.next_power_of_2(width))
        _permutation_kernel[(requests, triton.cdiv(width, block))](
            path,
            num_emitted,
            out,
            steps,
            width,
            path.stride(0),
            BLOCK_W=block,
            BLOCK_D=triton.next_power_of_2(max(steps, 1)),
            num_warps=1,
        )
    return out
