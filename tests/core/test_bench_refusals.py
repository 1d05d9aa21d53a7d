"""What `specplug bench` refuses before it starts an engine, each in one sentence, and what it would start."""

import json
import shutil
from pathlib import Path

import pytest
from commands import run

from specplug import bench_run, models, server
from specplug.provenance import config_hash
from specplug.recipe_shelf import find


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """The runs that would have started an engine."""
    found = []
    monkeypatch.setattr(bench_run.Bench, "run", lambda self: found.append(self))
    monkeypatch.setattr(server, "missing_engine", lambda **_: None)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arm", "x"], "--arm: expected NAME='FLAGS', got 'x'"),
        (["--arm", "plain=--foo"], "none of them 'plain'"),
        (["--arm", "x=--speculative-config {"], "arm x: --speculative-config: expected JSON"),
        (["--arm", 'x=--speculative-config {"a" 1}'], "--arm x: expected JSON"),
        (["--arm", "x=--dtype bfloat16"], "arm x: --dtype: bfloat16, and plain has float32"),
        (["--concurrency", "0"], "--concurrency: expected at least 1, got 0"),
        (["--rate", "0"], "--rate: expected a number above 0, got 0.0"),
        (["--max-tokens", "3"], "--max-tokens: expected at least 4, got 3"),
        (["--top-p", "0"], "--top-p: expected above 0"),
        (["--resume"], "--resume: bench.json: expected the file of an interrupted run, found none"),
        (["--recipe", "x", "--engine", "vllm"], "--recipe and --engine: expected one of them"),
        (["--recipe", "x"], "--recipe and --target: expected one of them"),
        (["--prompts", "none.jsonl"], "none.jsonl: expected a file of prompts, found none"),
        (["--target", "deep-thin", "--prompts", "turns.jsonl"], "turns.jsonl:2: expected turns that the"),
        (["--concurrency"], "--concurrency: expected a number, or --rate"),
        (["--budget", "0"], "--budget: expected at least 1, got 0"),
        (["--budget", "257"], "--budget: expected at most 256, got 257"),
        (["--seed", "-1"], "--seed: expected at least 0, got -1"),
        (["--seed", "4294967295"], "--seed: expected at most 4294967293, got 4294967295"),
        (["--near-tie", "nan"], "--near-tie: expected 0 or more, got nan"),
        (["--draft", "nowhere"], "missing file: nowhere does not exist"),
        (["--draft", "nowhere", "--arm", "x=--y"], "missing file: nowhere does not exist"),
        (["--draft", str(models.path("quick", "target"))], "not a block drafter"),
        (["--max-tokens", "2048"], "exceed the target's 2048 positions"),
        (["--server-args", "'x"], "--server-args: No closing quotation"),
        (["--generator-args", "'x"], "--generator-args: No closing quotation"),
        (
            ["--server-args", "--spec-method ngram", "--arm", "x=--y"],
            "arm plain: expected plain decoding, got the method ngram",
        ),
        (["--arm", "x=--port 9"], "arm x: --port: expected none, as a free one is taken, got 9"),
        (["--out", "a.md"], "--out a.md: expected a name beside which the report a.md"),
        (["--out", "empty.json"], "--out empty.json: expected a name beside which"),
        (["--arm", "x='y"], "--arm x: No closing quotation"),
        (
            ["--target", "empty", "--draft", "empty", "--arm", "x=--y"],
            "target empty: expected a tokenizer, got none that loads",
        ),
    ],
)
def test_arguments_that_cannot_work_end_in_one_sentence(begun, capsys, arguments, said):
    Path("empty").mkdir()
    Path("empty.run").touch()
    Path("turns.jsonl").write_text(
        '{"prompt": "Hello there, my friend"}\n{"messages": [{"role": "user", "content": 3}]}\n'
    )
    assert run("bench", "--target", "quick", *arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not begun


def _first(part, **changed):
    return lambda result: result[part][0].update(changed)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (_first("cells", repeats=[]), "repeats: expected one or more of plain, 1 in flight, got none; "),
        (
            lambda result: result["cells"].append(result["cells"][0]),
            "cells: expected each once, got plain, 1 in ",
        ),
        (_first("cells", arm="ghost"), "arms: expected one named 'ghost', which is measured, got plain, "),
        (_first("quality", arm="ghost"), "arms: expected one named 'ghost'"),
        (lambda result: result.update(baseline="ghost"), "arms: expected one named 'ghost'"),
        (
            lambda result: result.update(arms=[]),
            "arms: expected one named 'plain', which is measured, got none",
        ),
        (_first("arms", command=[]), "command: expected the server's of arm plain, got nothing"),
        (None, "broken.json: expected a result of specplug bench, got none: No such file or directory; "),
    ],
)
def test_results_that_contradict_themselves_are_not_compared(capsys, tmp_path, broken, said):
    measured = Path(__file__).parents[2] / "recipes" / "measured" / "bench-sglang-cpu.json"
    if broken is not None:
        result = json.loads(measured.read_text())
        broken(result)
        (tmp_path / "broken.json").write_text(json.dumps(result))
    assert run("bench", "--compare", measured, tmp_path / "broken.json") == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_recipes_tokenizer_is_that_of_its_revision(begun, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        return models.path("quick", "target")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert run("bench", "--recipe", "vllm-ddtree-dspark-qwen3-8b", "--dataset", "chat") == 0
    stated = find("vllm-ddtree-dspark-qwen3-8b").recipe.target
    assert asked == [(stated.model, stated.revision)]
    (bench,) = begun
    assert bench.tokenizer == str(models.path("quick", "target"))
    assert bench.settings.target_hash == config_hash(models.path("quick", "target"))


def test_a_server_has_no_more_room_than_the_targets_positions_unless_they_are_stretched(begun, capsys):
    asked = ("bench", "--dataset", "chat", "--count", "1", "--arm", "x=--y", "--max-tokens")
    assert run(*asked, "2000", "--target", "quick") == 0
    assert "--max-model-len 2048" in " ".join(begun[0].settings.server_args)
    shutil.copytree(models.path("quick", "target"), "long")
    config = json.loads(Path("long/config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    Path("long/config.json").write_text(json.dumps(config))
    run(*asked, "3000", "--target", "long", "--draft", "long")
    assert "positions" not in capsys.readouterr().err
    run(*asked, "3000", "--target", "quick")
    assert "positions" in capsys.readouterr().err
