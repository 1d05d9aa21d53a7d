"""Attention inside the verify windows, over this step's own keys and values, under ancestor words.

A window is the root's row (column 0) and then one row a drafted node (column j + 1 is node j). A column sees
the root, its ancestors and itself: key column 0 always, key column j + 1 where bit j of its word is set (the
root has no word and sees itself alone). Nodes stand after their parents, so no column sees a later one and
the keys of a block of rows end at its last column. With s = scale * q . k over the seen keys,

    lse = log sum exp(s),    out = sum exp(s - lse) v

kept online over blocks of keys (FlashAttention, Dao et al. 2022). The merged form weighs ``out`` against the
attention to the committed prefix by the two lse, so the prefix pass can be the host's own kernel, without a
mask. The heads that share a key head are folded into the rows (row = column * group + head in group): small
windows still fill a matrix instruction and keys are read once for the group.

Reference: specplug.attention.partial_attention and merge under specplug.tree.ancestor_mask.

Bytes, each read or written once, with n = counts + 1 rows of a window and e bytes an element:
    in_tree         sum n * (H + 2 Hkv) * D * e + T * W * H * (D + 1) * 4 + T * W * 8
    in_tree_merged  sum n * (H * (D * (2 e + e_prefix) + 4) + 2 Hkv * D * e) + T * W * 8
Blocks of rows of one window read its keys again, out of the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specplug_kernels.contract import MAX_GRID, check

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 65  # the root and 64 nodes: one bit of an int64 word a node
MAX_HEAD_SIZE = 256  # the largest compiled ahead of time for every target, without spills
ALIGN = 8  # elements: 16 bytes of a 2-byte dtype, the widest load; strides are multiples of it


INTEGERS = list(range(11, 32))  # q_row_units to width: no value of theirs gets a binary of its own


@triton.jit(do_not_specialize=INTEGERS)
def in_tree_kernel(
    q_ptr,  # [N, H, D]
    k_ptr,  # [N, Hkv, D], or [blocks, block, Hkv, D] where PAGED
    v_ptr,  # as k
    starts_ptr,  # [T] int32
    counts_ptr,  # [T] int32
    words_ptr,  # [T, B] int64
    slots_ptr,  # [T, W] int64 where PAGED
    prefix_out_ptr,  # [T, W, H, D] where MERGED
    prefix_lse_ptr,  # [T, W, H] where MERGED
    out_ptr,  # [T, W, H, D] fp32, or [N, H, D] where MERGED
    lse_ptr,  # [T, W, H] fp32 contiguous unless MERGED
    q_row_units,  # strides ending in _units count ALIGN elements
    q_head_units,
    k_block_units,
    k_row_units,
    k_head_units,
    v_block_units,
    v_row_units,
    v_head_units,
    words_stride,
    slots_stride,
    prefix_out_request_units,
    prefix_out_column_units,
    prefix_out_head_units,
    prefix_lse_request_stride,
    prefix_lse_column_stride,
    prefix_lse_head_stride,
    out_request_units,
    out_row_units,
    out_head_units,
    block_size,  # slots in a cache block where PAGED
    width,  # W
    scale,
    ALIGN: tl.constexpr,
    GROUP: tl.constexpr,  # H / Hkv
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr,
    MERGED: tl.constexpr,
):
    request = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    start = tl.load(starts_ptr + request).to(tl.int64)
    last_column = tl.minimum(tl.load(counts_ptr + request), width - 1)  # -1: an empty window

    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_SIZE
    column = m // GROUP
    head = kv_head * GROUP + m % GROUP
    inside = column <= last_column
    tile = inside[:, None] & in_head[None, :]

    q_offset = (column * q_row_units + head * q_head_units) * ALIGN
    q_ptr += start * q_row_units * ALIGN
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=tile, other=0.0)
    words_ptr += request * words_stride
    words = tl.load(words_ptr + (column - 1), mask=inside & (column > 0), other=0)

    if PAGED:
        slots_ptr += request * slots_stride
        k_ptr += kv_head.to(tl.int64) * k_head_units * ALIGN
        v_ptr += kv_head.to(tl.int64) * v_head_units * ALIGN
    else:
        k_ptr += (start * k_row_units + kv_head * k_head_units) * ALIGN
        v_ptr += (start * v_row_units + kv_head * v_head_units) * ALIGN

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # largest score so far, in units of log 2
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    block_last = (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUP
    num_keys = tl.minimum(last_column, block_last) + 1
    for first in range(0, num_keys, BLOCK_N):
        key = first + n
        held = key < num_keys
        if PAGED:
            slot = tl.load(slots_ptr + key, mask=held, other=0)
            page = slot // block_size
            place = slot - page * block_size
            k_offset = (page * k_block_units + place * k_row_units) * ALIGN
            v_offset = (page * v_block_units + place * v_row_units) * ALIGN
        else:
            k_offset = key * k_row_units * ALIGN
            v_offset = key * v_row_units * ALIGN
        k = tl.load(k_ptr + k_offset[None, :] + d[:, None], mask=held[None, :] & in_head[:, None], other=0.0)
        v = tl.load(v_ptr + v_offset[:, None] + d[None, :], mask=held[:, None] & in_head[None, :], other=0.0)

        node = tl.minimum(tl.maximum(key - 1, 0), 63).to(tl.int64)
        seen = (((words[:, None] >> node[None, :]) & 1) != 0) | (key[None, :] == 0)
        seen = seen & held[None, :] & inside[:, None]
        score = tl.dot(q, k, input_precision="ieee") * (scale * 1.4426950408889634)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key so far: exp2(-inf - 0) = 0
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        out = tl.dot(weight.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        top = new_top

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out = out / total[:, None]
    lse = (top + tl.log2(total)) * 0.6931471805599453  # -inf where empty, as top is

    if MERGED:
        prefix_lse_ptr += request * prefix_lse_request_stride
        prefix_lse_offset = column * prefix_lse_column_stride + head * prefix_lse_head_stride
        prefix_lse = tl.load(prefix_lse_ptr + prefix_lse_offset, mask=inside, other=0.0).to(tl.float32)
        prefix_out_ptr += request * prefix_out_request_units * ALIGN
        prefix_offset = (column * prefix_out_column_units + head * prefix_out_head_units) * ALIGN
        prefix = tl.load(prefix_out_ptr + prefix_offset[:, None] + d[None, :], mask=tile, other=0.0)
        # either infinity marks a side without keys
        lse = tl.where(tl.abs(lse) == float("inf"), float("-inf"), lse)
        prefix_lse = tl.where(tl.abs(prefix_lse) == float("inf"), float("-inf"), prefix_lse)
        larger = tl.maximum(lse, prefix_lse)
        larger = tl.where(larger == float("-inf"), 0.0, larger)
        ours = tl.exp(lse - larger)
        theirs = tl.exp(prefix_lse - larger)
        both = ours + theirs
        both = tl.where(both == 0.0, 1.0, both)
        ours = (ours / both)[:, None]
        theirs = (theirs / both)[:, None]
        # > 0 is false for NaN too: as in the reference, a NaN lse gives 0
        out = tl.where(ours > 0.0, ours * out, 0.0)
        out += tl.where(theirs > 0.0, theirs * prefix.to(tl.float32), 0.0)
        out_ptr += start * out_row_units * ALIGN
    else:
        tile = (column < width)[:, None] & in_head[None, :]
        out_ptr += request * out_request_units * ALIGN
        num_heads = tl.num_programs(1) * GROUP
        lse_ptr += request * width * num_heads
        tl.store(lse_ptr + column * num_heads + head, lse, mask=column < width)
    out_offset = (column * out_row_units + head * out_head_units) * ALIGN
    tl.store(out_ptr + out_offset[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=tile)


class InTree(NamedTuple):
    """Attention of every window column inside its own window."""

    out: torch.Tensor  # [T, W, H, D] fp32; 0 past the window
    lse: torch.Tensor  # [T, W, H] fp32, natural log; -inf past the window


def in_tree(
    q: torch.Tensor,  # [N, H, D], the step's rows
    k: torch.Tensor,  # [N, Hkv, D]; with slots a cache [blocks, block, Hkv, D]
    v: torch.Tensor,  # as k
    *,
    starts: torch.Tensor,  # [T] int32, row of each window's root
    counts: torch.Tensor,  # [T] int32, node rows behind it; -1: no window (a padding request)
    ancestors: torch.Tensor,  # [T, B] int64, bit j of word i: j is i's ancestor or i itself (j <= i)
    scale: float,
    width: int | None = None,
    slots: torch.Tensor | None = None,  # [T, W] int64, cache slot of each column's key: block * size + place
    out: InTree | None = None,
) -> InTree:
    """Attention inside the windows, to be merged with a prefix pass by its log-sum-exp.

    q, k and v are all fp16, bf16 or fp32; sums are fp32. Strides are free (slices of a fused projection, NHD
    and HND caches) but for the last, which is 1, and the others, multiples of 8. That windows lie within the
    rows, and slots within the cache, is the caller's promise: no device value is read on the host.

    Args:
        width: W, at least 1 + max(counts), at most 1 + B, which it is unless given.
        out: contiguous buffers to write and return; else new ones.

    Raises:
        ValueError: a dtype, shape or stride the kernel does not serve.
    """
    _check_windows(q, starts, ancestors)
    width = ancestors.shape[-1] + 1 if width is None else width
    shape = (starts.shape[0], width, *q.shape[1:])
    if out is None:
        out = InTree(
            torch.empty(shape, dtype=torch.float32, device=q.device),
            torch.empty(shape[:-1], dtype=torch.float32, device=q.device),
        )
    check("out.out", out.out, torch.float32, shape, like=q)
    check("out.lse", out.lse, torch.float32, shape[:-1], like=q)
    _launch(q, k, v, starts, counts, ancestors, scale, width, slots, output=out.out, lse=out.lse)
    return out


def in_tree_merged(
    q: torch.Tensor,  # [N, H, D], the step's rows
    k: torch.Tensor,  # [N, Hkv, D]; with slots a cache [blocks, block, Hkv, D]
    v: torch.Tensor,  # as k
    *,
    starts: torch.Tensor,  # [T] int32
    counts: torch.Tensor,  # [T] int32
    ancestors: torch.Tensor,  # [T, B] int64
    scale: float,
    prefix_out: torch.Tensor,  # [T, W, H, D] fp16, bf16 or fp32
    prefix_lse: torch.Tensor,  # [T, W, H] fp32, natural log, any strides; either infinity: an empty prefix
    output: torch.Tensor,  # [N or more, H, D] fp16, bf16 or fp32; shares no memory with an input
    slots: torch.Tensor | None = None,  # [T, W] int64
) -> None:
    """:func:`in_tree` merged with the prefix pass into the windows' rows of ``output``; its other rows stay.

    W is that of ``prefix_out``. Raises ValueError as :func:`in_tree` does.
    """
    _check_windows(q, starts, ancestors)
    check("prefix_out", prefix_out, DTYPES, (None, None, None, None), like=q, dense_from=3)
    width = prefix_out.shape[1]
    shape = (starts.shape[0], width, *q.shape[1:])
    check("prefix_out", prefix_out, DTYPES, shape, like=q, dense_from=3)
    check("prefix_lse", prefix_lse, torch.float32, shape[:-1], like=q, dense_from=3)
    check("output", output, DTYPES, (None, *q.shape[1:]), like=q, dense_from=2)
    if output.shape[0] < q.shape[0]:
        raise ValueError(f"output: expected at least q's {q.shape[0]} rows, got {output.shape[0]}; pad it")
    prefix = (prefix_out, prefix_lse)
    _launch(q, k, v, starts, counts, ancestors, scale, width, slots, output=output, prefix=prefix)


def _check_windows(q: torch.Tensor, starts: torch.Tensor, ancestors: torch.Tensor) -> None:
    """What sizes are read off, so before anything else."""
    check("q", q, DTYPES, (None, None, None), dense_from=2)
    check("starts", starts, torch.int32, (None,), like=q)
    check("ancestors", ancestors, torch.int64, (*starts.shape, None), like=q, dense_from=1)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    width: int,
    slots: torch.Tensor | None,
    *,
    output: torch.Tensor,  # [T, W, H, D], or [N, H, D] with prefix
    lse: torch.Tensor | None = None,
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    _, heads, size = q.shape
    rows = (None, None) if slots is not None else (q.shape[0],)
    check("k", k, q.dtype, (*rows, None, size), like=q, dense_from=len(rows) + 1)
    check("v", v, q.dtype, k.shape, like=q, dense_from=len(rows) + 1)
    requests, kv_heads = starts.shape[0], k.shape[-2]
    check("counts", counts, torch.int32, (requests,), like=q)
    if slots is not None:
        check("slots", slots, torch.int64, (requests, width), like=q, dense_from=1)
    if size % ALIGN or not 0 < size <= MAX_HEAD_SIZE:
        raise ValueError(
            f"q: expected a head size that is a multiple of {ALIGN} up to {MAX_HEAD_SIZE}, got {size}; use "
            "the core's torch attention"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q: expected a multiple of k's {kv_heads} heads, got {heads}; pass matching heads")
    if not 1 <= width <= min(ancestors.shape[1] + 1, MAX_WIDTH):
        raise ValueError(
            f"width: expected 1 to {MAX_WIDTH} and at most one more than the {ancestors.shape[1]} ancestor "
            f"words of a request, got {width}; narrow the windows"
        )
    if max(requests, kv_heads) > MAX_GRID:
        raise ValueError(
            f"starts: expected at most {MAX_GRID} windows and key heads, got {requests} and {kv_heads}; "
            "launch them in parts"
        )
    prefix_out, prefix_lse = prefix if prefix is not None else (None, None)
    q_units = _units("q", q, width)
    k_units, v_units = (
        _units(name, x, 0 if slots is not None else width) for name, x in (("k", k), ("v", v))
    )
    output_units = _units("output", output, width)
    if requests == 0 or heads == 0:
        return
    config = block_config(q.dtype, size)
    in_tree_kernel[(triton.cdiv(width * (heads // kv_heads), config["BLOCK_M"]), kv_heads, requests)](
        q,
        k,
        v,
        starts,
        counts,
        ancestors,
        slots,
        prefix_out,
        prefix_lse,
        output,
        lse,
        *q_units,
        *(k_units if slots is not None else (0, *k_units)),
        *(v_units if slots is not None else (0, *v_units)),
        ancestors.stride(0),
        slots.stride(0) if slots is not None else 0,
        *(_units("prefix_out", prefix_out, width) if prefix_out is not None else (0, 0, 0)),
        *(prefix_lse.stride() if prefix_lse is not None else (0, 0, 0)),
        *(output_units if prefix is None else (0, *output_units)),
        k.shape[1] if slots is not None else 0,
        width,
        float(scale),
        GROUP=heads // kv_heads,
        HEAD_SIZE=size,
        PAGED=slots is not None,
        MERGED=prefix is not None,
        **config,
    )


def block_config(dtype: torch.dtype, head_size: int) -> dict[str, int]:
    """Block sizes and launch options, from the dtype and head size alone: one compilation serves every width.

    Larger blocks of fp32 spill registers (its products do not use the matrix units), compiled for the six
    targets of tests/kernels/aot_attention.py with Triton 3.9.
    """
    rows = 16 if dtype == torch.float32 else 32
    columns = max(16, triton.next_power_of_2(head_size))  # 16: tl.dot's least
    return {
        "ALIGN": ALIGN,
        "BLOCK_D": columns,
        "BLOCK_M": rows,
        "BLOCK_N": rows,
        "num_warps": 4,
        "num_stages": 1,
    }


def _units(name: str, tensor: torch.Tensor, width: int) -> tuple[int, ...]:
    """Strides of all but the last dimension in units of ALIGN; ``width`` rows must span 32-bit offsets."""
    shape = tensor.shape[:-1]
    strides = [stride if n > 1 else 0 for n, stride in zip(shape, tensor.stride()[:-1], strict=True)]
    if any(stride % ALIGN for stride in strides):
        raise ValueError(
            f"{name}: expected strides that are multiples of {ALIGN} but for the last, got "
            f"{list(tensor.stride())} for shape {list(tensor.shape)}; call contiguous()"
        )
    if width * strides[-2] + shape[-1] * strides[-1] >= 2**31:
        raise ValueError(
            f"{name}: expected {width} rows within 2**31 elements, got strides {list(tensor.stride())}; call "
            "contiguous()"
        )
    return tuple(stride // ALIGN for stride in strides)
