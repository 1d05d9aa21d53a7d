"""From probes to curves: seconds as a function of rows, on planes of equal requests and context.

Below the largest captured graph a step costs what the next larger graph costs: a staircase with a stair per
graph size. Above, it is linear between probes, and past the last one it keeps the last slope. Noise must not
make more rows look cheaper, so the medians are pooled to a non-decreasing sequence first (isotonic
regression, weights = repeats). A curve that does not rise by itself, of one row count say, takes the slope of
the nearest curve that does: of its own shape, else of another.

Rows are whole numbers, so a staircase is a piecewise linear curve too: stair (g', g] has the knots g' + 1 and
g. All curves of a shape therefore live on one set of knots, a mixture of planes is a mixture of rows of one
matrix, and any number of row counts is one `numpy.interp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Shape = Literal["plain", "chain", "tree"]
Lookup = Literal["measured", "floor", "clamped"]
"""How seconds follow from probes. measured: this module's docstring. floor: the last probe at or below, as in
SGLang's step table. clamped: linear between probes, constant outside, as in SGLang's additive table."""

Floats = NDArray[np.float64]
FAR = float(1 << 31)  # rows: a knot past every step there will be, for the slope after the last probe
SMALLEST_RISE = 1e-3  # share of a step; a curve that rises less over its whole width says nothing
NOISE = 3.0  # standard errors by which the ends of a curve must differ; the higher end is a maximum of many


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A measured target step, or (``tokens`` 0) a measured draft."""

    shape: Shape
    requests: int
    tokens: int  # rows the target computed: roots, nodes and prefill
    context: float  # mean committed tokens a request
    median_seconds: float
    spread_seconds: float = 0.0  # standard error of the median
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.requests < 1 or self.repeats < 1:
            raise ValueError(
                f"probe: expected 1 or more requests and repeats, got {self.requests} and {self.repeats}"
            )
        if not 0 <= self.tokens < FAR or self.requests >= FAR:
            raise ValueError(
                f"probe: expected 0 or more tokens and numbers below 2^31, got {self.tokens} tokens of "
                f"{self.requests} requests"
            )
        check_seconds("probe: median_seconds", self.median_seconds)
        for name in ("context", "spread_seconds"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"probe: {name}: expected a finite number of at least 0, got {value}")

    @property
    def key(self) -> tuple[str, float, int, int]:
        """Order of probes in a table."""
        return self.shape, self.context, self.requests, self.tokens


def check_seconds(name: str, value: float) -> None:
    """Raises ValueError for what is no duration."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, got {value}; measure again")


class Plane(NamedTuple):
    """Curves of one context."""

    requests: Floats  # [P] rising
    seconds: Floats  # [P, K] at the surface's knots


@dataclass(frozen=True)
class Surface:
    """Seconds of one shape. Between requests and between contexts linear; fewer or shorter than measured are
    taken as the nearest, more or longer keep the last slope (never a falling one). Lookups other than
    "measured" take more requests as the nearest too.
    """

    knots: Floats  # [K] rows, rising
    contexts: Floats  # [C] rising
    planes: tuple[Plane, ...]  # [C]
    lookup: Lookup
    rises: bool  # some curve rises by more than its noise
    curves: int  # with two row counts or more

    def seconds(self, requests: int, rows: NDArray[np.int64], context: float) -> Floats:
        """Seconds at ``rows`` (any shape)."""
        last = len(self.contexts) - 1
        index = min(max(int(np.searchsorted(self.contexts, context, side="right")) - 1, 0), max(last - 1, 0))
        curve = self._at(index, requests)
        if last and context > self.contexts[index]:
            above = self._at(index + 1, requests)
            share = (context - self.contexts[index]) / (self.contexts[index + 1] - self.contexts[index])
            if share <= 1:
                curve = curve + share * (above - curve)
            else:  # both curves rise with the rows; their extrapolated difference need not
                curve = np.maximum.accumulate(above + (share - 1) * np.maximum(above - curve, 0))
        return np.interp(rows, self.knots, curve)

    def _at(self, index: int, requests: int) -> Floats:
        plane = self.planes[index]
        upper = int(np.searchsorted(plane.requests, requests))
        if upper == len(plane.requests):
            return self._beyond(plane, requests)
        if upper == 0 or plane.requests[upper] == requests:
            return plane.seconds[upper]
        below, above = plane.requests[upper - 1], plane.requests[upper]
        share = (requests - below) / (above - below)
        return plane.seconds[upper - 1] * (1 - share) + plane.seconds[upper] * share

    def _beyond(self, plane: Plane, requests: int) -> Floats:
        """The last octave of requests, carried on; a shorter base would magnify noise. Where that falls with
        the rows (a plane is flat before its first probe) it is cut to what more rows cost.
        """
        most, last = plane.requests[-1], plane.seconds[-1]
        lower = max(int(np.searchsorted(plane.requests, most / 2, side="right")) - 1, 0)
        if self.lookup != "measured" or lower == len(plane.requests) - 1:
            return last
        share = (requests - most) / (most - plane.requests[lower])
        further: Floats = last + share * np.maximum(last - plane.seconds[lower], 0)
        return np.minimum.accumulate(further[::-1])[::-1]

    def last_slope(self, requests: int, context: float) -> float:
        """Seconds a row past all probes of a measured surface, of the nearest curve that rises there; 0 where
        none does.
        """
        width = self.knots[-1] - self.knots[-2]
        slopes = [
            (abs(at - context), abs(many - requests), float(rise / width))
            for at, plane in zip(self.contexts, self.planes, strict=True)
            for many, rise in zip(plane.requests, plane.seconds[:, -1] - plane.seconds[:, -2], strict=True)
            if rise > 0
        ]
        return min(slopes)[2] if slopes else 0.0


class _Curve(NamedTuple):
    """One plane before it is put on common knots."""

    knots: Floats
    seconds: Floats


def surface(
    probes: Sequence[Probe],
    *,
    graph_sizes: Sequence[int],
    lookup: Lookup,
    slope: Callable[[int, float], float] = lambda requests, context: 0.0,
) -> Surface:
    """The surface through probes of one shape.

    Where every probe has one row a request (plain decoding), requests and rows are one axis: one curve a
    context, over the rows. ``slope`` says seconds a row, by requests and context, where a measured curve does
    not rise by itself.
    """
    one_axis = all(probe.requests == probe.tokens for probe in probes)
    groups: dict[float, dict[int, list[Probe]]] = {}
    for probe in probes:
        plane = groups.setdefault(probe.context, {})
        plane.setdefault(0 if one_axis else probe.requests, []).append(probe)
    sizes = np.asarray(graph_sizes, dtype=np.float64)
    curves = {
        context: {
            requests: _curve(group, sizes, lookup, partial(slope, group[-1].requests, context))
            for requests, group in sorted(plane.items())
        }
        for context, plane in sorted(groups.items())
    }
    every = [curve for plane in curves.values() for curve in plane.values()]
    knots = np.unique(np.concatenate([curve.knots for curve in every]))
    planes = tuple(
        Plane(
            np.asarray(list(plane), dtype=np.float64),
            np.stack([np.interp(knots, curve.knots, curve.seconds) for curve in plane.values()]),
        )
        for plane in curves.values()
    )
    wide = [group for plane in groups.values() for group in plane.values() if _width(group) > 1]
    return Surface(
        knots=knots,
        contexts=np.asarray(list(curves), dtype=np.float64),
        planes=planes,
        lookup=lookup,
        rises=any(_rises(group) for group in wide),
        curves=len(wide),
    )


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The non-decreasing sequence nearest to ``values`` in weighted squares, [n] (pool violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, mass, members = blocks.pop()
            total = mass + block[1]
            block = ((mean * mass + block[0] * block[1]) / total, total, members + block[2])
        blocks.append(block)
    return np.repeat([mean for mean, _, _ in blocks], [members for _, _, members in blocks])


def _curve(probes: Sequence[Probe], sizes: Floats, lookup: Lookup, fallback: Callable[[], float]) -> _Curve:
    rows = np.asarray([probe.tokens for probe in probes], dtype=np.float64)
    seconds = np.asarray([probe.median_seconds for probe in probes])
    if lookup == "clamped":
        return _Curve(rows, seconds)
    if lookup == "floor":
        ends = np.append(rows[1:] - 1, rows[-1])
        return _stairs(rows, ends, seconds)
    weights = np.asarray([probe.repeats for probe in probes], dtype=np.float64)
    bucket = rows.copy()
    inside = rows <= (sizes[-1] if len(sizes) else 0)
    bucket[inside] = sizes[np.searchsorted(sizes, rows[inside])]
    at, group = np.unique(bucket, return_inverse=True)
    mass = np.bincount(group, weights).astype(np.float64)
    level = isotonic(np.bincount(group, weights * seconds) / mass, mass)
    slope = _last_slope(at, level) or fallback()
    far = level[-1] + slope * (FAR - at[-1])
    if not len(sizes):
        return _Curve(np.append(at, FAR), np.append(level, far))
    captured = at <= sizes[-1]
    smooth, smooth_level = at[~captured], level[~captured]
    # Graph sizes without a probe: on the line between those with one; past the last, on its slope.
    known, known_level = (at[captured], level[captured]) if captured.any() else (at[:1], level[:1])
    heights = np.interp(sizes, known, known_level)
    beyond = sizes > known[-1]
    heights[beyond] += (_last_slope(known, known_level) or slope) * (sizes[beyond] - known[-1])
    if len(smooth):
        heights = np.minimum(heights, smooth_level[0])
    stairs = _stairs(np.append(1, sizes[:-1] + 1), sizes, heights)
    if not len(smooth):
        return _Curve(np.append(stairs.knots, FAR), np.append(stairs.seconds, far))
    first = sizes[-1] + 1  # the graphs' last stair ends here, whatever comes after is another regime
    start = smooth_level[0]
    if len(smooth) > 1:
        start -= (smooth_level[1] - smooth_level[0]) / (smooth[1] - smooth[0]) * (smooth[0] - first)
    start = max(start, heights[-1])
    knots = np.concatenate((stairs.knots, [first] if smooth[0] > first else [], smooth, [FAR]))
    levels = np.concatenate((stairs.seconds, [start] if smooth[0] > first else [], smooth_level, [far]))
    return _Curve(knots, levels)


def _stairs(begins: Floats, ends: Floats, heights: Floats) -> _Curve:
    """Constant ``heights`` from ``begins`` to ``ends``, both included; a stair may be one row wide."""
    knots = np.stack((begins, ends), 1).flatten()
    keep = np.append(True, np.diff(knots) > 0)
    return _Curve(knots[keep], np.repeat(heights, 2)[keep])


def _last_slope(rows: Floats, seconds: Floats) -> float:
    """Seconds a row after the last probe: from the last probe that was cheaper; 0 where none was."""
    lower = np.flatnonzero(seconds < seconds[-1])
    if not len(lower):
        return 0.0
    return float((seconds[-1] - seconds[lower[-1]]) / (rows[-1] - rows[lower[-1]]))


def _width(probes: Sequence[Probe]) -> int:
    return len({probe.tokens for probe in probes})


def _rises(probes: Sequence[Probe]) -> bool:
    """Whether the dearest probe is above the narrowest one by more than chance and more than nothing."""
    low, high = probes[0], max(probes, key=lambda probe: probe.median_seconds)
    noise = NOISE * math.hypot(low.spread_seconds, high.spread_seconds)
    rise = high.median_seconds - low.median_seconds
    return high.tokens > low.tokens and rise > max(noise, SMALLEST_RISE * low.median_seconds)
