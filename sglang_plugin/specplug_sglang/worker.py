"""The worker of DDTREE: SGLang's DSPARK worker with a tree where it has a chain.

Prefill, draft forward, target forward, cache moves and the commit of features are the stock parts. What is
ours is one decode step: draft, tree, verify, walk, commit. The walk's permutation (accepted path first) makes
every later step of SGLang believe that a chain was verified.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import (
    BuildRaggedVerifyWindow,
    ScatterCompactToStrided,
)
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input
from sglang.srt.speculative.dspark_components.dspark_planner import VerifyWindow, alloc_verify_window
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache

from specplug.drafting import Drafted
from specplug.flat_window import FlatWindow, flat_mask, flat_window
from specplug.round_log import Rounds
from specplug.tree import DraftTree
from specplug.verify import Walk, path_permutation, walk
from specplug_sglang import config
from specplug_sglang.drafter import TreeDrafter
from specplug_sglang.planner import TreePlanner
from specplug_sglang.refusals import check_backend
from specplug_sglang.sampling import root_only, temperatures
from specplug_sglang.verify_input import TreeVerifyInput
from specplug_sglang.watched import WatchedWorker


class Verified(NamedTuple):
    """The target's answer, one row a window column, whatever was trimmed."""

    logits_output: Any  # next_token_logits [R * W, V], hidden_states [R * W, H]; rows not computed are 0
    live: torch.Tensor  # [R] int32, nodes that may be accepted
    nodes: int  # draft rows that were computed
    graph: bool  # whether a captured graph ran


class TreeWorker(WatchedWorker, DSparkWorkerV2):
    """One a rank. R requests, B nodes, W = B + 1 window rows, gamma depth."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for a target or a draft that trees do not work with."""
        super().__init__(*args, **kwargs)
        settings = self.tree_settings = config.settings()
        if mambaish_config(self.model_runner.model_config) is not None:
            raise ValueError("DDTREE refuses: recurrent layers cannot follow a branch; use another target.")
        self._drafter = TreeDrafter(self, settings)
        self._verify_planner = TreePlanner(self._verify_planner, budget=settings.budget, depth=settings.depth)

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        check_backend(self.model_runner.attn_backend)

    def init_cuda_graphs(self) -> None:
        """The last step of the start: a cost table is checked against the engine as it will run."""
        super().init_cuda_graphs()
        settings = self.tree_settings
        self._verify_planner.policy = self.start_watching(
            settings.options, algorithm=config.ALGORITHM, budget=settings.budget
        )

    def _maybe_build_draft_sampler(self) -> None:
        """No chain is drawn inside the draft's graph: trees are grown from its hidden states."""
        return None

    def _forward_decode(
        self, batch: Any, on_publish: Any, grammar_barrier: Any = None, coordination_plan: Any = None
    ) -> GenerationBatchResult:
        if batch.spec_info is None:
            batch.spec_info = DFlashDraftInputV2.create_idle_input(device=self.device)
        if batch.forward_mode.is_idle():
            self._watch.interrupted()
            return super()._forward_decode(batch, on_publish, grammar_barrier, coordination_plan)
        planner, prefix = self._verify_planner, batch.seq_lens
        self._watch.started(batch)
        slots = self._slots(batch)
        shape = planner.coming_shape(batch)
        drafted = self._drafter.draft(batch, slots, shape)
        for name in ("tokens", "parents", "depths", "scores", "counts"):  # one tree on all ranks
            self._tp_sync.sync(SpecTpSyncSite.DSPARK_DRAFT, getattr(drafted.tree, name))
        self._watch.drafted(shape)
        tree, rooted = drafted.tree, root_only(batch)
        if rooted is not None:
            tree = tree.select(~rooted, DraftTree.empty(len(rooted), tree.budget, device=rooted.device))
        survivals = planner.relay.pack(tree, shape) if planner.schedules_verify_budget else None
        layout = planner.layout(batch, survivals)
        windows = flat_window(tree, batch.spec_info.bonus_tokens.view(-1), prefix, max_depth=self.gamma)
        prepared = self._paths.prepare(batch, tree)
        verified = self._verify(batch, tree, windows, layout, slots)
        output = verified.logits_output
        draws = self._paths.draw(batch, output, tree, windows.positions, prepared, grammar_barrier)
        draws = self._tp_sync.sync(SpecTpSyncSite.DSPARK_ACCEPT_SAMPLE, draws)
        result = walk(tree.parents, tree.tokens, verified.live, draws, max_depth=self.gamma)
        self._paths.committed(batch, result.tokens)
        if batch.return_logprob:
            self._paths.logprobs(batch, output, draws, result)
        lengths = prefix + result.num_emitted.to(prefix.dtype)
        self._move_cache(batch, slots, result)
        if on_publish is not None:
            on_publish(lengths, **({} if survivals is None else {"confidence": survivals}))
        self._commit_features(slots, output.hidden_states, result)
        output.hidden_states = None
        rounds = None
        if self._watch.records_rounds:
            asked = temperatures(batch.sampling_info)
            rounds = Rounds.of(Drafted(tree, drafted.log_probs), verified.live, asked, result)
        answer = self._result(result, lengths, verified)
        return self._watch.ended(answer, plan=planner.plan, nodes=verified.nodes, rounds=rounds)

    def _slots(self, batch: Any) -> VerifyWindow:
        """Cache slots of every window, W a request."""
        lengths = batch.seq_lens_cpu
        return alloc_verify_window(
            batch=batch,
            bs=len(batch.seq_lens),
            device=self.device,
            verify_num_draft_tokens=self.verify_num_draft_tokens,
            block_pos_offsets=self._block_pos_offsets,
            model_runner=self.model_runner,
            seq_lens_cpu=batch.spec_info.nxt_kv_lens_cpu if lengths is None else lengths,
        )

    def _verify(
        self,
        batch: Any,
        tree: DraftTree,
        windows: FlatWindow,
        layout: RaggedVerifyLayout | None,
        slots: VerifyWindow,
    ) -> Verified:
        """One target forward over the windows, or over the rows of them that the layout keeps."""
        width, prefix = self.verify_num_draft_tokens, batch.seq_lens
        lengths, total = batch.seq_lens_cpu, batch.seq_lens_sum
        compact = self._verify_planner.should_run_compact(layout=layout)
        if compact:
            packed = BuildRaggedVerifyWindow.execute(
                batch=batch,
                layout=layout,
                draft_block_ids=windows.ids[:, :1],
                draft_tokens=windows.ids[:, 1:],
                bs=len(prefix),
                device=self.device,
                verify_num_draft_tokens=width,
                model_runner=self.model_runner,
            )
            index = packed.window_index
            ids, batch.out_cache_loc = packed.verify_ids, packed.verify_cache_loc
            positions = windows.positions.flatten()[index.clamp_min(0)].masked_fill(index < 0, 0)
            rows = layout.verify_lens
            host_rows = torch.tensor(layout.verify_lens_cpu or rows.tolist())
        else:
            index, ids, positions = None, windows.ids.flatten(), windows.positions.flatten()
            batch.out_cache_loc = slots.verify_cache_loc
            rows, host_rows = torch.full_like(tree.counts, width), torch.full_like(lengths, width)
        host_rows = host_rows.to(lengths.dtype)
        verify_input = TreeVerifyInput(
            draft_token=ids,
            positions=positions,
            draft_token_num=width,
            topk=2,  # what tells a tree from a chain
            custom_mask=flat_mask(
                windows.sees, prefix, rows, size=int((host_rows * (lengths + host_rows)).sum())
            ),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            ragged_verify_layout=layout if compact else None,
            live_seq_lens_cpu=lengths,
            kv_loc_plan=slots.kv_loc_plan,
            kv_loc_cols=index,
        )
        batch.seq_lens_cpu = lengths + host_rows
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        answer = self._verify_executor._forward_prepared_verify(
            batch=batch, verify_input=verify_input, seq_lens_cpu_backup=lengths, seq_lens_sum_backup=total
        )
        if compact:
            for name in ("next_token_logits", "hidden_states"):
                strided = ScatterCompactToStrided.execute(
                    compact=getattr(answer.logits_output, name),
                    layout=layout,
                    fill_value=0.0,
                    verify_num_draft_tokens=width,
                )
                setattr(answer.logits_output, name, strided)
        live = tree.counts
        if layout is not None:
            live = torch.minimum(live, layout.verify_lens.to(live.dtype) - 1)
        nodes = int(host_rows.sum()) - len(prefix)
        return Verified(answer.logits_output, live, nodes, bool(answer.can_run_cuda_graph))

    def _move_cache(self, batch: Any, slots: VerifyWindow, result: Walk) -> None:
        """The target's keys and values of the accepted path move to the front of the window."""
        requests, steps = result.path.shape
        first = torch.arange(requests, device=result.path.device)[:, None] * self.verify_num_draft_tokens
        taken = torch.arange(steps, device=result.path.device) < result.num_emitted[:, None]
        batch.out_cache_loc = slots.verify_cache_loc
        move_accept_tokens_to_target_kvcache(
            batch,
            torch.where(taken, result.path + first, -1).to(torch.int32),
            result.num_emitted - 1,
            self.model_runner.token_to_kv_pool_allocator,
        )

    def _commit_features(self, slots: VerifyWindow, features: torch.Tensor, result: Walk) -> None:
        """The draft's context grows by the accepted path's features, in path order."""
        width = self.verify_num_draft_tokens
        features = features.view(len(result.path), width, -1)
        order = path_permutation(result.path, result.num_emitted, width)
        features = features.gather(1, order[..., None].expand_as(features))
        places = self._kv_injector.ids_for(slots.kv_loc_plan)
        with self._draft_context():
            self._kv_injector.inject_target_hidden(
                target_hidden=features.flatten(0, 1),
                cache_loc=places,
                cache_loc_2d=places.view(len(features), width),
                positions=slots.positions_2d.reshape(-1),
                commit_lens=result.num_emitted,
            )

    def _result(self, result: Walk, lengths: torch.Tensor, verified: Verified) -> GenerationBatchResult:
        """What SGLang's scheduler reads; a request's tokens lead its W columns."""
        width = self.verify_num_draft_tokens
        tokens = torch.nn.functional.pad(result.tokens.clamp_min(0), (0, width - result.tokens.shape[1]))
        bonus = tokens.gather(1, result.num_emitted.long()[:, None] - 1)[:, 0]
        following = make_next_draft_input(bonus_tokens=bonus, new_seq_lens=lengths)
        return GenerationBatchResult(
            logits_output=verified.logits_output,
            next_token_ids=tokens.flatten(),
            accept_lens=result.num_emitted,
            block_accept_lens=result.num_emitted,
            cap_lens=verified.live.to(torch.int32) + 1,
            can_run_cuda_graph=verified.graph,
            next_draft_input=following,
            speculative_num_draft_tokens=width,
            new_seq_lens=lengths,
        )
