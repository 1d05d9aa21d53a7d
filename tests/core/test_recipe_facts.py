"""Whether a recipe's models and prompts are the ones it states."""

import shutil

import msgspec
import pytest

from specplug import models
from specplug.recipe_facts import facts
from specplug.recipe_shelf import find

CPU = "vllm-ddtree-dflash-cpu"
GPU = "vllm-ddtree-dflash-qwen3-8b"


def test_damaged_weights_are_found(monkeypatch, tmp_path):
    """The hash is of the file that would be served, not of the list of files."""
    copy = tmp_path / "models"
    shutil.copytree(models.path("deep-thin", "dflash"), copy / "deep-thin" / "dflash")
    shutil.copytree(models.path("deep-thin", "target"), copy / "deep-thin" / "target")
    with (copy / "deep-thin" / "dflash" / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\x7f")
    monkeypatch.setattr(models, "path", lambda name, part: copy / name / part)
    shelved = find(CPU)
    wrong = [one.detail for one in facts(shelved.recipe, shelved.folder) if one.state == "failed"]
    assert any("model.safetensors: expected SHA-256" in detail for detail in wrong)


def test_prompts_that_are_not_there_are_wrong_and_a_missing_hash_is_not():
    shelved = find(CPU)

    def dataset(**changed):
        data = msgspec.structs.replace(shelved.recipe.dataset, **changed)
        recipe = msgspec.structs.replace(shelved.recipe, status="unverified", expectations=[], dataset=data)
        (found,) = (one for one in facts(recipe, shelved.folder) if one.what == "dataset")
        return found.state

    assert dataset(name="nosuch.jsonl") == "failed"
    assert dataset(sha256=None) == "ok"
    assert dataset(sha256="0" * 64) == "failed"


def test_a_hub_model_is_found_in_the_cache_and_never_fetched(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    shelved = find(GPU)

    def target():
        (found,) = (one for one in facts(shelved.recipe, shelved.folder) if one.what == "target")
        return found.state

    assert target() == "absent"
    cached = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / shelved.recipe.target.revision
    cached.mkdir(parents=True)
    assert target() == "absent"
    (cached / "config.json").write_text("{}")
    assert target() == "ok"


def test_only_a_block_drafter_has_a_layout_to_compare(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["MedusaModel"]}')
    shelved = find("vllm-medusa-qwen3-8b")
    draft = msgspec.structs.replace(shelved.recipe.draft, model=str(tmp_path), revision=None)
    for kind, found in (("medusa", []), ("dflash", ["failed"])):
        recipe = msgspec.structs.replace(shelved.recipe, draft=msgspec.structs.replace(draft, kind=kind))
        layout = [one.state for one in facts(recipe, shelved.folder) if one.what == "draft layout"]
        assert layout == found
