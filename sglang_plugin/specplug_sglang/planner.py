"""How many nodes of each request's tree are verified, through SGLang's ragged verification.

SGLang splits the decision in two: the host picks the batch's total from confidences that are some steps old,
the device ranks the live ones. Nodes stand in score order, so what a request keeps is a prefix of its nodes
and a tree of its own. Ours differs from the stock planner in what is relayed (`specplug.relay`: survivals of
the nodes and of the tree's greedy chain, instead of confidences), and in who picks the total: a policy.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_schedule
from sglang.srt.speculative.dspark_components.dspark_planner import DSparkVerifyPlanner
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from specplug.budget import Plan
from specplug.cost_curves import Shape
from specplug.policies import FullTrees, Policy
from specplug.ragged import admit
from specplug.relay import SurvivalRelay


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
        self.relay = SurvivalRelay(budget=budget, depth=depth)
        self.plan: Plan | None = None  # the last one made
        self._context = 0.0  # mean committed tokens of the batch
        self._shape: Shape = "tree"

    def layout(
        self,
        batch: Any,
        survivals: torch.Tensor | None,  # of `relay`, of the trees at hand; None: nobody chooses
    ) -> RaggedVerifyLayout | None:
        """Rows of every request this step; None: whole windows."""
        batched = {"req_pool_indices": batch.req_pool_indices, "prefix_lens": batch.seq_lens}
        budget = self.resolve_verify_token_budget(
            draft_input=batch.spec_info, confidence=survivals, **batched
        )
        return self.schedule_layout(
            device=batch.seq_lens.device, confidence=survivals, budget=budget, **batched
        )

    def _budget_from_resolved(self, *, resolved: Any, req_pool_indices_cpu: torch.Tensor) -> int | None:
        """The policy's node total: from the live survivals, or under overlap from the last that have landed.
        None, before any have: verify everything."""
        self.plan = None
        if resolved is None:
            return None
        slots = req_pool_indices_cpu.to(torch.int64)
        current = self.model_runner.req_to_token_pool.req_generation[slots].to(torch.int64)
        owned = (current >= 1) & (resolved.generation.to(torch.int64) == current)
        rows = resolved.confidence.to(torch.float32).numpy()
        forced = self._budget_planner.forced_budget_frac  # /set_internal_state, SGLang's own profiler
        if forced is not None:
            return int(forced * len(rows) * self.relay.budget)
        self.plan = self.relay.plan(
            self.policy, rows, owned.numpy(), shape=self._shape, context=self._context
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

    def _choose_shape(self, batch: Any) -> None:
        if batch.seq_lens_cpu is not None and len(batch.seq_lens_cpu):
            self._context = float(batch.seq_lens_cpu.float().mean())
        self._shape = self.policy.draft(len(batch.reqs), context=self._context)

    def _schedule_verify_lens(
        self, *, confidence: torch.Tensor | None, budget: int | None, device: Any, **_: Any
    ) -> torch.Tensor | None:
        """Root and admitted nodes of each request, [R] int32; None: whole windows."""
        if self._budget_planner is None or confidence is None or budget is None:
            return None
        survival = confidence[:, : self.relay.budget]
        drafted = (survival > 0).sum(1, dtype=torch.int32)
        rows = 1 + torch.minimum(admit(survival, drafted, min(budget, survival.numel())), drafted)
        return self._tp_sync.sync(SpecTpSyncSite.DSPARK_PLAN, rows.to(device))
