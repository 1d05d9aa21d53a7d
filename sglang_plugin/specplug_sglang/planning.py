"""From the options to a policy: what each step verifies, and whether the cost table is of this engine."""

from __future__ import annotations

import logging
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specplug.budget import Planner
from specplug.config import TreeOptions
from specplug.cost import check_provenance, read_cost_table
from specplug.policies import Explorer, FullTrees, Policy
from specplug.provenance import config_hash, device_name
from specplug.step_log import EngineFacts

logger = logging.getLogger(__name__)


def engine_facts(worker: Any) -> EngineFacts:
    """What this engine is, as a cost table's provenance names it."""
    import sglang
    import torch
    from sglang.srt.runtime_context import get_model, get_parallel, get_spec

    runner = worker.model_runner
    target, draft = get_model().model_path, get_spec().speculative_draft_model_path
    return EngineFacts(
        engine="sglang",
        engine_version=sglang.__version__,
        target=target,
        draft=draft,
        target_hash=_hash(target),
        draft_hash=_hash(draft),
        device=device_name(torch.device(worker.device)),
        dtype=str(runner.dtype).removeprefix("torch."),
        tensor_parallel=get_parallel().tp_size,
        context=runner.model_config.context_len,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=shlex.join(sys.argv),
    )


def make_policy(options: TreeOptions, here: EngineFacts, *, budget: int, depth: int) -> Policy:
    """The policy of one engine; says in the log which and why.

    With more than one rank nothing is corrected online: every rank decides for itself, from numbers all of
    them have, and their clocks differ. Raises ValueError for a table that cannot be read, or was measured for
    something else and ``cost_table_mismatch`` is "refuse".
    """
    policy: Policy
    if options.cost_table is None:
        policy = Explorer() if options.explore else FullTrees()
        logger.info("specplug: %s.", policy.reason)
        return policy
    table = read_cost_table(options.cost_table)
    wrong = check_provenance(table, here.provenance())
    if wrong:
        text = f"cost_table {options.cost_table}: {'; '.join(wrong)}"
        if options.cost_table_mismatch == "refuse":
            raise ValueError(
                f'{text}. Run `specplug profile` on this engine, or add "cost_table_mismatch": "warn".'
            )
        logger.warning("specplug: %s. Used all the same: cost_table_mismatch is warn.", text)
    online = options.online and here.tensor_parallel == 1
    policy = Planner(table, budget=budget, depth=depth, min_gain=options.min_gain, online=online)
    logger.info(
        "specplug: budgets from the cost table %s (%s), %s%s.",
        options.cost_table,
        table.provenance or "origin unknown",
        "corrected online" if online else "not corrected online",
        f"; {policy.reason}" if policy.reason else "",
    )
    return policy


def _hash(model: str) -> str:
    folder = Path(model)
    return config_hash(folder) if folder.is_dir() else ""
