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


def admit(
    survival: torch.Tensor,  # [R, B] fp32, a(v) of each request's nodes in order, non-increasing along a row
    capacities: torch.Tensor,  # [R] integer, nodes of each request that may be taken, at most B
    nodes: int,  # host value, at most the sum of the capacities
) -> torch.Tensor:
    """How many of its first nodes each request keeps when the batch's best ``nodes`` are taken: [R] int32.

    Equal survivals go to the lower request, then to the lower node. As a child never scores above its parent,
    what a request keeps is a prefix of its nodes and a tree of its own. NaN counts as 0. No host read: on a
    device this is one stable sort of R * B values.
    """
    requests, budget = survival.shape
    place = torch.arange(budget, device=survival.device)
    # Rounding may lift a child above its parent by an ulp: a row is made non-increasing first.
    rows = survival.nan_to_num(0.0).cummin(1).values if budget else survival
    scores = torch.where(place < capacities[:, None], rows, -1.0).flatten()
    taken = scores.sort(descending=True, stable=True).indices[:nodes]
    admitted = torch.zeros_like(scores, dtype=torch.int32)
    return admitted.index_fill_(0, taken, 1).view(requests, budget).sum(1, dtype=torch.int32)
