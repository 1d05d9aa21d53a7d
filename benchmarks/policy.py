"""Ours against plain decoding, the chain and fixed trees, on every table, data set and concurrency.

    python benchmarks/policy.py [--cost FILE ...] [--recording FILE] [--mixed-only] [--json FILE]

Replays the shipped recordings (specplug simulate) through cost tables: the ones measured on machines
(recipes/measured/cost-*.json) and the computed models. A *cell* is one table, one traffic, one concurrency.
Traffics: each data set at each temperature by itself, and all of them mixed in one batch.

Mixed traffic is judged per table, where one setting has to serve every load: ours over a fixed policy,
averaged over the nine concurrencies (and over the traffics where said). Three averages: "loads alike", the
geometric mean of the ratios; "hours alike", every cell runs for the same time (total tokens); "tokens alike",
every cell emits as many tokens (total time). The best single fixed policy is the best by that very average.
Nothing is warmed up: ours pays for learning in every cell. All cells it loses are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specplug import contest as contests
from specplug.contest import OURS, Contest, geometric_mean
from specplug.cost import CostTable, read_cost_table
from specplug.cost_models import MODELS, model_table
from specplug.outcomes import Outcomes, cross_fitted, outcomes
from specplug.recording_source import read_recording
from specplug.simulate import CONCURRENCY, columns

MEASURED = Path(__file__).resolve().parents[1] / "recipes" / "measured"
ALL = "all mixed"
CELL_FLOOR, MIXED_FLOOR = 0.99, 1.08  # what the project promises


class Row(NamedTuple):
    """One traffic on one table: tokens a second by policy and concurrency."""

    table: str
    traffic: str
    rates: dict[str, list[float]]  # by policy, in order of the loads

    def best(self, load: int) -> str:
        """The best fixed policy at the load of this number."""
        return max(fixed(self), key=lambda name: self.rates[name][load])

    def ratios(self) -> list[float]:
        """Ours over the best fixed policy, by load."""
        return [ours / self.rates[self.best(i)][i] for i, ours in enumerate(self.rates[OURS])]


def fixed(row: Row) -> list[str]:
    return [name for name in row.rates if name != OURS]


def averages(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Ours over one fixed policy, three ways; see the module."""
    pairs = [pair for row in rows for pair in zip(row.rates[OURS], row.rates[name], strict=True)]
    return {
        "loads alike": geometric_mean([ours / theirs for ours, theirs in pairs]),
        "hours alike": math.fsum(ours for ours, _ in pairs) / math.fsum(theirs for _, theirs in pairs),
        "tokens alike": math.fsum(1 / theirs for _, theirs in pairs)
        / math.fsum(1 / ours for ours, _ in pairs),
    }


def single_best(rows: Sequence[Row]) -> dict[str, tuple[str, float]]:
    """By each average, the best single fixed policy and ours over it."""
    by_name = {name: averages(rows, name) for name in fixed(rows[0])}
    kinds = next(iter(by_name.values()))
    result = {}
    for kind in kinds:
        best = min(by_name, key=lambda name: by_name[name][kind])
        result[kind] = best, by_name[best][kind]
    return result


def traffics(whole: Outcomes, *, mixed_only: bool) -> Iterator[tuple[str, Outcomes]]:
    """Everything mixed, then each data set at each temperature; calibrated as the whole."""
    yield ALL, whole
    recording = whole.recording
    for dataset in [] if mixed_only else recording.about.datasets:
        for temperature in sorted(set(recording.requests.temperature.tolist())):
            keep = recording.matching(dataset=dataset, temperature=temperature)
            yield f"{dataset} T {temperature:g}", whole.take(keep)


def measure(
    table: CostTable, calibrated: Outcomes, *, loads: Sequence[int], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens a second by policy, in order of the loads."""
    contest = Contest(table, outcomes(calibrated.recording), calibrated, options.min_gain, options.seed)
    return {
        name: [contests.closed(contest, name, n, tokens=options.tokens).tokens_per_second for n in loads]
        for name in contests.names(calibrated.recording)
    }


def main() -> int:
    """Exit code 1 when a promise is not kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measured = sorted(MEASURED.glob("cost-*.json"))
    parser.add_argument("--cost", nargs="+", default=[*map(str, measured), *MODELS], metavar="FILE|MODEL")
    parser.add_argument("--recording", default="deep-thin")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--mixed-only", action="store_true", help="not each data set by itself")
    parser.add_argument("--min-gain", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tokens", type=int, help="a cell; default 400 a request in the batch, at least 20,000"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every cell")
    a = parser.parse_args()
    calibrated = cross_fitted(read_recording(a.recording))
    rows: list[Row] = []
    for cost in a.cost:
        name = cost if cost in MODELS else Path(cost).stem
        table = model_table(cost) if cost in MODELS else read_cost_table(cost)
        for traffic, some in traffics(calibrated, mixed_only=a.mixed_only):
            rates = measure(table, some, loads=a.concurrency, options=a)
            rows.append(Row(name, traffic, rates))
            print(f"{name}, {traffic}: {_numbers(rows[-1].ratios())}", file=sys.stderr, flush=True)
    if a.json:
        a.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    print("\n".join(report(rows, a.concurrency)))
    return int(not kept(rows))


def kept(rows: Sequence[Row]) -> bool:
    """Both promises: every cell, and the best single policy of all tables with loads alike."""
    mixed = single_best([row for row in rows if row.traffic == ALL])["loads alike"][1]
    return min(min(row.ratios()) for row in rows) >= CELL_FLOOR and mixed >= MIXED_FLOOR


def report(rows: Sequence[Row], loads: Sequence[int]) -> list[str]:
    """The matrix, the losing cells and the mixed traffic."""
    head = ["ours / best fixed", "traffic", *map(str, loads)]
    lines = [
        columns([head, *([row.table, row.traffic, *map("{:.3f}".format, row.ratios())] for row in rows)])
    ]
    cells = [(ratio, row, i) for row in rows for i, ratio in enumerate(row.ratios())]
    lost = sorted((c for c in cells if c[0] < 1), key=lambda cell: cell[0])
    below = sum(ratio < CELL_FLOOR for ratio, _, _ in cells)
    lines.append(
        f"\n{len(cells)} cells: ours is slower than the best fixed policy in {len(lost)}, below {CELL_FLOOR} "
        f"in {below}; worst {min(c[0] for c in cells):.3f}. The cells it loses:"
    )
    lines += [
        f"  {ratio:.4f} of {row.best(i)}: {row.table}, {row.traffic}, concurrency {loads[i]}"
        for ratio, row, i in lost
    ]
    lines.append("\nOver mixed traffic, ours over the best single fixed policy:")
    for table in dict.fromkeys(row.table for row in rows):
        mine = [row for row in rows if row.table == table]
        for what, some in ((ALL, [row for row in mine if row.traffic == ALL]), ("every traffic", mine)):
            if some and (what == ALL or len(mine) > 1):
                found = single_best(some)
                text = ", ".join(f"{kind} {ratio:.3f} ({best})" for kind, (best, ratio) in found.items())
                lines.append(f"  {table}, {what}: {text}")
    found = single_best([row for row in rows if row.traffic == ALL])
    text = ", ".join(f"{kind} {ratio:.3f} ({best})" for kind, (best, ratio) in found.items())
    lines.append(f"  every table, {ALL}: {text}")
    return lines


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    raise SystemExit(main())
