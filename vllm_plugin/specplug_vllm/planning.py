"""What this engine is, which policy it runs, and the manager that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.logger import init_logger
from vllm.v1.worker.gpu.attn_utils import get_query_lens_mismatch_unsupported_backend

from specplug.config import TreeOptions
from specplug.planning import choose_policy
from specplug.policies import Policy
from specplug.provenance import device_name
from specplug.step_log import EngineFacts, facts_here
from specplug_vllm import metrics, ranks
from specplug_vllm.manager import BudgetManager
from specplug_vllm.recorder import Recorder

logger = init_logger("vllm.specplug")


def engine_facts(vllm_config: Any, device: torch.device) -> EngineFacts:
    """What this engine is, as a cost table's provenance names it."""
    target, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    compilation = vllm_config.compilation_config
    graphs = compilation.cudagraph_capture_sizes if compilation.cudagraph_mode else ()
    return facts_here(
        engine="vllm",
        engine_version=vllm.__version__,
        target=target.model,
        draft=draft.model,
        device=device_name(device),
        dtype=str(target.dtype).removeprefix("torch."),
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        context=target.max_model_len,
        graph_sizes=tuple(sorted(graphs or ())) if device.type == "cuda" else (),
    )


def plan(vllm_config: Any, here: EngineFacts) -> Policy | None:
    """The policy of the engine, None where no step is planned. Raises ValueError as `choose_policy`."""
    config = vllm_config.speculative_config
    if not config.options.planned:
        return None
    return choose_policy(
        config.options,
        here,
        budget=config.num_speculative_tokens,
        depth=config.tree_depth,
        one_rank_decides=True,
        logger=logger,
    )


def attach_manager(runner: Any, here: EngineFacts, policy: Policy) -> BudgetManager:
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
    leads, index, recorder = ranks.leads(), runner.parallel_config.data_parallel_index, None
    if options.record and leads:
        recorder = Recorder(
            Path(options.record),
            here,
            speculator.store,
            forced=options.explore,
            rounds=not options.explore and options.cost_table is None,
        )
        logger.info("specplug: recording to %s, which slows the engine down.", options.record)
    manager = BudgetManager(
        runner,
        policy if leads else None,
        store=speculator.store,
        ops=speculator.ops,
        depth=speculator.depth,
        counters=_counters(config.counters_file, engine=index) if leads else None,
        recorder=recorder,
    )
    runner.adaptive_verification = speculator.manager = manager
    return manager


def _counters(path: str, *, engine: int) -> metrics.Counters | metrics.SharedCounters | None:
    try:
        return metrics.counters(path, engine)
    except OSError:
        logger.warning("specplug: %s is not on this machine; its counters stay at 0.", path)
        return None
