"""Records on disk, the figures made of them, and prompts: pure functions and files, no model."""

import itertools
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="specplug.local needs the extra `local`")

from specplug.local import figures, library, prompts, records, report
from specplug.local.records import Record, RoundRecord, Settings

SETTINGS = Settings(
    target="t", draft="d", methods=["plain", "chain"], temperatures=[0.0], datasets={"chat": "0"},
    max_tokens=8, batch=1, candidates=4, depth=2, seed=0, repeats=1, dtype="float32", device="cpu",
    record=True,
)  # fmt: skip


def record(prompt: int, emitted: list[int], method: str = "chain", seconds: float = 1.0, **changes) -> Record:
    fields = {
        "dataset": "chat",
        "temperature": 0.0,
        "method": method,
        "prompts": [prompt],
        "tokens": [list(range(sum(emitted)))],
        "emitted": [emitted],
        "seconds": {"prefill": 0.0, "verify": seconds},
    }
    return Record(**fields | changes)


def jackknife(pairs, statistic) -> float:
    """Standard error by leaving one prompt out: an independent, asymptotically equal estimate."""
    n = len(pairs)
    left = [statistic(pairs[:i] + pairs[i + 1 :]) for i in range(n)]
    mean = sum(left) / n
    return math.sqrt((n - 1) / n * sum((x - mean) ** 2 for x in left))


def some_records(seed: int, method: str, extra: int = 0) -> list[Record]:
    r = random.Random(seed)
    return [record(i, [r.randint(1, 5) + extra for _ in range(r.randint(5, 12))], method) for i in range(60)]


def test_accepted_length_and_its_error():
    rows = some_records(1, "chain")
    pairs = [(sum(one.emitted[0]), len(one.emitted[0])) for one in rows]
    estimate = figures.accepted_length(rows)
    assert estimate.value == sum(t for t, _ in pairs) / sum(r for _, r in pairs)
    by_jackknife = jackknife(pairs, lambda p: sum(t for t, _ in p) / sum(r for _, r in p))
    assert math.isclose(estimate.standard_error, by_jackknife, rel_tol=0.05)


def test_ratio_to_the_chain_and_its_error():
    chain = some_records(2, "chain")
    tree = [record(one.prompts[0], [x + 1 for x in one.emitted[0]], "tree 4") for one in chain]
    estimate = figures.ratio_of_ratios(tree, chain)
    pairs = list(zip(tree, chain, strict=True))

    def statistic(some) -> float:
        sides = zip(*some, strict=True)
        lengths = [
            sum(sum(x.emitted[0]) for x in side) / sum(len(x.emitted[0]) for x in side) for side in sides
        ]
        return lengths[0] / lengths[1]

    assert math.isclose(estimate.value, statistic(pairs))
    assert math.isclose(estimate.standard_error, jackknife(pairs, statistic), rel_tol=0.05)
    unpaired = estimate.value * math.hypot(
        *(figures.accepted_length(side)[1] / figures.accepted_length(side)[0] for side in (tree, chain))
    )
    assert estimate.standard_error < 0.7 * unpaired  # pairing is what makes the comparison sharp


def test_a_ratio_needs_the_same_prompts():
    with pytest.raises(ValueError, match="the same prompts on both sides"):
        figures.ratio_of_ratios([record(0, [1])], [record(1, [1])])


def test_one_prompt_has_no_standard_error():
    assert figures.accepted_length([record(0, [2, 4])]) == figures.Estimate(3.0, None)


def test_rows_by_hand():
    """Two prompts, three methods; every figure worked out on paper."""
    plain = [record(0, [1] * 4, "plain", 8.0), record(1, [1] * 2, "plain", 2.0)]
    chain = [record(0, [3, 1], seconds=4.0), record(1, [2], seconds=2.0)]
    tree = [record(0, [4], "tree 4", 2.0), record(1, [2], "tree 4", 0.5, tokens=[[0, 7]])]
    by_method = {row.method: row for row in figures.rows([*plain, *chain, *tree])}
    one = by_method["chain"]
    assert (one.prompts, one.tokens, one.rounds, one.accepted_length.value) == (2, 6, 3, 2.0)
    assert [round(share.value, 9) for share in one.accepted_by_position] == [round(2 / 3, 9), round(1 / 3, 9)]
    assert one.tokens_per_forward == 6 / 5
    assert one.wall_ratio == 1.5  # the median of 2 and 1
    assert one.identical == 2
    assert one.step_milliseconds == {"prefill": 0.0, "verify": 2000.0}
    one = by_method["tree 4"]
    assert one.over_chain.value == 1.5
    assert (one.wall_over_chain, one.identical) == (3.0, 1)
    assert one.distinct_ngrams == 1.0  # of the one answer that has a 4-gram
    assert by_method["plain"].accepted_by_position == []


def test_several_data_sets_have_a_row_for_all():
    rows = figures.rows([record(0, [2]), record(0, [4], dataset="code")])
    assert [(row.dataset, row.accepted_length.value) for row in rows] == [
        ("chat", 2.0),
        ("all", 3.0),
        ("code", 4.0),
    ]
    table = report.table(rows).splitlines()
    assert len(table) == 5
    assert len({line.count("|") for line in table}) == 1


@given(st.lists(st.integers(0, 3), max_size=40))
def test_distinct_ngrams(tokens):
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    assert figures.distinct_ngrams(tokens) == (len(set(grams)) / len(grams) if grams else None)


def test_what_was_written_is_read(tmp_path):
    assert records.open_folder(tmp_path / "run", SETTINGS, resume=False) == {}
    written = [record(i, [2, 1]) for i in range(3)]
    records.append(tmp_path / "run" / "records.jsonl", written[:2])
    records.append(tmp_path / "run" / "records.jsonl", written[2:])
    again = records.open_folder(tmp_path / "run", SETTINGS, resume=True)
    assert list(again.values()) == written


def test_a_torn_last_line_is_dropped_wherever_it_tears(tmp_path):
    whole = tmp_path / "whole"
    records.open_folder(whole, SETTINGS, resume=False)
    written = [record(0, [2]), record(1, [3])]
    records.append(whole / "records.jsonl", written)
    bytes_of = (whole / "records.jsonl").read_bytes()
    first = bytes_of.index(b"\n") + 1
    for cut in range(first, len(bytes_of)):
        folder = tmp_path / str(cut)
        records.open_folder(folder, SETTINGS, resume=False)
        (folder / "records.jsonl").write_bytes(bytes_of[:cut])
        assert list(records.open_folder(folder, SETTINGS, resume=True).values()) == written[:1]
        records.append(folder / "records.jsonl", written[1:])  # nothing is left to run into
        assert records.read(folder / "records.jsonl", Record) == written


def test_damage_before_the_last_line_is_an_error(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_bytes(b'{"dataset": 1}\n')
    with pytest.raises(ValueError, match=r"records.jsonl:1: .*dataset"):
        records.read(file, Record)


def test_a_run_is_not_overwritten_nor_mixed(tmp_path):
    records.open_folder(tmp_path, SETTINGS, resume=False)
    with pytest.raises(ValueError, match="has a run already; add --resume"):
        records.open_folder(tmp_path, SETTINGS, resume=False)
    changes = {"seed": 1, "methods": ["plain"], "datasets": {"chat": "1"}}
    for name, value in changes.items():
        other = json.loads((tmp_path / "settings.json").read_text()) | {name: value}
        with pytest.raises(ValueError, match=f"{name}: the run has"):
            records.open_folder(tmp_path, Settings(**other), resume=True)


def test_rounds_of_a_repeated_batch_count_once(tmp_path):
    def one(prompt: int, number: int) -> RoundRecord:
        return RoundRecord(
            dataset="chat", temperature=0.0, method="tree 4", prompt=prompt, round=number, tokens=[1],
            parents=[-1], depths=[1], ranks=[0], log_probs=[-0.5], survivals=None, accepted=[True],
        )  # fmt: skip

    file = tmp_path / "rounds.jsonl"
    records.append(file, [one(0, 0), one(0, 1), one(1, 0)])
    records.append(file, [one(1, 0), one(1, 1)])  # prompt 1 was interrupted and run again
    assert [(r.prompt, r.round) for r in records.read_rounds(tmp_path)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_built_in_prompts():
    sets = prompts.data_sets(prompts.CHAT_SETS, files=[], count=None, seed=0)
    assert [len(lines) for lines in sets.values()] == [22, 21, 21]
    assert all(line.question and "<|" not in line.question for lines in sets.values() for line in lines)
    assert len(prompts.data_sets(["maths"], files=[], count=3, seed=0)["maths"]) == 3


def test_library_windows_come_from_held_out_files_only():
    files = library.library_files()
    kept = [text for number, (_, text) in enumerate(files) if library.held_out(number)]
    trained = [text for number, (_, text) in enumerate(files) if not library.held_out(number)]
    assert 0 < len(kept) * 15 < len(trained)
    pieces = library.windows(20, seed=5)
    assert pieces == library.windows(20, seed=5) != library.windows(20, seed=6)
    assert all(any(piece in text for text in kept) for piece in pieces)
    assert not any(piece in text for piece, text in itertools.product(pieces[:3], trained))


def test_files_of_prompts(tmp_path):
    file = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "def f("},
        {"question": "Why?", "answer": "unknown keys are the data set's business"},
        {"messages": [{"role": "user", "content": "Hi"}], "kind": "talk"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    sets = prompts.data_sets([], files=[file], count=None, seed=0)
    assert {name: len(rows) for name, rows in sets.items()} == {"mine": 2, "talk": 1}
    named = prompts.data_sets([f"own={file}", "code"], files=[], count=2, seed=0)
    assert {name: len(rows) for name, rows in named.items()} == {"own": 2, "code": 2}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected one prompt or more, got an empty file"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', r"bad.jsonl:2: Expected `str \| null`, got `int`"),
        ('{"promt": "a"}\n', "bad.jsonl:1: expected one of prompt, question, messages, got none"),
        ('{"prompt": "a", "question": "b"}\n', "got prompt and question"),
        ("[1]\n", "bad.jsonl:1"),
        ("{\n", "bad.jsonl:1"),
    ],
)
def test_bad_files_of_prompts_are_refused(text, complaint, tmp_path):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        prompts.read_lines(tmp_path / "bad.jsonl")


@pytest.mark.parametrize("name", ["chatt", "=x", "x=/nowhere.jsonl"])
def test_bad_names_of_data_sets_are_refused(name):
    with pytest.raises(ValueError, match="expected"):
        prompts.data_sets([name], files=[], count=None, seed=0)


class Words:
    """A tokenizer: one id a character."""

    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*([1] if add_special_tokens else []), *map(ord, text)]}

    def apply_chat_template(self, turns, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "<" + turns[0]["content"] + ">"


def test_prompts_become_tokens():
    plain, chat = Words(), Words()
    chat.chat_template = "some"
    text, question = prompts.Line(prompt="a"), prompts.Line(question="b")
    turns = prompts.Line(messages=[{"role": "user", "content": "c"}])
    assert prompts.encode(text, chat) == [1, ord("a")]
    assert prompts.encode(question, chat) == list(map(ord, "<b>"))
    assert prompts.encode(question, plain) == [1, ord("b")]
    assert prompts.encode(turns, chat) == list(map(ord, "<c>"))
    with pytest.raises(ValueError, match="the target has no chat template"):
        prompts.encode(turns, plain)
