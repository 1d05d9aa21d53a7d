"""Stamps of a worker's steps: wall clock on a CPU, events of the stream on a GPU, where nobody waits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from specplug.run_delay import waited_seconds


class StepClock:
    """One a worker."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self._last: tuple[frozenset[str], Any] | None = None  # requests of the last step, and its end

    def stamp(self) -> Any:
        """Now. Differences are `seconds`; on a GPU only once the later stamp has passed (``query``)."""
        if not self.on_gpu:  # other processes' time on a shared core is not the step's
            return time.perf_counter() - waited_seconds()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """Between two stamps, at least 0: the kernel books a wait late, so that a short stretch may lose more
        than it took."""
        return first.elapsed_time(last) / 1000 if self.on_gpu else max(0.0, last - first)

    def begin(self, requests: Iterable[str]) -> Any:
        """Where a step of these requests begins: in a busy engine where the last one ended, because
        scheduling is part of its price; now, where none of its requests goes on."""
        if self._last is not None and not self._last[0].isdisjoint(requests):
            return self._last[1]
        return self.stamp()

    def end(self, requests: Iterable[str]) -> Any:
        """The end of a step, now."""
        self._last = frozenset(requests), self.stamp()
        return self._last[1]

    def interrupt(self) -> None:
        """Something else runs: the next step does not follow on the last."""
        self._last = None
