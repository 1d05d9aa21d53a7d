"""SGLang's temperatures for the confidence head of a chain: the file, the fit and the use (STS).

Sequential temperature scaling: position j of a chain has the confidence sigmoid(raw_j / T_j), and its
survival is the product of the confidences up to j. T_1, T_2, ... are fitted left to right, each minimising
the ECE of its position's *survival* against "the prefix up to j was accepted", the earlier ones held. One
table a temperature regime.

File: ``{"temperatures":[gamma floats > 0],"dataset":"","num_samples":0,"ece_before":[],"ece_after":[]}``, the
form that SGLang's ``--speculative-dspark-confidence-sts-path`` reads.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from specplug.jsonfile import read_struct
from specplug.reliability import ece

GRID = np.logspace(-1, 1, 41)  # candidate temperatures, those of SGLang's own fit; 1 is one of them


class StsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One STS file. Raises ValueError for a temperature that is not a finite positive number, or for none."""

    temperatures: list[float]  # gamma, position 1 first
    dataset: str = ""
    num_samples: int = 0
    ece_before: list[float] = []
    ece_after: list[float] = []

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("temperatures: expected one number a draft position, got an empty list")
        for position, value in enumerate(self.temperatures):
            if not 0 < value < float("inf"):
                raise ValueError(f"temperatures[{position}]: expected a finite number above 0, got {value}")

    def save(self, path: Path | str) -> None:
        """Write the file that SGLang reads."""
        Path(path).write_bytes(msgspec.json.encode(self) + b"\n")


def read_sts(path: Path | str, *, depth: int | None = None) -> StsTable:
    """Read a file.

    Raises ValueError for an unknown key, a wrong type or value, or, where ``depth`` is given, another number
    of temperatures than ``depth`` (SGLang demands equality).
    """
    table = read_struct(path, StsTable)
    if depth is not None and len(table.temperatures) != depth:
        raise ValueError(
            f"{path}: expected {depth} temperatures, one a draft position, got {len(table.temperatures)}; "
            "fit a table for this depth"
        )
    return table


def survival(
    raw: torch.Tensor,  # [R, gamma] any float dtype, the confidence head's output before its sigmoid
    temperatures: torch.Tensor,  # [gamma] fp32
) -> torch.Tensor:
    """Probability that the chain is accepted up to each position, [R, gamma] fp32, non-increasing."""
    return (raw.float() / temperatures).sigmoid().cumprod(1)


def fit_sts(raw: NDArray[np.floating], accepted: NDArray[np.bool_], *, dataset: str = "") -> StsTable:
    """Fit temperatures from N chains: raw confidences and "accepted up to here", both [N, gamma].

    Of equal ECEs the temperature nearest to 1 wins. Raises ValueError for other shapes, no chains, or an
    outcome that is accepted after a rejection.
    """
    x, y = np.asarray(raw, dtype=np.float64), np.asarray(accepted, dtype=bool)
    if x.ndim != 2 or x.shape != y.shape or not x.size:
        raise ValueError(f"raw, accepted: expected one shape [N, gamma], not empty, got {x.shape}, {y.shape}")
    if (y[:, 1:] & ~y[:, :-1]).any():
        raise ValueError("accepted: expected prefix outcomes (nothing accepted after a rejection)")
    grid = sorted(GRID.tolist(), key=lambda t: abs(np.log(t)))  # min() keeps the first of equals
    temperatures, before, after = [], [], []
    plain = np.cumprod(_sigmoid(x), axis=1)
    above = np.ones(len(x))
    for j in range(x.shape[1]):
        errors = {t: ece(above * _sigmoid(x[:, j] / t), y[:, j]) for t in grid}
        best = min(errors, key=lambda t: errors[t])
        above = above * _sigmoid(x[:, j] / best)
        temperatures.append(best)
        before.append(ece(plain[:, j], y[:, j]))
        after.append(errors[best])
    return StsTable(
        temperatures=temperatures, dataset=dataset, num_samples=len(x), ece_before=before, ece_after=after
    )


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1 + np.tanh(x / 2))
