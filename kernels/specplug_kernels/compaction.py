"""Padded rows to ragged ones and back, and the first row of each ragged window.

    row_starts   starts[r] = counts[0] + .. + counts[r - 1]
    compact      ragged[starts[r] + j] = padded[r, j]        j < starts[r + 1] - starts[r]
    expand       padded[r, j] = ragged[starts[r] + j], 0 past the end

Elements are copied as bits: exact in every dtype, fp8 included. Sizes come from the host's shapes, so a step
whose counts only the device knows has buffers for the most rows it can have.

Reference: plain indexing (specplug.ragged.window_index).

Bytes: row_starts R * 8; compact 2 * rows * F * element; expand (rows + R * W) * F * element.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from specplug_kernels.contract import MAX_GRID, check, raw_bits, stride_unit, tile_elements

INTEGERS = (torch.int32, torch.int64)
COUNTS_A_TURN = 1024


@triton.jit(do_not_specialize=["requests"])
def _row_starts_kernel(
    counts_ptr,  # [R]
    starts_ptr,  # [R + 1] int32
    requests,
    BLOCK: tl.constexpr,
):
    tl.store(starts_ptr, 0)
    before = 0
    for first in range(0, requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        count = tl.load(counts_ptr + request, mask=request < requests, other=0).to(tl.int32)
        tl.store(starts_ptr + request + 1, before + tl.cumsum(count, 0), mask=request < requests)
        before += tl.sum(count)


@triton.jit(
    do_not_specialize=[
        "num_rows", "window", "width", "padded_request_stride", "padded_row_stride", "ragged_stride"
    ]
)  # fmt: skip
def _copy_kernel(
    padded_ptr,  # [R, W, F]
    ragged_ptr,  # [N, F]
    starts_ptr,  # [R + 1]
    num_rows,  # N
    window,  # W
    width,  # F, in units as the strides
    padded_request_stride,
    padded_row_stride,
    ragged_stride,
    EXPAND: tl.constexpr,  # ragged to padded
    UNIT: tl.constexpr,  # elements
    BLOCK_W: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + request).to(tl.int64)
    end = tl.minimum(tl.load(starts_ptr + request + 1).to(tl.int64), num_rows)
    row = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    column = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    in_window = (row < window)[:, None] & (column < width * UNIT)[None, :]
    held = in_window & (start + row < end)[:, None]
    row = row.to(tl.int64)
    padded_row = (request * padded_request_stride + row * padded_row_stride) * UNIT
    ragged_row = (start + row) * ragged_stride * UNIT
    padded = padded_ptr + padded_row[:, None] + column[None, :]
    ragged = ragged_ptr + ragged_row[:, None] + column[None, :]
    if EXPAND:
        tl.store(padded, tl.load(ragged, mask=held, other=0), mask=in_window)
    else:
        tl.store(ragged, tl.load(padded, mask=held), mask=held)


def row_starts(
    counts: torch.Tensor,  # [R] int32 or int64, at least 0
    *,
    out: torch.Tensor | None = None,  # [R + 1] int32
) -> torch.Tensor:
    """First row of each ragged window, and the number of rows last: [R + 1] int32, one launch.

    Raises ValueError for a dtype, shape, stride or device that the kernel does not take.
    """
    check("counts", counts, INTEGERS, (None,))
    requests = counts.shape[0]
    if out is None:
        out = torch.empty(requests + 1, dtype=torch.int32, device=counts.device)
    check("out", out, torch.int32, (requests + 1,), like=counts)
    if not requests:
        return out.zero_()
    block = min(COUNTS_A_TURN, triton.next_power_of_2(requests))
    _row_starts_kernel[(1,)](counts, out, requests, BLOCK=block, num_warps=4)
    return out


def compact(
    padded: torch.Tensor,  # [R, W, ...] any dtype; each row contiguous
    starts: torch.Tensor,  # [R + 1] int32 or int64, as `row_starts`
    num_rows: int,  # N, rows of the result: at least what the windows hold; a host value
    *,
    out: torch.Tensor | None = None,  # [N, ...], each row contiguous
) -> torch.Tensor:
    """The first starts[r + 1] - starts[r] rows of each request, one after another: [N, ...].

    Rows past the last window are zero in a new result and stay as they are in ``out``. A count above W leaves
    the window's rows past W as they are too.

    Raises ValueError as `row_starts`.
    """
    if num_rows < 0:
        raise ValueError(f"num_rows: expected at least 0, got {num_rows}; give the rows of all windows")
    if out is None:
        out = padded.new_zeros(num_rows, *padded.shape[2:])
    _copy(padded, out, starts, num_rows, expand=False)
    return out


def expand(
    ragged: torch.Tensor,  # [N, ...] any dtype; each row contiguous
    starts: torch.Tensor,  # [R + 1] int32 or int64, as `row_starts`
    width: int,  # W, rows of a request in the result; a longer window is cut
    *,
    out: torch.Tensor | None = None,  # [R, W, ...], each row contiguous
) -> torch.Tensor:
    """Each request's rows as a rectangle, zero past their end: [R, W, ...].

    Raises ValueError as `row_starts`.
    """
    check("starts", starts, INTEGERS, (None,))
    if width < 0 or not len(starts):
        raise ValueError(
            f"width, starts: expected at least 0 and at least one entry, got {width} and {len(starts)}; "
            "make starts with row_starts"
        )
    if out is None:
        out = ragged.new_empty(starts.shape[0] - 1, width, *ragged.shape[1:])
    check("out", out, ragged.dtype, (starts.shape[0] - 1, width, *ragged.shape[1:]), dense_from=2)
    _copy(out, ragged, starts, ragged.shape[0], expand=True)
    return out


def _copy(
    padded: torch.Tensor, ragged: torch.Tensor, starts: torch.Tensor, num_rows: int, *, expand: bool
) -> None:
    features = padded.shape[2:]
    check("padded", padded, padded.dtype, (None, None, *features), dense_from=2)
    requests, window = padded.shape[:2]
    check("ragged", ragged, padded.dtype, (num_rows, *features), like=padded, dense_from=1)
    check("starts", starts, INTEGERS, (requests + 1,), like=padded)
    width = math.prod(features)
    if not padded.numel():
        return
    strides = padded.stride(0), padded.stride(1), ragged.stride(0)
    unit = min(stride_unit(padded, *strides, width), stride_unit(ragged))
    elements = tile_elements(padded, unit)
    block_f = min(triton.next_power_of_2(width), elements)
    block_w = min(triton.next_power_of_2(window), elements // block_f)
    grid = (requests, triton.cdiv(window, block_w), triton.cdiv(width, block_f))
    if max(grid[1:]) > MAX_GRID:
        raise ValueError(
            f"padded: expected at most {MAX_GRID * block_w} rows of {MAX_GRID * block_f} elements a request, "
            f"got {window} of {width}; copy them in parts"
        )
    _copy_kernel[grid](
        raw_bits(padded),
        raw_bits(ragged),
        starts,
        num_rows,
        window,
        width // unit,
        *(stride // unit for stride in strides),
        EXPAND=expand,
        UNIT=unit,
        BLOCK_W=block_w,
        BLOCK_F=block_f,
        num_warps=4,
    )
