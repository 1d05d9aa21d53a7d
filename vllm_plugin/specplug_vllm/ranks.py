"""Tensor-parallel ranks. Each grows the same trees, from logits that are the same on all of them to the last
bit. What a rank reads from its own clock, or has on the host sooner than another, rank 0 decides.

A decision is a number or a word and travels through vLLM's own queue between the ranks of a machine, once
before a step's forward and once before its draft. Nothing travels where no step is planned, or with one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

import specplug
from specplug import ranks
from specplug.policies import Policy
from specplug.provenance import file_hash
from specplug.step_log import EngineFacts

logger = init_logger("vllm.specplug")

Decision = TypeVar("Decision")


def leads() -> bool:
    """Whether this rank decides, counts and records for its group."""
    return get_tp_group().rank_in_group == 0


def decided(decide: Callable[[], Decision]) -> Decision:
    """Rank 0's decision, on every rank. All ranks must come here in the same order.

    ``decide`` runs on rank 0 alone.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return decide()
    return group.broadcast_object(decide() if group.rank_in_group == 0 else None, src=0)


def compare(vllm_config: Any, engine: EngineFacts, policy: Policy | None) -> None:
    """Raise RuntimeError, on every rank of the group, where one would run other trees than the rest."""
    group = get_tp_group()
    if group.world_size == 1:
        return
    facts = facts_of(vllm_config, engine, policy)
    ranks.agree(facts, group.cpu_group)
    if leads():
        logger.info("specplug: %d tensor-parallel ranks agree on %s.", group.world_size, ", ".join(facts))


def facts_of(vllm_config: Any, engine: EngineFacts, policy: Policy | None) -> dict[str, Any]:
    """Whatever a tree, its scores to the last bit, or the number of its nodes depends on."""
    config = vllm_config.speculative_config
    options = config.options
    return {
        "versions": (specplug.__version__, engine.engine_version, torch.__version__),
        "target": (engine.target, engine.target_hash, engine.dtype),
        "draft": (engine.draft, engine.draft_hash, config.method),
        "budget": config.num_speculative_tokens,
        "depth": config.tree_depth,
        "candidates": config.tree_candidates,
        "kernels": config.kernels,
        "device": engine.device,
        "threads": torch.get_num_threads() if vllm_config.device_config.device_type == "cpu" else None,
        "policy": None if policy is None else (type(policy).__qualname__, policy.reason),
        "options": repr(options),
        "files": [
            None if path is None else file_hash(path) for path in (options.cost_table, options.calibration)
        ],
    }
