"""What a round of a shape is expected to bring: the last rows of survivals, replayed.

Before drafting nobody knows the coming survivals, so the last 512 requests' rows of the same shape stand
for them. For R requests they are put into groups of R, each group is a round, and the rounds are budgeted
exactly as `specplug.budget` would: the long-run rate is the fixed point (Dinkelbach 1967) of

    rate = sum of tokens / sum of seconds,   every round maximal in tokens - rate * seconds

so a batch size never seen is predicted from the rows of other sizes, and the difference between requests
is kept. The rows' own noise is that of 512 drafts: about 1 % of the tokens.

What it does not know: whether the coming rounds are like the last ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROWS = 512  # a mean of 512 drafts scatters by 1 to 2 %
ROWS_A_ROUND = 32  # so that the sample spans 16 rounds of a large batch
TOTALS = 2048  # of one round that are looked at; of more nodes, evenly spaced totals
ITERATIONS, PRECISION = 12, 1e-6  # Dinkelbach's method converges superlinearly; 5 are typical


class Outlook(NamedTuple):
    """A typical round of one shape."""

    tokens: float
    seconds: float  # draft included

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class RecentRows:
    """The last rows of survivals of one shape: [1024, width] fp32, whatever it sees."""

    def __init__(self, width: int) -> None:
        self._rows = np.zeros((2 * ROWS, width), np.float32)  # written upwards; full, the newest move down
        self._end = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: NDArray[np.float32]) -> None:  # [N, at most width]
        """Put rows of one round in front; of more than `ROWS_A_ROUND`, evenly spaced ones."""
        rows = rows[:: -(-len(rows) // ROWS_A_ROUND) or 1]
        number, width = rows.shape
        if self._end + number > len(self._rows):
            self._rows[:ROWS] = self._rows[self._end - ROWS : self._end]
            self._end = ROWS
        at = slice(self._end, self._end + number)
        self._rows[at, :width] = rows
        self._rows[at, width:] = 0
        self._end += number
        self._count = min(self._count + number, ROWS)

    def keep(self, newest: int) -> None:
        """Forget all but the newest."""
        self._count = min(self._count, newest)

    def newest(
        self, *, at_least: int = 0, otherwise: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Rows, newest first, [n, width]; short of ``at_least``, filled up with rows of ``otherwise``."""
        rows = self._rows[self._end - self._count : self._end][::-1]
        if len(rows) >= at_least or otherwise is None or not len(otherwise):
            return rows
        fill = np.zeros((at_least - len(rows), rows.shape[1]), np.float32)
        fill[:, : otherwise.shape[1]] = otherwise[np.arange(len(fill)) % len(otherwise)]
        return np.concatenate([rows, fill])


def outlook(
    rows: NDArray[np.float32],  # [m, B] survivals, m >= 1
    *,
    requests: int,
    scale: float,  # accepted over predicted, see `correction.AcceptanceCorrection`
    step_seconds: Callable[[NDArray[np.int64]], NDArray[np.float64]],  # of 0, 1, .. nodes of the batch
    draft_seconds: float,
) -> Outlook:
    """A typical round of ``requests`` requests that all emit, nothing else in the batch."""
    groups = max(1, len(rows) // requests)
    rows = rows[: groups * requests]
    each = requests / (len(rows) // groups)  # requests that a row of a group stands for
    ordered = np.sort(-rows.reshape(groups, -1), axis=1)
    grid = np.arange(-(-ordered.shape[1] // TOTALS) - 1, ordered.shape[1], -(-ordered.shape[1] // TOTALS))
    gains = np.cumsum(ordered, axis=1, dtype=np.float64)[:, grid] * (-scale * each)
    tokens = requests + np.where(ordered[:, grid] < 0, gains, -np.inf)  # a node of survival 0 is not there
    tokens = np.concatenate([np.full((groups, 1), float(requests)), tokens], axis=1)
    nodes = np.rint(np.append(0, grid + 1) * each).astype(np.int64)
    seconds = step_seconds(nodes)
    total = Outlook(float(requests), float(seconds[0]) + draft_seconds)
    rate = total.rate
    for _ in range(ITERATIONS):
        best = (tokens - rate * seconds).argmax(1)
        total = Outlook(
            float(tokens[np.arange(groups), best].mean()), float(seconds[best].mean()) + draft_seconds
        )
        if total.rate <= rate * (1 + PRECISION):
            break
        rate = total.rate
    return total
