"""Seconds of steps and drafts as the budget reads them: the cost table times its online correction.

A decision reads the seconds of thousands of totals. Curves over 1, 2, .. tokens are therefore kept, by
shape, requests and context (both to 4 %, requests up to 16 exactly), and made again every `REFRESH_READS`
reads, by when the correction may have moved.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from specplug.correction import CostCorrection
from specplug.cost import CostTable
from specplug.cost_curves import Shape

Floats = NDArray[np.float64]

REFRESH_READS = 512  # some 160 rounds of the budget
KEPT_CURVES = 32  # least recently made ones go first; 32 of 16,384 tokens are 4 MB
STEPS_AN_OCTAVE = 16
EXACT = 16

Kept = TypeVar("Kept")


class Curve(NamedTuple):
    """Seconds of a step over a base and 0, 1, .. n more rows. Shared: not to be written to."""

    seconds: Floats  # [n + 1]
    least: Floats  # [n + 1] the fewest seconds of that many rows or more


class Prices:
    """Corrected seconds. Bounded memory: 32 curves and two corrections."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._verify, self._draft = CostCorrection(), CostCorrection()
        self._curves: dict[tuple[Shape, int, float], tuple[int, Curve]] = {}
        self._drafts: dict[tuple[Shape, int, float], tuple[int, float]] = {}
        self._reads = 0

    def step(self, shape: Shape, requests: int, base_tokens: int, nodes: int, context: float) -> Curve:
        """A step over ``base_tokens`` + 0, 1, .. ``nodes`` rows."""
        last = base_tokens + nodes
        key = (shape, rounded_requests(requests), rounded_context(context))
        kept = self._curves.get(key)
        if kept is None or self._old(kept[0]) or len(kept[1].seconds) <= last:
            tokens = np.arange(last + last // 8 + 1).clip(1)
            seconds = self._table.verify_seconds(key[1], tokens, context=key[2], shape=shape)
            seconds = seconds * self._verify.factor(shape, requests=key[1], tokens=tokens)
            kept = (self._reads, Curve(seconds, np.minimum.accumulate(seconds[::-1])[::-1]))
            _keep(self._curves, key, kept)
        self._reads += 1
        return Curve(kept[1].seconds[base_tokens : last + 1], kept[1].least[base_tokens : last + 1])

    def draft(self, shape: Shape, requests: int, context: float) -> float:
        """Seconds of drafting for ``requests``."""
        key = (shape, rounded_requests(requests), rounded_context(context))
        kept = self._drafts.get(key)
        if kept is None or self._old(kept[0]):
            tabled = self._table.draft_seconds(key[1], context=key[2], shape=shape)
            factor = self._draft.factor(shape, requests=key[1], tokens=np.array(key[1]))
            kept = (self._reads, tabled * float(factor))
            _keep(self._drafts, key, kept)
        self._reads += 1
        return kept[1]

    def _old(self, made: int) -> bool:
        return self._reads - made >= min(REFRESH_READS, 1 + self._reads // 4)

    def observe_step(
        self, shape: Shape, requests: int, tokens: int, context: float, *, seconds: float
    ) -> None:
        """Learn from a step's seconds. Raises ValueError unless they are finite and above 0."""
        tabled = self._table.verify_seconds(requests, np.array([tokens]), context=context, shape=shape)[0]
        self._verify.observe(shape, requests=requests, tokens=tokens, observed=seconds, tabled=float(tabled))

    def observe_draft(self, shape: Shape, requests: int, context: float, *, seconds: float) -> None:
        """Learn from a draft's seconds; nothing where the table holds no drafts (its steps hold them then).

        Raises ValueError unless they are finite and above 0.
        """
        tabled = self._table.draft_seconds(requests, context=context, shape=shape)
        if tabled > 0:
            self._draft.observe(shape, requests=requests, tokens=requests, observed=seconds, tabled=tabled)


def _keep(memory: dict[tuple[Shape, int, float], Kept], key: tuple[Shape, int, float], value: Kept) -> None:
    memory.pop(key, None)
    if len(memory) >= KEPT_CURVES:
        del memory[next(iter(memory))]
    memory[key] = value


@functools.lru_cache(maxsize=1024)
def rounded_requests(requests: int) -> int:
    """To 4 %; exact up to 16."""
    if requests <= EXACT:
        return requests
    return round(2 ** (round(math.log2(requests) * STEPS_AN_OCTAVE) / STEPS_AN_OCTAVE))


@functools.lru_cache(maxsize=1024)
def rounded_context(context: float) -> float:
    """To 4 %; 0 below 1."""
    if context < 1:
        return 0.0
    return 2 ** (round(math.log2(context) * STEPS_AN_OCTAVE) / STEPS_AN_OCTAVE)
