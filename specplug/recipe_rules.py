"""What a recipe must hold beyond the types of its keys: no number without its origin, no arm that differs in
two settings, no pin left open once a status claims more than "unverified"."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from specplug.recipe_measuring import check_measuring

if TYPE_CHECKING:
    from specplug.recipe import Arm, Draft, Engine, Model, Recipe

_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9.]+)*")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)*")
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?")
ARM_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


def check_rules(recipe: Recipe) -> None:
    """Raises ValueError, "key: expected ..., got ...; the fix", for the first rule that does not hold."""
    if not _NAME.fullmatch(recipe.name):
        raise ValueError(f"name: expected lower-case words joined by dashes, got {recipe.name!r}")
    for key, value in msgspec.to_builtins(recipe).items():
        _check_lines(key, value)
    check_date("date", recipe.date)
    _check_pins(recipe)
    _check_models(recipe)
    _check_files(recipe)
    _check_arms(recipe)
    check_measuring(recipe)


def _check_lines(key: str, value: object) -> None:
    """Text of one line but in a model's config: a recipe's words stand in sentences and commands."""
    if isinstance(value, str) and _CONTROL.search(value):
        raise ValueError(f"{key}: expected text in one line, without control characters, got {value!r}")
    if isinstance(value, list):
        for one in value:
            _check_lines(key, one)
    if isinstance(value, dict):
        for name, one in value.items():
            _check_lines(f"{key}: a key", name)
            if name != "config":
                _check_lines(f"{key}.{name}", one)


def _check_pins(recipe: Recipe) -> None:
    engine, software = recipe.engine, recipe.software
    _check_engine(engine)
    _check_sha256("engine.distribution_sha256", engine.distribution_sha256)
    _check_sha256("software.requirements_sha256", software.requirements_sha256)
    if recipe.device.kind == "cpu" and software.cuda is not None:
        raise ValueError(f"software.cuda: expected null on a CPU, got {software.cuda!r}")
    if recipe.device.count < 1:
        raise ValueError(f"device.count: expected 1 or more, got {recipe.device.count}")
    if recipe.device.threads is not None and recipe.device.threads < 1:
        raise ValueError(f"device.threads: expected 1 or more, or null, got {recipe.device.threads}")
    if (software.requirements is None) != (software.requirements_sha256 is None):
        raise ValueError("software.requirements_sha256: expected one beside requirements, and none without")
    if recipe.status == "unverified":
        return
    if engine.distribution_sha256 is None and engine.image_digest is None:
        raise ValueError(
            f"engine.distribution_sha256: expected a hash or an image_digest at status {recipe.status}, "
            "got none; without one the recipe is unverified"
        )
    for key in ("torch", "triton", "requirements"):
        if getattr(software, key) is None:
            raise ValueError(
                f"software.{key}: expected a value at status {recipe.status}, got null; "
                "without it the recipe is unverified"
            )


def _check_engine(engine: Engine) -> None:
    if not _VERSION.fullmatch(engine.version):
        raise ValueError(
            f"engine.version: expected a version such as 0.32.0, without a local part, got {engine.version!r}"
        )
    if (engine.distribution is None) == (engine.image is None):
        raise ValueError(
            f"engine.distribution: expected it or image, not both, got {engine.distribution!r} and "
            f"{engine.image!r}"
        )
    if engine.distribution is not None:
        name, _, version = engine.distribution.partition("==")
        if not _PACKAGE.fullmatch(name) or version.partition("+")[0] != engine.version:
            raise ValueError(
                f"engine.distribution: expected NAME=={engine.version}, the engine.version, "
                f"got {engine.distribution!r}"
            )
    if (engine.image is None) != (engine.image_digest is None):
        raise ValueError("engine.image_digest: expected one beside image, and none without")
    if engine.image_digest is not None:
        _check_sha256("engine.image_digest", engine.image_digest.removeprefix("sha256:"))


def _check_models(recipe: Recipe) -> None:
    models: list[tuple[str, Model]] = [("target", recipe.target)]
    if recipe.draft is not None:
        models.append(("draft", recipe.draft))
        _check_layout(recipe.draft, recipe.status)
    for key, model in models:
        _check_model(key, model, recipe.status)
    data = recipe.dataset
    _check_sha256("dataset.sha256", data.sha256)
    if data.sha256 is None and recipe.status != "unverified":
        raise ValueError(
            f"dataset.sha256: expected the hash of {data.name} at status {recipe.status}, got null"
        )


def _check_model(key: str, model: Model, status: str) -> None:
    from specplug.recipe import SHIPPED, model_name

    for file, value in (model.sha256 or {}).items():
        _check_sha256(f"{key}.sha256.{file}", value)
    if not model.model:
        raise ValueError(f"{key}.model: expected specplug:SET/PART, a folder or a hub id, got ''")
    if model.model.startswith(SHIPPED):
        try:
            model_name(model)
        except ValueError as error:
            raise ValueError(f"{key}.model: {error}") from None
        if not model.sha256:
            raise ValueError(f"{key}.sha256: expected the hashes of {model.model}, got none")
        if model.revision is not None:
            raise ValueError(
                f"{key}.revision: expected null for a model of the package, got {model.revision!r}"
            )
    elif model.revision is not None and not _COMMIT.fullmatch(model.revision):
        raise ValueError(
            f"{key}.revision: expected a commit of 40 hex digits, got {model.revision!r}; a branch moves"
        )
    elif model.revision is None and not model.sha256 and status != "unverified":
        raise ValueError(
            f"{key}.revision: expected the commit of {model.model} at status {status}, or for a folder "
            "sha256, got null; without it the recipe is unverified"
        )


def _check_layout(draft: Draft, status: str) -> None:
    from specplug.recipe import BLOCK_DRAFTS, DRAFTS  # that module needs this one

    if draft.kind not in DRAFTS:
        raise ValueError(f"draft.kind: expected one of {', '.join(DRAFTS)}, got {draft.kind!r}")
    for key in ("depth", "vocab_size", "draft_vocab_size"):
        value = getattr(draft, key)
        if value is not None and value < 1:
            raise ValueError(f"draft.{key}: expected 1 or more, or null, got {value}")
    if draft.target_layer_ids is not None and min(draft.target_layer_ids, default=-2) < -1:
        raise ValueError(
            "draft.target_layer_ids: expected layers from 0 on, -1 the embedding, or null, got "
            f"{draft.target_layer_ids}"
        )
    block = draft.kind in BLOCK_DRAFTS
    if not block and draft.layout is not None:
        raise ValueError(f"draft.layout: expected null for a draft of kind {draft.kind}, got {draft.layout}")
    for key in ("layout", "depth", "target_layer_ids", "vocab_size"):
        if block and getattr(draft, key) is None and status != "unverified":
            raise ValueError(f"draft.{key}: expected what specplug inspect says, got null")


def _check_files(recipe: Recipe) -> None:
    for key, file in (("cost_table", recipe.cost_table), ("calibration", recipe.calibration)):
        if file is not None:
            _check_sha256(f"{key}.sha256", file.sha256)
    for name, value in recipe.files.items():
        _check_sha256(f"files.{name}", value)


def _check_arms(recipe: Recipe) -> None:
    from specplug.recipe import PLACEHOLDERS
    from specplug.recipe_arms import differences

    names = [arm.name for arm in recipe.arms]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"arms: expected at least one, each with a name of its own, got {names}")
    given = {"target", "port", "folder"}
    given |= {key for key in ("draft", "cost_table", "calibration") if getattr(recipe, key) is not None}
    for arm in recipe.arms:
        _check_words(arm)
        text = " ".join([*arm.command, *arm.environment.values()])
        used = set(_PLACEHOLDER.findall(text))
        for name in sorted(used - set(PLACEHOLDERS)):
            raise ValueError(
                f"arm {arm.name}: expected placeholders out of {', '.join(PLACEHOLDERS)}, got {{{name}}}"
            )
        for name in sorted(used - given):
            raise ValueError(f"arm {arm.name}: expected no {{{name}}}, as the recipe's {name} is null")
        for name in sorted({"target", "port"} - set(_PLACEHOLDER.findall(" ".join(arm.command)))):
            raise ValueError(f"arm {arm.name}: expected {{{name}}} in its command, found none")
        _check_revisions(recipe, arm, used, text)
        if arm is not recipe.arms[0]:
            found = differences(recipe.arms[0], arm)
            if len(found) != 1:
                raise ValueError(
                    f"arm {arm.name}: expected one setting other than in {names[0]}, "
                    f"got {len(found)}{': ' if found else ''}{', '.join(found)}; "
                    "make it a recipe of its own, or make the others equal"
                )


def _check_words(arm: Arm) -> None:
    if not ARM_NAME.fullmatch(arm.name):
        raise ValueError(f"arms: expected names such as plain or top-4, got {arm.name!r}")
    for name in arm.environment:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"arm {arm.name}: environment: expected names of variables, got {name!r}")


def _check_revisions(recipe: Recipe, arm: Arm, used: set[str], text: str) -> None:
    for key, model in (("target", recipe.target), ("draft", recipe.draft)):
        if model is not None and model.revision is not None and key in used and model.revision not in text:
            raise ValueError(
                f"arm {arm.name}: expected {key}.revision {model.revision} in its command, found none; "
                "the engine would take whatever the hub has"
            )


def _check_sha256(key: str, value: str | None) -> None:
    if value is not None and not _SHA256.fullmatch(value):
        raise ValueError(f"{key}: expected 64 hex digits, got {value!r}")


def check_date(key: str, value: str) -> None:
    from specplug.recipe import is_date

    if not is_date(value):
        raise ValueError(f"{key}: expected a day such as 2026-11-30, got {value!r}")
