"""What kind of draft a checkpoint folder holds, decided from config keys and tensor shapes, or refused.

A wrong guess here is silent: the engine serves, and about 1 % of the drafts are accepted. So every fact is
read from a key, checked against the tensors, and refused by name where it cannot be decided. No weight is
read.

Layouts (block of n rows, row 0 embeds the anchor, the others the mask token):
    fill_in       row j sits at the position it predicts, row 0 predicts nothing:  depth = n - 1  (DFlash)
    anchor_first  row j predicts the position after its own:                       depth = n      (DSpark)

`target_layer_ids` are kept in one convention: i is the *output* of target layer i, -1 the embedding. Configs
of the speculators library, and ``eagle_aux_hidden_state_layer_ids``, count one more.

What an engine does with the draft is another question: ``vllm_refusal`` here, specplug.serving for both.

Where this differs from vLLM 0.32, which it hands the same folder to:
    - vLLM reads a DSpark config without ``sample_from_anchor`` as anchor-first, but a speculators-wrapped one
      as fill-in, and speculators itself as anchor-first: wrapped and absent is refused here.
    - vLLM takes the first of several keys for one fact (`_ALIASES` in draft_config has its order); here they
      must agree.
    - vLLM captures target layers as a sorted set, whatever order the list has: unsorted or repeated ids are
      refused.
    - vLLM never reads ``markov_head_type`` of a Qwen3 draft (and has no gated or rnn head), never reads a
      DFlash ``block_size``, and shares the target's lm_head with a DFlash draft of a reduced vocabulary that
      ships none.
    - A Qwen3DSparkModel with ``markov_rank`` 0 (DeepSpec's ``dflash_*`` drafts) is a DFlash draft of the
      anchor-first layout. Neither vLLM nor SGLang loads it as shipped; specplug's local loop does.
    - vLLM guesses the method from a substring of the path ("dflash", "dspark"); here the architecture
      decides.
    - vLLM loads Gemma 4, Kimi K3, Muse Glimmer, Laguna, DFlash2 and LiLiCorr drafts by other code: no trees
      yet.

Sources: DFlash (z-lab), DSpark (DeepSpec), speculators; their config.json and safetensors files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from specplug.draft_config import (
    DSPARK,
    MAX_DEPTH,
    DraftConfig,
    Family,
    Layout,
    agreed,
    decide_layout,
    decode_config,
    identify,
    model_config,
    read_config,
)
from specplug.draft_tensors import MarkovHeadInfo, check_tensors, markov_head
from specplug.hub import checkpoint_folder
from specplug.rope import read_rope
from specplug.weights import INDEX_FILE, TensorInfo, read_tensors

__all__ = [
    "DraftCheckpoint", "MarkovHeadInfo", "check_method", "check_pair", "read_draft", "vllm_refusal",
]  # fmt: skip


@dataclass(frozen=True)
class DraftCheckpoint:
    """Everything the engine adapters need to know about a draft before a weight is read."""

    path: Path
    kind: Literal["dflash", "dspark"]  # dspark = with a Markov head, whatever the architecture is called
    layout: Layout
    block_size: int  # as the config states it
    depth: int  # tokens one draft pass predicts
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # output of that target layer, -1 = the embedding
    hidden_size: int
    target_hidden_size: int  # of one captured feature; fc takes len(target_layer_ids) of them
    num_target_layers: int | None  # None = the config does not say
    vocab_size: int  # of the input ids, the target's
    draft_vocab_size: int | None  # of the logits where it is reduced (d2t maps it up), else None
    num_layers: int
    markov_head: MarkovHeadInfo | None
    confidence_head: bool
    own_embedding: bool
    own_lm_head: bool
    base_method: Literal["dflash", "dspark"] | None  # vLLM's method that loads this checkpoint, if any
    wrapper: Literal["plain", "speculators"]


_SPELLING = {"dflash": "DFlash", "dspark": "DSpark"}


def read_draft(path_or_repo: str | Path, *, revision: str | None = None) -> DraftCheckpoint:
    """Read what a draft checkpoint is from its config.json and its safetensors headers.

    ``path_or_repo`` is a local folder or a hub id (``org/name``, looked up through huggingface_hub at
    ``revision``). Raises ValueError when something is missing, damaged, contradictory or not supported; it
    names the key.
    """
    name = str(path_or_repo)
    folder = checkpoint_folder(name, files=["config.json"], revision=revision)
    raw = read_config(folder)
    family, wrapper = identify(raw, name)
    config = decode_config(raw, wrapper, name)
    layout = decide_layout(config, family, wrapper, name)
    read_rope(model_config(raw, wrapper, name), name)  # refuses spellings that contradict each other
    folder = checkpoint_folder(
        name, files=["*.safetensors", INDEX_FILE, "mask_embedding.pt"], revision=revision
    )
    tensors = read_tensors(folder)
    if not tensors:
        raise ValueError(f"{name}: the safetensors files hold no tensor; fetch the checkpoint again")
    if family is DSPARK and (folder / "mask_embedding.pt").is_file():
        raise ValueError(f"{name}: mask_embedding.pt beside a DSpark draft, and vLLM would not load it")
    head = markov_head(config, family, tensors, name)
    draft = _assemble(
        config,
        folder=folder,
        family=family,
        wrapper=wrapper,
        layout=layout,
        head=head,
        tensors=tensors,
    )
    check_tensors(config, head, tensors, taps=len(draft.target_layer_ids), name=name)
    return draft


def check_pair(draft: DraftCheckpoint, target_config: Mapping[str, Any]) -> None:
    """Refuse, before any weight is read, a draft that was not made for this target.

    ``target_config`` is the target's config.json; where it nests a ``text_config`` (multimodal targets, also
    inside ``thinker_config``), that one counts. Raises ValueError naming the key that differs. Vocabularies
    must be equal: sizes padded differently are refused, because ids past the smaller one would be read out of
    bounds.
    """
    text = target_config
    for section in ("thinker_config", "text_config"):
        nested = text.get(section)
        if isinstance(nested, Mapping):
            text = nested
    layers = _target_int(text, "num_hidden_layers")
    hidden = _target_int(text, "hidden_size")
    vocab = _target_int(text, "vocab_size")
    last = draft.target_layer_ids[-1]
    made_for = draft.num_target_layers
    where = f"{draft.path} was not made for this target"
    if draft.vocab_size != vocab:
        raise ValueError(
            f"{where}: vocab_size: expected the draft's {draft.vocab_size}, the target has {vocab}"
        )
    if draft.target_hidden_size != hidden:
        taps = len(draft.target_layer_ids)
        raise ValueError(
            f"{where}: hidden_size: fc takes {taps} features of {draft.target_hidden_size}, the target gives "
            f"{hidden}"
        )
    if draft.hidden_size != hidden and not (draft.own_embedding and draft.own_lm_head):
        raise ValueError(
            f"{where}: hidden_size: the draft ({draft.hidden_size}) borrows the target's embedding or "
            f"lm_head ({hidden})"
        )
    if last >= layers:
        raise ValueError(f"{where}: target_layer_ids: {last} is past the target's {layers} layers")
    if made_for is not None and made_for != layers:
        raise ValueError(f"{where}: num_target_layers: expected {made_for} layers, the target has {layers}")


def vllm_refusal(draft: DraftCheckpoint) -> str | None:
    """Why specplug's trees in vLLM cannot serve this draft, with what can; None when they can."""
    fault = None
    if draft.markov_head is not None and draft.markov_head.kind != "vanilla":
        fault = (
            f"markov_head_type is {draft.markov_head.kind!r}, and vLLM's DSpark has the vanilla head alone"
        )
    elif draft.base_method is None:
        fault = (
            "markov_rank is 0 under Qwen3DSparkModel, as in DeepSpec's dflash_* drafts, and neither vLLM nor "
            "SGLang loads that as shipped"
        )
    elif draft.draft_vocab_size is not None:
        fault = (
            f"draft_vocab_size is {draft.draft_vocab_size} of {draft.vocab_size}, and trees over a reduced "
            "vocabulary are not served yet"
        )
    return fault and f"{draft.path}: {fault}; specplug's local loop drafts trees with it"


def check_method(draft: DraftCheckpoint, method: str) -> str | None:
    """Why vLLM's `method` cannot serve this draft, with the fix; None when it can."""
    if method == "ddtree":
        return vllm_refusal(draft)
    if method == draft.base_method:
        return None
    if draft.base_method is None:
        return f"method: {method!r} cannot load this draft, nor can any other: {vllm_refusal(draft)}"
    return (
        f"method: {method!r} cannot load {draft.path}, a {_SPELLING[draft.kind]} checkpoint; "
        f"use 'ddtree' for draft trees or {draft.base_method!r} for its chain"
    )


def _assemble(
    config: DraftConfig,
    *,
    folder: Path,
    family: Family,
    wrapper: Literal["plain", "speculators"],
    layout: Layout,
    head: MarkovHeadInfo | None,
    tensors: Mapping[str, TensorInfo],
) -> DraftCheckpoint:
    name = str(folder)
    block_size = agreed("block_size", config, name)
    mask_token_id = agreed("mask_token_id", config, name)
    layer_ids = agreed("target_layer_ids", config, name)
    depth = block_size if layout == "anchor_first" else block_size - 1
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(
            f"{name}: block_size: expected a depth of 1..{MAX_DEPTH}, got {block_size} ({layout})"
        )
    if not 0 <= mask_token_id < config.vocab_size:
        raise ValueError(f"{name}: mask_token_id: expected 0..{config.vocab_size - 1}, got {mask_token_id}")
    if not layer_ids or layer_ids[0] < -1 or any(a >= b for a, b in pairwise(layer_ids)):
        raise ValueError(
            f"{name}: target_layer_ids: expected rising layer numbers from -1 on, got {list(layer_ids)}; "
            "vLLM captures them sorted and once each, so fc would read other features than it was trained on"
        )
    draft_vocab = config.draft_vocab_size or config.vocab_size
    if not 1 <= draft_vocab <= config.vocab_size:
        raise ValueError(f"{name}: draft_vocab_size: expected 1..{config.vocab_size}, got {draft_vocab}")
    headless_dspark = family is DSPARK and head is None
    loadable = not headless_dspark and (head is None or head.kind == "vanilla")
    return DraftCheckpoint(
        path=folder,
        kind="dflash" if headless_dspark else family.kind,
        layout=layout,
        block_size=block_size,
        depth=depth,
        mask_token_id=mask_token_id,
        target_layer_ids=layer_ids,
        hidden_size=config.hidden_size,
        target_hidden_size=config.target_hidden_size or config.hidden_size,
        num_target_layers=config.num_target_layers,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab if draft_vocab < config.vocab_size else None,
        num_layers=config.num_hidden_layers,
        markov_head=head,
        confidence_head=config.enable_confidence_head,
        own_embedding="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors,
        base_method=family.base_method if loadable else None,
        wrapper=wrapper,
    )


def _target_int(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the target's config.json: {key}: expected a whole number, got {value!r}")
    return value
