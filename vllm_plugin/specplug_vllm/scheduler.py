"""vLLM's own scheduler, reserving per step the draft rows that the budget will use.

A request is scheduled with as many rows as it might verify, and they count against
``max_num_batched_tokens`` whether they are verified or not. vLLM reads the number per batch size from a plain
table (``dynamic_sd_lookup``) once a step; here the table is the budget manager, which runs in the same
process. 0 makes the coming round a plain one: nothing is drafted.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from specplug_vllm import manager


class _Widths:
    """Draft rows a request by batch size, asked once a step."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def __getitem__(self, requests: int) -> int:
        running = manager.running()
        return self.budget if running is None else running.draft_rows(requests)


def tree_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """The stock scheduler of this configuration; named by the public option ``scheduler_cls``."""
    stock = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = stock(vllm_config=vllm_config, **kwargs)
    scheduler.dynamic_sd_lookup = _Widths(scheduler.num_spec_tokens)
    return scheduler
