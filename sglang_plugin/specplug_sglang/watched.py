"""What the workers of DDTREE and of the upgraded DSPARK share: a policy and a watch over their steps, the
requests' parameters through prefill, ranks that agree at the start, and the block in /server_info."""

from __future__ import annotations

import logging
import os
from typing import Any

import sglang
import torch
from sglang.srt.runtime_context import get_model, get_parallel, get_spec

from specplug import ranks
from specplug.config import TreeOptions
from specplug.planning import choose_policy
from specplug.policies import Policy
from specplug.provenance import device_name
from specplug.step_log import EngineFacts, facts_here
from specplug_sglang.config import ALGORITHM
from specplug_sglang.install import hooked, unapplied
from specplug_sglang.rounds import Watch
from specplug_sglang.sampling import PathSampler

logger = logging.getLogger(__name__)


class WatchedWorker:
    """Mixed in before DSparkWorkerV2."""

    def start_watching(self, options: TreeOptions, *, algorithm: str, budget: int) -> Policy:
        """The policy of a worker that is ready to run; says in one log line what runs.

        Raises ValueError for a table of another engine, RuntimeError where the ranks of a group differ.
        """
        here, trees = engine_facts(self), algorithm == ALGORITHM
        policy = choose_policy(options, here, budget=budget, depth=self.gamma, trees=trees, logger=logger)
        self._paths = PathSampler(self.model_runner, max_depth=self.gamma)
        self._watch = Watch(self, policy, options, here)
        mode = self._verify_planner.mode_value
        everything = "every drafted node is verified: SGLANG_RAGGED_VERIFY_MODE is static"
        self._ranks = ranks.agree(
            {
                "worker": type(self).__qualname__,
                "draft": type(self.draft_model).__name__,
                "policy": type(policy).__qualname__,
                "reason": everything if mode == "static" else policy.reason,
                "mode": mode,
                "options": repr(options),
                "hooks": hooked(),
                "faults": tuple(unapplied()),
            },
            get_parallel().tp_group.cpu_group,
        )
        self._facts = {"algorithm": algorithm, "nodes": budget, "depth": self.gamma}
        logger.info(
            "specplug: %s, pid %d, rank %d of %d: %s over %s, %d nodes, depth %d, verification %s, %s.",
            algorithm,
            os.getpid(),
            get_parallel().tp_rank,
            len(self._ranks),
            type(self).__name__,
            type(self.draft_model).__name__,
            budget,
            self.gamma,
            mode,
            self._ranks[0]["reason"] or "budgets from a cost table",
        )
        return policy

    def specplug_status(self) -> dict[str, Any]:
        """What runs in this rank, for /server_info."""
        return {**self._facts, "ranks": self._ranks, **self._watch.totals}

    def _forward_prefill(self, batch: Any, on_publish: Any, pp_proxy_tensors: Any = None) -> Any:
        self._watch.interrupted()
        if batch.forward_mode.is_idle():
            return super()._forward_prefill(batch, on_publish, pp_proxy_tensors)
        with self._paths.prefilling(batch):
            result = super()._forward_prefill(batch, on_publish, pp_proxy_tensors)
        self._paths.prefilled(batch, result.next_token_ids)
        return result


def engine_facts(worker: Any) -> EngineFacts:
    """What this engine is, as a cost table's provenance names it."""
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
