"""Ragged windows in flat row order: request r owns the rows starts[r] .. starts[r] + counts[r] - 1."""

from __future__ import annotations

import torch


def window_index(
    starts: torch.Tensor,  # [R] integer, first flat row of each window
    counts: torch.Tensor,  # [R] integer, rows of each window, may be 0
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat rows of each window as a rectangle: (index [R, width] int64, valid [R, width] bool).

    ``valid`` is false past a window's end; a window longer than ``width`` is cut. Columns past the end repeat
    the window's last row. An empty window points at the row before its start, or at row 0 if there is none:
    so gathering never leaves the flat tensor as long as that has a row at all.
    """
    starts, counts = starts.long()[:, None], counts.long()[:, None]
    column = torch.arange(width, device=starts.device)
    index = torch.minimum(starts + column, starts + counts - 1).clamp_min(0)
    return index, column < counts
