"""The picture of a cost table: probes with their spread, and the curves the budget reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specplug.cost import CostTable


def plot(table: CostTable, file: Path) -> None:
    """Write a picture: seconds against rows, a panel a context and shape, a colour a number of requests.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = sorted({probe.context for probe in table.verify})
    shapes = sorted({probe.shape for probe in table.verify})
    figure, axes = pyplot.subplots(
        len(shapes), len(contexts), squeeze=False, figsize=(5 * len(contexts), 3.5 * len(shapes))
    )
    requests = sorted({probe.requests for probe in table.verify})
    for row, shape in enumerate(shapes):
        for column, context in enumerate(contexts):
            axis = axes[row, column]
            mine = [p for p in table.verify if (p.shape, p.context) == (shape, context)]
            for number, count in enumerate(requests):
                probes = [p for p in mine if p.requests == count]
                if not probes:
                    continue
                colour = f"C{number % 10}"
                axis.errorbar(
                    [p.tokens for p in probes],
                    [1000 * p.median_seconds for p in probes],
                    [1000 * p.spread_seconds for p in probes],
                    fmt="o",
                    markersize=4,
                    color=colour,
                    label=f"{count} request(s)",
                )
                rows = np.arange(probes[0].tokens, probes[-1].tokens + 1)
                seconds = table.verify_seconds(count, rows, context=context, shape=shape)
                axis.plot(rows, 1000 * seconds, color=colour, linewidth=1)
            axis.set(title=f"{shape}, context {context:.0f}", xlabel="rows", ylabel="ms a step")
            axis.set_ylim(bottom=0)
    axes[0, 0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
