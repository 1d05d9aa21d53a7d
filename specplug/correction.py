"""Keeping predictions true in service: seconds of the cost table, and how many drafted tokens are accepted.

**Seconds.** The log of observed over tabled seconds is kept by region: shape, octave of the requests,
octave of the tokens. A region's factor is the *median* of its last 31 observations, so one in a hundred
that took a hundred times as long (a compilation, a garbage collection) moves nothing, a lasting change is
followed after 16 of them, and memory is constant. Between regions of one (shape, requests) row the log
factor is linear in the tokens: a jump at the edge of a region would read as a step of the cost curve. A
region seen fewer than 5 times leans on the recent median of its shape, and that on the recent median of
all.

**Acceptance.** One factor a shape: accepted over predicted drafted tokens, both fading, leaning on the
factor of all shapes, and that on 1. The map from a draft's probability to a(v) by depth is
`specplug.calibration`'s and `specplug.drift`'s; this only keeps the sum honest.

Both take every step's word once. Host side, numpy.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specplug.cost_curves import Shape

SHAPES: tuple[Shape, ...] = ("plain", "chain", "tree")  # cheapest first
REQUEST_OCTAVES, TOKEN_OCTAVES = 12, 17  # up to 4,096 requests and 131,072 tokens; larger ones share the last
WINDOW = 31  # median of 31 readings with 10 % noise: 2.3 %
TRUSTED = 5  # readings after which a region stands alone: one outlier of them does not move the median far
HALF_LIFE = 2_000.0  # predicted drafted tokens; accepted counts of some 1,000 requests scatter by 2 %
PRIOR = 16.0  # predicted drafted tokens that the factor 1 weighs
LEANING = 256.0  # those that the factor of all shapes weighs: two shapes' own differ by 5 %, more is rare
ACCEPTANCE_RANGE = (0.1, 2.0)


class CostCorrection:
    """Factors on the seconds of a cost table, learned from observed steps. About 180 kB, whatever it sees."""

    def __init__(self) -> None:
        regions = (len(SHAPES), REQUEST_OCTAVES + 1, TOKEN_OCTAVES + 1)
        self._log_ratios = np.zeros((*regions, WINDOW), np.float32)
        self._tokens = np.zeros((*regions, WINDOW), np.float32)
        self._seen = np.zeros(regions, np.int64)
        self._recent = np.zeros((len(SHAPES) + 1, WINDOW), np.float32)  # log ratios by shape, and last of all
        self._recent_seen = np.zeros(len(SHAPES) + 1, np.int64)

    def observe(self, shape: Shape, *, requests: int, tokens: int, observed: float, tabled: float) -> None:
        """Take one step: seconds observed and seconds by the uncorrected table.

        Raises ValueError unless both are finite and above 0, and requests and tokens at least 1.
        """
        for name, seconds in (("observed", observed), ("tabled", tabled)):
            if not (0 < seconds < math.inf):
                raise ValueError(f"{name}: expected seconds above 0, got {seconds}; leave the step out")
        log_ratio = math.log(observed / tabled)
        region = (SHAPES.index(shape), _octave(requests, REQUEST_OCTAVES), _octave(tokens, TOKEN_OCTAVES))
        place = self._seen[region] % WINDOW
        self._log_ratios[region][place] = log_ratio
        self._tokens[region][place] = tokens
        self._seen[region] += 1
        for row in (region[0], -1):
            self._recent[row, self._recent_seen[row] % WINDOW] = log_ratio
            self._recent_seen[row] += 1

    def factor(
        self,
        shape: Shape,
        *,
        requests: int,
        tokens: NDArray[np.int64],  # [...]
    ) -> NDArray[np.float64]:
        """What to multiply the table's seconds by, [...], above 0; 1 where nothing was ever seen."""
        row = (SHAPES.index(shape), _octave(requests, REQUEST_OCTAVES))
        recent = _medians(self._recent, self._recent_seen)
        common = _leaning(recent, self._recent_seen, 0.0)[-1]
        common = _leaning(recent, self._recent_seen, common)[row[0]]
        some = np.flatnonzero(self._seen[row])
        if not len(some):
            return np.full(np.shape(tokens), math.exp(common))
        seen = self._seen[row][some]
        at = _medians(self._tokens[row][some], seen)
        logs = _leaning(_medians(self._log_ratios[row][some], seen), seen, common)
        return np.interp(tokens, at, np.exp(logs))


class AcceptanceCorrection:
    """Accepted over predicted drafted tokens, one factor a shape."""

    def __init__(self) -> None:
        self._sums = np.zeros((len(SHAPES), 2))  # predicted, accepted

    def observe(self, shape: Shape, *, predicted: float, accepted: float) -> None:
        """Take one step's nodes: tokens predicted as `factor` had it then, and accepted."""
        raw = predicted / self.factor(shape)
        sums = self._sums[SHAPES.index(shape)]
        sums[:] = sums * 0.5 ** (raw / HALF_LIFE) + (raw, accepted)

    def factor(self, shape: Shape) -> float:
        """What to multiply sums of a(v) by."""
        predicted, accepted = (self._sums.sum(0) + PRIOR).tolist()
        common = accepted / predicted
        predicted, accepted = self._sums[SHAPES.index(shape)].tolist()
        factor = (accepted + LEANING * common) / (predicted + LEANING)
        return min(max(factor, ACCEPTANCE_RANGE[0]), ACCEPTANCE_RANGE[1])


def _octave(value: int, last: int) -> int:
    if value < 1:
        raise ValueError(f"requests and tokens: expected at least 1, got {value}; leave the step out")
    return min(round(math.log2(value)), last)


def _medians(
    windows: NDArray[np.float32],  # [N, WINDOW], filled from the left
    seen: NDArray[np.int64],  # [N]
) -> NDArray[np.float64]:
    """Median of the readings in each window, [N]; 0 of none."""
    count = np.minimum(seen, WINDOW)
    ordered = np.where(np.arange(WINDOW) < count[:, None], windows, np.inf).astype(np.float64)
    ordered.sort(axis=1)
    middle = np.stack([(count - 1).clip(0) // 2, count // 2], 1).clip(max=WINDOW - 1)
    return np.where(count > 0, np.take_along_axis(ordered, middle, 1).mean(1), 0.0)


def _leaning(values: NDArray[np.float64], seen: NDArray[np.int64], on: float) -> NDArray[np.float64]:
    """Values of regions seen often; towards ``on`` where seldom."""
    weight = np.minimum(seen / TRUSTED, 1.0)
    return weight * values + (1 - weight) * on
