"""What each engine makes of a draft: the exact command line, or why there is none.

The depth K (tokens drafted a round) is spelled K in vLLM and K + 1, the rows verified, in SGLang; a tree of B
nodes is ``tree_budget`` B in vLLM and B + 1 rows in SGLang.

Sources: vLLM 0.32, config/speculative.py and model_executor/models/qwen3_dspark.py; SGLang, srt/speculative/
dspark_components/dspark_config.py and srt/models/dspark.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import NamedTuple

from specplug.checkpoint import DraftCheckpoint, vllm_refusal
from specplug.mask_row import SIDECAR
from specplug.recognised import RecognisedDraft

BUDGET = 16  # nodes in the printed commands, the default of TreeOptions
CHAIN, TREE = "chain", "tree"


class Serving(NamedTuple):
    """One engine and one way to draft."""

    engine: str  # "vLLM" or "SGLang"
    way: str  # "chain", the engine's own method, or "tree", specplug's
    command: str | None  # None = it cannot
    reason: str | None  # why not
    notes: tuple[str, ...] = ()  # what to know before using the command


def serving(draft: DraftCheckpoint | RecognisedDraft, *, model: str, target: str) -> tuple[Serving, ...]:
    """Commands for ``model``, the draft as the user named it, and ``target``; vLLM's first, trees first."""
    if isinstance(draft, RecognisedDraft):
        return _recognised(draft, model, target)
    refusal = vllm_refusal(draft)
    tree = {"method": "ddtree", "model": model, "num_speculative_tokens": draft.depth, "tree_budget": BUDGET}
    chain = {"method": draft.base_method, "model": model, "num_speculative_tokens": draft.depth}
    reason, notes = _sglang_refusal(draft), _sglang_notes(draft)
    method = "DSPARK" if draft.kind == "dspark" else "DFLASH"
    sglang_chain = _sglang(target, method, model, draft.depth + 1)
    if method == "DSPARK" and draft.layout == "fill_in":  # SGLang adds the anchor's row to block_size
        sglang_chain += f" --speculative-dspark-block-size {draft.depth}"
    return (
        _serving("vLLM", TREE, _vllm(target, tree), refusal),
        _serving("vLLM", CHAIN, _vllm(target, chain), None if draft.base_method else refusal),
        _serving("SGLang", TREE, _sglang(target, "DDTREE", model, BUDGET + 1), reason, (*notes, *_adapter())),
        _serving("SGLang", CHAIN, sglang_chain, reason, notes),
    )


def _recognised(draft: RecognisedDraft, model: str, target: str) -> tuple[Serving, ...]:
    why = f"{draft.architecture} {draft.unsupported}"
    target = model if draft.bundled else target
    # vLLM takes the target's own checkpoint where no draft is named.
    named = {} if draft.bundled else {"model": model}
    options = {"method": "dspark", **named, "num_speculative_tokens": draft.depth}
    return (
        Serving("vLLM", TREE, None, why),
        _serving("vLLM", CHAIN, _vllm(target, options), None),
        Serving("SGLang", TREE, None, why),
        _serving("SGLang", CHAIN, _sglang(target, "DSPARK", model, draft.depth + 1), None),
    )


def _serving(engine: str, way: str, command: str, reason: str | None, notes: tuple[str, ...] = ()) -> Serving:
    return Serving(engine, way, None if reason else command, reason, () if reason else notes)


def _vllm(target: str, options: Mapping[str, object]) -> str:
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(options))}"


def _sglang(target: str, algorithm: str, model: str, rows: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(model)} "
        f"--speculative-num-draft-tokens {rows}"
    )


def _sglang_refusal(draft: DraftCheckpoint) -> str | None:
    if draft.kind == "dflash" and draft.base_method is None:
        return f"{draft.path}: markov_rank is 0 under Qwen3DSparkModel, and SGLang requires a rank above 0"
    if draft.draft_vocab_size is not None:
        return (
            f"{draft.path}: draft_vocab_size is {draft.draft_vocab_size} of {draft.vocab_size}, and SGLang "
            "scores a draft with the target's lm_head over all of its tokens"
        )
    if draft.wrapper == "speculators":
        return (
            f"{draft.path}: speculators_model_type wraps the config, and SGLang reads neither the layer ids "
            "nor the sizes in it; write it with the keys of DeepSpec"
        )
    return None


def _sglang_notes(draft: DraftCheckpoint) -> tuple[str, ...]:
    notes = []
    if draft.own_lm_head:
        notes.append("SGLang skips the draft's own embed_tokens and lm_head and takes the target's")
    if (draft.path / SIDECAR).is_file():
        notes.append(f"SGLang does not read {SIDECAR}")
    return tuple(notes)


def _adapter() -> tuple[str, ...]:
    names = {point.name for point in entry_points(group="sglang.srt.plugins")}
    return () if "specplug" in names else ("needs specplug's SGLang plugin, which is not installed here",)
