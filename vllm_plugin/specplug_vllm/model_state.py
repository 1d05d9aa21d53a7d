"""The target's ModelState: vLLM asks it for positions and attention metadata before the forward, for the
acceptance object once, and calls it when tokens have been accepted. It lays out the step's trees and commits
the accepted path.

A forward captured as a full CUDA graph runs none of this again: it reads the tensors of its capture. For such
a step (vLLM says so: a capture, or the mode FULL) the layout has the graph's padded shape and is copied to
fixed buffers before the replay. A chain is then verified as the tree it is: the graph knows no other path.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention

from specplug.verify import Walk
from specplug.window import Windows, commit, lay_out_windows
from specplug_kernels.ops import CacheMover
from specplug_vllm import grammar
from specplug_vllm.acceptance import TreeSampler
from specplug_vllm.attention_trees import AttentionTrees, GraphBuffers, check_captured_batch
from specplug_vllm.history import follow_paths
from specplug_vllm.refusals import check_attention_layers

if TYPE_CHECKING:
    from specplug_vllm.speculator import TreeSpeculator

logger = init_logger("vllm.specplug")


@dataclass(frozen=True)
class Step:
    """The layout of one step, from prepare_attn until propose."""

    windows: Windows  # of all R requests, then those of the padding
    parents: torch.Tensor  # [R, B] int32
    live: torch.Tensor  # [R] int32
    roots: torch.Tensor  # [R] int64, position of each root: the tokens committed before it
    slot_mappings: torch.Tensor  # [groups, N] int64


def chain_reasons(params: Any, vllm_config: Any) -> list[str]:
    """Why a request's drafts must be chains: stages of vLLM's sampler that read the tokens *before* a row
    take the rows above it for its history, which on a chain they are."""
    if params is None:
        return []
    reasons = {
        "structured_outputs": params.structured_outputs is not None and not grammar.served(vllm_config),
        "thinking_token_budget": params.thinking_token_budget is not None,
    }
    return [name for name, wanted in reasons.items() if wanted]


def _padded(values: torch.Tensor, requests: int, *, fill: int) -> torch.Tensor:
    """``values`` [R, ...] with rows of ``fill`` up to ``requests``."""
    missing = requests - values.shape[0]
    return torch.cat((values, values.new_full((missing, *values.shape[1:]), fill))) if missing else values


def tree_model_state_cls(base: type, speculator: TreeSpeculator, target_layers: frozenset[str]) -> type:
    """A subclass of vLLM's ``base`` ModelState bound to this worker's drafter."""

    class TreeModelState(base):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device) -> None:
            super().__init__(vllm_config, model, encoder_cache, device)
            layers = get_layers_from_vllm_config(vllm_config, Attention, list(target_layers))
            check_attention_layers(layers)
            self.step: Step | None = None
            self.branches = False  # whether a tree of the step may branch
            self.chain_requests: Counter[str] = Counter()  # requests drafted as chains, by reason
            self._layers = layers
            self._graph_buffers: GraphBuffers | None = None  # made when the first graph is captured
            self.cache_movers: list[CacheMover] = []  # one a group of cache layers, made at the first move
            self._tree_positions = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=device)
            self._custom_processors = False

        def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
            stock_processors = 3  # logit bias, penalties, bad words
            self._custom_processors = len(sampler.logits_processors) > stock_processors
            self._req_states = sampler.req_states
            paths = follow_paths(sampler)
            return sampler, TreeSampler(sampler, self, speculator.depth, paths, speculator.ops.walk)

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            reasons = chain_reasons(new_req_data.sampling_params, self.vllm_config)
            if self._custom_processors:
                reasons.append("custom logits processors")
            params = new_req_data.sampling_params
            speculator.store.forget(
                req_index, chain_only=bool(reasons), temperature=params.temperature if params else 0.0
            )
            for reason in reasons:
                self.chain_requests[reason] += 1
                if speculator.manager is not None and speculator.manager.counters is not None:
                    speculator.manager.counters.add("chain_requests", label=reason.replace(" ", "_"))
                if self.chain_requests[reason] == 1:
                    logger.info(
                        "specplug: a request uses %s, which follows the order of rows; "
                        "such requests draft chain-shaped trees (exact, shorter). Counted, not logged again.",
                        reason,
                    )

        def prepare_attn(
            self,
            input_batch: Any,
            cudagraph_mode: Any,
            block_tables: Any,
            slot_mappings: torch.Tensor,
            attn_groups: Any,
            kv_cache_config: Any,
            for_capture: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> dict[str, Any]:
            metadata = super().prepare_attn(
                input_batch,
                cudagraph_mode,
                block_tables,
                slot_mappings,
                attn_groups,
                kv_cache_config,
                for_capture,
                *args,
                **kwargs,
            )
            speculator.pending_commit = speculator.walked = None
            self.step = None
            self._kv_cache_groups = kv_cache_config.kv_cache_groups
            num_rows = input_batch.num_tokens_after_padding
            positions = input_batch.positions
            drafted_np = input_batch.num_draft_tokens_per_req
            drafts = drafted_np is not None and input_batch.num_draft_tokens > 0
            captured = for_capture or cudagraph_mode == CUDAGraphMode.FULL
            if captured:
                check_captured_batch(input_batch, speculator.budget + 1, for_capture=for_capture)
            if drafts or captured:
                width = speculator.budget + 1 if captured else int(drafted_np.max()) + 1
                step = self._lay_out(input_batch, slot_mappings, width, for_capture=for_capture)
                positions = step.windows.positions(positions)
                if drafts:
                    self.step = step
                    # Chains are what the host's attention and cache expect as they are.
                    self.branches = not speculator.store.linear(input_batch.idx_mapping_np[drafted_np > 0])
                if captured:
                    self._attach(metadata, self._captured_trees(step))
                elif self.branches:
                    self._attach(metadata, self._attention_trees(input_batch, step, drafted_np))
            if speculator.manager is not None and not for_capture:
                speculator.manager.begin(input_batch)
            self._tree_positions[:num_rows] = positions[:num_rows]
            return metadata

        @staticmethod
        def _attach(metadata: dict[str, Any], trees: AttentionTrees) -> None:
            for layer_metadata in {id(value): value for value in metadata.values()}.values():
                layer_metadata.specplug_trees = trees

        def _cache_mover(self, group: Any) -> CacheMover:
            layers = [self._layers[name] for name in group.layer_names if name in self._layers]
            views = [view for layer in layers for view in layer.impl.cache_views(layer.kv_cache)]
            return speculator.ops.cache_mover(views)

        def _lay_out(
            self, input_batch: Any, slot_mappings: torch.Tensor, width: int, *, for_capture: bool
        ) -> Step:
            store = speculator.store
            slots = input_batch.idx_mapping
            real, padded = input_batch.num_reqs, input_batch.num_reqs_after_padding
            ends = input_batch.query_start_loc[1 : padded + 1]
            if for_capture:  # nothing is drafted: whole windows without a live node
                drafted = input_batch.query_start_loc[: padded + 1].diff() - 1
            else:
                # Device values: the host's twins are only bounds when vLLM trims drafts.
                drafted = input_batch.cu_num_logits.diff()[:real] - 1
            roots = input_batch.positions[(ends[:real] - drafted - 1).long()]
            if for_capture:
                live = torch.zeros_like(drafted)
            else:
                # Drafts scheduled behind an unfinished prefill are placeholders: nothing was drafted there.
                prefilling = roots < self._req_states.prefill_len.gpu[slots]
                live = torch.where(prefilling, 0, torch.minimum(drafted, store.counts[slots]))
            parents, depths = store.parents[slots], store.depths[slots]
            windows = lay_out_windows(
                ends=ends,
                drafted=_padded(drafted, padded, fill=-1),  # the padding has no window
                parents=_padded(parents, padded, fill=-1),
                depths=_padded(depths, padded, fill=0),
                live=_padded(live, padded, fill=0),
                width=width,
                num_rows=input_batch.num_tokens_after_padding,
                max_depth=speculator.depth,
                visibility=speculator.ops.visibility,
            )
            return Step(windows, parents, live, roots, slot_mappings)

        def _attention_trees(self, input_batch: Any, step: Step, drafted_np: np.ndarray) -> AttentionTrees:
            with_drafts = np.flatnonzero(drafted_np)
            only_windows = (
                len(with_drafts) == input_batch.num_reqs
                and input_batch.num_draft_tokens + input_batch.num_reqs == input_batch.num_tokens
            )
            requests = torch.from_numpy(with_drafts).to(self.device, non_blocking=True)
            windows = step.windows.select(requests, input_batch.num_tokens_after_padding)
            prefix_lens = step.roots[requests].to(torch.int32)
            bound = int(input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].max())
            attend = speculator.ops.attention(windows)
            return AttentionTrees(windows, attend, requests, prefix_lens, bound, only_windows)

        def _captured_trees(self, step: Step) -> AttentionTrees:
            if self._graph_buffers is None:
                self._graph_buffers = GraphBuffers(step.windows, requests=self.max_num_reqs)
            return self._graph_buffers.hold(
                step.windows,
                step.roots,
                attention=speculator.ops.attention,
                max_prefix_len=self.max_model_len,
            )

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
            inputs = super().prepare_inputs(input_batch, req_states)
            return {**inputs, "positions": self._tree_positions[: input_batch.num_tokens_after_padding]}

        def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
            inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
            return {**inputs, "positions": self._tree_positions[:num_tokens]}

        def tree_positions(self, rows: torch.Tensor) -> torch.Tensor:
            """Positions the forward used at ``rows`` (int64): keys of the sampler's noise."""
            return self._tree_positions[rows]

        def accepted(self, walk: Walk) -> None:
            """Called by the acceptance object with the step's walk."""
            assert self.step is not None
            speculator.walked = walk, self.step.live
            if self.branches:
                speculator.pending_commit = commit(self.step.windows, walk.path, walk.num_emitted)

        def postprocess_state(
            self, idx_mapping: torch.Tensor, num_sampled: Any, *args: Any, **kwargs: Any
        ) -> None:
            super().postprocess_state(idx_mapping, num_sampled, *args, **kwargs)
            moves = speculator.pending_commit
            if moves is None or self.step is None:
                return
            if not self.cache_movers:
                self.cache_movers = [self._cache_mover(group) for group in self._kv_cache_groups]
            for move, slots in zip(self.cache_movers, self.step.slot_mappings, strict=True):
                move(moves, slots)

    return TreeModelState
