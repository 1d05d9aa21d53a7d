"""Moves of the accepted path's rows to the front of their window, in place: features, paged keys and values.

Row k of an accepted path moves to column k of its window, so that the window looks like a verified chain.
What is read and what is written overlap. A thread owns some elements of *all* rows of a request: it reads
them all, then writes them all, so the order of threads does not matter (a barrier alone would not do: on
AMD's GPUs loads may be under way across it). Windows of different requests do not share rows. Moves onto
themselves (a path that starts as a chain does) cost nothing.

Elements are copied as bits: exact in every dtype, fp8 included.

Reference: specplug.window.commit and Commit.move.

Bytes: per row that moves 2 * F * element, F elements a row (for keys and values layers * heads * head size),
    and its two slots, 16; plus R * ((D + 1) * 8 + 12).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specplug_kernels.contract import MAX_GRID, check, raw_bits, stride_unit

MAX_DEPTH = 16  # moves of one request: a thread holds them all
THREADS = 128
INTEGERS = (torch.int32, torch.int64)
WORDS = {torch.uint8: tl.uint8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}


class PathMoves(NamedTuple):
    """Row k of a walk's path to column k of its window, as specplug.window.commit makes them."""

    path: torch.Tensor  # [R, D + 1] int64 window columns, as in Walk
    num_emitted: torch.Tensor  # [R] int32
    starts: torch.Tensor  # [R] int32 or int64, the root's row of each window; any stride


class RowMoves(NamedTuple):
    """Given rows, D a request, as in specplug.window.Commit. All are read before any is written."""

    source: torch.Tensor  # [R, D] int64
    destination: torch.Tensor  # [R, D] int64, no two of a request alike that move


@triton.jit
def _root_and_count(second_ptr, starts_ptr, steps, starts_stride):
    """The root's row of this request and how many moves it has."""
    request = tl.program_id(0).to(tl.int64)
    if starts_ptr is None:
        root = request
        count = steps
    else:
        root = tl.load(starts_ptr + request * starts_stride).to(tl.int64)
        count = tl.minimum(tl.load(second_ptr + request) - 1, steps)
    return root, count


@triton.jit
def _move(k: tl.constexpr, first_ptr, second_ptr, starts_ptr, root, count, stride):
    """Source and destination of this request's move k; the same where there is none."""
    place = tl.program_id(0).to(tl.int64) * stride + k
    if starts_ptr is None:  # source and destination
        source = tl.load(first_ptr + place, mask=k < count, other=0)
        destination = tl.load(second_ptr + place, mask=k < count, other=0)
    else:  # path; its column 0 is the root, which stays
        source = root + tl.load(first_ptr + place + 1, mask=k < count, other=0)
        destination = root + tl.where(k < count, k + 1, 0)
    return source, destination


@triton.jit(do_not_specialize=["steps", "stride", "starts_stride", "row_stride", "width"])
def _move_rows_kernel(
    rows_ptr,  # [N, F] in place
    first_ptr,  # path [R, steps + 1] or source [R, steps], int64
    second_ptr,  # num_emitted [R] int32 or destination [R, steps] int64
    starts_ptr,  # [R], None with source and destination
    steps,  # D
    stride,  # of a request in first and destination
    starts_stride,
    row_stride,  # in units, as the width
    width,  # F
    UNIT: tl.constexpr,  # elements
    BLOCK_K: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    root, count = _root_and_count(second_ptr, starts_ptr, steps, starts_stride)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = column < width * UNIT
    values = ()
    masks = ()
    targets = ()
    for k in tl.static_range(BLOCK_K):
        source, destination = _move(k, first_ptr, second_ptr, starts_ptr, root, count, stride)
        mask = inside & (source != destination)
        values += (tl.load(rows_ptr + source * row_stride * UNIT + column, mask=mask),)
        masks += (mask,)
        targets += (destination * row_stride * UNIT,)
    tl.debug_barrier()
    for k in tl.static_range(BLOCK_K):
        tl.store(rows_ptr + targets[k] + column, values[k], mask=masks[k])


@triton.jit
def _block_and_place(slot, block_size):
    """Divided as int32 (a cache has fewer slots), for offsets in int64."""
    slot = slot.to(tl.int32)
    block = slot // block_size
    return block.to(tl.int64), (slot - block * block_size).to(tl.int64)


@triton.jit(
    do_not_specialize=[
        "steps", "stride", "starts_stride", "block_size", "block_stride", "slot_stride", "head_stride",
        "element_stride", "width",
    ]
)  # fmt: skip
def _move_kv_kernel(
    addresses_ptr,  # [layers] int64, of the views
    slots_ptr,  # [N] int64, or None: the moves are slots
    first_ptr,  # path [R, steps + 1] or source [R, steps], int64
    second_ptr,  # num_emitted [R] int32 or destination [R, steps] int64
    starts_ptr,  # [R], None with source and destination
    steps,  # D
    stride,  # of a request in first and destination
    starts_stride,
    block_size,
    block_stride,  # in units, as the other strides but the element's, and the width
    slot_stride,
    head_stride,
    element_stride,  # 1 where the unit is more than 1
    width,  # heads * HEAD_SIZE
    WORD: tl.constexpr,  # integer type of an element's bits
    UNIT: tl.constexpr,  # elements; more than 1 says that addresses are multiples of 16 bytes too
    HEAD_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    root, count = _root_and_count(second_ptr, starts_ptr, steps, starts_stride)
    cache_ptr = tl.cast(tl.load(addresses_ptr + tl.program_id(1)), tl.pointer_type(WORD))
    if UNIT > 1:
        cache_ptr = tl.multiple_of(cache_ptr, 16)
        element_stride = 1
    column = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = column < width * UNIT
    head = (column // HEAD_SIZE).to(tl.int64)
    in_slot = head * head_stride * UNIT + (column % HEAD_SIZE).to(tl.int64) * element_stride
    values = ()
    masks = ()
    targets = ()
    for k in tl.static_range(BLOCK_K):
        source, destination = _move(k, first_ptr, second_ptr, starts_ptr, root, count, stride)
        moves = source != destination
        if slots_ptr is not None:
            source = tl.load(slots_ptr + source, mask=moves, other=-1)
            destination = tl.load(slots_ptr + destination, mask=moves, other=-1)
        mask = inside & moves & (source >= 0) & (destination >= 0)  # a negative slot is no slot
        block, place = _block_and_place(source, block_size)
        offset = (block * block_stride + place * slot_stride) * UNIT
        values += (tl.load(cache_ptr + offset + in_slot, mask=mask),)
        masks += (mask,)
        block, place = _block_and_place(destination, block_size)
        targets += ((block * block_stride + place * slot_stride) * UNIT,)
    tl.debug_barrier()
    for k in tl.static_range(BLOCK_K):
        tl.store(cache_ptr + targets[k] + in_slot, values[k], mask=masks[k])


def move_rows(
    rows: torch.Tensor,  # [N, ...] any dtype; each row contiguous, rows at any stride
    moves: PathMoves | RowMoves,
) -> None:
    """Move rows in place, one launch.

    Raises:
        ValueError: A dtype, shape, stride or device that the kernel does not take, or D above ``MAX_DEPTH``.
    """
    given = _given(moves, like=rows)
    check("rows", rows, rows.dtype, [None] * max(rows.ndim, 1), dense_from=1)
    width = rows[:1].numel()
    if not moves[0].shape[0] or given.steps < 1 or not width:
        return
    unit = stride_unit(rows, rows.stride(0), width)
    block_f = _block(rows, unit, width)
    _move_rows_kernel[(moves[0].shape[0], triton.cdiv(width, block_f))](
        raw_bits(rows),
        *given,
        rows.stride(0) // unit,
        width // unit,
        UNIT=unit,
        BLOCK_K=triton.next_power_of_2(given.steps),
        BLOCK_F=block_f,
        num_warps=THREADS // 32,
    )


@dataclass(frozen=True)
class CacheViews:
    """Paged caches of one geometry, moved in one launch. Holds the views: their memory stays."""

    views: tuple[torch.Tensor, ...]  # each [blocks, block, heads, head size], any strides
    addresses: torch.Tensor  # [layers] int64 on the caches' device
    aligned: bool  # every address is a multiple of 16 bytes


def group_views(views: Sequence[torch.Tensor]) -> tuple[CacheViews, ...]:
    """Group views of paged caches [blocks, block, heads, head size] by geometry. Once, when caches are made.

    Both layouts of pages are views of this form: NHD [blocks, block, heads, head size] itself, HND by a
    transpose. Keys and values of a layer may be two views, or one whose rows hold both.

    Raises:
        ValueError: A view of another rank.
    """
    groups: dict[tuple, list[torch.Tensor]] = {}
    for view in views:
        check("cache view", view, view.dtype, (None, None, None, None), like=views[0], dense_from=4)
        key = (view.dtype, view.shape[1:], view.stride())
        groups.setdefault(key, []).append(view)
    return tuple(
        CacheViews(
            tuple(group),
            torch.tensor([view.data_ptr() for view in group], dtype=torch.int64, device=group[0].device),
            all(view.data_ptr() % 16 == 0 for view in group),
        )
        for group in groups.values()
    )


def move_kv(
    caches: CacheViews,
    moves: PathMoves | RowMoves,
    slots: torch.Tensor | None = None,  # [N] int64, cache slot of each row of the step; negative: none
) -> None:
    """Move keys and values in place, in every cache, one launch.

    A slot is block * block size + place in the block. Without ``slots`` the moves' source and destination are
    slots themselves. Raises ValueError as `move_rows`.
    """
    view = caches.views[0]
    given = _given(moves, like=view)
    if slots is not None:
        check("slots", slots, torch.int64, (None,), like=view)
    elif isinstance(moves, PathMoves):
        raise ValueError("slots: expected the slot of each row to follow a path, got None; give them")
    blocks, block_size, heads, head_size = view.shape
    if blocks * block_size >= 2**31:
        raise ValueError(
            f"cache: expected fewer than 2^31 slots, got {blocks} blocks of {block_size}; use the torch "
            "reference"
        )
    width = heads * head_size
    if not moves[0].shape[0] or given.steps < 1 or not view.numel():
        return
    *strides, element_stride = view.stride()
    dense = element_stride == 1 and caches.aligned
    unit = stride_unit(view, *strides, head_size) if dense else 1
    block_f = _block(view, unit, width)
    _move_kv_kernel[(moves[0].shape[0], len(caches.views), triton.cdiv(width, block_f))](
        caches.addresses,
        slots,
        *given,
        block_size,
        *(stride // unit for stride in strides),
        element_stride,
        width // unit,
        WORD=WORDS[raw_bits(view).dtype],
        UNIT=unit,
        HEAD_SIZE=head_size,
        BLOCK_K=triton.next_power_of_2(given.steps),
        BLOCK_F=block_f,
        num_warps=THREADS // 32,
    )


class _Given(NamedTuple):
    """Moves as the kernels take them."""

    first: torch.Tensor
    second: torch.Tensor
    starts: torch.Tensor | None
    steps: int
    stride: int
    starts_stride: int


def _given(moves: PathMoves | RowMoves, *, like: torch.Tensor) -> _Given:
    if isinstance(moves, PathMoves):
        path, num_emitted, starts = moves
        check("path", path, torch.int64, (None, None), like=like, dense_from=1)
        requests, steps = path.shape[0], path.shape[1] - 1
        check("num_emitted", num_emitted, torch.int32, (requests,), like=like)
        check("starts", starts, INTEGERS, (requests,), like=like, dense_from=1)
        given = _Given(path, num_emitted, starts, steps, path.stride(0), starts.stride(0))
    else:
        source, destination = moves
        check("source", source, torch.int64, (None, None), like=like)
        check("destination", destination, torch.int64, source.shape, like=like)
        given = _Given(source, destination, None, source.shape[1], source.shape[1], 0)
    if given.steps > MAX_DEPTH:
        raise ValueError(
            f"moves: expected at most {MAX_DEPTH} a request, got {given.steps}; draft shallower trees or use "
            "the torch reference"
        )
    return given


def _block(tensor: torch.Tensor, unit: int, width: int) -> int:
    """Elements of a row that a program moves: 16 bytes a thread, or one element where strides hide them."""
    block = THREADS * 16 // tensor.element_size() if unit > 1 else THREADS
    block = min(triton.next_power_of_2(width), block)
    if triton.cdiv(width, block) > MAX_GRID:
        raise ValueError(
            f"rows: expected at most {MAX_GRID * block} elements, got {width}; move them in parts"
        )
    return block
