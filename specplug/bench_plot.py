"""The picture of a benchmark: throughput and gain against the load, throughput against latency."""

from __future__ import annotations

from pathlib import Path

from specplug.bench_result import BenchResult


def plot(result: BenchResult, file: Path) -> None:
    """Write a picture; bars span the lowest and the highest repeat. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2))
    loads = result.loads()
    places = range(len(loads))
    for number, arm in enumerate(result.arms):
        cells = [result.cell(arm.name, load) for load in loads]
        mine = [(place, cell) for place, cell in zip(places, cells, strict=True) if cell is not None]
        if not mine:
            continue
        colour, label = f"C{number % 10}", arm.name
        at = [place for place, _ in mine]
        values = [cell.values("output_tokens_per_second") for _, cell in mine]
        middle = [cell.median("output_tokens_per_second") or 0.0 for _, cell in mine]
        below = [m - min(v) for m, v in zip(middle, values, strict=True)]
        above = [max(v) - m for m, v in zip(middle, values, strict=True)]
        axes[0].errorbar(at, middle, [below, above], marker="o", color=colour, label=label, capsize=3)
        gains = [result.gain(arm.name, cell.load) for _, cell in mine]
        axes[1].plot(at, [float("nan") if g is None else g for g in gains], marker="o", color=colour)
        tpot = [cell.median("tpot", "p50_ms") or 0.0 for _, cell in mine]
        axes[2].plot(tpot, middle, marker="o", color=colour)
        for x, y, (_, cell) in zip(tpot, middle, mine, strict=True):
            axes[2].annotate(str(cell.load), (x, y), fontsize=7, xytext=(4, 4), textcoords="offset points")
    for axis in axes[:2]:
        axis.set_xticks(list(places), [str(load) for load in loads], rotation=20)
    axes[1].axhline(1.0, color="black", linewidth=0.8)
    axes[0].set(title="output tokens a second", ylim=(0, None))
    axes[1].set(title=f"times {result.baseline}", ylim=(0, None))
    axes[2].set(title="tokens a second against TPOT", xlabel="TPOT p50, ms")
    axes[2].margins(0.2)
    axes[0].legend(fontsize="small")
    notes = [*result.labels, *dict.fromkeys(label for arm in result.arms for label in arm.labels)]
    figure.suptitle(f"{result.settings.engine}, {result.settings.device}", fontsize=9)
    figure.text(0.01, 0.01, "\n".join(notes), fontsize=7, color="red")
    figure.tight_layout(rect=(0, 0.02 + 0.03 * len(notes), 1, 1))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
