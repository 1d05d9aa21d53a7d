"""Step 5: write the set in the public checkpoint formats: bf16 safetensors, config.json, tokenizer.

{out}/target  Qwen3ForCausalLM, tied embeddings, chat template
{out}/dflash  DFlashDraftModel (fill-in, block DEPTH + 1)
{out}/dspark  Qwen3DSparkModel (anchor-first, block DEPTH); embedding and head are the target's, as the format
allows
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from presets import DEPTH, END_OF_TEXT, MASK, PRESETS, SPECIAL_TOKENS, TURN_END, VOCABULARY, Preset, Shape
from safetensors.torch import save_file

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def decoder_config(layers: int) -> dict[str, Any]:
    """The keys that target and drafts share."""
    return asdict(Shape()) | {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": TURN_END,
        "pad_token_id": END_OF_TEXT,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def draft_keys(kind: str, preset: Preset) -> dict[str, Any]:
    """The keys that make a config a block draft's."""
    taps = list(preset.taps)
    shared = {"num_target_layers": preset.layers[-1], "tie_word_embeddings": False}
    if kind == "dflash":
        return shared | {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": DEPTH + 1,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": taps},
        }
    return shared | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": DEPTH,
        "mask_token_id": MASK,
        "target_layer_ids": taps,
        "num_anchors": preset.anchors,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_head_type": "vanilla",
        "markov_rank": preset.markov_rank,
    }


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    rounded = {name: weight.bfloat16().contiguous() for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, tokenizer: Path) -> None:
    """tokenizer.json with the chat template and the tokens that end a generation."""
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    end_of_text, turn_start, turn_end, mask = SPECIAL_TOKENS
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": turn_end,
        "pad_token": end_of_text,
        "mask_token": mask,
        "additional_special_tokens": [turn_start],
        "model_max_length": Shape().max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", facts)
    ends = {"eos_token_id": [TURN_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False}
    write_json(folder / "generation_config.json", ends)


def write_json(file: Path, value: dict[str, Any]) -> None:
    """One JSON object, indented."""
    file.write_text(json.dumps(value, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Command line; run.py passes its arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of corpus.py")
    parser.add_argument("--target", type=Path, required=True, help="folder of train_target.py")
    parser.add_argument("--drafts", type=Path, required=True, help="folder of train_drafts.py, both kinds")
    parser.add_argument("--out", type=Path, required=True, help="folder for the set")
    a = parser.parse_args(arguments)
    preset = PRESETS[a.preset]
    config = decoder_config(preset.layers[-1])
    config |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    write_checkpoint(a.out / "target", config, torch.load(a.target / "target.pt", weights_only=True))
    write_tokenizer(a.out / "target", a.corpus / "tokenizer.json")
    for kind in ("dflash", "dspark"):
        config = decoder_config(preset.draft_layers) | draft_keys(kind, preset)
        write_checkpoint(a.out / kind, config, torch.load(a.drafts / f"{kind}.pt", weights_only=True))
    total = sum(file.stat().st_size for file in a.out.rglob("*") if file.is_file())
    print(f"{total} bytes in {a.out}")


if __name__ == "__main__":
    main()
