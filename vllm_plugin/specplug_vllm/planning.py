"""From the options to a budget manager: which policy, whether the cost table is of this engine."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.logger import init_logger
from vllm.v1.worker.gpu.attn_utils import get_query_lens_mismatch_unsupported_backend

from specplug.budget import Planner
from specplug.config import TreeOptions
from specplug.cost import check_provenance, read_cost_table
from specplug.policies import Explorer, FullTrees, Policy
from specplug.provenance import config_hash, device_name
from specplug.step_log import EngineFacts
from specplug_vllm.manager import BudgetManager
from specplug_vllm.metrics import Counters
from specplug_vllm.recorder import Recorder

logger = init_logger("vllm.specplug")


def engine_facts(vllm_config: Any, device: torch.device) -> EngineFacts:
    """What this engine is, as a cost table's provenance names it."""
    target, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    compilation = vllm_config.compilation_config
    graphs = compilation.cudagraph_capture_sizes if compilation.cudagraph_mode else ()
    return EngineFacts(
        engine="vllm",
        engine_version=vllm.__version__,
        target=target.model,
        draft=draft.model,
        target_hash=_hash(target.model),
        draft_hash=_hash(draft.model),
        device=device_name(device),
        dtype=str(target.dtype).removeprefix("torch."),
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        context=target.max_model_len,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=shlex.join(sys.argv),
        graph_sizes=tuple(sorted(graphs or ())) if device.type == "cuda" else (),
    )


def check_table(options: TreeOptions, here: EngineFacts) -> None:
    """Raise ValueError where the cost table was measured for something else, unless told to go on."""
    assert options.cost_table is not None
    wrong = check_provenance(read_cost_table(options.cost_table), here.provenance())
    if not wrong:
        return
    text = f"cost_table {options.cost_table}: {'; '.join(wrong)}"
    if options.cost_table_mismatch == "refuse":
        raise ValueError(
            f'{text}. Run `specplug profile` on this engine, or add "cost_table_mismatch": "warn".'
        )
    logger.warning("specplug: %s. Used all the same: cost_table_mismatch is warn.", text)


def attach_manager(runner: Any, here: EngineFacts) -> BudgetManager:
    """Give the runner a manager; from now on every step is planned, watched or both."""
    config, speculator = runner.vllm_config.speculative_config, runner.speculator
    options: TreeOptions = config.options
    backend = get_query_lens_mismatch_unsupported_backend(
        runner.attn_groups, checked_layer_names=speculator.target_layers
    )
    if backend is not None:
        raise ValueError(
            f"method ddtree refuses: cost_table and explore trim drafts on the device, which the attention "
            f"backend {backend} does not follow; leave them out."
        )
    policy: Policy
    if options.cost_table:
        table = read_cost_table(options.cost_table)
        policy = Planner(
            table,
            budget=config.num_speculative_tokens,
            depth=config.tree_depth,
            min_gain=options.min_gain,
            online=options.online,
        )
        logger.info(
            "specplug: budgets from the cost table %s (%s)%s.",
            options.cost_table,
            table.provenance or "origin unknown",
            f"; {policy.reason}" if policy.reason else "",
        )
    else:
        policy = Explorer() if options.explore else FullTrees()
        logger.info("specplug: %s.", policy.reason)
    recorder = None
    if options.record:
        recorder = Recorder(
            Path(options.record),
            here,
            speculator.store,
            forced=options.explore,
            rounds=isinstance(policy, FullTrees) and not options.explore,
        )
        logger.info("specplug: recording to %s, which slows the engine down.", options.record)
    manager = BudgetManager(
        runner,
        policy,
        store=speculator.store,
        depth=speculator.depth,
        counters=_counters(config.counters_file),
        recorder=recorder,
    )
    runner.adaptive_verification = speculator.manager = manager
    return manager


def _counters(path: str) -> Counters | None:
    try:
        return Counters(path)
    except OSError:
        logger.warning("specplug: %s is not on this machine; its counters stay at 0.", path)
        return None


def _hash(model: str) -> str:
    folder = Path(model)
    return config_hash(folder) if folder.is_dir() else ""
