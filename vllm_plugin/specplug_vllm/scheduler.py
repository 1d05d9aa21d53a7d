"""vLLM's own scheduler, reserving per step the draft rows that the budget will use.

A request is scheduled with as many rows as it might verify, and they count against
``max_num_batched_tokens`` whether they are verified or not. vLLM reads the number per batch size from a plain
table (``dynamic_sd_lookup``) once a step; here the table is the budget manager, which runs in the same
process. 0 makes the coming round a plain one: nothing is drafted. Where grammars follow trees, the trees come
with the draft tokens.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from specplug_vllm import grammar, manager


class _Widths:
    """Draft rows a request by batch size, asked once a step."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def __getitem__(self, requests: int) -> int:
        running = manager.running()
        return self.budget if running is None else running.draft_rows(requests)


class _Grammars:
    """Mixed in before a stock scheduler where grammars follow trees: the parents come with the tokens."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        self.structured_output_manager.drafted(draft_token_ids, self.requests)
        super().update_draft_token_ids(draft_token_ids)

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        self.structured_output_manager.drafted(draft_token_ids, self.requests)
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)


class _Scheduler(_Grammars, Scheduler):
    pass


class _AsyncScheduler(_Grammars, AsyncScheduler):
    pass


def tree_scheduler(vllm_config: Any, structured_output_manager: Any, **kwargs: Any) -> Scheduler:
    """The stock scheduler of this configuration; named by the public option ``scheduler_cls``."""
    overlapped = vllm_config.scheduler_config.async_scheduling
    scheduler_cls = AsyncScheduler if overlapped else Scheduler
    if grammar.served(vllm_config):
        scheduler_cls = _AsyncScheduler if overlapped else _Scheduler
        grammar.TreeStructuredOutput.take_over(structured_output_manager)
    scheduler = scheduler_cls(
        vllm_config=vllm_config, structured_output_manager=structured_output_manager, **kwargs
    )
    if vllm_config.speculative_config.options.planned:
        scheduler.dynamic_sd_lookup = _Widths(scheduler.num_spec_tokens)
    return scheduler
