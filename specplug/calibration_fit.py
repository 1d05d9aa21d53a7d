"""Fitting `specplug.calibration` from recorded rounds.

Each record is one verified node: what the draft knew and whether the node was accepted (its parent was, and
the target drew its token). The coefficients are the maximum a posteriori of a logistic regression under the
signs of the model: first one set for all depths, with a Gaussian prior at the identity, then each depth with
a prior at the common set. A depth with few records therefore stays near the others, and a regime with none
near the identity.

Newton's method: every step is a quadratic in at most five unknowns with bounds, solved by coordinate descent
and shortened until the posterior does not fall. The objective is convex, so there is one optimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.calibration import (
    IDENTITY,
    Calibration,
    Coefficients,
    DepthCoefficients,
    Regime,
    features,
    node_log_acceptance,
)
from specplug.reliability import ece_by_depth

# Weight of each prior in nodes: a node at p = 1/2 has curvature 1/4 in its log-odds. Chosen so that three
# rounds of a 16-node tree count as much as the prior and thousands of nodes leave nothing of it.
PRIOR_NODES = 50.0
PRIOR_PRECISION = PRIOR_NODES / 4
LOWER = np.array([0.0, 0.0, -np.inf, -np.inf, 0.0])  # signs of the model, order of FEATURES
UPPER = np.array([np.inf, np.inf, np.inf, 0.0, np.inf])
STEPS = 50  # Newton steps; fewer than 15 were needed for 1e-10 on every data set of the tests


class Records(NamedTuple):
    """N verified nodes of one temperature regime."""

    log_probs: NDArray[np.float64]  # [N] path log-probability, <= 0
    depths: NDArray[np.int64]  # [N] 1..gamma
    ranks: NDArray[np.int64]  # [N] rank among siblings, 0 = best
    accepted: NDArray[np.bool_]  # [N]
    confidence: NDArray[np.float64] | None = None  # [N] in [0, 1]


def check(records: Records) -> None:
    """Raises ValueError naming the field that has another length, a NaN or a value out of range."""
    n = len(records.log_probs)
    for name, values in records._asdict().items():
        if values is not None and np.shape(values) != (n,):
            raise ValueError(f"records.{name}: expected shape [{n}], got {np.shape(values)}")
    ranges = {
        "log_probs": (-np.inf, 0.0),
        "depths": (1, np.inf),
        "ranks": (0, np.inf),
        "confidence": (0.0, 1.0),
    }
    for name, (low, high) in ranges.items():
        values = getattr(records, name)
        if values is not None:
            wrong = ~((values >= low) & (values <= high))
            if wrong.any():
                i = int(wrong.argmax())
                raise ValueError(f"records.{name}[{i}]: expected {low}..{high}, got {values[i]}")


def fit(records: Mapping[float | None, Records], *, target: str = "", draft: str = "") -> Calibration:
    """Fit one regime a key, the key being its ``max_temperature`` (0 = greedy, None = no upper end).

    Raises ValueError for malformed or empty records.
    """
    keys = sorted(records, key=lambda end: np.inf if end is None else end)
    return Calibration(regimes=[_fit_regime(end, records[end]) for end in keys], target=target, draft=draft)


def predict(
    calibration: Calibration, records: Records, *, temperature: float, online: bool = True
) -> NDArray[np.float64]:
    """a of every record, [N], without the comparison with its parent."""
    n = len(records.log_probs)
    log_a = node_log_acceptance(
        Coefficients.of(calibration),
        torch.from_numpy(np.asarray(records.log_probs, dtype=np.float32)),
        depths=torch.from_numpy(np.asarray(records.depths, dtype=np.int64)),
        ranks=torch.from_numpy(np.asarray(records.ranks, dtype=np.int64)),
        temperatures=torch.full((n,), temperature),
        confidence=None
        if records.confidence is None
        else torch.from_numpy(np.asarray(records.confidence, dtype=np.float32)),
        online=online,
    )
    return np.minimum(log_a.double().exp().numpy(), 1.0)


def regression(
    terms: NDArray[np.float64],  # [N, K]
    outcomes: NDArray[np.float64],  # [N] in [0, 1]
    weights: NDArray[np.float64],  # [N] >= 0
    *,
    prior: NDArray[np.float64],  # [K]
    precision: NDArray[np.float64],  # [K]
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Coefficients [K] that maximise the posterior within the bounds; see the module."""

    def loss(w: NDArray[np.float64]) -> float:
        z = terms @ w
        return float(weights @ (np.logaddexp(0, z) - outcomes * z) + precision @ (w - prior) ** 2 / 2)

    w = np.clip(prior, lower, upper)
    now = loss(w)
    for _ in range(STEPS):
        p = 0.5 * (1 + np.tanh(terms @ w / 2))
        slope = terms.T @ (weights * (p - outcomes)) + precision * (w - prior)
        curvature = (terms * (weights * p * (1 - p))[:, None]).T @ terms + np.diag(precision)
        step = _bounded_step(slope, curvature, lower - w, upper - w)
        while (new := loss(w + step)) > now and np.abs(step).max() > 1e-12:
            step = step / 2
        if not now - new > 1e-10 * max(1.0, abs(now)):
            break
        w, now = w + step, new
    return np.clip(w, lower, upper)


def _bounded_step(
    slope: NDArray[np.float64],
    curvature: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
) -> NDArray[np.float64]:
    """argmin of slope x + x curvature x / 2 within the bounds, by coordinate descent."""
    x = np.zeros_like(slope)
    for _ in range(500):
        old = x.copy()
        for k in range(len(x)):
            free = x[k] - (slope[k] + curvature[k] @ x) / curvature[k, k]
            x[k] = min(max(free, lower[k]), upper[k])
        if np.abs(x - old).max() < 1e-12:
            break
    return x


def _fit_regime(end: float | None, records: Records) -> Regime:
    check(records)
    if not len(records.log_probs):
        raise ValueError(f"records: expected at least one node for max_temperature {end}, got none")
    head = records.confidence
    terms = features(
        torch.from_numpy(np.asarray(records.log_probs, dtype=np.float64)),
        torch.from_numpy(np.asarray(records.ranks, dtype=np.int64)),
        None if head is None else torch.from_numpy(np.asarray(head, dtype=np.float64)),
    ).numpy()
    outcomes = np.asarray(records.accepted, dtype=np.float64)
    max_depth = int(records.depths.max())

    def solve(rows: NDArray[np.bool_], prior: NDArray[np.float64]) -> NDArray[np.float64]:
        x, y = terms[rows], outcomes[rows]
        return regression(
            x,
            y,
            np.ones(len(y)),
            prior=prior,
            precision=np.full(5, PRIOR_PRECISION),
            lower=LOWER,
            upper=UPPER,
        )

    common = solve(np.ones(len(outcomes), dtype=bool), np.array(IDENTITY))
    depths = [solve(records.depths == depth, common).tolist() for depth in range(1, max_depth + 1)]
    regime = Regime(
        max_temperature=end,
        depths=[DepthCoefficients(fitted=depth) for depth in depths],
        uses_confidence=head is not None,
    )
    before = np.exp(records.log_probs)
    after = predict(Calibration(regimes=[regime]), records, temperature=0.0 if end is None else end)
    return Regime(
        max_temperature=end,
        depths=regime.depths,
        uses_confidence=regime.uses_confidence,
        nodes=len(outcomes),
        ece_before=ece_by_depth(before, outcomes, records.depths, max_depth=max_depth),
        ece_after=ece_by_depth(after, outcomes, records.depths, max_depth=max_depth),
    )
