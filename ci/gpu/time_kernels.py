"""Time every kernel launch that tests/kernels/aot_*.py lists; see ci/gpu.sh.

    python ci/gpu/time_kernels.py OUT

On a GPU a launch is captured into a CUDA graph, which alone shows that it reads nothing back and allocates
nothing the graph cannot replay. Three medians, in microseconds:

- warm: replays of a graph of GRAPH_LAUNCHES launches, divided: the device time, inputs in the L2 cache;
- cold: replays of one launch after the L2 cache was overwritten, less the same with an empty kernel in its
  place: what a launch costs in a model step, which leaves nothing of our inputs in the cache;
- eager: calls from Python in a row, without a graph: the larger of device time and host time.

The bytes are the fewest the launch must move; over the cold time and the bandwidth of a large copy, measured
in the same run, they say how far a memory-bound kernel is from its floor. Small launches are bound by
latency, and their share is small whatever the kernel does.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
KERNEL_TESTS = ROOT / "tests" / "kernels"
GRAPH_LAUNCHES = 20
REPEATS = 30
COPY_BYTES = 2**30
Launch = Callable[[], object]


class Row(NamedTuple):
    """One launch. Times in microseconds, None where not measured; `error` says why."""

    kernel: str
    launch: str
    ideal_bytes: int
    warm_us: float | None = None
    cold_us: float | None = None
    eager_us: float | None = None
    error: str = ""


class GpuClock:
    """Times launches on a CUDA (or ROCm) device."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.flood = torch.empty(4 * properties.L2_cache_size, dtype=torch.uint8, device=device)
        self.one = torch.zeros(1, device=device)
        self.empty = self._cold(_graph(lambda: self.one.add_(1)))
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        seconds = self._eager(lambda: target.copy_(source)) / 1e6
        self.facts = {
            "device": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "L2 bytes": properties.L2_cache_size,
            "copy GB/s": round(2 * COPY_BYTES / seconds / 1e9, 1),
            "empty kernel cold us": round(self.empty, 2),
        }

    def __call__(self, launch: Launch) -> tuple[float, float, float]:
        """Warm, cold and eager microseconds."""
        launch()
        many, single = _graph(launch, GRAPH_LAUNCHES), _graph(launch)
        warm = _median(many.replay) / GRAPH_LAUNCHES
        return warm, max(self._cold(single) - self.empty, 0.0), self._eager(launch)

    def _cold(self, graph: torch.cuda.CUDAGraph) -> float:
        return _median(graph.replay, before=lambda: self.flood.fill_(1))

    def _eager(self, launch: Launch) -> float:
        return _median(lambda: [launch() for _ in range(GRAPH_LAUNCHES)]) / GRAPH_LAUNCHES


def _graph(launch: Launch, launches: int = 1) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what torch asks for: warm up on the stream of the capture
        for _ in range(3):
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    return graph


def _median(work: Launch, *, before: Launch | None = None) -> float:
    """Median microseconds of `work` between two events; each repetition begins with `before`, not timed."""
    work()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)
    ]
    for start, end in events:
        if before is not None:
            before()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


class InterpreterClock:
    """The rehearsal: one call each, in host time. Says that a launch runs, nothing of its speed."""

    def __init__(self) -> None:
        self.facts = {"device": "Triton's interpreter", "copy GB/s": None}

    def __call__(self, launch: Launch) -> tuple[None, None, float]:
        began = time.perf_counter()
        launch()
        return None, None, 1e6 * (time.perf_counter() - began)


def rows(device: torch.device, clock: Any, until: float) -> Iterator[Row]:
    """Measure every launch until time.monotonic() is `until`, list those after it as not measured.

    A launch that fails is a result like any other: the rest are still measured.
    """
    for path in sorted(KERNEL_TESTS.glob("aot_*.py")):
        kernel = path.stem.removeprefix("aot_")
        try:
            launches = importlib.import_module(path.stem).timings(device)
        except Exception as error:
            yield Row(kernel, "its inputs", 0, error=_first_line(error))
            continue
        for name, launch, ideal_bytes in launches:
            row = Row(kernel, name, ideal_bytes)
            if time.monotonic() > until:
                yield row._replace(error="not measured: out of time")
                continue
            try:
                warm, cold, eager = clock(launch)
            except Exception as error:
                yield row._replace(error=_first_line(error))
            else:
                yield row._replace(warm_us=warm, cold_us=cold, eager_us=eager)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def markdown(facts: dict[str, Any], measured: list[Row]) -> str:
    lines = [f"- {key}: {value}" for key, value in facts.items()]
    lines += [
        "",
        "| kernel | launch | ideal bytes | warm us | cold us | eager us | share of copy bandwidth, cold |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in measured:
        share = ""
        if row.cold_us and facts["copy GB/s"]:
            share = f"{row.ideal_bytes / row.cold_us / 1e3 / facts['copy GB/s']:.0%}"
        times = ["-" if us is None else f"{us:.1f}" for us in (row.warm_us, row.cold_us, row.eager_us)]
        cells = [row.kernel, row.launch, f"{row.ideal_bytes:,}", *times, row.error or share]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for timings.json and timings.md")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop measuring after this long")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    device = torch.device(os.environ.get("SPECPLUG_KERNEL_DEVICE", "cuda"))
    sys.path.insert(0, str(KERNEL_TESTS))
    clock: Any
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton
        importlib.import_module("specplug_rig.interpreter").install()
        clock = InterpreterClock()
    else:
        clock = GpuClock(device)
    facts = clock.facts | {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    measured = []
    for row in rows(device, clock, until):
        measured.append(row)
        print(
            f"{row.kernel}: {row.launch}: {row.error or f'{row.warm_us or row.eager_us:.1f} us'}", flush=True
        )
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"facts": facts, "rows": [row._asdict() for row in measured]}
    (options.out / "timings.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "timings.md").write_text(markdown(facts, measured))
    failed = [row for row in measured if row.error]
    print(f"{len(measured)} launches, {len(failed)} without a time; {options.out / 'timings.md'}")
    sys.exit(1 if failed or not measured else 0)


if __name__ == "__main__":
    main()
