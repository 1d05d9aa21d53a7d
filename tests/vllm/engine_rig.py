"""Real vLLM engines inside the test process, and one stock vLLM in a process of its own to compare with.

In-process engines can be looked into (drafter, ModelState, block pool) and tampered with, which the negative
controls need. vLLM allows one at a time: :func:`engine` closes its engine before the next may start. The
reference is vLLM with specplug switched off, in another process, so nothing under test can reach it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

from specplug import models

BLOCK = 32  # tokens in a cache block: the smallest the CPU backend takes
MAX_MODEL_LEN = 512
DEPTH = {"dflash": 7, "dspark": 7}  # tree depth of the shipped drafts

Prompt = Sequence[int]


class Output(NamedTuple):
    """What one request returned. Log-probabilities: per position, token -> (log-probability, rank)."""

    ids: list[int]
    finish: str | None
    stop: int | str | None
    cached: int  # prompt tokens taken from the prefix cache
    logprobs: list[dict[int, tuple[float, int]]] | None
    prompt_logprobs: list[dict[int, tuple[float, int]] | None] | None

    @property
    def end(self) -> tuple[Any, Any]:
        return self.finish, self.stop


class Counters(NamedTuple):
    """Totals of an engine's life, from vLLM's own metrics."""

    drafts: int
    accepted: int
    preemptions: int

    def since(self, before: Counters) -> Counters:
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def accepted_length(self) -> float:
        """Tokens a target forward committed, the bonus token counted."""
        return 1 + self.accepted / self.drafts


class Engine:
    """One in-process vLLM."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(self, prompts: Sequence[Prompt], params: Any) -> list[Output]:
        """Outputs in the order of ``prompts``; ``params``: one SamplingParams for all, or one a prompt."""
        return _generate(self.llm, prompts, params)

    def abandon(self, prompts: Sequence[Prompt], params: Any, *, steps: int) -> None:
        """Abort requests after some steps, and step until nothing is left of them."""
        engine, names = self.llm.llm_engine, [f"gone-{i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        for _ in range(steps):
            engine.step()
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def state(self) -> Any:
        return self.runner.model_state

    @property
    def free_blocks(self) -> int:
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def counters(self) -> Counters:
        values = {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}
        return Counters(
            values.get("vllm:spec_decode_num_drafts", 0),
            values.get("vllm:spec_decode_num_accepted_tokens", 0),
            values.get("vllm:num_preemptions", 0),
        )

    @contextlib.contextmanager
    def traced(self) -> Iterator[dict[str, list[int]]]:
        """Tokens emitted by every step that verified drafts, by request id, in order."""
        sampler, trace = self.runner.rejection_sampler, {}

        def record(logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            output = type(sampler).__call__(sampler, logits, input_batch, *args, **kwargs)
            drafted, emitted = input_batch.num_draft_tokens_per_req, output.num_sampled.tolist()
            for request, nodes, tokens in zip(input_batch.req_ids, drafted, emitted, strict=False):
                if nodes and tokens:
                    trace.setdefault(request.rpartition("-")[0] or request, []).append(tokens)
            return output

        record.__dict__.update(vars(sampler))
        self.runner.rejection_sampler = record
        try:
            yield trace
        finally:
            self.runner.rejection_sampler = sampler


_running: list[Engine] = []


def tree(draft: str, budget: int, *, name: str = "quick", **options: Any) -> dict[str, Any]:
    """The speculative config under test."""
    return {"method": "ddtree", "model": str(models.path(name, draft)), "tree_budget": budget, **options}


@contextlib.contextmanager
def engine(
    speculative_config: dict[str, Any] | None = None,
    *,
    name: str = "quick",
    async_scheduling: bool = False,
    blocks: int = 192,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine in fp32 over the set ``name``; ``settings`` are vLLM's own, ``blocks`` its cache blocks."""
    assert not _running, "vLLM runs one engine in a process: leave the other `with engine(...)` first"
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}))
        if async_scheduling:
            patches.enter_context(_async_on_cpu())
        llm = _start(speculative_config, name, blocks, settings)
        running = Engine(llm)
        _running.append(running)
        try:
            assert running.core.vllm_config.scheduler_config.async_scheduling is async_scheduling
            yield running
        finally:
            _running.clear()
            llm.llm_engine.engine_core.shutdown()
            del llm, running.llm
            gc.collect()


def _start(spec: dict[str, Any] | None, name: str, blocks: int, settings: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # Another engine of this process may have left its attention backend behind.
    AttentionBackendEnum.CPU_ATTN.clear_override()
    selector._cached_get_attn_backend.cache_clear()
    defaults = {
        "model": str(models.path(name, "target")),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "block_size": BLOCK,
        "num_gpu_blocks_override": blocks,
        "disable_log_stats": False,
        "seed": 0,
        "speculative_config": spec,
    }
    return LLM(**{**defaults, **settings})


def _async_on_cpu() -> Any:
    """vLLM's CPU platform turns asynchronous scheduling off; the code under test must not depend on that."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def keep_async(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    return mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(keep_async))


def _generate(llm: Any, prompts: Sequence[Prompt], params: Any) -> list[Output]:
    wrapped = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    results = llm.generate(wrapped, params, use_tqdm=False)
    return [_output(result) for result in results]


def _output(result: Any) -> Output:
    (first,) = result.outputs

    def plain(position: Any) -> Any:
        return position and {token: (entry.logprob, entry.rank) for token, entry in position.items()}

    return Output(
        ids=list(first.token_ids),
        finish=first.finish_reason,
        stop=first.stop_reason,
        cached=result.num_cached_tokens or 0,
        logprobs=[plain(position) for position in first.logprobs] if first.logprobs else None,
        prompt_logprobs=[plain(position) for position in result.prompt_logprobs]
        if result.prompt_logprobs
        else None,
    )


class Reference:
    """Stock vLLM without speculation in its own process; answers are kept for the session."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=spawn, initializer=_switch_off)
        self._answers: dict[tuple[Any, ...], Output] = {}

    def generate(self, prompts: Sequence[Prompt], params: Any, *, name: str = "quick") -> list[Output]:
        each = list(params) if isinstance(params, list) else [params] * len(prompts)
        keys = [
            (name, tuple(prompt), pickle.dumps(wanted)) for prompt, wanted in zip(prompts, each, strict=True)
        ]
        missing = [i for i, key in enumerate(keys) if key not in self._answers]
        if missing:
            asked = [list(prompts[i]) for i in missing], [each[i] for i in missing]
            answers = self._process.submit(_answer, name, *asked).result()
            self._answers.update(zip((keys[i] for i in missing), answers, strict=True))
        return [self._answers[key] for key in keys]

    def close(self) -> None:
        self._process.shutdown()


def _switch_off() -> None:
    os.environ["SPECPLUG_DISABLE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


_plain: dict[str, Any] = {}  # in the reference process: its one engine, by model set


def _answer(name: str, prompts: list[list[int]], params: list[Any]) -> list[Output]:
    if name not in _plain:
        for llm in _plain.values():
            llm.llm_engine.engine_core.shutdown()
        _plain.clear()
        _plain[name] = _start(None, name, 192, {"max_num_seqs": 16})
    try:
        return _generate(_plain[name], prompts, params)
    except Exception:
        _plain.pop(name).llm_engine.engine_core.shutdown()  # it still holds the failed requests
        raise
