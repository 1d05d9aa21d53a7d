"""A folder that stands in for a checkpoint that is not here, so that an engine can judge a command line.

config.json holds what the recipe says of the model. A block draft also gets a safetensors file whose header
names every tensor of the format with its shape; the data behind it is a hole in the file, never read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from specplug.recipe import BLOCK_DRAFTS, Draft, Model

_BF16_BYTES = 2


def write_stand_in(folder: Path, model: Model) -> Path:
    """Make the folder; returns it. Raises ValueError, naming the key, for a config that lacks a size."""
    assert model.config is not None
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config, indent=1) + "\n")
    if isinstance(model, Draft) and model.kind in BLOCK_DRAFTS:
        try:
            _write_header(folder / "model.safetensors", _shapes(model.config))
        except OSError as error:
            raise ValueError(
                f"draft.config: expected sizes of a file that can be made, got {error}"
            ) from None
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Tensors of a DFlash or DSpark draft, from its config; the formats are in specplug.checkpoint."""
    hidden, inner, vocab, head = (
        _size(config, key) for key in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    )
    queries, keys = (_size(config, f"num_{name}_heads") * head for name in ("attention", "key_value"))
    inside = config.get("dflash_config")
    within = inside if isinstance(inside, dict) else {}
    layer_ids = config.get("target_layer_ids") or within.get("target_layer_ids")
    if not isinstance(layer_ids, list) or not layer_ids:
        raise ValueError(f"draft.config: target_layer_ids: expected a list of layers, got {layer_ids!r}")
    shapes = {
        "fc.weight": [hidden, len(layer_ids) * hidden],
        "hidden_norm.weight": [hidden],
        "norm.weight": [hidden],
    }
    for layer in range(_size(config, "num_hidden_layers", most=1024)):
        at = f"layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": [hidden],
            at + "post_attention_layernorm.weight": [hidden],
            at + "self_attn.q_proj.weight": [queries, hidden],
            at + "self_attn.k_proj.weight": [keys, hidden],
            at + "self_attn.v_proj.weight": [keys, hidden],
            at + "self_attn.o_proj.weight": [hidden, queries],
            at + "self_attn.q_norm.weight": [head],
            at + "self_attn.k_norm.weight": [head],
            at + "mlp.gate_proj.weight": [inner, hidden],
            at + "mlp.up_proj.weight": [inner, hidden],
            at + "mlp.down_proj.weight": [hidden, inner],
        }
    rank = _size(config, "markov_rank", least=0)
    if rank:
        shapes |= {name: [vocab, hidden] for name in ("embed_tokens.weight", "lm_head.weight")}
        shapes |= {f"markov_head.markov_w{i}.weight": [vocab, rank] for i in (1, 2)}
    if config.get("enable_confidence_head"):
        width = hidden + (rank if config.get("confidence_head_with_markov") else 0)
        shapes |= {"confidence_head.proj.weight": [1, width], "confidence_head.proj.bias": [1]}
    return shapes


def _size(config: dict[str, Any], key: str, *, least: int = 1, most: int = 1 << 20) -> int:
    value = config.get(key, 0 if least == 0 else None)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"draft.config: {key}: expected {least} to {most}, got {value!r}; see config.json")
    return value


def _write_header(file: Path, shapes: dict[str, list[int]]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * _BF16_BYTES
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
