"""What this engine is, and which policy it runs."""

from __future__ import annotations

import logging
from typing import Any

from specplug.config import TreeOptions
from specplug.planning import choose_policy
from specplug.policies import Policy
from specplug.provenance import device_name
from specplug.step_log import EngineFacts, facts_here

logger = logging.getLogger(__name__)


def engine_facts(worker: Any) -> EngineFacts:
    """What this engine is, as a cost table's provenance names it."""
    import sglang
    import torch
    from sglang.srt.runtime_context import get_model, get_parallel, get_spec

    runner = worker.model_runner
    return facts_here(
        engine="sglang",
        engine_version=sglang.__version__,
        target=get_model().model_path,
        draft=get_spec().speculative_draft_model_path,
        device=device_name(torch.device(worker.device)),
        dtype=str(runner.dtype).removeprefix("torch."),
        tensor_parallel=get_parallel().tp_size,
        context=runner.model_config.context_len,
    )


def make_policy(options: TreeOptions, here: EngineFacts, *, budget: int, depth: int) -> Policy:
    """`specplug.planning.choose_policy`, into this adapter's log."""
    return choose_policy(options, here, budget=budget, depth=depth, logger=logger)
