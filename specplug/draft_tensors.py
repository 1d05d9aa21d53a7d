"""Exactly the tensors a draft's config promises: names, and the shapes that decide something.

A name too many is as wrong as one too few: it is a part of the model that would silently not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from specplug.draft_config import DraftConfig, Family
from specplug.weights import TensorInfo

HeadKind = Literal["vanilla", "gated", "rnn"]


class MarkovHeadInfo(NamedTuple):
    """What biases a position's logits by the token before; formulas in specplug.heads."""

    kind: HeadKind
    rank: int


W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
GATE, JOINT = "markov_head.gate_proj", "markov_head.joint_proj"  # each with .weight and .bias
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
D2T, T2D = "d2t", "t2d"

_PROJECTIONS: Mapping[HeadKind, str | None] = {"vanilla": None, "gated": GATE, "rnn": JOINT}
_FIXED = ("fc", "norm", "hidden_norm")
_PER_LAYER = (
    "input_layernorm", "post_attention_layernorm",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
_ATTENTION_BIASES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_OPTIONAL = ("embed_tokens.weight", "lm_head.weight", T2D, "mask_embedding")  # vLLM skips the last two


def markov_head(
    config: DraftConfig, family: Family, tensors: Mapping[str, TensorInfo], name: str
) -> MarkovHeadInfo | None:
    """The Markov head that config and tensors both state; None for a draft without one.

    Raises ValueError where they differ.
    """
    present = sorted(tensor for tensor in tensors if tensor.startswith("markov_head."))
    rank = config.markov_rank or 0
    if rank < 0:
        raise ValueError(f"{name}: markov_rank: expected 0 or more, got {rank}")
    if rank and not present:
        raise ValueError(f"{name}: markov_rank is {rank}, but there is no markov_head tensor")
    if present and not rank:
        raise ValueError(
            f"{name}: {present[0]} is present, but markov_rank is {config.markov_rank}: expected its rank"
        )
    if rank and not family.markov:
        raise ValueError(
            f"{name}: markov_rank is {rank}, but a DFlash draft has no Markov head; is it a DSpark draft?"
        )
    if not rank:
        if family.markov and config.markov_rank is None:
            raise ValueError(
                f"{name}: markov_rank: missing; a DSpark draft states its rank, or 0 where it has no head"
            )
        return None
    kind = config.markov_head_type or "vanilla"
    if kind not in _PROJECTIONS:
        raise ValueError(f"{name}: markov_head_type: expected {', '.join(_PROJECTIONS)}, got {kind!r}")
    for other, projection in _PROJECTIONS.items():
        has = projection is not None and any(tensor.startswith(f"{projection}.") for tensor in present)
        if projection is not None and has != (other == kind):
            raise ValueError(
                f"{name}: markov_head_type is {kind!r}, but {projection} is {'present' if has else 'absent'}"
            )
    return MarkovHeadInfo(next(known for known in _PROJECTIONS if known == kind), rank)


def check_tensors(
    config: DraftConfig,
    head: MarkovHeadInfo | None,
    tensors: Mapping[str, TensorInfo],
    *,
    taps: int,  # captured target layers
    name: str,
) -> None:
    """Raise ValueError for a tensor that is missing, that nothing explains, or of another shape."""
    hidden, vocab = config.hidden_size, config.vocab_size
    logits = config.draft_vocab_size or vocab
    required = {f"{tensor}.weight" for tensor in _FIXED}
    required |= {
        f"layers.{i}.{tensor}.weight" for i in range(config.num_hidden_layers) for tensor in _PER_LAYER
    }
    optional = set(_OPTIONAL)
    if config.attention_bias:
        optional |= {
            f"layers.{i}.{tensor}.bias"
            for i in range(config.num_hidden_layers)
            for tensor in _ATTENTION_BIASES
        }
    if head:
        required |= {W1, W2}
        projection = _PROJECTIONS[head.kind]
        if projection:
            required |= {f"{projection}.weight", f"{projection}.bias"}
    if config.enable_confidence_head:
        required |= set(CONFIDENCE)
        if config.confidence_head_with_markov and not head:
            raise ValueError(
                f"{name}: confidence_head_with_markov is true, but the draft has no Markov head; set false"
            )
    elif any(tensor in tensors for tensor in CONFIDENCE):
        raise ValueError(f"{name}: {CONFIDENCE[0]} is present, but enable_confidence_head is not true")
    if logits < vocab:
        required |= {D2T, "lm_head.weight"}
    _refuse_first(required - tensors.keys(), f"{name}: missing tensor")
    _refuse_first(tensors.keys() - required - optional, f"{name}: tensor that the config does not explain:")

    rank = head.rank if head else 0
    # Engines differ on an absent confidence_head_with_markov (vLLM false, SGLang true): the shape tells.
    reads_markov = config.confidence_head_with_markov
    confidence = {hidden + rank, hidden} if reads_markov is None else {hidden + (rank if reads_markov else 0)}
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "fc.weight": ((hidden, taps * (config.target_hidden_size or hidden)),),
        "norm.weight": ((hidden,),),
        "hidden_norm.weight": ((hidden,),),
        "embed_tokens.weight": ((vocab, hidden),),
        "lm_head.weight": ((logits, hidden),),
        D2T: ((logits,),),
        T2D: ((vocab,),),
        W1: ((vocab, rank),),
        W2: ((logits, rank),),
        f"{GATE}.weight": ((rank, hidden + rank),),
        f"{GATE}.bias": ((rank,),),
        f"{JOINT}.weight": ((3 * rank, 2 * rank + hidden),),
        f"{JOINT}.bias": ((3 * rank,),),
        CONFIDENCE[0]: tuple((1, width) for width in sorted(confidence, reverse=True)),
        CONFIDENCE[1]: ((1,),),
    }
    for tensor, expected in shapes.items():
        if tensor in tensors and tensors[tensor].shape not in expected:
            raise ValueError(
                f"{name}: {tensor}: expected shape {' or '.join(map(str, expected))} from config.json, "
                f"got {tensors[tensor].shape}"
            )


def _refuse_first(names: Iterable[str], complaint: str) -> None:
    listed = sorted(names)
    if listed:
        raise ValueError(
            f"{complaint} {listed[0]}" + (f" (and {len(listed) - 1} more)" if len(listed) > 1 else "")
        )
