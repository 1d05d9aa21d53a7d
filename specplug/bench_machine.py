"""The machine of a benchmark: its name, and the most memory a server takes while a load runs.

A server is the session its first process leads (see `specplug.server`); its resident memory is the sum over
its processes, so pages that several of them share count several times. GPUs are asked through nvidia-smi, so
that this process takes no memory there itself; what is read is everything in use on the visible GPUs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from types import TracebackType

from specplug import provenance
from specplug.processes import resident_bytes

SECONDS = 0.25  # between two looks at the processes
GPU_EVERY = 8  # looks between two at the GPUs, as nvidia-smi takes 0.1 s and more
_MIB = 1 << 20


def device(*, on_gpu: bool, environment: Mapping[str, str]) -> str:
    """Name and number of the GPUs, or the CPU and the threads of the server's operators."""
    if on_gpu:
        names = _ask("name") or ["GPU of unknown name"]
        kinds = dict.fromkeys(names)
        return ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds)
    import torch

    model = provenance.device_name(torch.device("cpu")).rpartition(", ")[0]
    return f"{model}, {environment.get('OMP_NUM_THREADS', 'unlimited')} thread(s)"


def busy() -> str | None:
    """A label where other work was running when this was asked: half a core or more of every two."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < cores / 2:
        return None
    return f"BUSY MACHINE: load average {load:.1f} on {cores} cores as the run began; its times mean little"


def _ask(what: str) -> list[str]:
    """One answer of nvidia-smi a visible GPU; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [] if visible is None else [f"--id={visible}"]
    line = ["nvidia-smi", *chosen, f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(line, capture_output=True, text=True)
    return [] if answer.returncode else [row.strip() for row in answer.stdout.splitlines() if row.strip()]


class Peak:
    """The most memory between entering and leaving, sampled by a thread."""

    def __init__(self, session: int, *, on_gpu: bool) -> None:
        self._session, self._on_gpu = session, on_gpu
        self.host_bytes: int | None = None
        self.device_bytes: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        look = 0
        while True:
            self.host_bytes = max(self.host_bytes or 0, resident_bytes(self._session)) or None
            if self._on_gpu and look % GPU_EVERY == 0:
                used = [float(value) for value in _ask("memory.used") if value.replace(".", "").isdigit()]
                self.device_bytes = max(self.device_bytes or 0, round(sum(used) * _MIB)) or None
            look += 1
            if self._end.wait(SECONDS):
                return
