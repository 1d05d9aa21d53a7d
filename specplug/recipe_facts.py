"""Whether what a recipe states about files is so: hashes of models, prompts, tables and pins, and what its
draft is. Only what is on this machine is looked at; nothing is fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import specplug
from specplug import models
from specplug.checkpoint import DraftCheckpoint, read_draft
from specplug.provenance import file_hash
from specplug.recipe import BLOCK_DRAFTS, PROMPTS, SHIPPED, Draft, Model, Recipe, model_name
from specplug.recipe_shelf import clone
from specplug.recognised import recognise


class Finding(NamedTuple):
    """failed: the recipe is wrong; absent: it may be right, and cannot be looked at or run here."""

    what: str
    state: Literal["ok", "failed", "absent"]
    detail: str


def facts(recipe: Recipe, folder: Path) -> Iterator[Finding]:
    """One finding each thing that has a hash, a version or a checkpoint."""
    yield _version(recipe)
    yield _pins(recipe)
    yield from _model("target", recipe.target)
    if recipe.draft is not None:
        yield from _model("draft", recipe.draft)
        if recipe.draft.kind in BLOCK_DRAFTS:
            yield _layout(recipe.draft)
    yield _data(recipe, folder)
    for key, file in (("cost_table", recipe.cost_table), ("calibration", recipe.calibration)):
        if file is not None:
            yield _hashed(key, folder / file.path, file.sha256, note=f"measured on {file.measured_on}")
    for name, wanted in sorted(recipe.files.items()):
        yield _hashed("file", folder / name, wanted)


def _version(recipe: Recipe) -> Finding:
    here, wanted = specplug.__version__, recipe.software.specplug
    if here == wanted:
        return Finding("specplug", "ok", here)
    return Finding("specplug", "failed", f"expected {wanted}, this is {here}; install specplug=={wanted}")


def _pins(recipe: Recipe) -> Finding:
    name, wanted = recipe.software.requirements, recipe.software.requirements_sha256
    if name is None or wanted is None:
        return Finding("requirements", "absent", "the recipe has no list of pins")
    root = clone()
    if root is None:
        return Finding("requirements", "absent", f"{name} is in a clone of specplug, this is a wheel")
    return _hashed("requirements", root / name, wanted)


def _model(key: str, model: Model) -> Iterator[Finding]:
    folder = _folder(model)
    if folder is None:
        pinned = f"at {model.revision[:12]}" if model.revision else "no revision pinned"
        yield Finding(key, "absent", f"{model.model} is not on this machine, {pinned}")
        return
    if not model.sha256:
        yield Finding(key, "ok", f"{model.model} is in {folder}, no hashes are stated")
    for file, wanted in sorted((model.sha256 or {}).items()):
        yield _hashed(key, folder / file, wanted)
    if model.model.startswith(SHIPPED):
        name, _, part = model.model.removeprefix(SHIPPED).partition("/")
        listed = {
            file.removeprefix(f"{part}/")
            for file in models.manifest().sets[name].files
            if file.startswith(f"{part}/")
        }
        missing = sorted(listed - (model.sha256 or {}).keys())
        if missing:
            yield Finding(
                key, "failed", f"sha256: expected one of every file, got none of {', '.join(missing)}"
            )


def _folder(model: Model) -> Path | None:
    """A model's folder: shipped, one's own, or in the hub's cache; None where it is not here."""
    folder = Path(model_name(model))
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except (ImportError, ValueError):  # not installed, or no hub id
        return None
    return Path(file).parent if isinstance(file, str) else None


def _layout(draft: Draft) -> Finding:
    folder = _folder(draft)
    if folder is None:
        return Finding("draft layout", "absent", "as the recipe says: the checkpoint is not here")
    try:
        read = recognise(folder) or read_draft(folder)
    except ValueError as error:
        return Finding("draft layout", "failed", str(error))
    stated: dict[str, tuple[object, object]] = {
        "layout": (draft.layout, read.layout),
        "depth": (draft.depth, read.depth),
        "target_layer_ids": (draft.target_layer_ids, list(read.target_layer_ids)),
        "vocab_size": (draft.vocab_size, read.vocab_size),
    }
    if isinstance(read, DraftCheckpoint):
        stated["kind"] = (draft.kind, read.kind)
        stated["draft_vocab_size"] = (draft.draft_vocab_size, read.draft_vocab_size)
    wrong = [
        f"{key}: the recipe says {said}, the checkpoint {is_}"
        for key, (said, is_) in stated.items()
        if said != is_
    ]
    if wrong:
        return Finding("draft layout", "failed", f"{'; '.join(wrong)}; see specplug inspect {folder}")
    return Finding(
        "draft layout", "ok", f"{read.layout}, depth {read.depth}, layers {list(read.target_layer_ids)}"
    )


def _data(recipe: Recipe, folder: Path) -> Finding:
    data = recipe.dataset
    if data.name == PROMPTS:
        file = Path(models.__file__).parent / "prompts.jsonl"
        there = Counter(prompt.kind for prompt in models.prompts())
        for kind in data.kinds:
            if not there[kind]:
                return Finding(
                    "dataset", "failed", f"kinds: expected some of {', '.join(there)}, got {kind!r}"
                )
            if data.count > there[kind]:
                return Finding(
                    "dataset", "failed", f"{kind}: expected at most {there[kind]} prompts, got {data.count}"
                )
    else:
        file = folder / data.name
    if not file.is_file():
        return Finding("dataset", "failed", f"{file}: expected the prompts, found no file")
    if data.sha256 is None:
        return Finding("dataset", "ok", f"{data.name}, of which no hash is stated")
    return _hashed("dataset", file, data.sha256)


def _hashed(what: str, file: Path, wanted: str, *, note: str = "") -> Finding:
    if not file.is_file():
        return Finding(what, "failed", f"{file}: expected a file, found none")
    found = file_hash(file)
    if found != wanted:
        return Finding(
            what,
            "failed",
            f"{file}: expected SHA-256 {wanted[:12]}..., got {found[:12]}...; it is another file",
        )
    return Finding(what, "ok", f"{file.name} {found[:12]}{', ' if note else ''}{note}")
