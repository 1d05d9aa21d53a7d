"""The worker of the upgraded DSPARK: SGLang's own, the policy's budget and sampling parameters by path."""

from __future__ import annotations

import dataclasses
import logging
import os
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.runtime_context import get_context, get_parallel, get_spec
from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor

from specplug.tree import DraftTree
from specplug_sglang import dspark
from specplug_sglang.install import hooked, unapplied
from specplug_sglang.planning import engine_facts, make_policy
from specplug_sglang.prefill import WatchedPrefill
from specplug_sglang.ranks import agree
from specplug_sglang.sampling import PathSampler, penalised
from specplug_sglang.steps import StepWatch

logger = logging.getLogger(__name__)

_EAGER = SimpleNamespace(is_required=True)  # in a penaliser's place: SGLang then accepts outside its graph


class ChainWorker(WatchedPrefill):
    """Mixed into the stock worker's class; ``super()`` is DSparkWorkerV2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for a table of another engine, RuntimeError where the ranks of a group differ."""
        chosen = dspark.options(get_spec())
        if chosen.cost_table is not None:
            get_context().override(source="specplug", speculative_dspark_sps_table_path=chosen.cost_table)
        super().__init__(*args, **kwargs)
        if not self._hosts_draft:
            return
        planner = self._verify_planner
        policy = make_policy(chosen, engine_facts(self), budget=self.gamma, depth=self.gamma)
        trims = bool(chosen.cost_table) and planner.schedules_verify_budget
        if planner.is_compact_mode:
            planner._is_verify_all = not trims or bool(policy.reason)
        self._budget = dspark.ChainBudget(policy)
        dspark.run(self._budget if trims else None)
        self._watch = StepWatch(self, policy)
        self._paths = PathSampler(self.model_runner, max_depth=self.gamma)
        executor = self._verify_executor
        executor.__class__ = PathExecutor
        executor.paths, executor.watch = self._paths, self._watch
        self._specplug_ranks = agree(
            {
                "worker": type(self).__qualname__,
                "policy": type(policy).__qualname__,
                "reason": policy.reason,
                "mode": planner.mode_value,
                "options": repr(chosen),
                "hooks": hooked(),
                "faults": tuple(unapplied()),
            }
        )
        logger.info(
            "specplug: DSPARK, pid %d, rank %d of %d: %s, verification %s.",
            os.getpid(),
            get_parallel().tp_rank,
            len(self._specplug_ranks),
            "specplug's budget trims chains"
            if trims and not policy.reason
            else self._untrimmed(policy, trims),
            planner.mode_value,
        )

    def specplug_status(self) -> dict[str, Any]:
        """What runs in this rank, for /server_info."""
        return {
            "algorithm": dspark.ALGORITHM,
            "depth": self.gamma,
            "ranks": self._specplug_ranks,
            **self._watch.status(),
        }

    def _untrimmed(self, policy: Any, trims: bool) -> str:
        if not trims and not self._verify_planner.schedules_verify_budget:
            return "every chain is verified whole: SGLANG_RAGGED_VERIFY_MODE is static"
        return f"every chain is verified whole: {policy.reason}"

    def _forward_decode(
        self, batch: Any, on_publish: Any, grammar_barrier: Any = None, coordination_plan: Any = None
    ) -> Any:
        if batch.forward_mode.is_idle() or batch.spec_info is None:
            self._watch.interrupted()
            return super()._forward_decode(batch, on_publish, grammar_barrier, coordination_plan)
        self._budget.context = self._watch.begin(batch)
        stock, rows = batch.sampling_info, self.verify_num_draft_tokens
        if stock.need_min_p_sampling or any(map(penalised, batch.reqs)):
            batch.sampling_info = dataclasses.replace(
                stock, penalizer_orchestrator=_EAGER, acc_additive_penalties=None, acc_scaling_penalties=None
            )
        try:
            result = super()._forward_decode(batch, on_publish, grammar_barrier, coordination_plan)
        finally:
            batch.sampling_info = stock
        requests = len(result.accept_lens)
        there = torch.arange(rows, device=result.accept_lens.device) < result.accept_lens[:, None]
        self._paths.committed(batch, torch.where(there, result.next_token_ids.view(requests, rows), -1))
        plan, self._budget.plan = self._budget.plan, None
        compact = self._verify_planner.is_compact_mode and plan is not None
        nodes = plan.nodes if compact else requests * self.gamma
        self._watch.done(plan=plan, nodes=nodes, shape="chain", emitted=result.accept_lens)
        return result


class PathExecutor(TargetVerifyExecutor):
    """The stock verification, its logits adjusted by path instead of by request."""

    paths: PathSampler
    watch: StepWatch

    def run_non_compact(
        self, *, batch: Any, verify_ids_2d: torch.Tensor, sampling_info: Any, **rest: Any
    ) -> Any:
        self.watch.drafted("chain")
        result = super().run_non_compact(batch=batch, verify_ids_2d=verify_ids_2d, sampling_info=None, **rest)
        self._adjust(batch, result.logits_output, verify_ids_2d[:, 1:], sampling_info)
        return result

    def run_compact(self, *, batch: Any, draft_tokens: torch.Tensor, sampling_info: Any, **rest: Any) -> Any:
        self.watch.drafted("chain")
        result = super().run_compact(batch=batch, draft_tokens=draft_tokens, sampling_info=None, **rest)
        self._adjust(batch, result[0].logits_output, draft_tokens, sampling_info)
        return result

    def accept_and_finalize(
        self, *, target_logits: torch.Tensor | None, sampling_info: Any, **rest: Any
    ) -> Any:
        if sampling_info is not None and sampling_info.need_min_p_sampling and target_logits is not None:
            target_logits = _above_min_p(target_logits, sampling_info, self.verify_num_draft_tokens)
        return super().accept_and_finalize(target_logits=target_logits, sampling_info=sampling_info, **rest)

    def _adjust(self, batch: Any, output: Any, draft_tokens: torch.Tensor, sampling_info: Any) -> None:
        if sampling_info is not None:
            self.paths.adjust(batch, output.next_token_logits, _chain(draft_tokens))


def _chain(
    tokens: torch.Tensor,  # [R, gamma] int64
) -> DraftTree:
    """A chain as the tree it is."""
    requests, depth = tokens.shape
    places = torch.arange(depth, dtype=torch.int32, device=tokens.device).expand(requests, depth)
    scores = torch.zeros(requests, depth, device=tokens.device)
    return DraftTree(
        tokens=tokens, parents=places - 1, depths=places + 1, scores=scores, counts=places[:, -1] + 1
    )


def _above_min_p(
    logits: torch.Tensor,  # [R * W, V]
    info: Any,
    rows: int,
) -> torch.Tensor:
    """The logits, -inf below min_p of the likeliest token's probability; without min_p nothing is lost."""
    temperatures, least = (one.repeat_interleave(rows, 0) for one in (info.temperatures, info.min_ps))
    probabilities = (logits / temperatures).softmax(-1)
    floor = probabilities.amax(-1, keepdim=True) * least[:, None]
    return logits.masked_fill(probabilities < floor, float("-inf"))
