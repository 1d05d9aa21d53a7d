"""Say what a draft checkpoint is, as read from its keys and tensor shapes, and what each engine makes of it.

Optionally also whether it was made for a given target. One row of one weight is read, the mask token's.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from specplug.checkpoint import DraftCheckpoint, check_pair, read_draft
from specplug.draft_config import model_config, read_config
from specplug.hub import checkpoint_folder
from specplug.mask_row import read_mask_row
from specplug.recognised import RecognisedDraft, recognise
from specplug.rope import read_rope
from specplug.serving import serving

SCORES = {  # kind of Markov head -> what a node's score depends on in the trees specplug grows
    None: "scored by depth",
    "vanilla": "scored by depth and parent token",
    "gated": "scored by depth and parent token",
    "rnn": "scored by the whole path",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("draft", help="folder of a draft checkpoint, or its hub id")
    parser.add_argument(
        "--target", help="folder or hub id of a target: refuse the draft if it was not made for it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what was decided. Raises ValueError, naming the key, for what cannot be decided or does not
    fit.
    """
    facts = inspect(arguments.draft, arguments.target)
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    lines = list(_lines(facts))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:{width}}  {value}")
    if arguments.target is not None:
        print(f"made for {arguments.target}")
    return 0


def inspect(draft_name: str, target: str | None = None) -> dict[str, Any]:
    """Everything that ``specplug inspect`` prints, as JSON can hold it."""
    draft: DraftCheckpoint | RecognisedDraft = recognise(draft_name) or read_draft(draft_name)
    facts = {name: _plain(value) for name, value in _fields(draft).items()}
    facts["layer_ids"] = layer_ids(draft.target_layer_ids)
    if isinstance(draft, DraftCheckpoint):
        folder = None
        if target is not None:
            check_pair(draft, target_config(target))
            folder = Path(target).expanduser() if Path(target).expanduser().is_dir() else None
        rope = read_rope(model_config(read_config(draft.path), draft.wrapper), str(draft.path))
        mask = read_mask_row(draft, folder)
        facts["rope"] = {"theta": rope.theta, "kind": rope.kind, **dict(rope.scaling)}
        facts["mask_row"] = mask._asdict() | {"warning": mask.warning}
        head = draft.markov_head.kind if draft.markov_head else None
        facts["trees"] = SCORES[head]
    else:
        facts["trees"] = f"no: {draft.architecture} {draft.unsupported}"
    facts["serving"] = [way._asdict() for way in serving(draft, model=draft_name, target=target or "TARGET")]
    return facts


def layer_ids(outputs: tuple[int, ...]) -> dict[str, list[int]]:
    """The captured target layers as each convention counts them; ``outputs`` counts as DeepSpec does."""
    return {
        "output_of_layer": list(outputs),  # target_layer_ids of DeepSpec, z-lab, SGLang; -1 = the embedding
        "speculators": [i + 1 for i in outputs],  # aux_hidden_state_layer_ids; vLLM's eagle_aux_... too
        "sglang_capture": [i + 1 for i in outputs],  # "before layer i", layers_to_capture of its models
        "hidden_states": [i + 1 for i in outputs],  # index into transformers' output_hidden_states
    }


def target_config(target: str) -> dict[str, Any]:
    """The target's config.json. Raises ValueError when it is missing or no JSON object."""
    path = checkpoint_folder(target, files=["config.json"]) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the target's config.json, got {error}; check --target/--model"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """One line a fact; nested facts as name.key, commands and reasons as engine.way."""
    lines = []
    for name, value in facts.items():
        if name == "serving":
            for way in value:
                label = f"{way['engine']}.{way['way']}"
                lines.append((label, way["command"] or f"no: {way['reason']}"))
                lines += [(label, f"note: {note}") for note in way["notes"]]
        elif isinstance(value, dict) and name != "markov_head":
            lines += [(f"{name}.{key}", _text(inner)) for key, inner in value.items()]
        else:
            lines.append((name, _text(value)))
    return lines


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return "-" if value is None else str(value)


def _fields(draft: DraftCheckpoint | RecognisedDraft) -> dict[str, object]:
    return draft._asdict() if isinstance(draft, RecognisedDraft) else dict(vars(draft))


def _plain(value: object) -> object:
    """What JSON can hold; a path as its text, a named tuple by its field names."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "_asdict"):
        return value._asdict()
    return (
        dataclasses.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else value
    )
