"""Penalties and minimum lengths of the requests that ask for them, along every path of their trees.

An engine's own history lags under an overlapped schedule and knows no paths, so it is kept here, on the
device, for as many requests as ever asked at one time. Order and meaning are those of SGLang alone:
frequency and presence, then repetition, all over the output alone; stop tokens are forbidden before the
minimum length.

Notation: n requests that ask, W window rows, V vocabulary, gamma tree depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specplug.processors import Ancestors, add_bias, penalise


class Penalties(NamedTuple):
    """What n requests ask for."""

    rows: torch.Tensor  # [n] int64, of the history
    frequency: torch.Tensor  # [n] fp32
    presence: torch.Tensor  # [n] fp32
    repetition: torch.Tensor  # [n] fp32
    minimum: torch.Tensor  # [n] int32, output tokens before a stop token is allowed
    stops: torch.Tensor  # [n, S] int64, stop tokens
    stop_counts: torch.Tensor  # [n] int32


class Asked(NamedTuple):
    """What one request asks for."""

    slot: int  # of the engine's request pool
    frequency: float
    presence: float
    repetition: float
    minimum: int
    stops: Sequence[int]


class PenaltyHistory:
    """What the penalised requests have put out. Grows with the slots that ever held one, by V int32 each."""

    def __init__(self, vocabulary: int, device: torch.device | str) -> None:
        self._device = device
        self._row_of: dict[int, int] = {}  # slot -> row
        self._counts = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(0, dtype=torch.int32, device=device)

    def read(self, asked: Sequence[Asked]) -> Penalties:
        """The same as tensors, and where each request's history lies."""
        rows = [self._row_of.setdefault(one.slot, len(self._row_of)) for one in asked]
        missing = len(self._row_of) - len(self._lengths)
        if missing > 0:
            more = max(missing, len(self._lengths))
            self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._counts.shape[1])])
            self._lengths = torch.cat([self._lengths, self._lengths.new_zeros(more)])

        def floats(name: str) -> torch.Tensor:
            values = [float(getattr(one, name)) for one in asked]
            return torch.tensor(values, dtype=torch.float32, device=self._device)

        return Penalties(
            torch.tensor(rows, device=self._device),
            floats("frequency"),
            floats("presence"),
            floats("repetition"),
            floats("minimum").int(),
            padded([one.stops for one in asked], fill=0, device=self._device),
            torch.tensor([len(one.stops) for one in asked], dtype=torch.int32, device=self._device),
        )

    def begin(self, asked: Penalties, outputs: Sequence[Sequence[int]]) -> None:
        """Set the history of n requests to these tokens."""
        self._counts[asked.rows] = 0
        self._lengths[asked.rows] = 0
        if any(outputs):
            self.add(asked, padded(outputs, fill=-1, device=self._device))

    def add(
        self,
        asked: Penalties,
        tokens: torch.Tensor,  # [n, T] int64, -1 = none
    ) -> None:
        """The tokens are history."""
        there = (tokens >= 0).int()
        rows = asked.rows[:, None].expand_as(tokens)
        self._counts.index_put_((rows, tokens.clamp_min(0)), there, accumulate=True)
        self._lengths.index_add_(0, asked.rows, there.sum(1, dtype=torch.int32))

    def apply(
        self,
        logits: torch.Tensor,  # [n, W, V] any float dtype
        path: Ancestors,
        asked: Penalties,
    ) -> torch.Tensor:
        """Adjusted logits, [n, W, V] fp32."""
        counts, off = self._counts[asked.rows], torch.zeros_like(asked.frequency)
        history = {"output_counts": counts, "in_prompt": torch.zeros_like(counts, dtype=torch.bool)}
        added = {"frequency": asked.frequency, "presence": asked.presence}
        logits = penalise(logits, path, repetition=off + 1, **added, **history)
        logits = penalise(logits, path, repetition=asked.repetition, frequency=off, presence=off, **history)
        forbidden = torch.full_like(asked.stops, float("-inf"), dtype=torch.float32)
        stopless = add_bias(logits, tokens=asked.stops, values=forbidden, counts=asked.stop_counts)
        early = self._lengths[asked.rows, None] + path.depths < asked.minimum[:, None]
        return torch.where(early[..., None], stopless, logits)

    def standing(self, asked: Penalties) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for the next token alone, both [n, V] fp32: what is added to the logits, then what
        multiplies negative ones and divides the others."""
        shape = (len(asked.rows), 1, self._counts.shape[1])
        root = Ancestors(
            torch.zeros(shape[0], 1, 0, dtype=torch.int64, device=self._device),
            torch.zeros(shape[0], 1, dtype=torch.int64, device=self._device),
        )
        none = torch.zeros_like(asked.frequency)
        adding = asked._replace(repetition=none + 1)
        scaling = asked._replace(frequency=none, presence=none, minimum=torch.zeros_like(asked.minimum))
        added = self.apply(torch.zeros(shape, device=self._device), root, adding)
        scaled = self.apply(-torch.ones(shape, device=self._device), root, scaling)
        return added[:, 0], -scaled[:, 0]


def padded(rows: Sequence[Sequence[int]], *, fill: int, device: torch.device | str) -> torch.Tensor:
    """Lists of different lengths as one tensor, [n, the longest or 1] int64."""
    width = max(1, *map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], device=device)
