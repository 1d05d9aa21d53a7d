"""Policies against each other on one recording and one cost table: ours, plain, the chain, fixed trees.

"plain", "chain" and "tree N" are what one configures without a cost table and then has at every load. "ours"
is `specplug.budget.Planner`. It sees calibrated survivals, fitted on other requests; the fixed ones take the
draft's nodes in the draft's order and look at none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specplug.budget import Planner
from specplug.cost import CostTable
from specplug.policies import Fixed, Policy
from specplug.recording import Recording
from specplug.replay import Totals, closed_loop, open_loop

if TYPE_CHECKING:  # they import torch, which is slow
    from specplug.calibration import Calibration
    from specplug.outcomes import Outcomes

OURS = "ours"
TREES = (8, 16, 32, 64)
TOKENS, TOKENS_A_SLOT = 20_000, 400
"""Tokens of a closed loop: 400 a request of the batch, which is some 100 rounds or more, and 20,000 at least.
Ours learns in every cell from nothing; a shorter cell weighs that more, a served engine less."""


class Contest(NamedTuple):
    """What the policies are measured on."""

    table: CostTable
    drafted: Outcomes  # survivals as drafted, for the fixed policies
    calibrated: Outcomes  # for ours
    min_gain: float = 0.02
    seed: int = 0

    @property
    def depth(self) -> int:
        return self.drafted.recording.depth

    @property
    def budget(self) -> int:
        return self.drafted.recording.budget


class Cell(NamedTuple):
    """One policy at one concurrency of a closed loop."""

    policy: str
    concurrency: int
    tokens_per_second: float
    tokens_a_round: float  # of a request
    nodes_a_round: float  # of a request
    drafted: dict[str, float]  # share of the rounds by shape


class Service(NamedTuple):
    """One policy at one arrival rate of an open loop."""

    policy: str
    requests_per_second: float
    tokens_per_second: float
    batch: float  # requests in the batch, mean over rounds
    wait_seconds: list[float]  # for a slot, percentiles 50, 90, 99
    latency_seconds: list[float]  # from arrival to end, the same


class Loss(NamedTuple):
    """A cell where ours is slower than a fixed policy."""

    concurrency: int
    best: str
    ratio: float  # ours / best


def prepare(
    recording: Recording,
    table: CostTable,
    *,
    calibration: Calibration | None = None,
    cross_fit: bool = True,
    min_gain: float = 0.02,
    seed: int = 0,
) -> Contest:
    """``cross_fit``: each half of the prompts calibrated by the other; else by ``calibration``, if any.

    Raises ValueError for a recording of one prompt a data set where it is to be cross-fitted.
    """
    from specplug.outcomes import cross_fitted, outcomes

    calibrated = cross_fitted(recording) if cross_fit else outcomes(recording, calibration)
    return Contest(table, outcomes(calibrated.recording), calibrated, min_gain, seed)


def names(recording: Recording) -> list[str]:
    """Policies that a recording can tell about."""
    return ["plain", "chain", *(f"tree {n}" for n in TREES if n <= recording.budget), OURS]


def policy(name: str, contest: Contest) -> Policy:
    """A fresh policy. Raises ValueError for a name that is not one."""
    if name == OURS:
        return Planner(contest.table, budget=contest.budget, depth=contest.depth, min_gain=contest.min_gain)
    if name not in names(contest.drafted.recording):
        raise ValueError(
            f"policy: expected one of {', '.join(names(contest.drafted.recording))}, got {name!r}"
        )
    if name in ("plain", "chain"):
        return Fixed("plain" if name == "plain" else "chain")
    return Fixed("tree", int(name.split()[1]))


def closed(contest: Contest, name: str, concurrency: int, *, tokens: int | None = None) -> Cell:
    """Replay one cell; ``tokens``: how many to emit, see `TOKENS`."""
    totals = closed_loop(
        _outcomes(contest, name),
        contest.table,
        policy(name, contest),
        concurrency=concurrency,
        tokens=tokens or max(TOKENS, TOKENS_A_SLOT * concurrency),
        seed=contest.seed,
    )
    request_rounds = totals.rounds * concurrency
    return Cell(
        name,
        concurrency,
        totals.tokens_per_second,
        totals.tokens / request_rounds,
        totals.nodes / request_rounds,
        _shares(totals),
    )


def opened(contest: Contest, name: str, rate: float, *, requests: int, max_concurrency: int) -> Service:
    """Replay one arrival rate."""
    totals = open_loop(
        _outcomes(contest, name),
        contest.table,
        policy(name, contest),
        rate=rate,
        requests=requests,
        max_concurrency=max_concurrency,
        seed=contest.seed,
    )
    return Service(
        name,
        rate,
        totals.tokens_per_second,
        totals.request_rounds / totals.rounds,
        percentiles(totals.waits),
        percentiles(totals.latencies),
    )


def losses(cells: Iterable[Cell]) -> list[Loss]:
    """Every concurrency where a fixed policy is faster than ours."""
    found = []
    cells = list(cells)
    for concurrency in dict.fromkeys(cell.concurrency for cell in cells):
        rates = {c.policy: c.tokens_per_second for c in cells if c.concurrency == concurrency}
        best = max((name for name in rates if name != OURS), key=lambda name: rates[name])
        if rates[OURS] < rates[best]:
            found.append(Loss(concurrency, best, rates[OURS] / rates[best]))
    return found


def mixed(cells: Iterable[Cell]) -> dict[str, float]:
    """Each fixed policy's speed over ours, the geometric mean over the cells: every load counts alike."""
    rates = {(c.policy, c.concurrency): c.tokens_per_second for c in cells}
    loads = sorted({concurrency for _, concurrency in rates})
    fixed = dict.fromkeys(name for name, _ in rates if name != OURS)
    return {name: geometric_mean([rates[name, c] / rates[OURS, c] for c in loads]) for name in fixed}


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(ln))."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def percentiles(values: Sequence[float]) -> list[float]:
    """50, 90, 99: the smallest value that so many per cent do not exceed."""
    ordered = sorted(values)
    return [ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)] for p in (50, 90, 99)]


def _outcomes(contest: Contest, name: str) -> Outcomes:
    return contest.calibrated if name == OURS else contest.drafted


def _shares(totals: Totals) -> dict[str, float]:
    return {shape: count / totals.rounds for shape, count in totals.drafted.items() if count}
