"""What a recipe must hold beyond the types of its keys: no number without its origin, no arm that differs in
two settings, no pin left open once a status claims more than "unverified"."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specplug.recipe import Arm, Draft, Model, Recipe

_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9.]+)*")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_rules(recipe: Recipe) -> None:
    """Raises ValueError, "key: expected ..., got ...; the fix", for the first rule that does not hold."""
    if not _NAME.fullmatch(recipe.name):
        raise ValueError(f"name: expected lower-case words joined by dashes, got {recipe.name!r}")
    _check_date("date", recipe.date)
    _check_pins(recipe)
    _check_models(recipe)
    _check_files(recipe)
    _check_arms(recipe)
    _check_expectations(recipe)


def _check_pins(recipe: Recipe) -> None:
    engine, software = recipe.engine, recipe.software
    _check_sha256("engine.distribution_sha256", engine.distribution_sha256)
    _check_sha256("software.requirements_sha256", software.requirements_sha256)
    if recipe.device.kind == "cpu" and software.cuda is not None:
        raise ValueError(f"software.cuda: expected null on a CPU, got {software.cuda!r}")
    if recipe.device.count < 1:
        raise ValueError(f"device.count: expected 1 or more, got {recipe.device.count}")
    if (software.requirements is None) != (software.requirements_sha256 is None):
        raise ValueError("software.requirements_sha256: expected one beside requirements, and none without")
    if (engine.image is None) != (engine.image_digest is None):
        raise ValueError("engine.image_digest: expected one beside image, and none without")
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


def _check_models(recipe: Recipe) -> None:
    from specplug.recipe import SHIPPED  # that module needs this one

    models: list[tuple[str, Model]] = [("target", recipe.target)]
    if recipe.draft is not None:
        models.append(("draft", recipe.draft))
        _check_layout(recipe.draft, recipe.status)
    for key, model in models:
        for file, value in (model.sha256 or {}).items():
            _check_sha256(f"{key}.sha256.{file}", value)
        if model.model.startswith(SHIPPED):
            if not model.sha256:
                raise ValueError(f"{key}.sha256: expected the hashes of {model.model}, got none")
        elif model.revision is not None and not _COMMIT.fullmatch(model.revision):
            raise ValueError(
                f"{key}.revision: expected a commit of 40 hex digits, got {model.revision!r}; a branch moves"
            )
        elif model.revision is None and recipe.status != "unverified":
            raise ValueError(
                f"{key}.revision: expected the commit of {model.model} at status {recipe.status}, got null; "
                "without it the recipe is unverified"
            )
    data = recipe.dataset
    _check_sha256("dataset.sha256", data.sha256)
    if data.sha256 is None and recipe.status != "unverified":
        raise ValueError(
            f"dataset.sha256: expected the hash of {data.name} at status {recipe.status}, got null"
        )
    if data.count < 1:
        raise ValueError(f"dataset.count: expected 1 or more prompts, got {data.count}")


def _check_layout(draft: Draft, status: str) -> None:
    from specplug.recipe import BLOCK_DRAFTS  # that module needs this one

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
        text = " ".join([*arm.command, *arm.environment.values()])
        used = set(_PLACEHOLDER.findall(text))
        for name in sorted(used - set(PLACEHOLDERS)):
            raise ValueError(
                f"arm {arm.name}: expected placeholders out of {', '.join(PLACEHOLDERS)}, got {{{name}}}"
            )
        for name in sorted(used - given):
            raise ValueError(f"arm {arm.name}: {{{name}}} is used, and the recipe's {name} is null")
        for name in sorted({"target", "port"} - used):
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


def _check_revisions(recipe: Recipe, arm: Arm, used: set[str], text: str) -> None:
    for key, model in (("target", recipe.target), ("draft", recipe.draft)):
        if model is not None and model.revision is not None and key in used and model.revision not in text:
            raise ValueError(
                f"arm {arm.name}: expected {key}.revision {model.revision} in its command, found none; "
                "the engine would take whatever the hub has"
            )


def _check_expectations(recipe: Recipe) -> None:
    if recipe.status == "unverified" and recipe.expectations:
        raise ValueError(
            "expectations: expected none at status unverified, got some; "
            "a published number belongs in sources, a measured one makes the recipe verified"
        )
    for one in recipe.expectations:
        recipe.arm(one.arm)
        length, tolerance = one.accepted_length_bonus_counted, one.accepted_length_tolerance
        if (length is None) != (tolerance is None) or (tolerance is not None and tolerance < 0):
            raise ValueError(
                f"expectations: {one.arm}: expected accepted_length_bonus_counted with a tolerance of 0 or "
                f"more, got {length} and {tolerance}"
            )
        if length is not None and length < 1:
            raise ValueError(
                f"expectations: {one.arm}: expected an accepted length of 1 or more, got {length}: "
                "the bonus token counts"
            )
        speed = one.output_tokens_per_second
        if speed is not None and (len(speed) != 2 or not 0 < speed[0] <= speed[1]):
            raise ValueError(
                f"expectations: {one.arm}: output_tokens_per_second: expected [lowest, highest], got {speed}"
            )
        if one.concurrency < 1 or one.measured_by.runs < 1:
            raise ValueError(f"expectations: {one.arm}: concurrency and runs: expected 1 or more")
        _check_date(f"expectations: {one.arm}: measured_by.date", one.measured_by.date)
    first = recipe.arms[0].name
    if recipe.status == "verified" and not any(
        one.arm == first and one.accepted_length_bonus_counted is not None for one in recipe.expectations
    ):
        raise ValueError(
            f"expectations: expected a measured accepted length of arm {first} at status verified, got none"
        )


def _check_sha256(key: str, value: str | None) -> None:
    if value is not None and not _SHA256.fullmatch(value):
        raise ValueError(f"{key}: expected 64 hex digits, got {value!r}")


def _check_date(key: str, value: str) -> None:
    from specplug.recipe import is_date

    if not is_date(value):
        raise ValueError(f"{key}: expected a day such as 2026-11-30, got {value!r}")
