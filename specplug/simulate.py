"""Replay recorded rounds through a cost table: plain, chain, fixed trees and ours, at every load.

Judges a policy for a machine one does not have, or before switching it on. Closed loop: so many requests at a
time, tokens a second. Open loop (--rate): requests arrive at random, waiting and latency too. Cells where
ours is slower than a fixed setting are printed, all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specplug import contest as contests
from specplug.contest import OURS, Cell, Contest, Service
from specplug.cost import CostTable, read_cost_table
from specplug.cost_models import MODELS, model_table
from specplug.recording import Recording
from specplug.recording_source import read_recording

if TYPE_CHECKING:  # it imports torch, which is slow
    from specplug.calibration import Calibration

CONCURRENCY = [1, 2, 4, 8, 16, 32, 64, 128, 256]
SURVIVALS = {"cross": "calibrated, each half of the prompts by the other", "none": "as drafted"}


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """What is replayed, and what it costs; shared with `specplug advise`."""
    parser.add_argument(
        "--recording", default="deep-thin",
        help="file of specplug record, folder of specplug evaluate --record or of an engine, or a shipped "
        "recording; default deep-thin",
    )  # fmt: skip
    parser.add_argument(
        "--cost", default="staircase", metavar="FILE|MODEL",
        help="file of specplug profile, or a computed model: " + ", ".join(MODELS) + "; default staircase",
    )  # fmt: skip
    parser.add_argument("--method", help="of a folder with several: whose rounds, as 'tree 64'")
    parser.add_argument("--dataset", help="replay this data set only; default all, mixed")
    parser.add_argument("--temperature", type=float, help="replay this temperature only; default all, mixed")
    parser.add_argument(
        "--calibration", default="cross", metavar="FILE|cross|none",
        help="survivals that ours sees; cross: each half of the prompts fitted on the other (default)",
    )  # fmt: skip
    parser.add_argument("--min-gain", type=float, default=0.02, help="of the budget; default 0.02")
    parser.add_argument("--tokens", type=int, help="tokens a cell; default 400 a slot, at least 20,000")
    parser.add_argument("--seed", type=int, default=0, help="of the order of requests; default 0")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=CONCURRENCY, help="default 1 2 4 ... 256"
    )
    parser.add_argument("--rate", type=float, nargs="+", help="open loop: requests a second, one or more")
    parser.add_argument("--requests", type=int, default=500, help="open loop: how many; default 500")
    parser.add_argument("--max-concurrency", type=int, default=256, help="open loop: slots; default 256")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="throughput against concurrency")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0. Raises ValueError for arguments that cannot work."""
    a = arguments
    for flag, value in (("--requests", a.requests), ("--max-concurrency", a.max_concurrency)):
        if value < 1:
            raise ValueError(f"{flag}: expected at least 1, got {value}")
    if a.rate and not all(0 < rate < float("inf") for rate in a.rate):
        raise ValueError(f"--rate: expected finite numbers above 0, got {a.rate}")
    if a.plot and a.rate:
        raise ValueError("--plot: draws throughput against concurrency; leave out --rate")
    if a.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("matplotlib is not installed; pip install 'specplug[plot]'")
    check_numbers(a)
    contest, facts = open_contest(a)
    if a.rate:
        services = [
            contests.opened(contest, name, rate, requests=a.requests, max_concurrency=a.max_concurrency)
            for rate in dict.fromkeys(a.rate)
            for name in contests.names(contest.drafted.recording)
        ]
        result = {"facts": facts, "services": [service._asdict() for service in services]}
        print(json.dumps(result, indent=1) if a.json else "\n".join([*facts, "", service_table(services)]))
        return 0
    cells = [
        contests.closed(contest, name, concurrency, tokens=a.tokens)
        for concurrency in dict.fromkeys(a.concurrency)
        for name in contests.names(contest.drafted.recording)
    ]
    if a.plot:
        plot(cells, a.plot, title=facts[1])
    result = {
        "facts": facts,
        "cells": [cell._asdict() for cell in cells],
        "losses": [loss._asdict() for loss in contests.losses(cells)],
        "mixed": contests.mixed(cells),
    }
    print(
        json.dumps(result, indent=1) if a.json else "\n".join([*facts, "", matrix(cells), "", verdict(cells)])
    )
    return 0


def check_numbers(a: argparse.Namespace) -> None:
    """Raises ValueError for concurrencies, tokens or a gain out of range."""
    if min(a.concurrency) < 1 or max(a.concurrency) > 4096:
        raise ValueError(f"--concurrency: expected 1..4096, got {a.concurrency}")
    if a.tokens is not None and a.tokens < 1:
        raise ValueError(f"--tokens: expected at least 1, got {a.tokens}")
    if a.seed < 0:
        raise ValueError(f"--seed: expected at least 0, got {a.seed}")
    for flag, file, names in (("--cost", a.cost, MODELS), ("--calibration", a.calibration, SURVIVALS)):
        if file not in names and not Path(file).is_file():
            got = f"no file {file}"
            if Path(file).exists():
                got = f"{'a folder' if Path(file).is_dir() else 'no regular file'}, {file}"
            raise ValueError(f"{flag}: expected a file or one of {', '.join(names)}, got {got}")
    if not 0 <= a.min_gain < 1:
        raise ValueError(f"--min-gain: expected a fraction, 0 up to 1, got {a.min_gain}")


def open_contest(a: argparse.Namespace) -> tuple[Contest, list[str]]:
    """The contest, and what is to be known about it, a line each: recording, cost, survivals."""
    from specplug.calibration import read_calibration

    recording = read_recording(a.recording, method=a.method)
    if a.dataset is not None or a.temperature is not None:
        recording = recording.take(recording.matching(dataset=a.dataset, temperature=a.temperature))
    table = model_table(a.cost) if a.cost in MODELS else read_cost_table(a.cost)
    calibration = None if a.calibration in SURVIVALS else read_calibration(a.calibration)
    contest = contests.prepare(
        recording,
        table,
        calibration=calibration,
        cross_fit=a.calibration == "cross",
        min_gain=a.min_gain,
        seed=a.seed,
    )
    facts = [_recording_fact(a, recording), _cost_fact(a, table), _calibration_fact(a, calibration)]
    widest = max(getattr(a, "concurrency", [1])) * (recording.budget + 1)
    if table.max_tokens < widest:
        facts.append(
            f"Cost: beyond {table.max_tokens} rows a step is extrapolated; the largest here has {widest}."
        )
    return contest, facts


def matrix(cells: Sequence[Cell]) -> str:
    """Tokens a second, a row a policy and a column a concurrency, and ours over the best fixed policy."""
    loads = list(dict.fromkeys(cell.concurrency for cell in cells))
    rates = {(cell.policy, cell.concurrency): cell.tokens_per_second for cell in cells}
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    best = {c: max(rates[p, c] for p in policies if p != OURS) for c in loads}
    lines = [["tokens/s", *(str(c) for c in loads)]]
    lines += [[p, *(f"{rates[p, c]:,.0f}" for c in loads)] for p in policies]
    lines += [["ours / best fixed", *(f"{rates[OURS, c] / best[c]:.3f}" for c in loads)]]
    nodes = {cell.concurrency: cell.nodes_a_round for cell in cells if cell.policy == OURS}
    lines += [["ours: nodes/request", *(f"{nodes[c]:.1f}" for c in loads)]]
    return columns(lines)


def verdict(cells: Sequence[Cell]) -> str:
    """The cells that ours loses, and how it does over all loads."""
    lost = [
        f"  concurrency {loss.concurrency}: {loss.ratio:.3f} of {loss.best}"
        for loss in contests.losses(cells)
    ]
    mixed = contests.mixed(cells)
    best = max(mixed, key=lambda name: mixed[name])
    lines = (
        ["Cells where ours is slower than a fixed policy:", *lost] if lost else ["Ours is slower nowhere."]
    )
    lines.append(
        f"Over these loads (geometric mean) ours is {1 / mixed[best]:.3f} of {best}, the best single fixed "
        "policy; "
        + ", ".join(f"{1 / ratio:.2f} of {name}" for name, ratio in mixed.items() if name != best)
        + "."
    )
    return "\n".join(lines)


def service_table(services: Sequence[Service]) -> str:
    """A row a rate and policy."""
    head = [
        "requests/s",
        "policy",
        "tokens/s",
        "batch",
        "wait p50",
        "p90",
        "p99",
        "latency p50",
        "p90",
        "p99",
    ]
    lines = [head]
    for one in services:
        times = [f"{seconds:.3f}" for seconds in (*one.wait_seconds, *one.latency_seconds)]
        rate = f"{one.requests_per_second:g}"
        lines.append([rate, one.policy, f"{one.tokens_per_second:,.0f}", f"{one.batch:.1f}", *times])
    return columns(lines)


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, aligned: the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def plot(cells: Sequence[Cell], file: Path, *, title: str) -> None:
    """Throughput over plain decoding's against concurrency, a line a policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = {(cell.policy, cell.concurrency): cell.tokens_per_second for cell in cells}
    loads = sorted({cell.concurrency for cell in cells})
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for policy in dict.fromkeys(cell.policy for cell in cells):
        ratios = [rates[policy, c] / rates["plain", c] for c in loads]
        axes.plot(loads, ratios, marker="o", label=policy, linewidth=3 if policy == OURS else 1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(c) for c in loads])
    axes.set(
        xlabel="concurrency", ylabel="tokens a second over plain decoding's", title=title, ylim=(0, None)
    )
    axes.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _recording_fact(a: argparse.Namespace, recording: Recording) -> str:
    exact = "every position recorded: exact" if recording.about.complete else (
        "visited positions only: approximate, the nearest recorded round at or before stands in"
    )  # fmt: skip
    temperatures = ", ".join(f"{t:g}" for t in sorted(set(recording.requests.temperature.tolist())))
    used = recording.requests.dataset
    datasets = ", ".join(name for i, name in enumerate(recording.about.datasets) if (used == i).any())
    return (
        f"Recording: {a.recording}, {len(recording.request):,} rounds of {len(used)} answers ({datasets}; "
        f"temperature {temperatures}); {exact}."
    )


def _cost_fact(a: argparse.Namespace, table: CostTable) -> str:
    kind = "a computed model, not a measurement" if a.cost in MODELS else "measured"
    return f"Cost: {a.cost}, {kind}{f'; {table.reason}' if table.reason else ''}."


def _calibration_fact(a: argparse.Namespace, calibration: Calibration | None) -> str:
    if calibration is not None:
        return f"Survivals: calibrated by {a.calibration}."
    return f"Survivals: {SURVIVALS[a.calibration]}."
