"""The weights of a draft's heads, ready to use: Markov head, confidence head, reduced vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from safetensors import safe_open

from specplug.checkpoint import DraftCheckpoint
from specplug.confidence import ConfidenceHead
from specplug.draft_tensors import CONFIDENCE, D2T, GATE, JOINT, T2D, W1, W2
from specplug.heads import MarkovHead, Projection
from specplug.vocabulary import DraftVocabulary
from specplug.weights import read_tensors


class DraftHeads(NamedTuple):
    """Each is None where the draft has none."""

    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    vocabulary: DraftVocabulary | None


def build_heads(
    draft: DraftCheckpoint,
    tensors: Mapping[str, torch.Tensor],  # by checkpoint name; others are ignored
    *,
    scale: float = 1.0,  # what the host multiplies its logits by
) -> DraftHeads:
    """Heads over tensors that are already loaded, in their dtype and on their device.

    Raises ValueError where d2t is not one to one or t2d contradicts it.
    """
    markov = None
    if draft.markov_head is not None:
        projections = {}
        for field, name in (("gate", GATE), ("joint", JOINT)):
            if f"{name}.weight" in tensors:
                projections[field] = Projection(tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        markov = MarkovHead(tensors[W1], tensors[W2], scale, **projections)
        assert markov.kind == draft.markov_head.kind, (markov.kind, draft.markov_head)
    confidence = None
    if draft.confidence_head:
        weight, bias = (tensors[name] for name in CONFIDENCE)
        reads_markov = weight.shape[1] > draft.hidden_size
        confidence = ConfidenceHead(weight, bias, tensors[W1] if reads_markov else None)
    vocabulary = None
    if draft.draft_vocab_size is not None:
        vocabulary = DraftVocabulary.from_offsets(tensors[D2T], draft.vocab_size, t2d=tensors.get(T2D))
    return DraftHeads(markov, confidence, vocabulary)


def read_heads(
    draft: DraftCheckpoint,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,  # of the float tensors; None = as stored
) -> DraftHeads:
    """The heads of a checkpoint that ``read_draft`` accepted; no other tensor is read."""
    wanted = {W1, W2, D2T, T2D, *CONFIDENCE}
    wanted |= {f"{name}.{part}" for name in (GATE, JOINT) for part in ("weight", "bias")}
    tensors: dict[str, torch.Tensor] = {}
    for name, info in read_tensors(draft.path).items():
        if name not in wanted:
            continue
        with safe_open(draft.path / info.file, framework="pt") as opened:
            tensor = opened.get_tensor(name)
        tensors[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
    return build_heads(draft, tensors)
