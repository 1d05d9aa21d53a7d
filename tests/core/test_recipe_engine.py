"""What a recipe asks of an environment, and the stand-ins it shows an engine, where these are broken."""

import re

import msgspec
import pytest
from commands import run

from specplug import recipe_engine
from specplug.recipe_shelf import find
from specplug.recipe_stand_in import write_stand_in

CPU = "vllm-ddtree-dflash-cpu"
GPU = "vllm-ddtree-dflash-qwen3-8b"


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        (None, "Permission denied"),
        ("no program", "Exec format error"),
        ("#!/bin/sh\necho no torch >&2; exit 3\n", "exit code 3: no torch"),
        ("#!/bin/sh\necho hello\n", "Expecting value"),
        ("#!/bin/sh\necho '{}'\n", "missing 2 required positional arguments"),
        ("#!/bin/sh\nsleep 60\n", "no answer within 0 s"),
    ],
)
def test_an_environment_that_does_not_answer_gets_one_sentence(tmp_path, capsys, monkeypatch, script, fault):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(script or "")
    python.chmod(0o755 if script else 0o644)
    if "sleep" in (script or ""):
        monkeypatch.setattr(recipe_engine, "PROBE_SECONDS", 0.05)
    assert run("recipe", "check", CPU, "--no-engine", "--env", tmp_path) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"--env {tmp_path}: expected a Python that says what is installed, got " in said
    assert fault in said


def test_a_path_that_the_system_refuses_is_a_sentence(capsys):
    assert run("recipe", "show", "x" * 5000) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("specplug recipe: xxx")
    assert "expected a path that can be read or written, got 'File name too long'" in said


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"hidden_size": "x"}, "hidden_size: expected 1 to 1048576, got 'x'"),
        ({"hidden_size": None}, "hidden_size: expected 1 to 1048576, got None"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected 1 to 1024, got 1000000000"),
        ({"dflash_config": 3}, "target_layer_ids: expected a list of layers, got None"),
    ],
)
def test_a_stand_in_wants_sizes(tmp_path, changed, sentence):
    draft = find(GPU).recipe.draft
    write_stand_in(tmp_path / "good", draft)
    with pytest.raises(ValueError, match=re.escape(f"draft.config: {sentence}")):
        write_stand_in(tmp_path / "bad", msgspec.structs.replace(draft, config={**draft.config, **changed}))
