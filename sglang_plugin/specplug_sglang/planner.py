"""How many nodes of each request's tree are verified, through SGLang's ragged verification.

SGLang splits the decision in two: the host picks the batch's total from confidences that are some steps old,
the device ranks the live ones. Nodes stand in score order, so what a request keeps is a prefix of its nodes
and a tree of its own. Ours differs from the stock planner in what is relayed (a(v) of the nodes, then of the
tree's greedy chain, instead of confidences), in who picks the total (a policy of the core), and in that a
request nobody has seen yet counts as the usual one instead of as certain.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_schedule
from sglang.srt.speculative.dspark_components.dspark_planner import DSparkVerifyPlanner
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from specplug.budget import Plan
from specplug.cost import Shape
from specplug.greedy import greedy_survival
from specplug.policies import FullTrees, Policy
from specplug.ragged import admit
from specplug.tree import DraftTree

FADE = 0.9  # of the usual request's survivals, a step: follows a change within some ten steps


class _Scored:
    """Stands where the stock planner wants a draft with a confidence head: trees bring their own scores."""

    confidence_head = object()


class TreePlanner(DSparkVerifyPlanner):
    """One a rank. STATIC verifies every node, CAP_ACCEPT computes every node and accepts the chosen ones,
    COMPACT computes the chosen ones."""

    def __init__(self, stock: DSparkVerifyPlanner, *, budget: int, depth: int) -> None:
        """``stock``: the planner the DSPARK worker built; its model runner and ranks are taken over."""
        super().__init__(
            draft_model=_Scored(),
            gamma=budget,  # nodes stand where a chain's positions do
            model_runner=stock.model_runner,
            device=stock.device,
            tp_rank=-1,  # rank 0 would log the stock table a second time
            verify_num_draft_tokens=budget + 1,
            tp_sync=stock._tp_sync,
        )
        self._is_verify_all = False  # the policy decides, also where no stock table is given
        self.policy: Policy = FullTrees()  # until the engine is known well enough to choose another
        self.budget, self.depth = budget, depth
        self._usual = np.zeros(budget + depth, np.float32)
        self.context = 0.0  # mean committed tokens of the batch
        self.plan: Plan | None = None  # the last one made
        self._shape: Shape = "tree"

    @property
    def carries_confidence(self) -> bool:
        """Whether the worker publishes survivals with the new lengths."""
        return self.schedules_verify_budget

    def survivals(self, tree: DraftTree) -> torch.Tensor:
        """What is relayed: [R, budget + depth] fp32, a(v) of the nodes, then of the greedy chain."""
        survival = tree.scores.exp()
        chain = greedy_survival(survival, tree.parents, max_depth=self.depth)
        return torch.cat((survival, chain), 1)

    def layout(
        self,
        batch: Any,
        survivals: torch.Tensor,  # [R, budget + depth] fp32, of the trees at hand
    ) -> RaggedVerifyLayout | None:
        """Rows of every request this step; None: whole windows."""
        budget = self.resolve_verify_token_budget(
            draft_input=batch.spec_info,
            confidence=survivals,
            prefix_lens=batch.seq_lens,
            req_pool_indices=batch.req_pool_indices,
        )
        return self.schedule_layout(
            req_pool_indices=batch.req_pool_indices,
            prefix_lens=batch.seq_lens,
            device=batch.seq_lens.device,
            confidence=survivals,
            budget=budget,
        )

    def _budget_from_resolved(self, *, resolved: Any, req_pool_indices_cpu: torch.Tensor) -> int | None:
        """The policy's node total: from the live survivals, or under overlap from the last that have landed.
        None, before any have: verify everything."""
        self.plan = None
        if resolved is None:
            return None
        rows = req_pool_indices_cpu.to(torch.int64)
        current = self.model_runner.req_to_token_pool.req_generation[rows].to(torch.int64)
        seen = ((current >= 1) & (resolved.generation.to(torch.int64) == current)).numpy()
        # A row of the relay that no step has written yet holds whatever its memory held. It only misleads the
        # total of one step: the device admits by live survivals.
        values = np.nan_to_num(resolved.confidence.to(torch.float32).numpy()).clip(0.0, 1.0)
        if seen.any():
            self._usual = FADE * self._usual + (1 - FADE) * values[seen].mean(0)
        values[~seen] = self._usual
        forced = self._budget_planner.forced_budget_frac  # /set_internal_state, SGLang's own profiler
        if forced is not None:
            return int(forced * len(values) * self.budget)
        nodes, chain = np.split(values, [self.budget], axis=1)
        caps = np.where(seen, (nodes > 0).sum(1), self.budget).astype(np.int32)
        self.plan = self.policy.verify(
            np.minimum.accumulate(nodes, axis=1),
            caps,
            base_tokens=len(values),
            emitting=len(values),
            context=self.context,
            shape=self._shape,
            chain=chain,
        )
        return self.plan.nodes

    def prepare_verify_budget(self, batch: Any, future_map: Any) -> None:
        """Under overlap: called by the scheduler before the step is launched."""
        if not (batch.forward_mode.is_extend() or batch.is_extend_in_batch):
            self._choose_shape(batch)
        super().prepare_verify_budget(batch, future_map)

    def coming_shape(self, batch: Any) -> Shape:
        """What to draft this step; under overlap it was chosen with the budget."""
        if get_schedule().disable_overlap_schedule or not self.schedules_verify_budget:
            self._choose_shape(batch)
        return self._shape

    def relayed(self, survivals: torch.Tensor, shape: Shape) -> torch.Tensor:
        """What the next budgets are made from; after a step that drafted nothing, the usual request's."""
        if shape != "plain":
            return survivals
        return torch.from_numpy(self._usual).to(survivals).expand_as(survivals).contiguous()

    def _choose_shape(self, batch: Any) -> None:
        if batch.seq_lens_cpu is not None and len(batch.seq_lens_cpu):
            self.context = float(batch.seq_lens_cpu.float().mean())
        self._shape = self.policy.draft(len(batch.reqs), context=self.context)

    def _schedule_verify_lens(
        self, *, confidence: torch.Tensor | None, budget: int | None, device: Any, **_: Any
    ) -> torch.Tensor | None:
        """Root and admitted nodes of each request, [R] int32; None: whole windows."""
        if self._budget_planner is None or confidence is None or budget is None:
            return None
        survival = confidence[:, : self.budget]
        drafted = (survival > 0).sum(1, dtype=torch.int32)
        rows = 1 + torch.minimum(admit(survival, drafted, min(budget, survival.numel())), drafted)
        return self._tp_sync.sync(SpecTpSyncSite.DSPARK_PLAN, rows.to(device))
