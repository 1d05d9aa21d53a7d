"""Keeping a calibration true in service: the online correction, and the alarm when it drifts.

Accept logs fall into a histogram per (regime, depth, bin of the *fitted* a): nodes, sum of predictions, sum
of accepted. Older nodes fade with a half-life counted in nodes of the same regime and depth, so memory and
inertia are bounded: G * D * 15 * 3 numbers, about half_life / ln 2 nodes of weight. ``corrected`` fits the
online map on the bins, with a prior at the identity. One node moves a bin by its share of that weight and
predictions are probabilities, so an outlier has no more pull than any other node; the correction is bounded
on top.

The alarm compares, per depth, predictions *with* the calibration's present correction to what was accepted.
Everything here is host side, after a round, on numpy arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from specplug.calibration import ONLINE_IDENTITY, Calibration, DepthCoefficients, Regime, features
from specplug.calibration_fit import PRIOR_PRECISION, Records, check, predict, regression
from specplug.reliability import BINS, Reliability

HALF_LIFE = 20_000  # nodes: some 1,300 rounds of a 16-node tree
SLOPES, SHIFT = (0.25, 4.0), 3.0  # bounds of the online map: steepness, and log-odds
TOLERANCE = 0.05  # ECE of a depth that is worth an alarm: a budget is wrong by 1 node in 20
NOISE = 2.0  # and it must stand out of the ECE that chance gives this few nodes, were the prediction true


class DepthDrift(NamedTuple):
    """State of one depth of one regime."""

    max_temperature: float | None
    depth: int
    nodes: float  # weight in the histogram
    ece: float  # of the calibration as it stands, by bins of the fitted a
    bias: float  # mean prediction minus accepted fraction; above 0 = over-confident
    alarm: bool


class DriftLog:
    """Accept logs of the regimes of one calibration."""

    def __init__(self, calibration: Calibration, *, half_life: int = HALF_LIFE) -> None:
        """Raises ValueError for a calibration without regimes or a half-life below 1 node."""
        if not calibration.regimes:
            raise ValueError("calibration: expected at least one regime to follow, got none; fit it first")
        if half_life < 1:
            raise ValueError(f"half_life: expected at least 1 node, got {half_life}")
        self.calibration = calibration
        self.half_life = half_life
        depths = max(len(regime.depths) for regime in calibration.regimes)
        self._sums = np.zeros((len(calibration.regimes), depths, 3, BINS))  # nodes, predicted, accepted

    def observe(self, records: Records, *, temperature: float) -> None:
        """Add verified nodes of one temperature; nodes deeper than the calibration count at its last depth.

        Raises ValueError for malformed records, or a temperature without a regime.
        """
        check(records)
        index = self.calibration.regime_index(temperature)
        if index == len(self.calibration.regimes):
            raise ValueError(
                f"temperature: expected one of a fitted regime, got {temperature}; fit that regime"
            )
        sums = self._sums[index]
        p = predict(self.calibration, records, temperature=temperature, online=False)
        y = np.asarray(records.accepted, dtype=np.float64)
        depth = np.minimum(records.depths, len(self.calibration.regimes[index].depths)) - 1
        place = depth * BINS + np.minimum((p * BINS).astype(np.int64), BINS - 1)
        for i, values in enumerate((np.ones_like(p), p, y)):
            new = np.bincount(place, weights=values, minlength=sums.shape[0] * BINS).reshape(-1, BINS)
            if not i:
                fade = 0.5 ** (new.sum(1) / self.half_life)
                sums *= fade[:, None, None]
            sums[:, i] += new

    def corrected(self) -> Calibration:
        """The calibration with online maps fitted to the log; it also becomes the one the alarm judges."""
        regimes = []
        for regime, sums in zip(self.calibration.regimes, self._sums, strict=True):
            depths = [
                DepthCoefficients(fitted=depth.fitted, online=_online(sums[d]).tolist())
                for d, depth in enumerate(regime.depths)
            ]
            regimes.append(msgspec.structs.replace(regime, depths=depths))
        self.calibration = msgspec.structs.replace(self.calibration, regimes=regimes)
        return self.calibration

    def report(self) -> list[DepthDrift]:
        """Per-depth ECE and bias of every regime, and whether it is time to refit."""
        rows = []
        for regime, sums in zip(self.calibration.regimes, self._sums, strict=True):
            rows += [_judge(regime, d, sums[d]) for d in range(len(regime.depths))]
        return rows


def _online(
    sums: NDArray[np.float64],  # [3, BINS]
) -> NDArray[np.float64]:
    """Online coefficients [3] of one depth."""
    some = sums[0] > 0
    nodes, predicted, accepted = sums[:, some]
    return regression(
        _terms(predicted / nodes),
        accepted / nodes,
        nodes,
        prior=np.array(ONLINE_IDENTITY),
        precision=np.full(3, PRIOR_PRECISION),
        lower=np.array([SLOPES[0], SLOPES[0], -SHIFT]),
        upper=np.array([SLOPES[1], SLOPES[1], SHIFT]),
    )


def _judge(regime: Regime, index: int, sums: NDArray[np.float64]) -> DepthDrift:
    some = sums[0] > 0
    nodes, predicted, accepted = sums[:, some]
    online = np.array(regime.depths[index].online)
    p = 0.5 * (1 + np.tanh(_terms(predicted / nodes) @ online / 2))
    curve = Reliability(nodes, p, accepted / nodes)
    total = max(float(nodes.sum()), 1e-9)
    bias = float(nodes @ (p - accepted / nodes)) / total
    chance = float(np.sqrt(2 / np.pi * nodes * p * (1 - p)).sum()) / total  # E|normal| in every bin
    return DepthDrift(
        max_temperature=regime.max_temperature,
        depth=index + 1,
        nodes=float(nodes.sum()),
        ece=curve.ece,
        bias=bias,
        alarm=curve.ece > TOLERANCE + NOISE * chance,
    )


def _terms(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """ln p, -ln(1 - p), 1 for each bin, [bins, 3]."""
    log_p = torch.from_numpy(np.log(np.maximum(p, 1e-300)))
    return features(log_p, torch.zeros_like(log_p), None)[:, :3].numpy()
