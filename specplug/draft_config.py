"""What a draft's config.json says, in one spelling: family, layout, and facts that several keys may state.

Three dialects: plain DFlash and DSpark configs (a model config with a few more keys), and the speculators
wrapper (the model config nested, its own keys beside it, layer ids one higher). What the dialects and their
readers do differently is in the docstring of specplug.checkpoint, which checks all of this against the
tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from specplug.weights import decode_json

MAX_CONFIG_BYTES = 10_000_000
"""Longest config.json read. Origin: far above any published one (tens of kilobytes)."""
MAX_DEPTH = 1024
"""Deepest block accepted. Origin: far above any published draft (16); a table row is allocated per depth."""

Layout = Literal["fill_in", "anchor_first"]


class Family(NamedTuple):
    """What an architecture name implies."""

    kind: Literal["dflash", "dspark"]
    base_method: Literal["dflash", "dspark"]
    default_layout: Layout  # of a plain config without `sample_from_anchor`
    layouts: tuple[Layout, ...]  # vLLM has no other
    markov: bool


DFLASH = Family("dflash", "dflash", "fill_in", ("fill_in",), markov=False)
DSPARK = Family("dspark", "dspark", "anchor_first", ("anchor_first", "fill_in"), markov=True)

_PLAIN = {"DFlashDraftModel": DFLASH, "Qwen3DSparkModel": DSPARK}
_WRAPPED = {"dflash": DFLASH, "dspark": DSPARK}  # by speculators_model_type

UNSUPPORTED = {  # architecture -> why trees cannot use it, as a clause
    "Gemma4DSparkModel": "caps its logits, which the parent-conditioned scores do not model",
    "Qwen3OmniDSparkModel": "drafts for a multimodal thinker",
    "K3DSparkModel": "uses multi-head latent attention",
    "DSparkDraftModel": "ships inside the target's own checkpoint",
    "DSparkV41DraftModel": "ships inside the target's own checkpoint",
    "DFlash2DraftModel": "selects candidates with its own head",
    "DFlashLagunaForCausalLM": "has its own attention layers",
    "LiLiCorrDraftModel": "corrects its logits with its own head",
    "MuseGlimmerAssistantModel": "names its tensors differently",
}

# One fact, several keys, in the order vLLM takes them; all that are present must agree.
_ALIASES: Mapping[str, tuple[tuple[str, int], ...]] = {  # fact -> (key, what to add to reach our convention)
    "target_layer_ids": (
        ("aux_hidden_state_layer_ids", -1),  # of the speculators wrapper only
        ("eagle_aux_hidden_state_layer_ids", -1),
        ("dflash_config.target_layer_ids", 0),
        ("dspark_target_layer_ids", 0),
        ("target_layer_ids", 0),
    ),
    "mask_token_id": (("dflash_config.mask_token_id", 0), ("mask_token_id", 0), ("dspark_noise_token_id", 0)),
    "block_size": (("block_size", 0), ("dflash_config.block_size", 0), ("dspark_block_size", 0)),
}

# The speculators wrapper: these keys stand beside `transformer_layer_config`, the rest inside it.
_WRAPPER_KEYS = (
    "aux_hidden_state_layer_ids", "block_size", "mask_token_id", "sample_from_anchor",
    "target_hidden_size", "draft_vocab_size", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov", "use_aux_hidden_state",
)  # fmt: skip

MAX_LAYERS = 1024
"""Most draft layers accepted. Origin: far above any published draft (5); it bounds the list of tensors."""


class _DFlashConfig(msgspec.Struct):
    """The ``dflash_config`` of a draft's config.json; its other keys are the engine's business."""

    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    block_size: int | None = None
    sample_from_anchor: bool | None = None


class DraftConfig(msgspec.Struct):
    """The keys of a draft's config.json that decide something here. A model config carries many others."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    dflash_config: _DFlashConfig | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    sample_from_anchor: bool | None = None
    dspark_bonus_anchor: bool | None = None
    dspark_block_size: int | None = None
    dspark_noise_token_id: int | None = None
    dspark_target_layer_ids: list[int] | None = None
    dspark_markov_rank: int | None = None
    dspark_markov_head_type: str | None = None
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    draft_vocab_size: int | None = None
    attention_bias: bool = False
    use_aux_hidden_state: bool = True
    markov_rank: int | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool | None = None


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint folder. Raises ValueError when it is missing or no JSON object."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"missing file {file}: a draft needs its config.json; fetch the checkpoint again")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{file}: {file.stat().st_size} bytes, at most {MAX_CONFIG_BYTES} are read")
    return decode_json(file.read_bytes(), dict[str, Any], where=str(file))


def identify(raw: Mapping[str, Any], name: str) -> tuple[Family, Literal["plain", "speculators"]]:
    """Family and wrapper by name alone: `speculators_model_type` where there is one, else `architectures`."""
    wrapped = raw.get("speculators_model_type")
    if wrapped is not None:
        if isinstance(wrapped, str) and wrapped in _WRAPPED:
            return _WRAPPED[wrapped], "speculators"
        raise ValueError(
            f"{name}: not a block drafter that trees can use: speculators_model_type is {wrapped!r}, "
            f"expected {' or '.join(map(repr, _WRAPPED))}"
        )
    listed = raw.get("architectures")
    architectures = _architectures(raw)
    families = {_PLAIN[a] for a in architectures if a in _PLAIN}
    if len(families) == 1:
        return families.pop(), "plain"
    if families:
        raise ValueError(f"{name}: architectures: {architectures} name a DFlash and a DSpark draft; keep one")
    for architecture in architectures:
        if architecture in UNSUPPORTED:
            raise ValueError(
                f"{name}: {architecture} {UNSUPPORTED[architecture]}: recognised, but trees do not support "
                "it yet; use vLLM's own method for it"
            )
    in_checkpoint = sorted(key for key in raw if key.startswith("dspark_"))
    if in_checkpoint:
        raise ValueError(
            f"{name}: {in_checkpoint[0]} marks a DSpark draft inside its target's checkpoint (DeepSeek-V4): "
            "recognised, but trees do not support it yet; use vLLM's own method dspark"
        )
    raise ValueError(
        f"{name}: not a block drafter: architectures is {architectures or listed!r}, expected one of "
        f"{', '.join(_PLAIN)}; name a DFlash or DSpark draft"
    )


def model_config(raw: Mapping[str, Any], wrapper: str, name: str = "config.json") -> Mapping[str, Any]:
    """The draft's model config: what a speculators wrapper nests, else the whole."""
    if wrapper != "speculators":
        return raw
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ValueError(f"{name}: transformer_layer_config: expected an object, got {type(inner).__name__}")
    return inner


def known(raw: Mapping[str, Any]) -> bool:
    """Whether a plain config names an architecture that ``read_draft`` reads."""
    return any(a in _PLAIN for a in _architectures(raw))


def _architectures(raw: Mapping[str, Any]) -> list[str]:
    listed = raw.get("architectures")
    architectures = [a for a in listed if isinstance(a, str)] if isinstance(listed, list) else []
    if raw.get("model_type") == "qwen3":  # vLLM loads this pair as Qwen3DSparkModel
        architectures = ["Qwen3DSparkModel" if a == "DSparkDraftModel" else a for a in architectures]
    return architectures


def decode_config(raw: Mapping[str, Any], wrapper: str, name: str) -> DraftConfig:
    """The keys that matter, with their types checked; a speculators wrapper is flattened first."""
    flat = dict(raw)
    if wrapper == "speculators":
        inner = model_config(raw, wrapper, name)
        flat = {key: value for key, value in inner.items() if key not in _WRAPPER_KEYS}
        flat |= {key: raw[key] for key in _WRAPPER_KEYS if raw.get(key) is not None}
    else:
        flat.pop("aux_hidden_state_layer_ids", None)
    try:
        config = msgspec.convert(flat, DraftConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: config.json: {error}") from None
    for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
        if getattr(config, key) < 1:
            raise ValueError(f"{name}: {key}: expected at least 1, got {getattr(config, key)}")
    if config.num_hidden_layers > MAX_LAYERS:
        raise ValueError(
            f"{name}: num_hidden_layers: expected 1..{MAX_LAYERS}, got {config.num_hidden_layers}"
        )
    if not config.use_aux_hidden_state:
        raise ValueError(
            f"{name}: use_aux_hidden_state: expected true, got false; a block drafter reads the target"
        )
    return config


def decide_layout(config: DraftConfig, family: Family, wrapper: str, name: str) -> Layout:
    """The layout that `sample_from_anchor` and the family give. Raises ValueError where it stays open."""
    nested = config.dflash_config.sample_from_anchor if config.dflash_config else None
    flag = config.sample_from_anchor
    if family is DFLASH and flag is None:
        flag = nested
    elif nested is not None and nested != flag:
        raise ValueError(
            f"{name}: sample_from_anchor: {flag} at top level but {nested} in dflash_config; keep the "
            "top-level one"
        )
    if flag is None and wrapper == "speculators":
        raise ValueError(
            f"{name}: sample_from_anchor is absent, and tools disagree on what that means for a speculators "
            "checkpoint; add true (anchor-first) or false (fill-in) to its config.json, as it was trained"
        )
    stated: Layout = "anchor_first" if flag else "fill_in"
    layout = family.default_layout if flag is None else stated
    if config.dspark_bonus_anchor is not None and config.dspark_bonus_anchor != (layout == "fill_in"):
        raise ValueError(
            f"{name}: dspark_bonus_anchor: {config.dspark_bonus_anchor} contradicts sample_from_anchor "
            f"({'absent' if flag is None else flag}, read as {layout}); state both as the draft was trained"
        )
    if layout not in family.layouts:
        raise ValueError(
            f"{name}: sample_from_anchor: true on a DFlash draft; vLLM's dflash has only the fill-in layout "
            "and would read it one position off"
        )
    return layout


def agreed(fact: str, config: DraftConfig, name: str) -> Any:
    """The one value that all present keys of `fact` give, in our convention."""
    found: dict[str, Any] = {}
    for key, shift in _ALIASES[fact]:
        holder: Any = config
        *path, attribute = key.split(".")
        for section in path:
            holder = getattr(holder, section)
        value = getattr(holder, attribute) if holder is not None else None
        if value is not None:
            found[key] = tuple(v + shift for v in value) if isinstance(value, list) else value + shift
    if not found:
        raise ValueError(
            f"{name}: {fact}: missing; expected one of {', '.join(k for k, _ in _ALIASES[fact])}"
        )
    if len(set(found.values())) > 1:
        raise ValueError(f"{name}: {fact}: the keys {', '.join(found)} disagree; keep the right one")
    return next(iter(found.values()))
