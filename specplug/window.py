"""Where each request's tree lies in the rows of one target forward.

A step's rows are ragged: request r contributes some ordinary rows (prefill) and then, last, its *window*: the
root row followed by one row per drafted node. Everything the engine must do differently on a tree (positions,
mask, acceptance, commit) is a function of the window, computed here once per step with fixed shapes and no
host read.

Notation: R requests, W window width (1 + the widest tree), N rows of the step, gamma tree depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from specplug.ragged import window_index
from specplug.tree import ancestor_mask


@dataclass(frozen=True)
class Windows:
    """The windows of one step.

    Columns past a request's own width repeat one of its rows and are False in ``inside``. Nodes past ``live``
    are rows that were scheduled but hold no node of a tree: they see the root and themselves, and are never
    accepted.
    """

    rows: torch.Tensor  # [R, W] int64, row of the step that holds the window's column
    inside: torch.Tensor  # [R, W] bool
    mask: torch.Tensor  # [R, W, W] bool, True where the query column sees the key column; kernels: words
    depths: torch.Tensor  # [R, W] int64, 0 for the root
    column_of_row: torch.Tensor  # [N] int64, r * W + column for rows in a window, else 0
    in_window: torch.Tensor  # [N] bool

    def positions(self, linear: torch.Tensor) -> torch.Tensor:
        """Positions at which the rows are computed: the root's own, plus depth.

        Args:
            linear: [N] int64, the engine's positions (row order).

        Returns:
            [N] int64; unchanged outside the windows.
        """
        at_depth = linear[self.rows[:, :1]] + self.depths
        return torch.where(self.in_window, at_depth.flatten()[self.column_of_row], linear)

    def scatter(self, values: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Rows of ``into`` [N, ...] replaced by the windows' ``values`` [R, W, ...]; a new tensor."""
        flat = values.flatten(0, 1)[self.column_of_row].to(into.dtype)
        keep = self.in_window.view(-1, *([1] * (into.ndim - 1)))
        return torch.where(keep, flat, into)

    def select(self, requests: torch.Tensor, num_rows: int) -> Windows:
        """The windows of some requests only. ``requests``: [T] int64 indices into R; ``num_rows`` = N."""
        rows, inside = self.rows[requests], self.inside[requests]
        column_of_row, in_window = _column_of_row(rows, inside, num_rows)
        return Windows(rows, inside, self.mask[requests], self.depths[requests], column_of_row, in_window)


def lay_out_windows(
    *,
    ends: torch.Tensor,  # [R] int, one past each request's last row
    drafted: torch.Tensor,  # [R] int, node rows of the request (0: only its root's row; -1: no window)
    parents: torch.Tensor,  # [R, B] int32, node indices, -1 = root
    depths: torch.Tensor,  # [R, B] int32
    live: torch.Tensor,  # [R] int, nodes of a real tree among the drafted rows
    width: int,
    num_rows: int,
    max_depth: int,
    visibility: Callable[..., torch.Tensor] = ancestor_mask,
) -> Windows:
    """Lay out the windows of one step.

    Args:
        width: W, at least 1 + max(drafted), at most 1 + B; a host value.
        num_rows: N, rows of the step (padding included); a host value.
        max_depth: gamma, the deepest a node can be; a host value.
        visibility: makes ``mask``; a kernel's may pack it, as [R, W - 1] ancestor words.

    Raises:
        ValueError: ``width`` does not fit the trees' width.
    """
    budget = parents.shape[1]
    if not 1 <= width <= budget + 1:
        raise ValueError(
            f"window width must be within 1 and the tree's width + 1 = {budget + 1}, got {width}"
        )
    rows, inside = window_index(ends - drafted - 1, drafted + 1, width)
    nodes = width - 1
    mask = visibility(parents[:, :nodes], live, max_depth=max_depth)
    node = torch.arange(nodes, device=parents.device)
    node_depths = torch.where(node < live[:, None], depths[:, :nodes], 0).long()
    column_depths = torch.nn.functional.pad(node_depths, (1, 0))
    column_of_row, in_window = _column_of_row(rows, inside, num_rows)
    return Windows(rows, inside, mask, column_depths, column_of_row, in_window)


def _column_of_row(
    rows: torch.Tensor, inside: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert ``rows`` [R, W]; columns outside their window are written to a row past the end and cut off."""
    columns = torch.arange(rows.numel(), device=rows.device)
    target = torch.where(inside, rows, num_rows).flatten()
    column_of_row = torch.zeros(num_rows + 1, dtype=torch.int64, device=rows.device)
    column_of_row.scatter_(0, target, columns)
    in_window = torch.zeros(num_rows + 1, dtype=torch.bool, device=rows.device)
    in_window.index_fill_(0, target, True)
    return column_of_row[:num_rows], in_window[:num_rows]


class WindowBuffers:
    """Memory of fixed addresses for what a forward reads of its windows.

    A captured CUDA graph reads the tensors it was captured with. So each step's windows, laid out anew at the
    graph's padded shape, are copied here. Only a prefix along the first dimension is handed out: for R
    requests and N rows it is the same tensor every time.
    """

    def __init__(self, like: Windows, *, requests: int, rows: int) -> None:
        """Room for ``requests`` windows of the width and dtypes of ``like``, in a step of ``rows`` rows."""
        self._fields = {
            name: torch.zeros((most, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
            for name, most, tensor in (
                ("rows", requests, like.rows),
                ("mask", requests, like.mask),
                ("column_of_row", rows, like.column_of_row),
                ("in_window", rows, like.in_window),
            )
        }

    def hold(self, windows: Windows) -> Windows:
        """``windows``, with what a forward reads copied to the buffers. Raises RuntimeError if too large."""
        held = {}
        for name, buffer in self._fields.items():
            values = getattr(windows, name)
            if values.shape[0] > buffer.shape[0] or values.shape[1:] != buffer.shape[1:]:
                raise RuntimeError(
                    f"windows.{name}: expected at most {list(buffer.shape)}, got {list(values.shape)}; make "
                    "the buffers for the largest step"
                )
            held[name] = buffer[: values.shape[0]].copy_(values)
        return replace(windows, **held)


@dataclass(frozen=True)
class Commit:
    """Row moves that make the accepted path look like a verified chain.

    Entry k moves the row of the k-th accepted node to column k of its window; entries past the accepted
    length move the root row onto itself. Sources are read before destinations are written, so overlapping
    moves are right.
    """

    source: torch.Tensor  # [R * gamma] int64 rows of the step
    destination: torch.Tensor  # [R * gamma] int64

    def move(self, rows: torch.Tensor) -> None:
        """Apply to a tensor of rows [N, ...], in place."""
        rows.index_copy_(0, self.destination, rows.index_select(0, self.source))


def commit(windows: Windows, path: torch.Tensor, num_emitted: torch.Tensor) -> Commit:
    """The moves for one step's walk.

    Args:
        path: [R, gamma + 1] int64, the window column that drew token k (column 0 draws token 0).
        num_emitted: [R] int, 1 + accepted nodes.
    """
    k = torch.arange(1, path.shape[1], device=path.device)
    accepted = k < num_emitted[:, None]
    limit = windows.rows.shape[1] - 1
    source = torch.where(accepted, path[:, 1:], 0)
    destination = torch.where(accepted, k.clamp(max=limit), 0)
    return Commit(windows.rows.gather(1, source).flatten(), windows.rows.gather(1, destination).flatten())
