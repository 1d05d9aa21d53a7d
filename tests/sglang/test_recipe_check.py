"""`specplug recipe check` with the real SGLang: how far each arm's command gets, and why not further."""

import copy
import sys
from pathlib import Path

import msgspec
import pytest

from specplug.recipe_engine import asked_arms, environment
from specplug.recipe_shelf import find

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_sglang_itself_judges_the_commands_of_a_recipe():
    """Accepted, refused by its parser, refused by our DDTREE; and nothing starts."""
    folder, recipe = find("sglang-ddtree-cpu")
    good = recipe.arm("ddtree")

    def arm(name, *flags):
        return msgspec.structs.replace(good, name=name, command=[*good.command, *flags])

    arms = [
        good,
        recipe.arm("plain"),
        arm("unknown", "--attention-backends", "x"),
        arm("narrow", "--speculative-num-draft-tokens", "0"),
    ]
    changed = copy.copy(recipe)
    msgspec.structs.force_setattr(changed, "arms", arms)  # past the rule of one setting
    found = {one.what: one for one in asked_arms(changed, folder, environment(recipe, Path(sys.prefix)))}
    assert (found["arm ddtree"].state, found["arm ddtree"].detail) == ("ok", "config accepted")
    assert found["arm plain"].state == "ok"
    assert "unrecognized arguments: --attention-backends" in found["arm unknown"].detail
    assert found["arm narrow"].state == "failed"
    assert found["arm narrow"].detail.startswith("parsed; config refused here: ")


def test_sglang_accepts_the_trees_of_models_that_are_not_here():
    """From stand-ins: config.json of the recipe, and a draft whose file has its tensors' shapes alone."""
    folder, recipe = find("sglang-ddtree-dspark-qwen3-8b")
    found = {one.what: one for one in asked_arms(recipe, folder, environment(recipe, Path(sys.prefix)))}
    assert found["arm ddtree"].detail == "config accepted"
