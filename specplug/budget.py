"""The budget: which draft positions of the whole batch a step verifies, and whether a round drafts at all.

One step emits E + S_K tokens in expectation, S_K the sum of the K best a(v) of all requests, and takes
verify_seconds(base + K) after a draft of D seconds. Rows are non-increasing, so the K best are a prefix
of every request's nodes: a tree.

**Objective.** Over many rounds, tokens / seconds is maximal when every round maximises

    E + S_K - rate * seconds(base + K),        rate = the long-run tokens / seconds itself

(Dinkelbach 1967; the renewal-reward argument). A round's own best (E + S_K) / (D + seconds) is the same
thing with the round's own rate. It is right when all rounds are alike and otherwise wrong twice: a round
of poor drafts has a low rate, so time looks cheap to it and it verifies too much, a rich one too little;
and prefill rows, which run anyway, would make time look cheap too. The rate is that of pure decoding,
from `specplug.outlook`; the round's own serves until there is one. The draft of a round under way is sunk
and changes nothing of the argmax; it counts in the rate and in the choice of shape.

Measured costs are stairs, so the argmax is over the whole curve, never the first descent. Equal values:
fewer nodes. Equal survivals: lower request, then lower node.

**Shape.** Plain, chain and tree are answers to the same question: `specplug.outlook` predicts each one's
rate, `specplug.shapes` keeps the guard and probes what is not in use. `specplug.correction` keeps seconds
and tokens true.

Host side; a decision for 256 x 64 nodes costs less than three sorts of them (benchmarks/budget.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from specplug.correction import AcceptanceCorrection
from specplug.cost import CostTable
from specplug.cost_curves import Shape
from specplug.prices import Curve, Prices
from specplug.prospects import Prospects
from specplug.shapes import ShapeChoice

Floats = NDArray[np.float64]
Values = TypeVar("Values", float, Floats)

BLOCK = 64  # nodes whose prefix sums are only computed where they could hold the best total
ZERO, ONES = np.float32(0), np.ones(BLOCK)
SLACK = 1e-9  # of a value: sums taken in another order differ by less


class Plan(NamedTuple):
    """How many nodes each request verifies in one step, and what that should bring."""

    counts: NDArray[np.int32]  # [R] a prefix of each request's node order
    nodes: int  # counts.sum()
    tokens: float  # predicted tokens emitted this step
    seconds: float  # predicted, the draft included; NaN without an informative table; 0 where nobody emits
    gain: float  # predicted rate over plain decoding's rate; NaN without an informative table


class _Ranked(NamedTuple):
    rows: NDArray[np.float32]  # [R, B] -a(v), non-decreasing along a row, 0 past cap and last node
    best: NDArray[np.float32]  # [R * B] the same, best first
    live: int  # nodes that may be verified


def allocate(
    survival: NDArray[np.float32],  # [R, B] a(v) in node order, 0 past the last node
    caps: NDArray[np.int32],  # [R] most nodes of each request
    nodes: int,
) -> NDArray[np.int32]:
    """Counts of the ``nodes`` best, [R] int32; all there are where there are fewer.

    A node of survival 0 is not there, and one above its parent counts as its parent. Raises ValueError for
    NaN, survivals outside [0, 1], negative caps or nodes, and shapes that do not fit.
    """
    if nodes < 0:
        raise ValueError(f"nodes: expected at least 0, got {nodes}")
    return _cut(_ranked(survival, caps), nodes)


def best_total(
    tokens: Floats,  # [K + 1] expected tokens of a step with 0..K nodes
    seconds: Floats,  # [K + 1] above 0
    *,
    rate: float | None = None,  # tokens a second that the time is worth; None: the step's own
) -> int:
    """argmax of tokens - rate * seconds, or of tokens / seconds; the fewest nodes among equals.

    Raises ValueError for NaN, seconds not above 0 or curves of different lengths.
    """
    if tokens.shape != seconds.shape or tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"curves: expected two of one length, got {tokens.shape} and {seconds.shape}")
    if np.isnan(tokens).any() or not (seconds > 0).all():
        raise ValueError("curves: expected numbers, and seconds above 0; measure the cost table again")
    return int(_value(tokens, seconds, rate).argmax())


class Planner:
    """The budget of one engine. Bounded memory: two samples of 512 rows, 16 curves, the corrections.

    ``reason`` is "" or why nothing is trimmed: without an informative table every round drafts trees (chains,
    where the host drafts nothing else) and verifies all of their nodes.
    """

    def __init__(
        self,
        table: CostTable,
        *,
        budget: int,  # most nodes of a request
        depth: int,  # most nodes of a chain
        min_gain: float = 0.02,  # what a costlier shape must bring over the cheaper one
        online: bool = True,  # correct seconds and tokens by what is observed
        trees: bool = True,  # False: the host drafts chains alone
    ) -> None:
        """Raises ValueError for a budget or depth below 1, or a gain outside [0, 1)."""
        if budget < 1 or depth < 1:
            raise ValueError(f"budget and depth: expected at least 1, got {budget} and {depth}")
        self.reason = "" if table.informative else table.reason
        self._online, self._budget = online, max(budget, depth)
        self._usual: Shape = "tree" if trees else "chain"
        self._choice = ShapeChoice(min_gain=min_gain, first=self._usual)
        self._prices = Prices(table)
        self._acceptance = AcceptanceCorrection()
        self._prospects = Prospects(self._prices, self._acceptance, budget=budget, depth=depth, trees=trees)

    def draft(self, requests: int, *, context: float) -> Shape:
        """The shape to draft for ``requests`` of ``context`` mean committed tokens; "plain" = do not draft.

        Once a round, before drafting.
        """
        if requests < 1:
            return "plain"
        if self.reason:
            return self._usual
        seen = self._prospects.of(requests, context)
        # A tree shows its chain too; plain steps and chains are only probed for what they cost.
        probes: Container[Shape] = seen.outlooks if self._online else (self._usual,)
        shape = self._choice.choose(seen.outlooks, probes=probes)
        if shape == "plain" != self._choice.current:
            self._choice.probed("plain", paid=False)
        return shape

    def verify(
        self,
        survival: NDArray[np.float32],  # [R, B] a(v) in node order, 0 past the last node
        caps: NDArray[np.int32],  # [R] by context, max_tokens, scheduler; 0 = not decoding
        *,
        base_tokens: int,  # rows that run anyway: roots, prefill
        emitting: int,  # requests that emit at least one token
        context: float,  # mean committed tokens of the requests
        shape: Shape,  # what the survivals were drafted as
        chain: NDArray[np.float32] | None = None,  # [R, gamma] survivals of the trees' greedy chains
        known: NDArray[np.bool_] | None = None,  # [R] whose survivals are a draft's; None: everybody's
    ) -> Plan:
        """The nodes to verify of drafts at hand. The survivals may be some steps old (a host that reads late
        uses ``nodes`` only and lets the device `allocate`). Chains are only drafted where trees come with
        ``chain``, see `specplug.greedy`. Survivals that are not ``known`` are a guess: planned with, not
        learned from.

        Raises ValueError as `allocate`, for more emitting requests than rows that run, for trees wider than
        the budget, and for chains of another number of requests.
        """
        if not 0 <= emitting <= base_tokens:
            raise ValueError(f"emitting: expected 0 to base_tokens {base_tokens}, got {emitting}")
        ranked = _ranked(survival, caps)
        if ranked.rows.shape[1] > self._budget:
            raise ValueError(
                f"survival: expected at most budget {self._budget} nodes, got {ranked.rows.shape[1]}"
            )
        if chain is not None and (chain.ndim != 2 or len(chain) != len(ranked.rows)):
            raise ValueError(f"chain: expected [{len(ranked.rows)}, gamma], got {chain.shape}")
        requests = max(len(ranked.rows), emitting)
        scale = self._acceptance.factor(shape)
        if self.reason:
            tokens = emitting - scale * float(ranked.best.sum(dtype=np.float64))
            return Plan(_cut(ranked, ranked.live), ranked.live, tokens, math.nan, math.nan)
        none = np.zeros(len(ranked.rows), np.int32)
        if not emitting:
            return Plan(none, 0, 0.0, 0.0, 1.0)
        plain = float(self._prices.step("plain", requests, base_tokens, 0, context).seconds[0])
        drafting = self._prices.draft(shape, requests, context) if shape != "plain" else 0.0
        if shape == "plain" or not ranked.live:
            return Plan(none, 0, float(emitting), plain + drafting, plain / (plain + drafting))
        curve = self._prices.step(shape, requests, base_tokens, ranked.live, context)
        rate = self._prospects.rate(self._choice.current, emitting, context)
        drafted = np.asarray(caps) > 0 if known is None else (np.asarray(caps) > 0) & known
        if drafted.any():
            self._prospects.remember(shape, np.asarray(survival), drafted, chain)
        peak = _peak(ranked, curve, plain=plain, emitting=emitting, scale=scale, rate=rate, sunk=drafting)
        if shape != self._choice.current and drafted.any():
            self._choice.probed(shape, paid=rate is not None and peak.tokens > rate * peak.seconds)
        gain = peak.tokens / peak.seconds * plain / emitting
        return Plan(_cut(ranked, peak.nodes), *peak, gain)

    def observe(
        self,
        *,
        requests: int,  # R of the step, as `verify` had it
        tokens: int,  # rows the target computed: roots, nodes, prefill
        context: float,
        verified: Shape,  # "plain" when no node was verified
        verify_seconds: float | None,  # None = not measured
        drafted: Shape = "plain",  # what this step drafted
        draft_seconds: float | None = None,  # drafting and building; None = not measured
        drafted_requests: int | None = None,  # those drafted for; None = ``requests``
        emitting: int = 0,  # as `verify` had it
        emitted: int = 0,  # tokens that came
        emitted_context: float | None = None,  # ``context`` weighted by what each emitted; None = not known
        plan: Plan | None = None,  # what was executed; None = nothing planned, or something else executed
    ) -> None:
        """What a step came to. Once a step, in order, however late; ignored where ``online`` is off.

        Raises ValueError for seconds that are not finite and above 0.
        """
        if self.reason or not self._online:
            return
        if verify_seconds is not None:
            self._prices.observe_step(verified, requests, tokens, context, seconds=verify_seconds)
        if draft_seconds is not None and drafted != "plain":
            number = requests if drafted_requests is None else drafted_requests
            self._prices.observe_draft(drafted, number, context, seconds=draft_seconds)
        if emitted_context is not None and drafted != "plain":
            self._prospects.skewed(context=context, emitted_context=emitted_context)
        if plan is not None and plan.nodes and verified != "plain":
            self._acceptance.observe(
                verified, predicted=plan.tokens - emitting, accepted=max(0, emitted - emitting)
            )


def _ranked(survival: NDArray[np.float32], caps: NDArray[np.int32]) -> _Ranked:
    rows, caps = np.asarray(survival, np.float32), np.asarray(caps)
    if rows.ndim != 2 or caps.shape != rows.shape[:1]:
        raise ValueError(f"survival, caps: expected [R, B] and [R], got {rows.shape} and {caps.shape}")
    if not rows.size:
        return _Ranked(rows, rows.ravel(), 0)
    if caps.min() < 0:
        raise ValueError(f"caps: expected at least 0, got {caps.min()}")
    width = rows.shape[1]
    flat = rows.ravel()
    rises = flat[1:] > flat[:-1]
    rises[width - 1 :: width] = False  # from one row to the next
    if rises.any():
        rows = np.minimum.accumulate(rows, axis=1)
    negated = _masks(width).take(np.minimum(caps, width), axis=0)
    negated *= rows
    ranked = np.sort(negated, axis=None)
    if not (ranked[0] >= -1 and ranked[-1] <= 0):  # NaN sorts last
        raise ValueError(
            f"survival: expected numbers in [0, 1], got {-ranked[0]} and {-ranked[-1]} among them"
        )
    return _Ranked(negated, ranked, int(ranked.searchsorted(ZERO)))


@functools.lru_cache(maxsize=4)
def _masks(width: int) -> NDArray[np.float32]:
    """Row c: -1 at the first c of ``width`` places, [width + 1, width]."""
    return -np.tri(width + 1, width, -1, dtype=np.float32)


def _cut(ranked: _Ranked, nodes: int) -> NDArray[np.int32]:
    """The best nodes by request, [R]."""
    rows, best, live = ranked
    nodes = min(nodes, live)
    if not nodes:
        return np.zeros(len(rows), np.int32)
    last = best[nodes - 1]
    if nodes == live or best[nodes] > last:
        return _leading(rows <= last)
    above = _leading(rows < last)
    ties = _leading(rows <= last) - above
    left = nodes - above.sum()
    return above + (left - (ties.cumsum() - ties)).clip(0, ties).astype(np.int32)


def _leading(true: NDArray[np.bool_]) -> NDArray[np.int32]:
    """How many of each row, [R]; the true ones come first. `count_nonzero` takes twice as long."""
    return np.where(true[:, -1], true.shape[1], true.argmin(1)).astype(np.int32)


class _Peak(NamedTuple):
    nodes: int
    tokens: float
    seconds: float  # the draft included


def _value(tokens: Values, seconds: Values, rate: float | None) -> Values:
    return tokens / seconds if rate is None else tokens - rate * seconds


def _peak(
    ranked: _Ranked,
    curve: Curve,  # of live + 1 totals
    *,
    plain: float,  # seconds of no node at all
    emitting: int,
    scale: float,
    rate: float | None,
    sunk: float,  # seconds of the draft
) -> _Peak:
    """`best_total` of the ranked nodes, without most of the prefix sums.

    Sums are taken by blocks first. No total inside a block is worth more than the block's last tokens in the
    fewest seconds from its start on; only from the first to the last block where that reaches the best known
    total are all totals looked at.
    """
    live = ranked.live
    padded = np.zeros(-(-live // BLOCK) * BLOCK)
    padded[:live] = ranked.best[:live]
    ends = emitting - scale * (padded.reshape(-1, BLOCK) @ ONES).cumsum()
    nothing = _value(float(emitting), plain + sunk, rate)
    whole = live // BLOCK  # blocks of which every total exists
    known = _value(ends[:whole], curve.seconds[BLOCK::BLOCK][:whole] + sunk, rate)
    floor = max(nothing, known.max(initial=-np.inf))
    open_ = (_value(ends, curve.least[1::BLOCK] + sunk, rate) >= floor - SLACK * abs(floor)).nonzero()[0]
    if not len(open_):
        return _Peak(0, float(emitting), plain + sunk)
    first, last = int(open_[0]) * BLOCK, min(int(open_[-1]) * BLOCK + BLOCK, live)
    before = ends[open_[0] - 1] if first else emitting
    tokens = before - scale * padded[first:last].cumsum()
    seconds = curve.seconds[first + 1 : last + 1] + sunk
    values = _value(tokens, seconds, rate)
    best = int(values.argmax())
    if nothing >= values[best]:
        return _Peak(0, float(emitting), plain + sunk)
    return _Peak(first + best + 1, float(tokens[best]), float(seconds[best]))
