"""`specplug simulate`: the table, the losing cells, JSON, the open loop, and what it refuses."""

import functools
import importlib.util
import json
import sys

import commands
import pytest
import small_recordings as small

from specplug import simulate
from specplug.contest import Cell, losses, mixed, names, percentiles, policy, prepare
from specplug.cost import write_cost_table
from specplug.cost_models import model_table
from specplug.recording_file import write_file


@pytest.fixture
def recording(tmp_path):
    write_file(tmp_path / "r.npz", small.at_random(20, requests=16, budget=32))
    return tmp_path / "r.npz"


run = functools.partial(commands.run, "simulate")


def cell(policy: str, concurrency: int, rate: float) -> Cell:
    return Cell(policy, concurrency, rate, 1.0, 0.0, {})


CELLS = [
    cell("plain", 1, 100.0), cell("chain", 1, 200.0), cell("ours", 1, 190.0),
    cell("plain", 8, 800.0), cell("chain", 8, 400.0), cell("ours", 8, 880.0),
]  # fmt: skip


def test_losing_cells_and_the_mix_by_hand():
    assert losses(CELLS) == [(1, "chain", 0.95)]
    ratios = mixed(CELLS)
    assert ratios["plain"] == pytest.approx((100 / 190 * 800 / 880) ** 0.5)
    assert ratios["chain"] == pytest.approx((200 / 190 * 400 / 880) ** 0.5)
    text = simulate.verdict(CELLS)
    assert "concurrency 1: 0.950 of chain" in text
    assert f"ours is {1 / ratios['chain']:.3f} of chain" not in text  # plain is the better single one
    assert f"ours is {1 / ratios['plain']:.3f} of plain, the best single fixed policy" in text
    assert "slower nowhere" in simulate.verdict(CELLS[3:])


def test_the_matrix_by_hand():
    lines = simulate.matrix(CELLS).splitlines()
    assert lines[0].split() == ["tokens/s", "1", "8"]
    assert lines[3].split() == ["ours", "190", "880"]
    assert lines[4].split() == ["ours", "/", "best", "fixed", "0.950", "1.100"]
    assert len({len(line) for line in lines}) == 1


def test_percentiles_are_values_that_occurred():
    assert percentiles([3.0, 1.0, 2.0]) == [2.0, 3.0, 3.0]
    assert percentiles([5.0]) == [5.0, 5.0, 5.0]


def test_a_run_prints_every_policy_and_its_losses(recording, capsys):
    small_run = ("--recording", recording, "--concurrency", 1, 4, "--tokens", 300)
    assert run(*small_run) == 0
    text = capsys.readouterr().out
    for name in ("plain", "chain", "tree 8", "tree 16", "tree 32", "ours", "ours / best fixed"):
        assert f"\n{name}  " in text
    assert "tree 64" not in text  # wider than what was recorded
    assert "every position recorded: exact" in text
    assert "a computed model, not a measurement" in text
    assert run(*small_run, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["cells"]) == 2 * 6
    rates = {(c["policy"], c["concurrency"]): c["tokens_per_second"] for c in result["cells"]}
    fixed = ("plain", "chain", "tree 8", "tree 16", "tree 32")
    lost = [c for c in (1, 4) if rates["ours", c] < max(rates[p, c] for p in fixed)]
    assert [one["concurrency"] for one in result["losses"]] == lost
    assert run(*small_run, "--json") == 0
    assert json.loads(capsys.readouterr().out) == result  # the same seed, the same figures
    assert run(*small_run, "--json", "--seed", 1) == 0
    assert json.loads(capsys.readouterr().out) != result


def test_a_measured_table_is_read_and_its_end_is_told(recording, tmp_path, capsys):
    write_cost_table(tmp_path / "t.json", model_table("compute-bound"))
    argv = ("--recording", recording, "--cost", tmp_path / "t.json", "--tokens", 200, "--dataset", "a")
    assert run(*argv, "--concurrency", 2, "--temperature", 0.8, "--calibration", "none") == 0
    text = capsys.readouterr().out
    assert "t.json, measured" in text
    assert "8 answers" not in text
    assert "survivals: as drafted" in text.lower()
    assert "extrapolated" not in text
    assert run(*argv, "--concurrency", 2048, "--calibration", "cross") == 0
    assert "beyond 33280 rows a step is extrapolated; the largest here has 67584" in capsys.readouterr().out


def test_the_open_loop(recording, capsys):
    argv = ("--recording", recording, "--rate", 5, 500, "--requests", 40, "--max-concurrency", 4)
    assert run(*argv, "--json") == 0
    services = json.loads(capsys.readouterr().out)["services"]
    assert len(services) == 2 * 6
    for name in ("plain", "ours"):
        slow, fast = [one for one in services if one["policy"] == name]
        assert slow["wait_seconds"][0] == 0
        assert fast["batch"] > slow["batch"]
        assert fast["latency_seconds"] > slow["latency_seconds"]
    assert run(*argv) == 0
    assert "latency p50" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--concurrency", 0), "--concurrency: expected 1..4096, got [0]"),
        (("--tokens", 0), "--tokens: expected at least 1, got 0"),
        (("--rate", 0), "--rate: expected finite numbers above 0"),
        (("--rate", 1, "--requests", 0), "--requests: expected at least 1, got 0"),
        (("--rate", 1, "--max-concurrency", 0), "--max-concurrency: expected at least 1, got 0"),
        (("--rate", 1, "--plot", "p.png"), "--plot: draws throughput against concurrency"),
        (("--min-gain", 2), "--min-gain: expected a fraction"),
        (("--seed", -1), "--seed: expected at least 0, got -1"),
        (("--dataset", "poems"), "data set: expected one of chat, maths, code, library, got 'poems'"),
        (("--recording", "poems"), "recording: expected one of deep-thin, or a file, got 'poems'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(capsys, argv, message):
    assert run(*argv) == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path, capsys):
    for flag in ("--cost", "--calibration"):
        assert run(flag, tmp_path / "none.json", "--tokens", 1) == 2
        assert "none.json" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run("--plot", "p.png") == 2
    assert "pip install 'specplug[plot]'" in capsys.readouterr().err


def test_a_plot_is_written(recording, tmp_path):
    pytest.importorskip("matplotlib")
    argv = ("--recording", recording, "--tokens", 200, "--concurrency", 1, 2, "--plot", tmp_path / "p.png")
    assert run(*argv) == 0
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_policies_are_named():
    contest = prepare(small.at_random(21), model_table("staircase"), cross_fit=False)
    assert names(contest.drafted.recording) == ["plain", "chain", "tree 8", "tree 16", "ours"]
    with pytest.raises(
        ValueError, match="policy: expected one of plain, chain, tree 8, tree 16, ours, got 'tree 9'"
    ):
        policy("tree 9", contest)


def test_the_command_needs_no_engine_and_no_transformers():
    """Simulating is numpy and the shipped files."""
    import subprocess

    code = "import sys, specplug.simulate, specplug.advise; print([m for m in sys.modules if m in ('transformers', 'vllm', 'matplotlib')])"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
