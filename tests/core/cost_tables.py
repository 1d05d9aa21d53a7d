"""Made-up cost tables for the tests of the budget: seconds are any function of the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class MadeUp:
    """What `specplug.budget` reads of a CostTable."""

    step: Callable[[np.ndarray], np.ndarray]  # rows -> seconds, of chains and trees
    draft: dict[str, float] = field(default_factory=dict)  # seconds a draft, by shape
    plain: Callable[[np.ndarray], np.ndarray] | None = None  # of plain steps, where they differ
    informative: bool = True
    reason: str = ""
    max_tokens: int = 1 << 20

    def verify_seconds(self, requests, tokens, *, context=0.0, shape="tree"):
        function = self.plain if shape == "plain" and self.plain else self.step
        return np.asarray(function(np.asarray(tokens, np.float64)), np.float64)

    def draft_seconds(self, requests, *, context=0.0, shape="tree"):
        return self.draft.get(shape, 0.0)


def linear(base: float, row: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: base + row * rows


def stairs(sizes: list[int], heights: list[float], after: float) -> Callable[[np.ndarray], np.ndarray]:
    """The height of the first size that holds the rows; past the last, ``after`` a row on top."""
    sizes_, heights_ = np.array(sizes), np.array(heights)

    def seconds(rows: np.ndarray) -> np.ndarray:
        place = np.searchsorted(sizes_, rows)
        over = np.maximum(rows - sizes_[-1], 0) * after
        return heights_[place.clip(max=len(sizes) - 1)] + over

    return seconds
