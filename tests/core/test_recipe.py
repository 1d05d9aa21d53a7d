"""Recipes: what the schema takes, what it refuses in one sentence, and that every shipped recipe is right."""

import json
import re
import shlex
import shutil
from pathlib import Path

import msgspec
import pytest
from commands import run

from specplug import models
from specplug.recipe import Arm, Model, Recipe, read_recipe, resolve
from specplug.recipe_arms import differences
from specplug.recipe_facts import facts
from specplug.recipe_shelf import find, folders

NAMES = [folder.name for folder in folders()]
CPU = "vllm-ddtree-dflash-cpu"
GPU = "vllm-ddtree-dflash-qwen3-8b"
SAME = {"calibration"}  # its keys are those of cost_table


@pytest.fixture
def shelf(tmp_path) -> Path:
    """A folder of recipes of one's own, with copies of two shipped ones."""
    for name in (CPU, GPU):
        shutil.copytree(find(name).folder, tmp_path / name)
    return tmp_path


def edited(folder: Path, edit) -> Path:
    """The recipe in the folder after ``edit`` of its JSON."""
    file = folder / "recipe.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))
    return file


def measured(content):
    """Make a recipe look measured."""
    content["status"] = "verified"
    by = {"date": "2026-11-30", "machine": "a machine", "runs": 2}
    content["expectations"] = [
        {
            "arm": content["arms"][0]["name"],
            "concurrency": 4,
            "accepted_length_bonus_counted": 5.0,
            "accepted_length_tolerance": 0.1,
            "output_tokens_per_second": [10.0, 40.0],
            "measured_by": by,
        }
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_is_right_as_far_as_this_machine_can_say(name):
    shelved = find(name)
    wrong = [one for one in facts(shelved.recipe, shelved.folder) if one.state == "failed"]
    assert not wrong
    for arm in shelved.recipe.arms:
        command, environment = resolve(shelved.recipe, arm, folder=shelved.folder, port=1)
        left = [word for word in (*command, *environment.values()) if "{target}" in word or "{draft}" in word]
        assert not left
    if shelved.recipe.device.kind == "gpu":
        assert shelved.recipe.status == "unverified", "no GPU was here"


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda c: c.update(atention="x"), "unknown field `atention`"),
        (lambda c: c["serving"].update(graph_modes="x"), "did you mean 'graph_mode'?"),
        (lambda c: c["expectations"].append({}), "missing required field `arm`"),
        (lambda c: c.pop("sampling"), "missing required field `sampling`"),
        (lambda c: c.update(date="yesterday"), "date: expected a day such as 2026-11-30, got 'yesterday'"),
        (
            lambda c: c["target"].update(sha256=None),
            "target.sha256: expected the hashes of specplug:deep-thin",
        ),
        (lambda c: c["dataset"].update(sha256="abc"), "dataset.sha256: expected 64 hex digits, got 'abc'"),
        (lambda c: c["software"].update(cuda="13.0"), "software.cuda: expected null on a CPU, got '13.0'"),
        (lambda c: c["arms"][0]["command"].append("{drat}"), "expected placeholders out of target, draft"),
        (lambda c: c["arms"][0]["command"].append("{cost_table}"), "the recipe's cost_table is null"),
        (
            lambda c: (measured(c), c.update(status="unverified")),
            "expectations: expected none at status unverified",
        ),
        (
            lambda c: (measured(c), c.update(expectations=[])),
            "expected a measured accepted length of arm ddtree",
        ),
        (
            lambda c: (measured(c), c["expectations"][0].update(accepted_length_bonus_counted=0.7)),
            "expected an accepted length of 1 or more, got 0.7: the bonus token counts",
        ),
        (
            lambda c: (measured(c), c["expectations"][0].update(output_tokens_per_second=[40.0, 10.0])),
            "expected [lowest, highest], got [40.0, 10.0]",
        ),
        (
            lambda c: (measured(c), c["engine"].update(distribution_sha256=None)),
            "engine.distribution_sha256: expected a hash or an image_digest at status verified",
        ),
        (
            lambda c: c["arms"][2]["command"].append("--seed=1"),
            "got 2: --seed, method; make it a recipe of its own",
        ),
        (lambda c: c["arms"][1].update(c["arms"][0], name="again"), "got 0; make it a recipe of its own"),
    ],
)
def test_a_bad_recipe_gets_one_sentence(shelf, capsys, edit, sentence):
    def changed(content):
        content["status"], content["expectations"] = "unverified", []
        edit(content)

    file = edited(shelf / CPU, changed)
    assert run("recipe", "check", file) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith(f"specplug recipe: {file}: ")
    assert len(said.splitlines()) == 1


def test_a_gpu_recipe_needs_revisions_once_it_claims_more_than_unverified(shelf):
    with pytest.raises(ValueError, match=r"target.revision: expected the commit of Qwen/Qwen3-8B at status"):
        read_recipe(
            edited(shelf / GPU, lambda c: (measured(c), c["target"].update(revision=None), pinned(c)))
        )
    with pytest.raises(ValueError, match="a branch moves"):
        read_recipe(edited(shelf / GPU, lambda c: c["target"].update(revision="main")))
    old = find(GPU).recipe.target.revision
    with pytest.raises(ValueError, match=r"expected target.revision a{40} in its command, found none"):
        read_recipe(edited(shelf / GPU, lambda c: c["target"].update(revision="a" * 40)))
    assert old is not None


def pinned(content):
    content["software"] |= {
        "torch": "1", "triton": "1", "requirements": "pins.txt", "requirements_sha256": "0" * 64,
    }  # fmt: skip


def test_a_wrong_hash_and_a_wrong_layout_are_found(shelf, capsys):
    def edit(content):
        content["draft"]["sha256"]["config.json"] = "0" * 64
        content["draft"]["layout"] = "anchor_first"

    edited(shelf / CPU, edit)
    assert run("recipe", "check", "--no-engine", shelf / CPU) == 1
    said = capsys.readouterr().out
    assert "WRONG     draft: " in said
    assert "expected SHA-256 000000000000..., got d3c165c64aa7..." in said
    assert "layout: the recipe says anchor_first, the checkpoint fill_in" in said


def test_damaged_weights_are_found(shelf, monkeypatch, tmp_path):
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


def test_prompts_that_are_not_there_are_wrong_and_a_missing_hash_is_not(shelf):
    shelved = find(CPU)

    def dataset(**changed):
        data = msgspec.structs.replace(shelved.recipe.dataset, **changed)
        recipe = msgspec.structs.replace(shelved.recipe, status="unverified", expectations=[], dataset=data)
        (found,) = (one for one in facts(recipe, shelf / CPU) if one.what == "dataset")
        return found.state

    assert dataset(name="nosuch.jsonl") == "failed"
    assert dataset(sha256=None) == "ok"
    assert dataset(sha256="0" * 64) == "failed"


def test_only_a_block_drafter_has_a_layout_to_compare(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["MedusaModel"]}')
    shelved = find("vllm-medusa-qwen3-8b")
    draft = msgspec.structs.replace(shelved.recipe.draft, model=str(tmp_path), revision=None)
    for kind, found in (("medusa", []), ("dflash", ["failed"])):
        recipe = msgspec.structs.replace(shelved.recipe, draft=msgspec.structs.replace(draft, kind=kind))
        layout = [one.state for one in facts(recipe, shelved.folder) if one.what == "draft layout"]
        assert layout == found


def test_names_are_suggested_and_own_folders_are_found(shelf, tmp_path, capsys):
    assert run("recipe", "show", "vllm-ddtree-dflash-cp") == 2
    assert f"did you mean '{CPU}'?" in capsys.readouterr().err
    (shelf / CPU).rename(shelf / "mine")
    edited(shelf / "mine", lambda c: c.update(name="mine"))
    assert run("recipe", "show", "mine", "--dir", shelf) == 0
    assert capsys.readouterr().out.startswith("mine (")
    edited(shelf / "mine", lambda c: c.update(name="yours"))
    assert run("recipe", "show", "mine", "--dir", shelf) == 2
    assert "name: expected that of the folder, 'mine', got 'yours'" in capsys.readouterr().err
    assert run("recipe", "list", "--dir", tmp_path / "nothing") == 2
    assert "expected a folder of recipes" in capsys.readouterr().err


def test_the_list_goes_on_after_a_bad_recipe_and_says_so(shelf, capsys):
    edited(shelf / CPU, lambda c: c.update(date=""))
    assert run("recipe", "list", "--dir", shelf, "--json") == 1
    said = capsys.readouterr()
    assert {one["name"] for one in json.loads(said.out)} == set(NAMES)
    assert len(said.err.splitlines()) == 1


def test_show_prints_commands_that_can_be_pasted(capsys):
    assert run("recipe", "show", CPU) == 0
    said = capsys.readouterr().out
    assert f"serve {models.path('deep-thin', 'target')} " in said
    assert "{" not in said.replace('{"method"', "")
    assert run("recipe", "show", CPU, "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Recipe) == find(CPU).recipe


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("--a 1 --b", "--a 2 --b", ["--a"]),
        ("--a=1", "--a 1", []),
        ("m --a 1", "n --a 1 --c", ["--c", "program"]),
        ("--speculative-algorithm DDTREE --speculative-num-draft-tokens 17", "", ["method"]),
        (
            "--speculative-algorithm DDTREE --speculative-num-draft-tokens 17",
            "--speculative-algorithm DSPARK --speculative-num-draft-tokens 8",
            ["method", "num-draft-tokens"],
        ),
        (
            """--speculative-config '{"method": "ddtree", "model": "D", "tree_budget": 16}'""",
            """--speculative-config '{"method": "ddtree", "model": "D", "tree_budget": 32}'""",
            ["tree_budget"],
        ),
        (
            """--speculative-config '{"method": "ddtree", "model": "D", "tree_budget": 16}'""",
            """--speculative-config '{"method": "ddtree", "model": "D"}'""",
            ["tree_budget"],
        ),
        (
            """--speculative-config '{"method": "ddtree", "model": "D", "tree_budget": 16}'""",
            """--speculative-config '{"method": "dflash", "model": "E", "num_speculative_tokens": 7}'""",
            ["method", "model"],
        ),
    ],
)
def test_a_setting_is_a_flag_a_variable_or_a_key_and_a_method_brings_its_own(one, other, found):
    first, second = (Arm(name="x", command=shlex.split(text)) for text in (one, other))
    assert differences(first, second) == found
    assert differences(second, first) == found


def test_environment_variables_are_settings_too():
    plain = Arm(name="plain", command=["serve"], environment={"A": "1"})
    drafted = Arm(
        name="drafted",
        command=["serve", "--speculative-algorithm", "DSPARK"],
        environment={"A": "1", "SGLANG_RAGGED_VERIFY_MODE": "compact"},
    )
    static = msgspec.structs.replace(drafted, environment={"A": "1", "SGLANG_RAGGED_VERIFY_MODE": "static"})
    assert differences(plain, drafted) == ["method"]
    assert differences(drafted, static) == ["SGLANG_RAGGED_VERIFY_MODE"]
    assert differences(plain, msgspec.structs.replace(plain, environment={"A": "2"})) == ["A"]


def test_the_documentation_has_every_key_of_the_schema_and_no_other():
    def keys(kind, prefix=""):
        for field in msgspec.structs.fields(kind):
            yield prefix + field.name
            for part in (field.type, *getattr(field.type, "__args__", ())):
                if isinstance(part, type) and issubclass(part, msgspec.Struct) and field.name not in SAME:
                    yield from keys(part, f"{prefix}{field.name}.")

    inherited = {f"draft.{field.name}" for field in msgspec.structs.fields(Model)}
    text = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()
    table = text.partition("## The schema")[2].partition("\n\nIn `arms")[0]
    assert re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE) == [
        key for key in sorted(keys(Recipe), key=lambda key: key.count(".") > 0) if key not in inherited
    ]
