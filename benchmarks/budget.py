"""Time of one budget decision against numpy sorts of the same numbers, in one run on the CPU.

    python benchmarks/budget.py [--requests 256] [--budget 64] [--table FILE] [--repeats 30]

The yardstick is np.sort of the requests * budget fp32 survivals. "verify" is Planner.verify as an engine
calls it every step: checks, caps, one sort, the argmax over the whole curve, the counts. "draft" is
Planner.draft. "curve" is making the seconds of every total anew (table, correction), which happens at a new
load and every specplug.prices.REFRESH_READS reads, "outlooks" what Planner.draft makes anew every
specplug.prospects.OF_LARGE rounds (REFRESH_ROUNDS of small batches), "allocate" the cut alone. The parts take
turns, a few runs each after a warm one; figures are medians. "mean step" is draft and verify with everything
at the rate it really happens, a mean of CPU time. Without --table: a staircase at CUDA graph sizes up to 512,
linear above.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specplug.budget import Planner, allocate
from specplug.cost import CostTable, from_probes, read_cost_table
from specplug.cost_curves import Probe
from specplug.prices import Prices

CONTEXT, DEPTH = 1000.0, 7
TURN = 20  # timed runs of one part in a row, after an untimed one
STEPS = 512  # of the mean: a multiple of the refresh periods
GRAPHS = (1, 2, 4, *range(8, 513, 8))


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def staircase() -> CostTable:
    """A made-up GPU: 8 ms of weights, 4 us a row, a draft of 1 to 2 ms."""
    rows = (*GRAPHS, 1024, 4096, 16640)
    verify = [
        Probe(shape="tree", requests=1, tokens=n, context=CONTEXT, median_seconds=8e-3 + 4e-6 * n)
        for n in rows
    ]
    draft = [
        Probe(shape="tree", requests=n, tokens=0, context=CONTEXT, median_seconds=1e-3 + 4e-6 * n)
        for n in (1, 16, 256)
    ]
    return from_probes(verify, draft, graph_sizes=GRAPHS)


def survivals(requests: int, budget: int) -> NDArray[np.float32]:
    """Made-up trees: rows that fall like best-first trees do, some good and some bad."""
    noise = np.random.default_rng(0)
    first = noise.beta(2, 1, (requests, 1))
    fall = (np.arange(1, budget + 1) ** -noise.uniform(0.4, 1.2, (requests, 1))) * first
    return fall.astype(np.float32)


def medians(parts: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Microseconds of each part, the parts taking turns."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):
        for name, action in parts.items():
            action()
            for _ in range(TURN):
                start = time.perf_counter()
                action()
                times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(table: CostTable, *, requests: int, budget: int, repeats: int) -> dict[str, float]:
    rows, caps = survivals(requests, budget), np.full(requests, budget - 1, np.int32)
    chains = rows[:, :DEPTH] * np.float32(0.8)
    planner = Planner(table, budget=budget, depth=DEPTH)

    def verify() -> object:
        return planner.verify(
            rows, caps, base_tokens=requests, emitting=requests, context=CONTEXT, shape="tree", chain=chains
        )

    for _ in range(STEPS):
        planner.draft(requests, context=CONTEXT)
        verify()

    def curve() -> object:
        return Prices(table).step("tree", requests, requests, requests * budget, CONTEXT)

    def outlooks() -> object:
        return planner._prospects._compute(requests, CONTEXT)

    figures = medians(
        {
            "sort": lambda: np.sort(rows.ravel()),
            "verify": verify,
            "allocate": lambda: allocate(rows, caps, requests * budget // 2),
            "curve": curve,
            "outlooks": outlooks,
            "draft": lambda: planner.draft(requests, context=CONTEXT),
        },
        repeats,
    )
    start = time.process_time()
    for _ in range(STEPS):
        planner.draft(requests, context=CONTEXT)
        verify()
    figures["mean step"] = (time.process_time() - start) / STEPS * 1e6
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    for name in ("requests", "budget", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected 1 or more, got {getattr(options, name)}")
    table = read_cost_table(options.table) if options.table else staircase()
    if not table.informative:
        parser.error(f"--table: {table.reason}")
    figures = measure(table, requests=options.requests, budget=options.budget, repeats=options.repeats)
    print(f"{datetime.date.today()}, {processor()}, numpy {np.__version__}")
    print(f"{options.requests} requests x {options.budget} nodes")
    for name, microseconds in figures.items():
        print(f"{name:10s} {microseconds:8.1f} us {microseconds / figures['sort']:6.2f} sorts")


if __name__ == "__main__":
    main()
