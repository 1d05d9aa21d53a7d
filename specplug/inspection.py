"""Say what a draft checkpoint is, as read from its keys and tensor shapes.

Optionally also whether it was made for a given target. No weight is read.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from specplug.checkpoint import check_pair, read_draft
from specplug.hub import checkpoint_folder


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
    draft = read_draft(arguments.draft)
    if arguments.target is not None:
        check_pair(draft, target_config(arguments.target))
    facts = {name: _plain(value) for name, value in vars(draft).items()}
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        width = max(len(name) for name in facts)
        for name, value in facts.items():
            print(f"{name:{width}}  {'-' if value is None else value}")
        if arguments.target is not None:
            print(f"made for {arguments.target}")
    return 0


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
