"""What `specplug evaluate` shows: a table, a JSON report and, with matplotlib, a plot."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from specplug.local.figures import Estimate, Row
from specplug.local.records import Settings

HEADINGS = (
    "data set", "T", "method", "prompts", "rounds", "accepted length", "x chain", "tokens/forward",
    "wall x plain", "wall x chain", "tokens/s", "4-grams", "same as plain",
)  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line a row, standard errors in brackets."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(_cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def step_table(rows: Sequence[Row]) -> str:
    """Where a round's time goes, in milliseconds."""
    steps = list(rows[0].step_milliseconds)
    lines = [["data set", "T", "method", *steps], ["---"] * (3 + len(steps))]
    for row in rows:
        times = [f"{row.step_milliseconds[step]:.2f}" for step in steps]
        lines.append([row.dataset, f"{row.temperature:g}", row.method, *times])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def as_json(rows: Sequence[Row], settings: Settings) -> dict[str, Any]:
    """The report with what is needed to repeat it."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"processor": processor(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": msgspec.to_builtins(settings),
        "rows": msgspec.to_builtins(list(rows)),
    }


def processor() -> str:
    """Name and number of cores, as far as the system says."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def plot(rows: Sequence[Row], file: Path) -> None:
    """Accepted length by data set, and the share of rounds that accept each depth; one row a temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = sorted({row.temperature for row in rows})
    figure, axes = pyplot.subplots(
        len(temperatures), 2, figsize=(12, 4 * len(temperatures)), squeeze=False, layout="constrained"
    )
    for (bars, lines), temperature in zip(axes, temperatures, strict=True):
        here = [row for row in rows if row.temperature == temperature and row.method != "plain"]
        datasets = list(dict.fromkeys(row.dataset for row in here))
        methods = list(dict.fromkeys(row.method for row in here))
        for number, method in enumerate(methods):
            mine = {row.dataset: row for row in here if row.method == method}
            lengths = [mine[dataset].accepted_length for dataset in datasets]
            left = [i + (number - (len(methods) - 1) / 2) * 0.8 / len(methods) for i in range(len(datasets))]
            errors = [length.standard_error or 0.0 for length in lengths]
            values = [length.value for length in lengths]
            bars.bar(left, values, 0.8 / len(methods), yerr=errors, capsize=2, label=method)
            survival = [share.value for share in mine[datasets[-1]].accepted_by_position]
            lines.plot(range(1, len(survival) + 1), survival, marker="o", label=method)
        bars.set(title=f"T = {temperature:g}", ylabel="accepted length", xticks=range(len(datasets)))
        bars.set_xticklabels(datasets)
        lines.set(title=f"{datasets[-1]}, T = {temperature:g}", xlabel="draft position", ylim=(0, 1))
        lines.set_ylabel("share of rounds that accept it")
        lines.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _cells(row: Row) -> list[str]:
    wall = "-" if row.wall_ratio is None else f"{row.wall_ratio:.2f}"
    return [
        row.dataset,
        f"{row.temperature:g}",
        row.method,
        str(row.prompts),
        str(row.rounds),
        _estimate(row.accepted_length),
        _estimate(row.over_chain),
        f"{row.tokens_per_forward:.2f}",
        wall,
        "-" if row.wall_over_chain is None else f"{row.wall_over_chain:.2f}",
        f"{row.tokens_per_second:.0f}",
        "-" if row.distinct_ngrams is None else f"{row.distinct_ngrams:.2f}",
        _sameness(row),
    ]


def _sameness(row: Row) -> str:
    if row.identical is None:
        return "-"
    gap = f" (gap {row.largest_gap:.0e})" if row.largest_gap else ""
    return f"{row.identical}/{row.prompts}{gap}"


def _estimate(one: Estimate | None) -> str:
    if one is None:
        return "-"
    error = "" if one.standard_error is None else f" ({one.standard_error:.3f})"
    return f"{one.value:.3f}{error}"
