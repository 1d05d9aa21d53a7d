"""What a launcher asks of a tensor before its kernel runs over raw addresses, and how copies take memory.

Looks at dtype, shape, strides, address and device, which the host knows, never at values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MAX_GRID = 65535  # CUDA's limit on the second and third dimension of a grid


def check(
    name: str,
    tensor: torch.Tensor,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    *,
    like: torch.Tensor | None = None,
    dense_from: int = 0,
) -> None:
    """Raise ValueError where a tensor is not what a kernel assumes.

    Args:
        shape: expected sizes, None where any will do.
        like: a tensor whose device it must be on.
        dense_from: the dimensions from this one on must be contiguous among themselves; those before may
            have any stride.
    """
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dtype not in dtypes:
        names = " or ".join(_dtype(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: expected dtype {names}, got {_dtype(tensor.dtype)}; cast it")
    fits = tensor.ndim == len(shape) and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(tensor.shape)}; slice or reshape it")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {tensor.device}; move it")
    for dim in range(dense_from, tensor.ndim):
        dense = math.prod(tensor.shape[dim + 1 :])
        if tensor.shape[dim] > 1 and tensor.stride(dim) != dense and tensor.numel():
            raise ValueError(
                f"{name}: expected dimensions {dense_from} to {tensor.ndim - 1} contiguous, got strides "
                f"{list(tensor.stride())} for shape {list(tensor.shape)}; call contiguous()"
            )


def stride_unit(tensor: torch.Tensor, *sizes: int) -> int:
    """The unit, in elements, in which a copy kernel is told strides and widths: 16 where the address and all
    ``sizes`` are multiples of it, so that the compiler sees that 16 bytes can go at once; else 1.
    """
    return 16 if tensor.data_ptr() % 16 == 0 and all(size % 16 == 0 for size in sizes) else 1


def tile_elements(tensor: torch.Tensor, unit: int) -> int:
    """Elements a copying program of 128 threads holds: 64 bytes a thread, or 16 addresses where each element
    needs its own. More spills registers.
    """
    most = 8192 // tensor.element_size()
    return most if unit > 1 else min(most, 2048)


def raw_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the element's width: copied bit by bit whatever the dtype (NaN, fp8)."""
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
