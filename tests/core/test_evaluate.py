"""`specplug evaluate`, end to end on the quick set, in this process."""

import json
import subprocess
import sys

import pytest
from commands import run

pytest.importorskip("transformers", reason="specplug evaluate needs the extra `local`")

from specplug.local import evaluation, records

SMALL = (
    "evaluate", "--target", "quick", "--dataset", "library", "--count", "3", "--max-tokens", "12",
    "--method", "plain", "chain", "tree", "--budget", "4", "8", "--temperature", "0", "0.8",
)  # fmt: skip
LABELS = ["plain", "chain", "tree 4", "tree 8"]


def test_a_whole_run(tmp_path, capsys):
    assert run(*SMALL, "--out", tmp_path, "--record", "--steps") == 0
    out = capsys.readouterr().out
    assert out.count("| library | 0 | tree 8 |") == 2  # in both tables
    result = json.loads((tmp_path / "report.json").read_text())
    assert [(row["temperature"], row["method"]) for row in result["rows"]] == [
        (t, label) for t in (0.0, 0.8) for label in LABELS
    ]
    for row in result["rows"]:
        assert (row["prompts"], row["identical"], row["tokens"]) == (3, 3, 36)
        value, error = row["accepted_length"]
        assert (value, error) == (1, 0) if row["method"] == "plain" else (value > 1 and error > 0)
    rounds = records.read_rounds(tmp_path)
    kept = records.read(tmp_path / "records.jsonl", records.Record)
    for one in kept:
        mine = [r for r in rounds if (r.temperature, r.method) == (one.temperature, one.method)]
        mine = [r for r in mine if r.prompt == one.prompts[0]]
        if one.method == "plain":
            assert not mine
            continue
        assert [sum(r.accepted) + 1 for r in mine] == one.emitted[0]
        for r in mine:
            for node, parent in enumerate(r.parents):
                siblings = [n for n, other in enumerate(r.parents) if other == parent]
                assert r.ranks[node] == siblings.index(node)
                assert not r.accepted[node] or parent < 0 or r.accepted[parent]


def test_a_resumed_run_does_only_what_is_missing(tmp_path, monkeypatch, capsys):
    """Stopped after the fourth unit and with a torn line: two of six are left, and the report is the same."""
    answered = []
    true_answer = evaluation._answer

    def counting(pair, batch, method, unit, settings, **options):
        if len(answered) == counting.stop:
            raise KeyboardInterrupt
        if "limit" not in options:
            answered.append((unit.temperature, unit.prompts[0], method.label))
        return true_answer(pair, batch, method, unit, settings, **options)

    counting.stop = 4 * len(LABELS) + 1
    monkeypatch.setattr(evaluation, "_answer", counting)
    assert run(*SMALL, "--out", tmp_path) == 130
    assert "interrupted" in capsys.readouterr().err
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"dataset": "libr')
    answered.clear()
    counting.stop = None
    assert run(*SMALL, "--out", tmp_path, "--resume") == 0
    assert {key[:2] for key in answered} == {(0.8, 1), (0.8, 2)}
    assert len(answered) == 2 * len(LABELS)
    resumed = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert run(*SMALL, "--json") == 0
    whole = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))["rows"]
    timed = {
        "wall_ratio",
        "wall_ratio_quartiles",
        "wall_over_chain",
        "step_milliseconds",
        "tokens_per_second",
    }
    for one, other in zip(resumed, whole, strict=True):
        assert all(one[key] == other[key] for key in one.keys() - timed)


def test_an_answer_that_parts_from_plain_decoding_fails_the_run(tmp_path, monkeypatch, capsys):
    from specplug.local.target import SlotCache

    monkeypatch.setattr(SlotCache, "commit", lambda self, moves: None)
    assert run(*SMALL, "--out", tmp_path) == 1
    assert "not plain decoding's; where they part" in capsys.readouterr().err
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    wrong = [row for row in rows if row["identical"] < 3]
    assert {row["method"] for row in wrong} == {"tree 4", "tree 8"}
    assert all(row["largest_gap"] > 1e-3 for row in wrong)
    assert all(row["largest_gap"] == 0 for row in rows if row not in wrong)


def test_batches_give_the_same_answers(tmp_path):
    assert run(*SMALL, "--out", tmp_path / "one") == 0
    assert run(*SMALL, "--out", tmp_path / "two", "--batch", "2") == 0
    one, two = (json.loads((tmp_path / name / "report.json").read_text())["rows"] for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert (a["accepted_length"], a["identical"]) == (b["accepted_length"], b["identical"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--max-tokens", "0"], "--max-tokens: expected at least 1, got 0"),
        (["--batch", "0"], "--batch: expected at least 1"),
        (["--count", "0"], "--count: expected at least 1"),
        (["--temperature", "-1"], "--temperature: expected 0 or more"),
        (["--resume"], "--resume: needs a folder"),
        (["--record"], "--record: needs a folder"),
        (["--plot"], "--plot: needs a folder"),
        (["--target", "/nowhere"], "--draft: expected a folder or hub id for target /nowhere"),
        (
            ["--dataset", "poems"],
            "--dataset: expected NAME=FILE or one of chat, maths, code, library, got 'poems'",
        ),
        (["--budget", "0"], "budget: expected 1..256 nodes, got 0"),
        (["--budget", "257"], "budget: expected 1..256 nodes, got 257"),
        (["--candidates", "0"], "candidates: expected 1..1024"),
        (["--depth", "8"], "--depth: expected 1..7, the draft's own, got 8"),
        (["--max-tokens", "2048"], "exceed the target's 2048 positions"),
    ],
)
def test_what_cannot_work_is_refused(arguments, complaint, capsys):
    assert run("evaluate", *arguments) == 2
    assert complaint in capsys.readouterr().err


def test_a_draft_of_another_target_is_refused(capsys):
    from specplug import models

    assert run("evaluate", "--target", "quick", "--draft", models.path("deep-thin", "dspark")) == 2
    assert "was not made for this target" in capsys.readouterr().err


def test_importing_the_command_line_imports_no_engine():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, specplug.cli; print({'torch', 'transformers'} & {*sys.modules})"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"
