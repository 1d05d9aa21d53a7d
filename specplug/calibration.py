"""From a draft path to the probability that it is accepted, a(v).

A draft's path probability e^L is not its acceptance probability: drafts are over-confident, more so with
depth, and at temperature 0 the target accepts its argmax and nothing else. With L the path's log-probability,
r its last token's rank among its siblings and c the confidence head's survival of the path, where there is a
head,

    logit a = A ln(e^L) - B ln(1 - e^L) + C + D ln(1 + r) + E logit(c),        A, B, E >= 0, D <= 0

with coefficients of their own for every depth: beta calibration (Kull et al. 2017) with two more terms. A = B
= 1 and the rest 0 leave e^L as it is, which is the prior of every fit. The signs make a rise with L and c and
fall with r. A second map of the same form in a alone, the *online* correction, follows what is accepted in
service (`specplug.drift`). Last, a child is held at or below its parent, so prefixes stay closed under any
cut by score.

Regimes: one set of coefficients for temperature 0 and one for each range above it; a temperature without a
fitted regime keeps e^L. What it does not know: the text, the request, correlations between siblings.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from specplug.jsonfile import read_struct
from specplug.order import Reordered, by_score, sibling_ranks
from specplug.tree import DraftTree

FEATURES = ("log_p", "log_rest", "bias", "log_rank", "confidence")  # order of the coefficients
IDENTITY = (1.0, 1.0, 0.0, 0.0, 0.0)
ONLINE_IDENTITY = (1.0, 1.0, 0.0)  # the first three alone
LOG_FLOOR, LOG_CEILING = -30.0, -1e-6  # nats; keep both logarithms finite in fp32 (1 - e^-1e-6 = 1e-6)
CONFIDENCE_EDGE = 1e-6


class DepthCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Coefficients of one depth: the fitted map and the online correction after it.

    Raises ValueError for a wrong number of coefficients, or one whose sign would break monotonicity.
    """

    fitted: list[float] = msgspec.field(default_factory=lambda: list(IDENTITY))  # as FEATURES
    online: list[float] = msgspec.field(default_factory=lambda: list(ONLINE_IDENTITY))

    def __post_init__(self) -> None:
        for name, values, length in (("fitted", self.fitted, 5), ("online", self.online, 3)):
            if len(values) != length:
                raise ValueError(f"{name}: expected {length} coefficients, got {len(values)}")
            if not all(abs(value) < float("inf") for value in values):
                raise ValueError(f"{name}: expected finite coefficients, got {values}")
            signs = {0: values[0], 1: values[1]} | ({3: -values[3], 4: values[4]} if length == 5 else {})
            for index, value in signs.items():
                if value < 0:
                    sign = "at most" if index == 3 else "at least"
                    raise ValueError(
                        f"{name}[{index}] ({FEATURES[index]}): expected {sign} 0, got {values[index]}; "
                        "the other sign would not be monotone"
                    )


class Regime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Calibration of one range of temperatures, with what its fit reported."""

    max_temperature: float | None  # inclusive upper end; 0 = greedy only; null = no end
    depths: list[DepthCoefficients]  # depth 1 first; deeper nodes use the last
    uses_confidence: bool = False
    nodes: int = 0  # records of the fit
    ece_before: list[float] = []  # per depth, of e^L
    ece_after: list[float] = []  # per depth, on the fit's own records

    def __post_init__(self) -> None:
        if not self.depths:
            raise ValueError("depths: expected the coefficients of at least one depth, got none")
        if self.max_temperature is not None and not self.max_temperature >= 0:
            raise ValueError(f"max_temperature: expected at least 0, got {self.max_temperature}")
        if not self.uses_confidence and any(depth.fitted[4] for depth in self.depths):
            raise ValueError(
                "uses_confidence: expected true where a confidence coefficient is not 0, got false"
            )


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All regimes of one draft and target pair. Raises ValueError unless the temperatures rise."""

    regimes: list[Regime] = []
    target: str = ""  # names, for the reader; not checked
    draft: str = ""

    def __post_init__(self) -> None:
        ends = [_end(regime) for regime in self.regimes]
        if any(b <= a for a, b in itertools.pairwise(ends)):
            raise ValueError(f"regimes: expected strictly rising max_temperature (null last), got {ends}")

    def regime_index(self, temperature: float) -> int:
        """Index of the regime that holds a temperature; ``len(regimes)`` where none does."""
        return sum(temperature > _end(regime) for regime in self.regimes)

    def save(self, path: Path | str) -> None:
        """Write as JSON."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read_calibration(path: Path | str) -> Calibration:
    """Read what ``save`` wrote. Raises ValueError for an unknown key, a wrong type or an illegal value."""
    return read_struct(
        path, Calibration, what="a calibration", fix="fit it again with specplug record --calibration"
    )


def read_served_calibration(path: Path | str) -> Calibration:
    """The same for an engine. Raises ValueError also where a regime uses the confidence head."""
    calibration = read_calibration(path)
    if any(regime.uses_confidence for regime in calibration.regimes):
        raise ValueError(
            f"{path}: uses the confidence head, which no engine hands to us; fit it again without confidences"
        )
    return calibration


@dataclass(frozen=True)
class Coefficients:
    """A calibration as tensors on one device, for the round. G regimes and, last, the identity; D depths."""

    fitted: torch.Tensor  # [G + 1, D, 5] fp32
    online: torch.Tensor  # [G + 1, D, 3] fp32
    ends: torch.Tensor  # [G] fp32, inclusive upper temperatures
    uses_confidence: bool

    @classmethod
    def of(cls, calibration: Calibration, device: torch.device | str | None = None) -> Coefficients:
        """Copy to a device."""
        identity = Regime(max_temperature=None, depths=[DepthCoefficients()])
        regimes = [*calibration.regimes, identity]
        width = max(len(regime.depths) for regime in regimes)
        rows = [regime.depths + regime.depths[-1:] * (width - len(regime.depths)) for regime in regimes]
        return cls(
            fitted=torch.tensor([[depth.fitted for depth in row] for row in rows], device=device),
            online=torch.tensor([[depth.online for depth in row] for row in rows], device=device),
            ends=torch.tensor([_end(r) for r in calibration.regimes], dtype=torch.float32, device=device),
            uses_confidence=any(regime.uses_confidence for regime in calibration.regimes),
        )


def features(
    log_probs: torch.Tensor,  # [...] L, <= 0
    ranks: torch.Tensor,  # [...] int, 0 = best sibling
    confidence: torch.Tensor | None,  # [...] in [0, 1], or None
) -> torch.Tensor:
    """The terms of the formula, [..., 5] in the dtype of ``log_probs``."""
    log_p = log_probs.clamp(LOG_FLOOR, LOG_CEILING)
    one = torch.ones_like(log_p)
    head = torch.zeros_like(log_p) if confidence is None else confidence.to(log_p).logit(CONFIDENCE_EDGE)
    return torch.stack([log_p, _log_rest(log_p), one, ranks.to(log_p).log1p(), head], -1)


def node_log_acceptance(
    coefficients: Coefficients,
    log_probs: torch.Tensor,  # [...] fp32, L
    *,
    depths: torch.Tensor,  # [...] int, 1..gamma
    ranks: torch.Tensor,  # [...] int
    temperatures: torch.Tensor,  # [...] fp32
    confidence: torch.Tensor | None = None,  # [...] survival of the path by the confidence head
    online: bool = True,
) -> torch.Tensor:
    """log a of single nodes, [...] fp32, not yet held below their parents.

    Raises ValueError where a regime was fitted with confidences and none are given.
    """
    if coefficients.uses_confidence and confidence is None:
        raise ValueError(
            "confidence: expected the confidence head's survival of every node, got None; this calibration "
            "was fitted with it"
        )
    regime = torch.bucketize(temperatures.contiguous(), coefficients.ends)
    depth = depths.long().clamp(1, coefficients.fitted.shape[1]) - 1
    terms = features(log_probs.float(), ranks, confidence)
    logit = (coefficients.fitted[regime, depth] * terms).sum(-1)
    if online:
        log_p = torch.nn.functional.logsigmoid(logit).clamp(LOG_FLOOR, LOG_CEILING)
        a, b, c = coefficients.online[regime, depth].unbind(-1)
        logit = a * log_p + b * _log_rest(log_p) + c
    # A request in the identity regime keeps its score exactly, not up to the clamp and back.
    return torch.where(
        regime < len(coefficients.ends), torch.nn.functional.logsigmoid(logit), log_probs.float()
    )


def log_acceptance(
    coefficients: Coefficients,
    scores: torch.Tensor,  # [R, B] fp32, L; -inf for padding
    *,
    parents: torch.Tensor,  # [R, B] int32, -1 = root
    depths: torch.Tensor,  # [R, B] int32, 1..gamma, 0 for padding
    ranks: torch.Tensor,  # [R, B] int, see `order.sibling_ranks`
    temperatures: torch.Tensor,  # [R] fp32
    max_depth: int,
    confidence: torch.Tensor | None = None,  # [R, B] in [0, 1]
    online: bool = True,
) -> torch.Tensor:
    """log a(v) of every node, [R, B] fp32, <= 0, no child above its parent; padding keeps -inf.

    The order of the nodes may change: `order.by_score` sorts the tree again. ``max_depth`` is gamma.
    """
    flat = node_log_acceptance(
        coefficients,
        scores,
        depths=depths,
        ranks=ranks,
        temperatures=temperatures[:, None].expand_as(scores),
        confidence=confidence,
        online=online,
    )
    log_a = torch.where(scores > float("-inf"), flat, float("-inf"))
    above = parents.long() + 1
    for _ in range(max_depth - 1):
        log_a = torch.minimum(log_a, torch.nn.functional.pad(log_a, (1, 0)).gather(1, above))
    return log_a


def calibrated(
    tree: DraftTree,  # scores = the draft's path log-probabilities
    coefficients: Coefficients,
    temperatures: torch.Tensor,  # [R] fp32
    *,
    max_depth: int,
) -> Reordered:
    """The tree with log a(v) for scores, in their order; no confidence head."""
    scores = log_acceptance(
        coefficients,
        tree.scores,
        parents=tree.parents,
        depths=tree.depths,
        ranks=sibling_ranks(tree),
        temperatures=temperatures,
        max_depth=max_depth,
    )
    return by_score(tree, scores)


def _end(regime: Regime) -> float:
    return float("inf") if regime.max_temperature is None else regime.max_temperature


def _log_rest(log_p: torch.Tensor) -> torch.Tensor:
    """-ln(1 - p), exact for p near 0 and near 1."""
    return -torch.log(-torch.expm1(log_p))
