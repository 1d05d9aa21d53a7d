"""The worker of the upgraded DSPARK: SGLang's own, the policy's budget and sampling parameters by path."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.runtime_context import get_context, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.dspark_components.dspark_draft import (
    DraftBlockProposer,
    DraftBlockResult,
    DraftProposal,
    resolve_draft_params,
)
from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor

from specplug.processors import above_min_p
from specplug.tree import DraftTree
from specplug_sglang import dspark
from specplug_sglang.rounds import Watch
from specplug_sglang.sampling import PathSampler, penalised
from specplug_sglang.watched import WatchedWorker

_EAGER = SimpleNamespace(is_required=True)  # in a penaliser's place: SGLang then accepts outside its graph


class ChainWorker(WatchedWorker):
    """Mixed into the stock worker's class; ``super()`` is DSparkWorkerV2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for a table of another engine, RuntimeError where the ranks of a group differ."""
        chosen = dspark.options(get_spec())
        if chosen.cost_table is not None:
            get_context().override(source="specplug", speculative_dspark_sps_table_path=chosen.cost_table)
        super().__init__(*args, **kwargs)
        if not self._hosts_draft:
            return
        policy = self.start_watching(chosen, algorithm=dspark.ALGORITHM, budget=self.gamma)
        planner, executor, proposer = self._verify_planner, self._verify_executor, self._proposer
        self._trims = bool(chosen.cost_table) and planner.schedules_verify_budget
        if planner.is_compact_mode:
            planner._is_verify_all = not self._trims or bool(policy.reason)
        self._budget = dspark.ChainBudget(policy, depth=self.gamma)
        dspark.run(self._budget if self._trims else None)
        executor.__class__ = PathExecutor
        executor.paths, executor.watch, executor.shape = self._paths, self._watch, "chain"
        proposer.__class__ = IdleProposer
        self._may_idle = planner.is_compact_mode and may_idle(proposer, executor)

    def get_confidence_budget_prepare(self) -> Any:
        """Under overlap the scheduler calls what this returns before it launches a step."""
        stock = super().get_confidence_budget_prepare()
        if stock is None or not self._trims:
            return stock

        def prepare(batch: Any, future_map: Any) -> None:
            if not (batch.forward_mode.is_extend() or batch.is_extend_in_batch):
                self._budget.choose(batch)
            stock(batch, future_map)

        return prepare

    def _forward_decode(
        self, batch: Any, on_publish: Any, grammar_barrier: Any = None, coordination_plan: Any = None
    ) -> Any:
        if batch.forward_mode.is_idle() or batch.spec_info is None:
            self._watch.interrupted()
            return super()._forward_decode(batch, on_publish, grammar_barrier, coordination_plan)
        self._watch.started(batch)
        if self._trims and get_schedule().disable_overlap_schedule:
            self._budget.choose(batch)
        idle = self._may_idle and self._budget.shape == "plain" and not self._forced()
        self._proposer.idle = idle
        self._verify_executor.shape = "plain" if idle else "chain"
        if idle:
            batch.spec_info.verify_token_budget = 0
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
        nodes = plan.nodes if compact else 0 if idle else requests * self.gamma
        return self._watch.ended(result, plan=plan, nodes=nodes)

    def _forced(self) -> bool:
        """Whether /set_internal_state says how much is verified, as SGLang's own profiler does."""
        return self._verify_planner._budget_planner.forced_budget_frac is not None


def may_idle(proposer: Any, executor: Any) -> bool:
    """Whether a step may leave the draft out.

    The draft's cache holds committed tokens alone and is written after the verification, so it gets no hole.
    In place of the drafts stand certain ones, of which none is verified: SGLang's acceptance then draws the
    next token from the target's law, as for any draft behind the cut. Not so where the draft's graph writes
    the cache, where ranks with batches of their own draft together, or where acceptance is by another rule.
    """
    return (
        proposer.deferred_commit is None
        and not get_parallel().attn_dp_enabled
        and not executor._block_verification
        and executor._rejection_noise is None
        and executor._simulated_correct_len is None
    )


class IdleProposer(DraftBlockProposer):
    """The stock proposer, or none: see `may_idle`."""

    idle = False

    def propose(self, *, batch: Any, sampling_info: Any, bs: int, device: Any, **rest: Any) -> DraftProposal:
        if not self.idle:
            return super().propose(batch=batch, sampling_info=sampling_info, bs=bs, device=device, **rest)
        params = resolve_draft_params(sampling_info=sampling_info, bs=bs, device=device)
        tokens = torch.zeros(bs, self.gamma, dtype=torch.int64, device=device)
        anchors = batch.spec_info.bonus_tokens.view(-1, 1).long()
        block = DraftBlockResult(
            draft_tokens=tokens,
            corrected_logits=None,
            greedy_mask=params.greedy_mask,
            temperatures=params.temperatures,
            greedy_draft=True,
        )
        nothing = torch.zeros(bs, self.gamma, device=device)
        return DraftProposal(
            draft_block_ids=torch.cat([anchors, tokens[:, 1:]], 1), draft_block=block, confidence=nothing
        )


class PathExecutor(TargetVerifyExecutor):
    """The stock verification, its logits adjusted by path instead of by request."""

    paths: PathSampler
    watch: Watch
    shape: Any

    def run_non_compact(
        self, *, batch: Any, verify_ids_2d: torch.Tensor, sampling_info: Any, **rest: Any
    ) -> Any:
        self.watch.drafted(self.shape)
        result = super().run_non_compact(batch=batch, verify_ids_2d=verify_ids_2d, sampling_info=None, **rest)
        self._adjust(batch, result.logits_output, verify_ids_2d[:, 1:], sampling_info)
        return result

    def run_compact(self, *, batch: Any, draft_tokens: torch.Tensor, sampling_info: Any, **rest: Any) -> Any:
        self.watch.drafted(self.shape)
        result = super().run_compact(batch=batch, draft_tokens=draft_tokens, sampling_info=None, **rest)
        self._adjust(batch, result[0].logits_output, draft_tokens, sampling_info)
        return result

    def accept_and_finalize(
        self, *, target_logits: torch.Tensor | None, sampling_info: Any, **rest: Any
    ) -> Any:
        if sampling_info is not None and sampling_info.need_min_p_sampling and target_logits is not None:
            asked = sampling_info.temperatures, sampling_info.min_ps
            temperatures, least = (one.repeat_interleave(self.verify_num_draft_tokens, 0) for one in asked)
            target_logits = above_min_p(target_logits, temperatures=temperatures, min_p=least)
        return super().accept_and_finalize(target_logits=target_logits, sampling_info=sampling_info, **rest)

    def _adjust(self, batch: Any, output: Any, draft_tokens: torch.Tensor, sampling_info: Any) -> None:
        if sampling_info is not None:
            self.paths.adjust(batch, output.next_token_logits, DraftTree.chain(draft_tokens))
