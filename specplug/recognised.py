"""Drafts that are recognised and described, but not read: their model is not one specplug's trees know.

Gemma 4 DSpark drafts (DeepSpec) cap their logits and have layers of their own; DeepSeek-V4 targets carry a
DSpark draft in their own checkpoint (config keys ``dspark_*``, tensors ``mtp.*``). From the config alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from specplug.draft_config import (
    DSPARK,
    MAX_DEPTH,
    UNSUPPORTED,
    DraftConfig,
    Layout,
    agreed,
    decide_layout,
    decode_config,
    known,
    read_config,
)
from specplug.hub import checkpoint_folder

_DESCRIBED = {"Gemma4DSparkModel", "DSparkDraftModel", "DSparkV41DraftModel"}


class RecognisedDraft(NamedTuple):
    """What the config says of a draft that trees do not support."""

    path: Path
    architecture: str
    unsupported: str  # why, as a clause
    bundled: bool  # inside its target's checkpoint
    layout: Layout
    block_size: int
    depth: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # output of that target layer, -1 = the embedding
    markov_head: str | None  # its kind
    markov_rank: int
    confidence_head: bool
    vocab_size: int
    logit_softcap: float | None  # c of c tanh(logits / c)


def recognise(path_or_repo: str | Path) -> RecognisedDraft | None:
    """Describe a Gemma 4 or DeepSeek-V4 DSpark draft; None for any other, which ``read_draft`` judges.

    Raises ValueError for a damaged config or one that leaves a fact open, naming the key.
    """
    name = str(path_or_repo)
    folder = checkpoint_folder(name, files=["config.json"])
    raw = read_config(folder)
    if raw.get("speculators_model_type") is not None:
        return None
    listed = raw.get("architectures")
    architectures = [a for a in listed if isinstance(a, str)] if isinstance(listed, list) else []
    if known(raw) or (UNSUPPORTED.keys() - _DESCRIBED) & set(architectures):
        return None
    gemma = "Gemma4DSparkModel" in architectures
    bundled = not gemma and any(key.startswith("dspark_") for key in raw)
    if not gemma and not bundled:
        return None
    config = decode_config(raw, "plain", name)
    layout = decide_layout(config, DSPARK, "plain", name)
    block_size = agreed("block_size", config, name)
    depth = block_size if layout == "anchor_first" else block_size - 1
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(
            f"{name}: block_size: expected a depth of 1..{MAX_DEPTH}, got {block_size} ({layout})"
        )
    rank = _rank(config, name)
    kind = config.dspark_markov_head_type or config.markov_head_type or "vanilla"
    return RecognisedDraft(
        path=folder,
        architecture=next(iter(architectures), "unnamed"),
        unsupported=UNSUPPORTED["Gemma4DSparkModel" if gemma else "DSparkDraftModel"],
        bundled=bundled,
        layout=layout,
        block_size=block_size,
        depth=depth,
        mask_token_id=agreed("mask_token_id", config, name),
        target_layer_ids=agreed("target_layer_ids", config, name),
        markov_head=kind if rank else None,
        markov_rank=rank,
        confidence_head=config.enable_confidence_head,
        vocab_size=config.vocab_size,
        logit_softcap=_number(raw, "final_logit_softcapping", name),
    )


def _rank(config: DraftConfig, name: str) -> int:
    ranks = {rank for rank in (config.markov_rank, config.dspark_markov_rank) if rank is not None}
    if len(ranks) != 1 or min(ranks) < 0:
        raise ValueError(
            f"{name}: markov_rank or dspark_markov_rank: expected one rank of 0 or more, "
            f"got {sorted(ranks) or None}"
        )
    return ranks.pop()


def _number(raw: dict[str, Any], key: str, name: str) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{name}: {key}: expected a positive number, got {value!r}")
    return float(value)
