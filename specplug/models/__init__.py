"""Shipped checkpoints: tiny trained Qwen3 targets, each with a DFlash and a DSpark draft, and held-out
prompts.

A package resource, so `path` finds them wherever specplug is installed. manifest.json has every file's size
and SHA-256, which `verify` checks; README.md is the model card. Weights are bf16; load them as float32 on a
CPU.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec

from specplug.provenance import file_hash

PARTS = ("target", "dflash", "dspark")


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question that no shipped model was trained on, in the chat form of the deep-thin target."""

    kind: str  # "chat", "maths" or "code"
    prompt: str


class FileFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the manifest."""

    bytes: int
    sha256: str


class SetFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One set of the manifest. Counts are by part: tensors stored, and numbers in them."""

    tensors: dict[str, int]
    parameters: dict[str, int]
    files: dict[str, FileFacts]  # by path inside the set, such as "dflash/config.json"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """manifest.json: what is shipped, and the corpus its held-out split belongs to."""

    sets: dict[str, SetFacts]
    corpus: dict[str, str | int]  # of the deep-thin set: seed, documents, SHA-256 of its token streams


class Damage(NamedTuple):
    """A shipped file that is not as the manifest says."""

    file: Path
    reason: str


def sets() -> tuple[str, ...]:
    """Names of the shipped sets: "deep-thin" (demo, figures) and "quick" (fast tests)."""
    return tuple(manifest().sets)


def path(name: str, part: str) -> Path:
    """Folder of one checkpoint: a set from `sets()`, and "target", "dflash" or "dspark" of it.

    Raises ValueError for a name that is not shipped.
    """
    if name not in sets():
        raise ValueError(f"model set: expected one of {', '.join(sets())}, got {name!r}")
    if part not in PARTS:
        raise ValueError(f"model of the set: expected one of {', '.join(PARTS)}, got {part!r}")
    return _root() / name / part


def prompts() -> list[Prompt]:
    """The 64 held-out prompts, kinds taking turns (written by scripts/models/prompts.py)."""
    lines = (_root() / "prompts.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Prompt) for line in lines]


def manifest() -> Manifest:
    """manifest.json (written by scripts/models/manifest.py)."""
    return msgspec.json.decode((_root() / "manifest.json").read_bytes(), type=Manifest)


def verify() -> list[Damage]:
    """Every shipped file that is missing, changed, or not in the manifest; empty when all is well."""
    damage: list[Damage] = []
    for name, facts in manifest().sets.items():
        folder = _root() / name
        for inside, expected in facts.files.items():
            file = folder / inside
            if not file.is_file():
                damage.append(Damage(file, "missing"))
            elif file.stat().st_size != expected.bytes:
                damage.append(Damage(file, f"expected {expected.bytes} bytes, got {file.stat().st_size}"))
            elif file_hash(file) != expected.sha256:
                damage.append(Damage(file, "SHA-256 differs"))
        found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
        damage += [
            Damage(folder / inside, "not in the manifest") for inside in sorted(found - facts.files.keys())
        ]
    return damage


def _root() -> Path:
    return Path(__file__).resolve().parent
