"""Counters of the worker in vLLM's own metrics endpoint.

The worker counts where the steps run, the endpoint answers where the API server runs. Between them lies one
file of numbers, mapped by both; its path travels in the configuration. With several API server processes
vLLM serves only what prometheus_client keeps in its own files, and these counters are then not shown.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# name -> (what it counts, values of its label or none). Never reorder within a release: both sides index it.
COUNTERS: dict[str, tuple[str, tuple[str, tuple[str, ...]] | None]] = {
    "steps": ("Steps, by the shape that was verified.", ("shape", ("plain", "chain", "tree"))),
    "drafts": ("Rounds, by the shape that was drafted for the next.", ("shape", ("plain", "chain", "tree"))),
    "nodes_drafted": ("Draft nodes that were scheduled for verification.", None),
    "nodes_verified": ("Draft nodes that the target verified.", None),
    "nodes_accepted": ("Draft nodes that the target accepted.", None),
    "tokens_predicted": ("Tokens that planned steps were expected to emit.", None),
    "tokens_emitted": ("Tokens that planned steps emitted.", None),
    "seconds_predicted": ("Seconds that planned steps were expected to take, drafting included.", None),
    "seconds_observed": ("Seconds that planned steps took, drafting included.", None),
    "seconds_plain": ("Seconds that plain decoding would have taken for what planned steps emitted.", None),
    "chain_requests": (
        "Requests that draft chains only, by reason.",
        (
            "reason",
            (
                "structured_outputs",
                "thinking_token_budget",
                "custom_logits_processors",
            ),
        ),
    ),
}
PREFIX = "specplug:"
_INDEX = {
    (name, value): i
    for i, (name, value) in enumerate(
        (name, value) for name, (_, label) in COUNTERS.items() for value in (label[1] if label else ("",))
    )
}


class Counters:
    """The mapped numbers."""

    def __init__(self, path: Path | str) -> None:
        """Raises OSError where the file is not there, as in a worker on another host."""
        self.values = np.memmap(path, dtype=np.float64, mode="r+", shape=(len(_INDEX),))

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Count; ``label``: the value of the counter's label, if it has one."""
        self.values[_INDEX[name, label]] += amount

    def get(self, name: str, label: str = "") -> float:
        return float(self.values[_INDEX[name, label]])


def create_file() -> str:
    """A file of zeros, removed when this process ends."""
    handle, path = tempfile.mkstemp(prefix="specplug-", suffix=".counters")
    with os.fdopen(handle, "wb") as file:
        file.write(bytes(8 * len(_INDEX)))
    owner = os.getpid()
    atexit.register(lambda: Path(path).unlink(missing_ok=True) if os.getpid() == owner else None)
    return path


class _Collector:
    """Reads the file whenever the endpoint is asked."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        for name, (text, label) in COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=[label[0]] if label else [])
            for value in label[1] if label else ("",):
                family.add_metric([value] if label else [], self.counters.get(name, value))
            yield family


_registered: list[_Collector] = []


def serve(path: str) -> None:
    """Show the counters of ``path`` in this process's registry, in place of an earlier engine's."""
    from prometheus_client import REGISTRY

    while _registered:
        REGISTRY.unregister(_registered.pop())
    collector = _Collector(Counters(path))
    REGISTRY.register(collector)
    _registered.append(collector)
