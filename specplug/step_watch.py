"""An engine's steps watched: what they took and gave, for the policy, the engine's counters and the log.

A step is draft, verification and acceptance of one batch. Its numbers are handed in when they are on the
host, however late; nobody waits for them. For engines that draft first; vLLM drafts at a step's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specplug import step_log
from specplug.budget import Plan
from specplug.cost_curves import Shape
from specplug.policies import Policy
from specplug.round_log import RoundLog, Rounds
from specplug.step_clock import StepClock

COUNTERS = {
    "steps": "Steps by the shape that was verified.",
    "drafts": "Steps by the shape that was drafted.",
    "nodes_verified": "Draft nodes that the target verified.",
    "nodes_accepted": "Draft nodes that the target accepted.",
}


@dataclass
class WatchedStep:
    """One step on its way."""

    requests: list[str]  # ids
    contexts: NDArray[np.float64]  # [R] committed tokens
    begin: Any  # stamps
    drafted: Any = None
    end: Any = None
    draft: Shape = "plain"
    verified: Shape = "plain"
    nodes: int = 0  # draft rows the target computed
    plan: Plan | None = None
    rounds: Rounds | None = None

    @property
    def context(self) -> float:
        """Mean committed tokens."""
        return float(self.contexts.mean())


class StepWatch:
    """One a worker. ``totals``: counts since the start, by shape as ``steps_SHAPE`` and ``drafts_SHAPE``."""

    def __init__(
        self,
        policy: Policy,
        *,
        on_gpu: bool,
        log: RoundLog | None = None,
        forced: bool = False,  # the nodes are drawn to be measured, not chosen
        count: Callable[[str, int, str], None] | None = None,  # counter, amount, shape or ""
    ) -> None:
        self._policy, self._log, self._forced, self._tell = policy, log, forced, count
        self._clock = StepClock(on_gpu=on_gpu)
        self._open: WatchedStep | None = None
        self.totals: Counter[str] = Counter()

    def begin(self, requests: list[str], contexts: NDArray[np.float64]) -> float:
        """Before the draft; the batch's mean committed tokens."""
        self._open = WatchedStep(requests, contexts, self._clock.begin(requests))
        return self._open.context

    def drafted(self, shape: Shape) -> None:
        """The draft is made; what follows is the target's."""
        if self._open is not None:
            self._open.draft, self._open.drafted = shape, self._clock.stamp()

    def done(self, *, plan: Plan | None, nodes: int, rounds: Rounds | None = None) -> WatchedStep | None:
        """Acceptance is over; `landed` takes the step once its tokens are on the host."""
        step, self._open = self._open, None
        if step is not None:
            step.plan, step.nodes, step.rounds = plan, nodes, rounds
            step.verified = step.draft if nodes else "plain"
            step.end = self._clock.end(step.requests)
        return step

    def interrupted(self) -> None:
        """Something else runs: the next step does not follow on the last."""
        self._open = None
        self._clock.interrupt()

    def landed(
        self,
        step: WatchedStep,
        emitted: NDArray[np.integer],  # [R] tokens of each request
        alive: Sequence[bool],  # [R] false: it had ended before, and its tokens are thrown away
    ) -> None:
        """The step's numbers are on the host, on a GPU its stamps have passed."""
        requests, tokens = len(step.requests), int(emitted.sum())
        middle = step.begin if step.drafted is None else step.drafted
        draft = self._clock.seconds(step.begin, middle) if middle is not step.begin else 0.0
        verify = self._clock.seconds(middle, step.end)
        rows = requests + step.nodes
        self._policy.observe(
            requests=requests,
            tokens=rows,
            context=step.context,
            emitted_context=float(step.contexts @ emitted / tokens) if tokens else None,
            verified=step.verified,
            verify_seconds=verify or None,
            drafted=step.draft,
            draft_seconds=draft or None,
            emitting=requests,
            emitted=tokens,
            plan=step.plan,
        )
        self._count("steps", 1, step.verified)
        self._count("drafts", 1, step.draft)
        self._count("nodes_verified", step.nodes)
        self._count("nodes_accepted", tokens - requests)
        if self._log is None:
            return
        line = step_log.Step(
            requests=requests,
            rows=rows,
            nodes=step.nodes,
            context=round(step.context, 1),
            verify_seconds=verify,
            draft_seconds=draft if step.draft != "plain" else 0.0,
            verified=step.verified,
            drafted=step.draft,
            forced=self._forced,
        )
        self._log.step(line)
        if step.rounds is not None:
            ids = [one if still else None for one, still in zip(step.requests, alive, strict=True)]
            self._log.rounds(ids, step.rounds)

    def _count(self, name: str, value: int, shape: str = "") -> None:
        self.totals[f"{name}_{shape}" if shape else name] += value
        if self._tell is not None:
            self._tell(name, value, shape)
