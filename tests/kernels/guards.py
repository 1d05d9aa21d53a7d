"""Output buffers with watched surroundings: a store outside the output is seen."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

GUARD_BYTES = 16 * 1024  # on either side: more than any block of a kernel is wide
PATTERN = 0xA5  # of guards and of the output before it is written; no token, id or plausible float


class Guarded(NamedTuple):
    view: torch.Tensor
    check: Callable[[], None]


def guarded(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Guarded:
    """A contiguous tensor of `shape` for a kernel to write to, filled with a pattern, between two guards.

    `check()` raises AssertionError if a byte outside the view was changed; whether the view itself was
    written fully shows when it is compared, since the pattern is no result.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    buffer = torch.full((GUARD_BYTES + size + GUARD_BYTES,), PATTERN, dtype=torch.uint8, device=device)
    view = buffer[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape)

    def check() -> None:
        for side, guard in (("before", buffer[:GUARD_BYTES]), ("after", buffer[GUARD_BYTES + size :])):
            changed = (guard != PATTERN).nonzero().flatten()
            assert changed.numel() == 0, (
                f"{changed.numel()} bytes {side} the output of shape {tuple(shape)} were overwritten, the "
                f"first {changed[0].item()} bytes into the guard"
            )

    return Guarded(view, check)
