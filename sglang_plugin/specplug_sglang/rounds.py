"""A step's numbers, from the worker to the policy, /metrics, /server_info and each request's meta_info.

SGLang brings a step's tokens to the host and then looks at them request by request. There our step, which
travels with the step's result, is finished: nothing is copied for it and nobody waits. A request's counts
ride with its output through the detokenizer to the process that answers, which puts them into meta_info under
``specplug``: rounds by shape, and the nodes that were verified for it. (Accepted lengths and verify counts
are SGLang's own: spec_accept_length, spec_verify_ct.) With several tokenizer workers or the Rust server
SGLang drops such extras.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from specplug.config import TreeOptions
from specplug.cost_curves import Shape
from specplug.policies import Policy
from specplug.round_log import RoundLog, Rounds
from specplug.step_log import EngineFacts
from specplug.step_watch import COUNTERS, StepWatch

KEY = "specplug"


class Watch(StepWatch):
    """One a worker."""

    def __init__(self, worker: Any, policy: Policy, options: TreeOptions, facts: EngineFacts) -> None:
        """Raises OSError where the folder to record to cannot be made or written."""
        from sglang.srt.runtime_context import get_parallel

        first = get_parallel().tp_rank == 0
        log = RoundLog(Path(options.record), facts) if options.record and first else None
        super().__init__(
            policy,
            on_gpu=torch.device(worker.device).type == "cuda",
            log=log,
            forced=options.explore,
            count=_metrics() if first and worker.server_args.enable_metrics else None,
        )
        # Of a trimmed tree nobody knows how the rest would have fared.
        self.records_rounds = log is not None and not options.explore and options.cost_table is None

    def started(self, batch: Any) -> float:
        """Before the draft; the batch's mean committed tokens, a step old where the device alone knows."""
        if batch.seq_lens_cpu is not None:
            contexts = batch.seq_lens_cpu.numpy().astype(np.float64)
        else:
            known = [len(one.origin_input_ids) + len(one.output_ids) for one in batch.reqs]
            contexts = np.array(known, dtype=np.float64)
        return self.begin([request.rid for request in batch.reqs], contexts)

    def ended(self, result: Any, *, plan: Any, nodes: int, rounds: Rounds | None = None) -> Any:
        """Acceptance is over; ``nodes``: draft rows the target computed. The step travels with its result."""
        result.specplug = self, self.done(plan=plan, nodes=nodes, rounds=rounds)
        return result


def _resolve(original: Any, self: Any, result: Any, batch: Any) -> Any:
    watch, step = getattr(result, "specplug", (None, None))
    if step is None:
        return original(self, result, batch)
    alive = [not (request.is_retracted or request.finished()) for request in batch.reqs]
    tokens = original(self, result, batch)
    width = result.speculative_num_draft_tokens
    rows = [width] * len(alive) if result.cap_lens is None else result.cap_lens.tolist()
    for request, still, verified in zip(batch.reqs, alive, rows, strict=True):
        if still:
            counts = vars(request).setdefault(KEY, no_rounds())
            counts[f"rounds_{step.verified if verified > 1 else 'plain'}"] += 1
            counts["nodes_verified"] += verified - 1
    watch.landed(step, result.accept_lens.numpy(), alive)
    return tokens


def no_rounds() -> dict[str, int]:
    """The counts of a request that has not decoded."""
    return {**{f"rounds_{shape}": 0 for shape in get_args(Shape)}, "nodes_verified": 0}


class _Counting:
    """Mixed in before SGLang's output streamer."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        stock = super().build_additional_customized_info(reqs)
        return {**stock, KEY: [dict(getattr(request, KEY, no_rounds())) for request in reqs]}


def _streamer_class(original: Any, self: Any) -> type:
    stock = original(self)
    if self.rust_server is not None or not hasattr(type(self.draft_worker), "specplug_status"):
        return stock
    return type(f"Specplug{stock.__name__}", (_Counting, stock), {})


def _meta_info(
    original: Any, self: Any, meta_info: Any, state: Any, customized_info: Any, index: int, *rest: Any
) -> None:
    others = {key: values for key, values in customized_info.items() if key != KEY}
    original(self, meta_info, state, others, index, *rest)
    if KEY in customized_info:
        meta_info[KEY] = customized_info[KEY][index]


def _metrics() -> Any:
    """Counters beside SGLang's in its registry, which /metrics shows, from zero on."""
    from prometheus_client import Counter as Metric

    metrics = {
        name: Metric(f"specplug:{name}", text, ["shape"] if name in ("steps", "drafts") else [])
        for name, text in COUNTERS.items()
    }
    for shape in get_args(Shape):
        metrics["steps"].labels(shape), metrics["drafts"].labels(shape)

    def count(name: str, value: int, shape: str) -> None:
        (metrics[name].labels(shape) if shape else metrics[name]).inc(value)

    return count


_MANAGERS = "sglang.srt.managers"
AROUND = {
    f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
    "_resolve_spec_v2_tokens": _resolve,
    f"{_MANAGERS}.scheduler.Scheduler.get_output_streamer_class": _streamer_class,
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.update_request_meta_info": _meta_info,
}
