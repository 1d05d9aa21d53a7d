"""A target and the draft that reads it, loaded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from specplug.checkpoint import DraftCheckpoint
from specplug.local.draft import Draft
from specplug.local.target import Target


class Pair(NamedTuple):
    """What is evaluated, recorded or timed."""

    target: Target
    draft: Draft
    stop: frozenset[int]  # token ids that end an answer


def load_pair(
    target: str | Path,  # folder or hub id
    checkpoint: DraftCheckpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    depth: int | None = None,  # None: the draft's own
) -> Pair:
    """The target with its hooks, and the draft over its embedding and head. Raises ValueError as both do."""
    model = Target.load(target, taps=checkpoint.target_layer_ids, dtype=dtype, device=device)
    draft = Draft(
        checkpoint,
        embedding=model.model.get_input_embeddings().weight,
        lm_head=model.model.get_output_embeddings().weight,
        dtype=dtype,
        depth=depth,
    )
    return Pair(model, draft, model.stop_tokens())
