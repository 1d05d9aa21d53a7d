"""Counters of the worker in vLLM's own metrics endpoint.

The worker counts where the steps run, the endpoint answers where the API server runs. Between them lies one
file of numbers, mapped by both; its path travels in the configuration. It has a row for each data-parallel
engine, written by the first of its ranks, and the endpoint shows the sums. With several API server processes
vLLM serves only what prometheus_client keeps in its own files: the worker then counts there.
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
    """The mapped numbers of one engine."""

    def __init__(self, path: Path | str, engine: int = 0) -> None:
        """``engine``: data-parallel index. Raises OSError where the file is not there, as in a worker on
        another host."""
        self.values = _mapped(path)[engine]

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Count; ``label``: the value of the counter's label, if it has one."""
        self.values[_INDEX[name, label]] += amount


class SharedCounters:
    """The same where several API servers answer: in files of prometheus_client, summed by each."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, values

        # A forked worker has prometheus_client as it was before vLLM named the folder of these files.
        values.ValueClass = values.get_value_class()
        registry = CollectorRegistry()
        families = {
            name: Counter(PREFIX + name, text, [label[0]] if label else [], registry=registry)
            for name, (text, label) in COUNTERS.items()
        }
        self._counters = {
            (name, value): families[name].labels(value) if value else families[name] for name, value in _INDEX
        }

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """As `Counters.add`."""
        self._counters[name, label].inc(float(amount))


def counters(path: str, engine: int) -> Counters | SharedCounters:
    """Where the worker of this engine counts. Raises OSError as `Counters`."""
    return SharedCounters() if os.environ.get("PROMETHEUS_MULTIPROC_DIR") else Counters(path, engine)


def _mapped(path: Path | str) -> np.ndarray:
    """[engines, counters] fp64."""
    return np.memmap(path, dtype=np.float64, mode="r+").reshape(-1, len(_INDEX))


def create_file(engines: int = 1) -> str:
    """A file of zeros for so many engines, removed when this process ends."""
    handle, path = tempfile.mkstemp(prefix="specplug-", suffix=".counters")
    with os.fdopen(handle, "wb") as file:
        file.write(bytes(8 * len(_INDEX) * engines))
    owner = os.getpid()
    atexit.register(lambda: Path(path).unlink(missing_ok=True) if os.getpid() == owner else None)
    return path


class Collector:
    """Reads the file whenever the endpoint is asked."""

    def __init__(self, path: Path | str) -> None:
        self._values = _mapped(path)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        totals = self._values.sum(axis=0)
        for name, (text, label) in COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=[label[0]] if label else [])
            for value in label[1] if label else ("",):
                family.add_metric([value] if label else [], float(totals[_INDEX[name, value]]))
            yield family


_registered: list[Collector] = []


def serve(path: str) -> None:
    """Show the counters of ``path`` in this process's registry, in place of an earlier engine's."""
    from prometheus_client import REGISTRY

    while _registered:
        REGISTRY.unregister(_registered.pop())
    collector = Collector(path)
    REGISTRY.register(collector)
    _registered.append(collector)
