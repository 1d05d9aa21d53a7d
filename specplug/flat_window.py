"""Verify windows in the form that SGLang and FlashInfer read: rows back to back, the mask one row of bits.

The mask goes request by request, row by row, over the request's committed tokens and then over its window.
Notation: R requests, W = B + 1 window rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specplug.tree import DraftTree, ancestor_mask


class FlatWindow(NamedTuple):
    """The windows before any trimming."""

    ids: torch.Tensor  # [R, W] int64, the root's token first
    positions: torch.Tensor  # [R, W] int64, committed length + depth
    sees: torch.Tensor  # [R, W, W] bool, row = query


def flat_window(
    tree: DraftTree,
    anchors: torch.Tensor,  # [R] int64, last committed tokens
    prefix: torch.Tensor,  # [R] int64, tokens in the cache
    *,
    max_depth: int,
) -> FlatWindow:
    """Ids, positions and sight of every row; padding nodes stand at the root's position and see it."""
    depths = torch.nn.functional.pad(tree.depths.long(), (1, 0))
    return FlatWindow(
        torch.cat((anchors.long()[:, None], tree.tokens), 1),
        prefix.long()[:, None] + depths,
        ancestor_mask(tree.parents, tree.counts, max_depth=max_depth),
    )


def flat_mask(
    sees: torch.Tensor,  # [R, W, W] bool
    prefix: torch.Tensor,  # [R] int, committed tokens
    rows: torch.Tensor,  # [R] int, window rows that are verified
    size: int,  # sum of rows * (prefix + rows); a host value, so that nothing waits for the device
) -> torch.Tensor:
    """The mask of the first ``rows`` of every window, [size] bool."""
    prefix, rows = prefix.long(), rows.long()
    width = prefix + rows
    ends = (rows * width).cumsum(0)
    bit = torch.arange(size, device=sees.device)
    request = torch.searchsorted(ends, bit, right=True).clamp_max(len(ends) - 1)
    within = bit - (ends - rows * width)[request]
    row, column = within // width[request], within % width[request] - prefix[request]
    return (column < 0) | sees[request, row.clamp_max(sees.shape[1] - 1), column.clamp_min(0)]
