"""How far predicted probabilities are from what happened: reliability curves and ECE.

Predictions fall into equal-width bins of [0, 1]. With n_b nodes, mean prediction m_b and accepted fraction
y_b in bin b, ECE = sum of n_b / n * |m_b - y_b| (Naeini et al. 2015), as a fraction, not in per cent. ECE
says nothing about sharpness: the base rate alone is calibrated.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

BINS = 15  # the usual number, and SGLang's


class Reliability(NamedTuple):
    """One reliability curve."""

    counts: NDArray[np.float64]  # [bins] nodes
    predicted: NDArray[np.float64]  # [bins] mean prediction, 0 in an empty bin
    accepted: NDArray[np.float64]  # [bins] accepted fraction, 0 in an empty bin

    @property
    def ece(self) -> float:
        """Expected calibration error; 0 without any node."""
        gap = np.abs(self.predicted - self.accepted) * self.counts
        return float(gap.sum() / max(self.counts.sum(), 1.0))


def reliability(predicted: ArrayLike, accepted: ArrayLike, *, bins: int = BINS) -> Reliability:
    """The curve of N predictions in [0, 1] and N outcomes (bool or 0/1).

    Raises ValueError for different lengths, for a prediction outside [0, 1] and for NaN.
    """
    p = np.asarray(predicted, dtype=np.float64).ravel()
    y = np.asarray(accepted, dtype=np.float64).ravel()
    if p.shape != y.shape:
        raise ValueError(f"accepted: expected {p.size} outcomes, one a prediction, got {y.size}")
    if not ((p >= 0) & (p <= 1)).all():
        bad = p[~((p >= 0) & (p <= 1))][0]
        raise ValueError(f"predicted: expected probabilities in [0, 1], got {bad}")
    place = np.minimum((p * bins).astype(np.int64), bins - 1)
    counts, predictions, outcomes = (
        np.bincount(place, weights=weights, minlength=bins).astype(np.float64)
        for weights in (np.ones_like(p), p, y)
    )
    some = np.maximum(counts, 1.0)
    return Reliability(counts, predictions / some, outcomes / some)


def ece(predicted: ArrayLike, accepted: ArrayLike, *, bins: int = BINS) -> float:
    """Expected calibration error; see `reliability`."""
    return reliability(predicted, accepted, bins=bins).ece


def ece_by_depth(
    predicted: ArrayLike, accepted: ArrayLike, depths: ArrayLike, *, max_depth: int, bins: int = BINS
) -> list[float]:
    """ECE among the nodes of each depth 1..max_depth; 0 for a depth without nodes."""
    p, y, d = np.asarray(predicted), np.asarray(accepted), np.asarray(depths)
    return [ece(p[d == depth], y[d == depth], bins=bins) for depth in range(1, max_depth + 1)]


def plot(curves: dict[str, Reliability], path: Path | str, *, title: str = "") -> None:
    """Draw reliability curves, one a label, into a PNG, SVG or PDF file.

    Raises ImportError with the fix when matplotlib is missing (``pip install 'specplug[plot]'``).
    """
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError("reliability plot: needs matplotlib; pip install 'specplug[plot]'") from error
    figure = Figure(figsize=(6, 6), layout="constrained")
    curve_axes, count_axes = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    curve_axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for label, curve in curves.items():
        some = curve.counts > 0
        curve_axes.plot(
            curve.predicted[some], curve.accepted[some], marker="o", label=f"{label}, ECE {curve.ece:.4f}"
        )
        count_axes.plot(curve.predicted[some], curve.counts[some], marker="o")
    curve_axes.set(ylabel="accepted fraction", title=title, xlim=(0, 1), ylim=(0, 1))
    curve_axes.legend()
    count_axes.set(xlabel="predicted acceptance", ylabel="nodes", yscale="log")
    figure.savefig(path)
