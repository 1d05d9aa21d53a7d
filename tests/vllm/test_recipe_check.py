"""`specplug recipe check` with the real vLLM: how far each arm's command gets, and why not further."""

import copy
import sys
from pathlib import Path

import msgspec
import pytest

from specplug.recipe_engine import asked_arms, environment
from specplug.recipe_shelf import find

pytestmark = pytest.mark.vllm


def test_vllm_itself_judges_the_commands_of_a_recipe():
    """Accepted, refused by its parser, refused by its configuration, refused by ours; and nothing starts."""
    folder, recipe = find("vllm-ddtree-dflash-cpu")
    good = recipe.arm("ddtree")

    def arm(name, *flags, command=good.command):
        return msgspec.structs.replace(good, name=name, command=[*command, *flags])

    nodes = [word.replace('"tree_budget": 16', '"tree_budget": 999') for word in good.command]
    arms = [
        good,
        recipe.arm("plain"),
        arm("unknown", "--attention-backends", "x"),
        arm("long", "--max-model-len", "9000"),
        arm("wide", command=nodes),
    ]
    changed = copy.copy(recipe)
    msgspec.structs.force_setattr(changed, "arms", arms)  # past the rule of one setting
    found = {one.what: one for one in asked_arms(changed, folder, environment(recipe, Path(sys.prefix)))}
    assert (found["arm ddtree"].state, found["arm ddtree"].detail) == ("ok", "config accepted")
    assert found["arm plain"].state == "ok"
    assert found["arm unknown"].state == "failed"
    assert (
        "not parsed: vllm serve: error: unrecognized arguments: --attention-backends"
        in found["arm unknown"].detail
    )
    assert found["arm long"].detail.startswith("parsed; config refused here: ")
    assert "max_model_len" in found["arm long"].detail
    assert "tree_budget: expected 1..256 nodes, got 999" in found["arm wide"].detail


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vllm-ddtree-dflash-qwen3-8b", "vllm-ddtree-dspark-qwen3-8b"])
def test_vllm_accepts_the_trees_of_models_that_are_not_here(name):
    """From stand-ins: config.json of the recipe, and a draft whose file has its tensors' shapes alone."""
    folder, recipe = find(name)
    found = {one.what: one for one in asked_arms(recipe, folder, environment(recipe, Path(sys.prefix)))}
    assert found["arm ddtree"].detail == "config accepted"
