"""What draft trees do not work with, by the target's config.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def target_refusals(target: Mapping[str, Any]) -> Iterator[str]:
    """Reasons not to serve a target, each a sentence with the fix. ``target``: its config.json."""
    text = target.get("text_config") or target
    if "vision_config" in target or "audio_config" in target:
        yield "the target takes multi-modal inputs, untested with trees; use a text-only target."
    if target.get("is_encoder_decoder"):
        yield "the target is an encoder-decoder model; use a decoder-only target."
    kinds = set(text.get("layer_types") or ())
    if kinds - {"full_attention", "sliding_attention"} or text.get("mamba_d_state"):
        yield "the target's recurrent layers cannot follow a branch; use an attention-only target."
    if "sliding_attention" in kinds or (text.get("sliding_window") and text.get("use_sliding_window", True)):
        yield "the target's sliding window would count rows instead of depth; use a full-attention target."
    if text.get("kv_lora_rank"):
        yield "the target uses MLA attention, which is not served yet; use a target with ordinary attention."
