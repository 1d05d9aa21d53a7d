"""Acceptance: vLLM's own sampler draws the target's token at every row, and the walk keeps the path it
spells.

Replaces the stock RejectionSampler through ``ModelState.custom_sampler``. The noise of vLLM's V2 sampler is
keyed by (seed, position) and positions are depths, so a row's draw is the draw plain decoding would make
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import _iter_request_chunks, get_max_chunk_logits

import specplug.verify
from specplug.processors import Ancestors, ancestors
from specplug.ragged import window_index
from specplug.verify import Walk, path_permutation
from specplug_vllm.history import Paths, RowPaths

if TYPE_CHECKING:
    from specplug_vllm.model_state import Step


class TreeSampler:
    """Called with the logits of a step that has drafts; the signature is that of vLLM's RejectionSampler."""

    enable_adaptive_verification = False  # read by v1/worker/gpu/warmup.py

    def __init__(
        self,
        sampler: Any,
        state: Any,
        max_depth: int,
        paths: Paths,
        walk: Callable[..., Walk] = specplug.verify.walk,
    ) -> None:
        self.sampler = sampler
        self.state = state
        self.max_depth = max_depth
        self.walk = walk
        self.paths = paths

    def __call__(
        self,
        logits: torch.Tensor,  # [L, V], one row a window column of every request
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,  # [L] bool, rows the grammar rules out
    ) -> SamplerOutput:
        step = self.state.step
        assert step is not None, "drafts in the batch without a layout: prepare_attn was not called"
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        dims = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        positions = self.state.tree_positions(input_batch.logits_indices)
        input_ids = input_batch.input_ids[input_batch.logits_indices]

        # As the stock rejection sampler: whole requests in chunks, to bound the fp32 copy of the logits.
        bounds = input_batch.cu_num_logits_np
        limit = get_max_chunk_logits(logits.shape[1])
        chunks = [(0, input_batch.num_reqs)]
        if logits.shape[0] > limit:
            chunks = list(_iter_request_chunks(bounds, limit))
        walks, logprobs = [], []
        for first, last in chunks:
            rows = (
                slice(int(bounds[first]), int(bounds[last])) if len(chunks) > 1 else slice(0, logits.shape[0])
            )
            starts = input_batch.cu_num_logits[first : last + 1] - rows.start
            index, inside = window_index(starts[:-1], starts.diff(), step.windows.rows.shape[1])
            window_ids = input_ids[rows][index]
            if self.state.branches and self.paths.wanted(input_batch.idx_mapping_np[first:last]):
                path = self._path(step, slice(first, last), window_ids)
                self.paths.rows = RowPaths.of(path, index, inside, rows.stop - rows.start)
            sampled, processed = self.sampler.sample(
                logits[rows],
                input_batch.expanded_idx_mapping[rows],
                input_batch.idx_mapping[first:last],
                input_batch.idx_mapping_np[first:last],
                positions[rows],
                input_ids[rows],
                input_batch.expanded_local_pos[rows],
                input_batch.seq_lens_cpu_upper_bound.numpy()[first:last],
                return_logprobs=dims is not None,
            )
            self.paths.rows = None
            blocked = None if invalid_drafts is None else invalid_drafts[rows][index]
            result = self._walk(step, slice(first, last), sampled[index], window_ids, blocked)
            walks.append(result)
            if dims is not None:
                source = processed if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES else logits[rows]
                mapping = input_batch.expanded_idx_mapping[rows]
                logprobs.append(self._logprobs(source, result, index, inside, dims, mapping))

        accepted = (
            walks[0] if len(walks) == 1 else Walk(*(torch.cat(parts) for parts in zip(*walks, strict=True)))
        )
        self.state.accepted(accepted)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            accepted.num_emitted.clone(),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=accepted.tokens,
            logprobs_tensors=self._concatenated(logprobs, input_batch.cu_num_logits),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _path(self, step: Step, requests: slice, input_ids: torch.Tensor) -> Ancestors:
        """What each window row's past is beyond the root. ``input_ids``: [r, W] int32."""
        nodes = input_ids.shape[1] - 1
        return ancestors(
            step.parents[requests, :nodes],
            input_ids[:, 1:].long(),
            step.windows.depths[requests, 1:],
            max_depth=self.max_depth,
        )

    def _walk(
        self,
        step: Step,
        requests: slice,
        sampled: torch.Tensor,  # [r, W] int64
        input_ids: torch.Tensor,  # [r, W] int32
        blocked: torch.Tensor | None,  # [r, W] bool
    ) -> Walk:
        nodes = sampled.shape[1] - 1
        return self.walk(
            step.parents[requests, :nodes],
            input_ids[:, 1:].long(),
            step.live[requests],
            sampled,
            max_depth=self.max_depth,
            blocked=None if blocked is None else blocked[:, 1:],
        )

    def _logprobs(
        self,
        scores: torch.Tensor,  # [l, V]
        result: Walk,
        index: torch.Tensor,  # [r, W]
        inside: torch.Tensor,  # [r, W]
        dims: tuple[int, int],
        request_of_row: torch.Tensor,  # [l] int64
    ) -> LogprobsTensors:
        """vLLM reads the first num_sampled rows of a request: put the accepted path's rows there."""
        rows = scores.shape[0]
        width = index.shape[1]
        columns = path_permutation(result.path, result.num_emitted, width)
        target = torch.where(inside, index, rows).flatten()
        order = torch.arange(rows + 1, device=scores.device)
        order.scatter_(0, target, index.gather(1, columns).flatten())
        emitted = torch.nn.functional.pad(
            result.tokens, (0, max(0, width - result.tokens.shape[1])), value=-1
        )
        sampled = torch.zeros(rows + 1, dtype=torch.int64, device=scores.device)
        sampled.scatter_(0, target, emitted[:, :width].clamp(min=0).flatten())
        num_logprobs, max_token_ids = dims
        return compute_topk_scores(
            scores[order[:rows]],
            num_logprobs,
            sampled[:rows],
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=request_of_row,
            max_per_req_token_ids=max_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    @staticmethod
    def _concatenated(
        parts: list[LogprobsTensors],
        bounds: torch.Tensor,  # [R + 1] int32, first logits row of each request
    ) -> LogprobsTensors | None:
        if not parts:
            return None
        return LogprobsTensors.cat(parts)._replace(cu_num_generated_tokens_tensor=bounds.clone())
