"""The CPU operators of sgl_kernel that SGLang 0.5.23 needs for the DSPARK family, in plain torch.

`torch.ops.sgl_kernel.convert_weight_packed` must not exist: by it SGLang recognises a CPU with AMX kernels.
Without it, it uses its own torch code for norms, rotary embedding, activation and sampling.
"""

import ctypes
from typing import Any

import torch

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, out_cache_loc, pool_len) -> None:
    """Write the slots of `out_cache_loc`, back to back, into columns [start, end) of each request's row."""
    for row, start, end, slots in _spans(requests, starts, ends, out_cache_loc):
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(requests, req_to_token, starts, ends, out_cache_loc, pool_len) -> None:
    """The reverse: read columns [start, end) of each request's row into `out_cache_loc`."""
    for row, start, end, slots in _spans(requests, starts, ends, out_cache_loc):
        slots.copy_(req_to_token[row, start:end])


def _spans(requests, starts, ends, slots):
    at = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, start, end, slots[at : at + end - start]
        at += end - start


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    """Slots of the accepted rows, those that are not -1, packed to the front."""
    rows = accept_index.flatten()
    rows = rows[rows >= 0].long()
    accept_out_cache_loc[: len(rows)] = out_cache_loc[rows]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, targets, sources) -> None:
    """In every buffer, copy rows `sources` of `stride` bytes to rows `targets`; the two may overlap."""
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        base = pointer % 2**64  # a tensor of int64 holds addresses
        rows = [ctypes.string_at(base + row * stride, stride) for row in sources.tolist()]
        for row, content in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(base + row * stride, content, stride)


_MASK = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """32-bit MurmurHash3 of (seed low, seed high, position, column).

    seed [rows], positions [rows], columns [columns] -> [rows, columns] int64, below 2**32.

    Source: the MurmurHash3_x86_32 algorithm of A. Appleby, on four words of four bytes.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.long()
    words = (seed[:, None], seed[:, None] >> 32, positions.long()[:, None], columns.long()[None])
    state = torch.zeros(1, 1, dtype=torch.int64)
    for word in words:
        word = _rotated(_times(word & _MASK, 0xCC9E2D51), 15)
        state = state ^ _times(word, 0x1B873593)
        state = (_times(_rotated(state, 13), 5) + 0xE6546B64) & _MASK
    state = state ^ 16  # bytes hashed
    state = _times(state ^ state >> 16, 0x85EBCA6B)
    state = _times(state ^ state >> 13, 0xC2B2AE35)
    return state ^ state >> 16


def _times(word: torch.Tensor, factor: int) -> torch.Tensor:
    return word * factor & _MASK  # int64 wraps around, and the lower 32 bits stay right


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word << bits | word >> 32 - bits) & _MASK


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def __getattr__(name: str) -> Any:
    """Operators that SGLang imports on a CPU and that the DSPARK family never calls."""
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' of the test rig has no attribute {name!r}")

    def absent(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not in the test rig")

    return absent
