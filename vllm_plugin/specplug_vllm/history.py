"""Penalties and bad words along the paths of trees, in place of vLLM's, which follow the rows.

vLLM keeps the state; only its kernels are replaced, and only in steps that verify trees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from specplug.processors import Ancestors
from specplug_kernels import history


class RowPaths(NamedTuple):
    """The path of each logits row: what was drafted below the root, the row's own token last."""

    tokens: torch.Tensor  # [L, gamma] int64
    depths: torch.Tensor  # [L] int64, tokens that count

    @classmethod
    def of(
        cls,
        path: Ancestors,  # of windows [R, W]
        index: torch.Tensor,  # [R, W] int64, logits row of each window column
        inside: torch.Tensor,  # [R, W] bool
        rows: int,
    ) -> RowPaths:
        target = torch.where(inside, index, rows).flatten()
        tokens = path.tokens.new_zeros(rows + 1, path.tokens.shape[2])
        depths = path.depths.new_zeros(rows + 1)
        tokens.index_copy_(0, target, path.tokens.flatten(0, 1))
        depths.index_copy_(0, target, path.depths.flatten())
        return cls(tokens[:rows], depths[:rows])


class Paths:
    """The paths of the rows that are being sampled; ``rows`` is None where a request's rows are in line."""

    def __init__(self, penalties: PenaltiesState, bad_words: BadWordsState) -> None:
        self.rows: RowPaths | None = None
        self._penalties, self._bad_words = penalties, bad_words

    def wanted(self, slots: np.ndarray) -> bool:
        """Whether a request in these slots has penalties or bad words."""
        return bool(self._penalties.use_penalty[slots].any() or self._bad_words.num_bad_words.np[slots].any())


class PathPenalties(PenaltiesState):
    paths: Paths

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        if self.paths.rows is None or not np.any(self.use_penalty[ctx.idx_mapping_np]):
            return super().apply(logits, ctx)
        history.penalise(
            logits,
            ctx.expanded_idx_mapping,
            *self.paths.rows,
            repetition=self.repetition_penalty.gpu,
            frequency=self.frequency_penalty.gpu,
            presence=self.presence_penalty.gpu,
            prompt_words=self.prompt_bin_mask,
            output_counts=self.output_bin_counts,
        )
        return logits


class PathBadWords(BadWordsState):
    paths: Paths

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        most_words = int(self.num_bad_words.np[ctx.idx_mapping_np].max())
        if self.paths.rows is None or not most_words:
            return super().apply(logits, ctx)
        history.ban(
            logits,
            ctx.expanded_idx_mapping,
            *self.paths.rows,
            words=self.bad_word_token_ids.gpu,
            offsets=self.bad_word_offsets.gpu,
            num_words=self.num_bad_words.gpu,
            most_words=most_words,
            all_tokens=self.req_states.all_token_ids.gpu,
            prompt_lens=self.req_states.prompt_len.gpu,
            total_lens=self.req_states.total_len.gpu,
        )
        return logits


def follow_paths(sampler: Any) -> Paths:
    """Make a sampler's penalties and bad words follow paths, which the caller sets around each sampling."""
    (penalties,) = (one for one in sampler.logits_processors if type(one) is PenaltiesState)
    (bad_words,) = (one for one in sampler.logits_processors if type(one) is BadWordsState)
    penalties.__class__, bad_words.__class__ = PathPenalties, PathBadWords
    penalties.paths = bad_words.paths = Paths(penalties, bad_words)
    return penalties.paths
