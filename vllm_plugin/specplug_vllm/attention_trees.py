"""What the attention layers of the target read of a step, eager or from a captured CUDA graph.

An eager step hands its own tensors down. A captured forward reads the tensors it was captured with, at their
addresses and shapes, whatever the Python of a later step makes: so the step's layout, padded to the graph's
requests and to windows of B + 1 rows, is copied into buffers made once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specplug.window import WindowBuffers, Windows
from specplug_kernels.ops import Attend


@dataclass(frozen=True)
class AttentionTrees:
    """What the attention layers need of a step: the windows of the requests that drafted, or in a captured
    forward those of all its requests, the padding's without a row."""

    windows: Windows  # of T requests
    attend: Attend  # over these windows
    requests: torch.Tensor  # [T] int64 indices into the batch
    prefix_lens: torch.Tensor  # [T] int32, committed tokens before the root
    max_prefix_len: int  # host bound
    only_windows: bool  # every row of the step is in a window
    captured: bool = False  # the tensors are fixed buffers, the shapes and bounds those of every replay


class GraphBuffers:
    """What captured forwards read of a step: fixed addresses, one set for every graph of a worker."""

    def __init__(self, windows: Windows, *, requests: int) -> None:
        """Room for ``requests`` requests; ``windows``: any step's, at the width of the graphs."""
        device, width = windows.rows.device, windows.rows.shape[1]
        self._windows = WindowBuffers(windows, requests=requests, rows=requests * width)
        self._requests = torch.arange(requests, device=device)
        self._prefix_lens = torch.zeros(requests, dtype=torch.int32, device=device)

    def hold(
        self,
        windows: Windows,  # of R requests, padding included
        roots: torch.Tensor,  # [real requests] int64, committed tokens
        *,
        attention: Callable[[Windows], Attend],
        max_prefix_len: int,
    ) -> AttentionTrees:
        """A step in the buffers. ``max_prefix_len``: of any step, the model's longest context."""
        requests = windows.rows.shape[0]
        self._prefix_lens[: len(roots)].copy_(roots)
        self._prefix_lens[len(roots) :].zero_()
        held = self._windows.hold(windows)
        return AttentionTrees(
            windows=held,
            attend=attention(held),
            requests=self._requests[:requests],
            prefix_lens=self._prefix_lens[:requests],
            max_prefix_len=max_prefix_len,
            only_windows=True,
            captured=True,
        )


def check_captured_batch(input_batch: Any, width: int, *, for_capture: bool) -> None:
    """Raise RuntimeError for rows outside windows of ``width`` rows: a captured forward computes none."""
    widest, rows = int(input_batch.num_scheduled_tokens.max()), input_batch.num_tokens
    in_windows = input_batch.num_reqs + input_batch.num_draft_tokens
    if widest > width or not (for_capture or rows == in_windows):
        raise RuntimeError(
            f"full_graphs: expected a step of windows of at most {width} rows, got {rows} rows of which "
            f"{in_windows} are in windows and {widest} of one request; set full_graphs to false"
        )
