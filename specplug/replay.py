"""Replay of recorded rounds through a cost table and a policy, in virtual time.

A batch of requests goes round by round: the policy says what to draft, then, from the survivals, how many
nodes of each request to verify; the recording says what is accepted; the table says how long it took. Closed
loop: ``concurrency`` requests are in the batch, a finished one is replaced at once. Open loop: requests
arrive at random (a Poisson process), wait for a slot, and leave.

It replays decoding. Prefill costs every policy the same and is left out, and nothing is lost between rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specplug.cost import CostTable, Shape
from specplug.policies import Policy

if TYPE_CHECKING:  # it imports torch, which is slow
    from specplug.outcomes import Outcomes

STEADY_ROUNDS = 100  # a closed loop that is not told how long: enough for a request's noise to average out


@dataclass
class Totals:
    """What a replay came to."""

    tokens: int = 0
    seconds: float = 0.0  # virtual, waiting for arrivals included
    rounds: int = 0
    request_rounds: int = 0  # rounds, each counted for every request in it
    nodes: int = 0  # verified
    drafted: dict[Shape, int] = field(default_factory=lambda: {"plain": 0, "chain": 0, "tree": 0})  # rounds
    verified: dict[Shape, int] = field(default_factory=lambda: {"plain": 0, "chain": 0, "tree": 0})
    finished: list[int] = field(default_factory=list)  # requests of the recording, in order of their ends
    waits: list[float] = field(default_factory=list)  # of the finished: seconds from arrival to a slot
    latencies: list[float] = field(default_factory=list)  # of the finished: seconds from arrival to the end

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Batch:
    """Requests in the batch and the virtual clock."""

    def __init__(self, outcomes: Outcomes, table: CostTable, policy: Policy) -> None:
        self.outcomes, self.table, self.policy = outcomes, table, policy
        self.totals = Totals()
        self.request = np.zeros(0, np.int64)  # [R]
        self.position = np.zeros(0, np.int64)  # [R]
        self.arrived = np.zeros(0)  # [R] seconds
        self.started = np.zeros(0)  # [R] seconds

    def admit(
        self,
        requests: NDArray[np.int64],  # [n]
        arrived: NDArray[np.float64],  # [n]
        position: NDArray[np.int64] | int = 0,  # [n] where they start
    ) -> None:
        """Let requests in, now."""
        self.request = np.concatenate((self.request, requests))
        self.position = np.concatenate((self.position, np.broadcast_to(position, requests.shape)))
        self.arrived = np.concatenate((self.arrived, arrived))
        self.started = np.concatenate((self.started, np.full(len(requests), self.totals.seconds)))

    def round(self) -> int:
        """One round of all; those that end leave. How many ended."""
        recording, policy, totals = self.outcomes.recording, self.policy, self.totals
        requests, count = recording.requests, len(self.request)
        row = recording.rows[recording.first[self.request] + self.position]
        contexts = requests.prompt_tokens[self.request] + self.position
        context = float(contexts.mean())
        shape = policy.draft(count, context=context)
        drafts = self.outcomes.drafts[shape]
        spare = recording.about.max_tokens - self.position > 1  # with one token left, none can be accepted
        plan = policy.verify(
            drafts.survival[row],
            np.where(spare, drafts.counts[row], 0).astype(np.int32),
            base_tokens=count,
            emitting=count,
            context=context,
            shape=shape,
            chain=None if drafts.chain is None else drafts.chain[row],
        )
        emitted = drafts.accepted[row, plan.counts].astype(np.int64) + 1
        verified: Shape = shape if plan.nodes else "plain"
        rows = count + plan.nodes
        verify_seconds = float(
            self.table.verify_seconds(count, np.asarray(rows), context=context, shape=verified)
        )
        draft_seconds = self.table.draft_seconds(count, context=context, shape=shape)
        policy.observe(
            requests=count,
            tokens=rows,
            context=context,
            verified=verified,
            verify_seconds=verify_seconds,
            drafted=shape,
            draft_seconds=draft_seconds,
            emitting=count,
            emitted=int(emitted.sum()),
            emitted_context=float(contexts @ emitted / emitted.sum()),
            plan=plan,
        )
        left = requests.answer_tokens[self.request] - self.position
        totals.tokens += int(np.minimum(emitted, left).sum())
        totals.seconds += verify_seconds + draft_seconds
        totals.rounds += 1
        totals.request_rounds += count
        totals.nodes += plan.nodes
        totals.drafted[shape] += 1
        totals.verified[verified] += 1
        self.position += emitted
        ended = emitted >= left
        if ended.any():
            totals.finished += self.request[ended].tolist()
            totals.waits += (self.started - self.arrived)[ended].tolist()
            totals.latencies += (totals.seconds - self.arrived[ended]).tolist()
            for name in ("request", "position", "arrived", "started"):
                setattr(self, name, getattr(self, name)[~ended])
        return int(ended.sum())


def closed_loop(
    outcomes: Outcomes,
    table: CostTable,
    policy: Policy,
    *,
    concurrency: int,
    tokens: int | None = None,
    warm_tokens: int = 0,
    seed: int = 0,
) -> Totals:
    """Run until ``tokens`` are out, by default `STEADY_ROUNDS` for every request of the batch.

    All policies meet the same requests in the same order, the first ones at random positions of their
    answers. The first ``warm_tokens`` tokens are not counted. Raises ValueError for numbers below 1.
    """
    if concurrency < 1 or (tokens is not None and tokens < 1):
        raise ValueError(
            f"closed loop: expected concurrency and tokens of at least 1, got {concurrency}, {tokens}"
        )
    wanted = tokens or concurrency * STEADY_ROUNDS
    batch, random = Batch(outcomes, table, policy), np.random.default_rng(seed)
    stream = _stream(len(outcomes.recording.requests.dataset), random)
    first = np.fromiter(stream, np.int64, concurrency)
    lengths = outcomes.recording.requests.answer_tokens[first]
    batch.admit(first, np.zeros(concurrency), (random.random(concurrency) * lengths).astype(np.int64))
    while batch.totals.tokens < warm_tokens:
        _closed_round(batch, stream)
    batch.totals = Totals()
    batch.arrived[:] = batch.started[:] = 0.0
    while batch.totals.tokens < wanted:
        _closed_round(batch, stream)
    return batch.totals


def open_loop(
    outcomes: Outcomes,
    table: CostTable,
    policy: Policy,
    *,
    rate: float,  # requests a second
    requests: int,
    max_concurrency: int,
    seed: int = 0,
) -> Totals:
    """Serve ``requests`` Poisson arrivals to the last. Raises ValueError for numbers below 1, or no rate."""
    if not 0 < rate < float("inf") or requests < 1 or max_concurrency < 1:
        raise ValueError(
            f"open loop: expected a finite rate above 0 and at least 1 request and slot, got {rate}, "
            f"{requests} and {max_concurrency}"
        )
    batch, random = Batch(outcomes, table, policy), np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, requests))
    waiting = np.fromiter(_stream(len(outcomes.recording.requests.dataset), random), np.int64, requests)
    served = 0
    while len(batch.totals.finished) < requests:
        if not len(batch.request):
            batch.totals.seconds = max(batch.totals.seconds, float(arrivals[served]))
        here = int(np.searchsorted(arrivals, batch.totals.seconds, side="right"))
        until = min(here, served + max_concurrency - len(batch.request))
        if until > served:
            batch.admit(waiting[served:until], arrivals[served:until])
            served = until
        batch.round()
    return batch.totals


def _closed_round(batch: Batch, stream: Iterator[int]) -> None:
    ended = batch.round()
    if ended:
        batch.admit(np.fromiter(stream, np.int64, ended), np.full(ended, batch.totals.seconds))


def _stream(requests: int, random: np.random.Generator) -> Iterator[int]:
    """Request numbers without end: all of them in a random order, again and again."""
    while True:
        yield from random.permutation(requests).tolist()
