"""Ragged trees through vLLM's adaptive verification: each step, the nodes that pay.

vLLM trims every request's drafts to a prefix whose length is chosen on the device by a global top-k of
survival probabilities; the host knows only the total. A tree's nodes stand in score order, so a prefix of
them is a tree: the stock machinery trims trees as it trims chains. Ours differs from the stock manager in
what is ranked (a(v) instead of products of confidences), in who chooses the total (a policy of the core), and
in that it watches the steps: what they cost, what they gave.

On a GPU the host must not wait, so it decides with the last numbers that have landed, a step or two old; the
device then admits by the newest. On a CPU they are the same numbers.

With tensor parallelism every rank has a manager and rank 0's alone has a policy, watches and counts: clocks
differ between ranks. Which nodes are admitted each rank ranks for itself, by the same survivals.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as stock
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from specplug.budget import Plan
from specplug.cost import Shape
from specplug.greedy import greedy_survival
from specplug.policies import Policy
from specplug.step_clock import StepClock
from specplug_vllm import ranks

logger = init_logger("vllm.specplug")

if TYPE_CHECKING:
    from specplug.round_log import Rounds
    from specplug.verify import Walk
    from specplug_kernels.ops import Ops
    from specplug_vllm.metrics import Counters, SharedCounters
    from specplug_vllm.recorder import Recorder
    from specplug_vllm.store import TreeStore

LEAST_ROWS = 4  # draft rows a request is scheduled with in a round that drafts
HEADROOM = 1.5  # rows scheduled over the most that any request used lately
FADE = 0.98  # of that most, a step

_running: BudgetManager | None = None


def running() -> BudgetManager | None:
    """The manager of this process's worker, for the scheduler beside it; None without one."""
    return _running


@dataclass
class Step:
    """One step on its way: facts from the host, and what the device still has to say."""

    requests: list[str]
    begin: Any  # stamp
    rows: int  # all rows of the target forward
    prefill_rows: int
    contexts: np.ndarray  # [R] committed tokens
    plan: Plan | None = None
    scheduled: int = 0  # nodes
    emitting: int = 0
    verified: Shape = "plain"
    drafted: Shape = "plain"
    accepted: Any = None  # stamps: after acceptance, after drafting
    end: Any = None
    survival: torch.Tensor | None = None  # host copy, [slots, B + gamma]: of the trees and of their chains
    emitted: torch.Tensor | None = None  # host copy, [R]
    landed: Any = None  # CUDA event of the copies
    joined: list[int] = field(default_factory=list)  # slots taken by new requests since the copy was made
    rounds: Rounds | None = None

    @property
    def context(self) -> float:
        """Mean committed tokens."""
        return float(self.contexts.mean())

    @property
    def nodes(self) -> int:
        return self.plan.nodes if self.plan else 0


class BudgetManager(stock.AdaptiveVerificationManager):
    """vLLM's runner calls add_request, get_num_tokens, compact_batch, reallocate_drafts and
    record_confidences; the drafter calls begin, coming_shape, accepted and drafted. Counters and recorder
    are rank 0's."""

    def __init__(
        self,
        runner: Any,
        policy: Policy | None,  # None on a rank that follows another's
        *,
        store: TreeStore,
        ops: Ops,
        depth: int,
        counters: Counters | SharedCounters | None,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(
            runner.req_states,
            runner.input_buffers.query_start_loc,
            runner.model_state.num_new_sampled_tokens_per_step,
            get_max_chunk_logits(runner.vocab_size),
        )
        self.policy, self.store, self.counters, self.recorder = policy, store, counters, recorder
        self.ops = ops
        stock._assign_draft_token_budget_compiled = self._admit  # deterministic, and nothing to compile
        self.budget = store.budget
        self._exact_lengths = not runner.scheduler_config.async_scheduling
        self._survival = self._confidence_probs.zero_()  # the stock buffer holds a(v) itself
        slots = self._survival.shape[0]
        self._chains = self._survival.new_zeros(slots, depth)  # a(v) of the trees' greedy chains
        self._host = np.zeros((slots, self.budget + depth), dtype=np.float32)  # both, as last landed
        self._in_flight: deque[Step] = deque()
        self._plan: tuple[Plan, int, int] | None = None  # plan, scheduled nodes, emitting requests
        self._step: Step | None = None
        self._clock = StepClock(on_gpu=self._survival.is_cuda)
        # Decided while scheduling, for the rounds that draft; under async scheduling one is ahead.
        self._shapes: deque[Shape] = deque(maxlen=8)
        self._said: set[Shape] = {"tree"}
        self._peaks: dict[int, float] = {}  # nodes of the busiest request lately, by bit length of the batch
        self._context = 0.0
        global _running
        _running = self

    def add_request(self, req_idx: int) -> None:
        """A slot has a new owner: nothing is drafted for it yet."""
        self._survival[req_idx] = 0
        self._chains[req_idx] = 0
        self._host[req_idx] = 0
        for step in self._in_flight:
            step.joined.append(req_idx)

    def batches_to_profile(self, capture_sizes: list[int]) -> Any:
        """None: costs come from the cost table."""
        return iter(())

    def set_initial_cost_curves(self, samples: Any) -> None:
        pass

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Rows of the step once the policy has chosen its nodes."""
        ids = list(num_tokens_per_req)
        scheduled = np.array([num_tokens_per_req[i] for i in ids], dtype=np.int32)
        drafts = np.array([len(draft_tokens.get(i, ())) for i in ids], dtype=np.int32)
        others = scheduled - drafts
        nodes = ranks.decided(lambda: self._choose(ids, drafts, others))
        self._batch_budget = (
            dict(zip(ids, drafts.tolist(), strict=True)),
            dict(zip(ids, others.tolist(), strict=True)),
            nodes,
        )
        return int(others.sum()) + nodes

    def _choose(self, ids: list[str], drafts: np.ndarray, others: np.ndarray) -> int:
        """Nodes of the step. ``drafts``, ``others``: [R] int32, rows scheduled for nodes and for the rest."""
        self._drain()
        slots = np.array([self.req_states.req_id_to_index[i] for i in ids])
        computed = self.req_states.num_computed_tokens_np[slots]
        emitting = int((computed + others >= self.req_states.prefill_len.np[slots]).sum())
        most = max(0, self._max_total_logits - self.num_bonus_tokens * len(ids)) // len(ids)
        caps = np.minimum(drafts, most)
        if self._exact_lengths:  # whoever needs one token more needs no draft
            caps = np.where(computed + others + 1 < self.req_states.max_seq_len[slots], caps, 0)
        survival, chain = np.split(self._host[slots], [self.budget], axis=1)
        plan = self.policy.verify(
            survival,
            caps.astype(np.int32),
            base_tokens=int(others.sum()),
            emitting=emitting,
            context=float(computed.mean()),
            shape="chain" if self.store.linear(slots) else "tree",
            chain=chain,
        )
        self._plan = plan, int(drafts.sum()), emitting
        self._remember(len(ids), int(plan.counts.max(initial=0)), int(drafts.max(initial=0)))
        return int(plan.nodes)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """After drafting: publish the new survivals, and let the step's numbers travel to the host."""
        slots, survival = input_batch.idx_mapping, confidence_probs[: input_batch.num_reqs]
        self._survival[slots] = survival
        parents = self.store.parents[slots]
        self._chains[slots] = greedy_survival(survival, parents, max_depth=self._chains.shape[1])
        step, self._step = self._step, None
        if step is None:
            return
        step.survival = torch.cat((self._survival, self._chains), 1).to("cpu", non_blocking=True)
        if self._clock.on_gpu:
            step.landed = torch.cuda.Event()
            step.landed.record()
        self._in_flight.append(step)
        self._drain()

    def draft_rows(self, requests: int) -> int:
        """Draft rows to schedule for each of ``requests``; decides whether the coming round drafts at all."""
        self._drain()
        shape = self.policy.draft(requests, context=self._context)
        self._shapes.append(shape)
        if shape == "plain":
            return 0
        peak = self._peaks.get(requests.bit_length())
        return self.budget if peak is None else min(self.budget, max(LEAST_ROWS, int(HEADROOM * peak) + 1))

    def coming_shape(self, requests: int, rows: int | None) -> Shape:
        """What to draft now. ``rows``: draft rows the scheduler will reserve, None where it does not say; 0
        also where no request can use a draft (vLLM 0.33), whatever was decided for the step."""
        shape = self._shapes.popleft() if self._shapes else None
        if rows == 0:
            return "plain"
        if shape is not None:
            return shape
        return ranks.decided(lambda: self.policy.draft(requests, context=self._context))

    def begin(self, input_batch: Any) -> None:
        """Before the target's forward."""
        if self.policy is None:
            return
        slots = input_batch.idx_mapping_np
        computed = self.req_states.num_computed_tokens_np[slots]
        prefill = self.req_states.prefill_len.np[slots]
        emitting = int((computed + input_batch.num_scheduled_tokens >= prefill).sum())
        plan, scheduled, emitting = self._plan or (None, 0, emitting)
        self._plan = None
        self._context = float(computed.mean())
        nodes = plan.nodes if plan else 0
        windows = int((computed >= prefill).sum())  # requests that decode
        self._step = Step(
            requests=input_batch.req_ids,
            begin=self._clock.begin(input_batch.req_ids),
            rows=input_batch.num_tokens,
            prefill_rows=max(0, input_batch.num_tokens - nodes - windows),
            contexts=computed,
            plan=plan,
            scheduled=scheduled,
            emitting=emitting,
            verified="plain" if not nodes else "chain" if self.store.linear(slots) else "tree",
        )

    def accepted(
        self, num_sampled: torch.Tensor, slots: torch.Tensor, walked: tuple[Walk, torch.Tensor] | None
    ) -> None:
        """After acceptance, the trees still in the store. ``num_sampled``: [R] int, tokens of each request;
        ``walked``: the walk and the nodes [R] it could take, None where no node was verified."""
        if self._step is None:
            return
        self._step.accepted = self._clock.stamp()
        self._step.emitted = num_sampled.to("cpu", non_blocking=True)
        if self.recorder is not None and walked is not None:
            tokens = self.req_states.draft_tokens[slots]
            self._step.rounds = self.recorder.rounds(slots, tokens, *walked)

    def drafted(self, shape: Shape) -> None:
        """After drafting."""
        if self._step is None:
            return
        self._step.drafted, self._step.end = shape, self._clock.end(self._step.requests)
        if shape not in self._said and not self.policy.reason:
            self._said.add(shape)
            logger.info(
                "specplug: with %d requests %s is worth more than a tree; taken where that is so. Counted, "
                "not logged again.",
                len(self._step.requests),
                "decoding without a draft" if shape == "plain" else "a chain",
            )

    def _drain(self) -> None:
        """Take every step whose numbers have landed."""
        while self._in_flight and (self._in_flight[0].landed is None or self._in_flight[0].landed.query()):
            step = self._in_flight.popleft()
            assert step.survival is not None
            self._host = step.survival.numpy()
            self._host[step.joined] = 0
            self._finish(step)

    def _finish(self, step: Step) -> None:
        tokens = step.emitted.numpy() if step.emitted is not None else np.zeros(len(step.requests))
        emitted = int(tokens.sum())
        # A round without a draft still writes the drafter's context: part of its step.
        drafting = step.drafted != "plain"
        verify = self._clock.seconds(step.begin, step.accepted if drafting else step.end)
        draft = self._clock.seconds(step.accepted, step.end) if drafting else 0.0
        self.policy.observe(
            requests=len(step.requests),
            tokens=step.rows,
            context=step.context,
            emitted_context=float(step.contexts @ tokens / emitted) if emitted else None,
            verified=step.verified,
            verify_seconds=verify or None,
            drafted=step.drafted,
            draft_seconds=draft or None,
            emitting=step.emitting,
            emitted=emitted,
            plan=step.plan,
        )
        if self.counters is not None:
            self._count(step, emitted, verify + draft)
        if self.recorder is not None:
            self.recorder.step(step, verify, draft)

    def _count(self, step: Step, emitted: int, seconds: float) -> None:
        counters, plan = self.counters, step.plan
        assert counters is not None
        counters.add("steps", label=step.verified)
        counters.add("drafts", label=step.drafted)
        counters.add("nodes_drafted", step.scheduled)
        counters.add("nodes_verified", step.nodes)
        if plan is None:
            return
        counters.add("nodes_accepted", max(0, emitted - step.emitting))
        counters.add("tokens_emitted", emitted)
        counters.add("tokens_predicted", plan.tokens)
        counters.add("seconds_observed", seconds)
        if np.isfinite(plan.seconds):
            counters.add("seconds_predicted", plan.seconds)
            # gain = (tokens / seconds) over plain decoding's tokens a second
            counters.add("seconds_plain", emitted * plan.gain * plan.seconds / max(plan.tokens, 1e-9))

    def _remember(self, requests: int, used: int, scheduled: int) -> None:
        """Follow the widest request; one that used all it was scheduled with may want twice as much."""
        key = requests.bit_length()
        wanted = 2 * used if used == scheduled < self.budget else used
        self._peaks[key] = max(float(wanted), FADE * self._peaks.get(key, 0.0))

    def _admit(
        self,
        survival: torch.Tensor,  # [slots, B]
        idx_mapping: torch.Tensor,  # [R]
        capacities: torch.Tensor,  # [R] int32: nodes scheduled, then nodes admitted
        draft_budget: int,
        num_steps: int,
    ) -> None:
        """In place of vLLM's compiled ranking of products of confidences."""
        capacities.copy_(self.ops.admit(survival[idx_mapping], capacities, draft_budget))
