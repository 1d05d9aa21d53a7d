"""A worker's steps watched: what they took and gave, for the policy, SGLang's metrics and the record.

A step is draft, verification and acceptance of one batch. On a GPU its numbers land later and are taken when
they have; nobody waits for them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from specplug import step_log
from specplug.budget import Plan
from specplug.cost import Shape
from specplug.policies import Policy
from specplug.step_clock import StepClock
from specplug.step_log import EngineFacts, append_steps, write_engine

COUNTERS = {
    "steps": "Steps by the shape that was verified.",
    "nodes_verified": "Draft nodes that the target verified.",
    "nodes_accepted": "Draft nodes that the target accepted.",
}


@dataclass
class _Step:
    requests: list[str]
    contexts: np.ndarray  # [R] committed tokens
    begin: Any  # stamps
    drafted: Any = None
    end: Any = None
    draft: Shape = "plain"
    verified: Shape = "plain"
    nodes: int = 0
    plan: Plan | None = None
    emitted: torch.Tensor | None = None  # host copy, [R]

    @property
    def context(self) -> float:
        """Mean committed tokens."""
        return float(self.contexts.mean())


class StepWatch:
    """One a worker. ``record`` with ``facts``: folder to write the steps to."""

    def __init__(
        self,
        worker: Any,
        policy: Policy,
        *,
        record: str | None = None,
        facts: EngineFacts | None = None,
        forced: bool = False,  # the nodes are drawn to be measured, not chosen
    ) -> None:
        """Raises OSError where the folder cannot be made or written."""
        from sglang.srt.runtime_context import get_parallel

        first = get_parallel().tp_rank == 0
        self._policy, self._forced = policy, forced
        self._clock = StepClock(on_gpu=torch.device(worker.device).type == "cuda")
        self._folder = Path(record) if record and first else None
        if self._folder is not None:
            assert facts is not None
            write_engine(self._folder, facts)
        self._totals: Counter[str] = Counter()
        self._metrics = _metrics() if first and worker.server_args.enable_metrics else {}
        self._open: _Step | None = None
        self._in_flight: deque[_Step] = deque()

    def begin(self, batch: Any) -> float:
        """Before the draft; the batch's mean committed tokens, a step old where the device alone knows."""
        self._drain()
        requests = [request.rid for request in batch.reqs]
        if batch.seq_lens_cpu is not None:
            contexts = batch.seq_lens_cpu.numpy().astype(np.float64)
        else:
            known = [len(one.origin_input_ids) + len(one.output_ids) for one in batch.reqs]
            contexts = np.array(known, dtype=np.float64)
        self._open = _Step(requests, contexts, self._clock.begin(requests))
        return self._open.context

    def drafted(self, shape: Shape) -> None:
        """The draft is made; what follows is the target's."""
        if self._open is not None:
            self._open.draft, self._open.drafted = shape, self._clock.stamp()

    def done(
        self,
        *,
        plan: Plan | None,
        nodes: int,  # draft rows the target computed
        shape: Shape,  # of the drafts
        emitted: torch.Tensor,  # [R] int32
    ) -> None:
        """Acceptance is over."""
        step, self._open = self._open, None
        if step is None:
            return
        step.plan, step.nodes, step.verified = plan, nodes, shape if nodes else "plain"
        step.emitted = emitted.to("cpu", non_blocking=True)
        step.end = self._clock.end(step.requests)
        self._in_flight.append(step)
        self._drain()

    def interrupted(self) -> None:
        """Something else runs: the next step does not follow on the last."""
        self._open = None
        self._clock.interrupt()

    def status(self) -> dict[str, Any]:
        """Totals since the start, for /server_info."""
        return dict(self._totals)

    def _drain(self) -> None:
        while self._in_flight and (not self._clock.on_gpu or self._in_flight[0].end.query()):
            self._finish(self._in_flight.popleft())

    def _finish(self, step: _Step) -> None:
        assert step.emitted is not None
        tokens = step.emitted.numpy()
        requests, emitted = len(step.requests), int(tokens.sum())
        draft = self._clock.seconds(step.begin, step.drafted) if step.drafted is not None else 0.0
        verify = self._clock.seconds(step.drafted if step.drafted is not None else step.begin, step.end)
        rows = requests + step.nodes
        self._policy.observe(
            requests=requests,
            tokens=rows,
            context=step.context,
            emitted_context=float(step.contexts @ tokens / emitted) if emitted else None,
            verified=step.verified,
            verify_seconds=verify or None,
            drafted=step.draft,
            draft_seconds=draft or None,
            emitting=requests,
            emitted=emitted,
            plan=step.plan,
        )
        self._count("steps", 1, step.verified)
        self._count("nodes_verified", step.nodes)
        self._count("nodes_accepted", emitted - requests)
        if self._folder is not None:
            line = step_log.Step(
                requests=requests,
                rows=rows,
                nodes=step.nodes,
                context=round(step.context, 1),
                verify_seconds=verify,
                draft_seconds=draft,
                verified=step.verified,
                drafted=step.draft,
                forced=self._forced,
            )
            append_steps(self._folder, [line])

    def _count(self, name: str, value: int, shape: Shape | None = None) -> None:
        self._totals[f"{name}_{shape}" if shape else name] += value
        if name in self._metrics:
            counter = self._metrics[name]
            (counter.labels(shape) if shape else counter).inc(value)


def _metrics() -> dict[str, Any]:
    """Counters beside SGLang's in its registry, which /metrics shows, from zero on."""
    from prometheus_client import Counter as Metric

    metrics = {
        name: Metric(f"specplug:{name}", text, ["shape"] if name == "steps" else [])
        for name, text in COUNTERS.items()
    }
    for shape in get_args(Shape):
        metrics["steps"].labels(shape)
    return metrics
