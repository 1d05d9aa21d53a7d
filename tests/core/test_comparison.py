"""The demo's table: numbers from vLLM's counters; a difference in the output is never shown as agreement."""

import pytest

from specplug.comparison import Counters, Run, counters, print_table, print_texts, report

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a}b"} 20.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a}b"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a}b"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a}b"} 140.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a}b"} 6e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a}b",position="0"} 16.0
"""

PLAIN = Run("none", ["one", "two"], [[1, 2, 3], [4, 5, 6]], Counters(0, 0), wall_seconds=2.0)
TREE = Run("ddtree", ["one", "two"], [[1, 2, 3], [4, 5, 6]], Counters(2, 3), wall_seconds=1.0)
WRONG = Run("dflash", ["one", "too"], [[1, 2, 3], [4, 5, 7]], Counters(3, 1), wall_seconds=1.0)


def test_counters_add_up_over_engines_and_nothing_else_is_counted():
    assert counters(METRICS) == Counters(drafts=24, accepted=60)


def test_a_server_without_speculation_has_no_counters():
    assert counters("vllm:num_requests_running 0.0\n") == Counters(0, 0)


def test_forwards_and_accepted_length():
    # Two requests of three tokens. Plain: one pass a token. Tree: two prompt passes and two drafts, which
    # committed 2 + 3 accepted and bonus tokens, one of them past an answer's end.
    assert (PLAIN.target_forwards, PLAIN.accepted_length, PLAIN.tokens_per_second) == (6, 1.0, 3.0)
    assert (TREE.target_forwards, TREE.accepted_length, TREE.tokens_per_second) == (4, 2.5, 6.0)


def rows(capsys) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_table_says_yes_only_for_the_same_token_ids(capsys):
    print_table([PLAIN, WRONG, TREE], draft="dspark", on_gpu=False)
    table = {row[0] + row[-6]: row[-5:] for row in rows(capsys) if len(row) >= 7 and row[-5].isdigit()}
    assert table == {
        "plaindecoding": ["6", "6", "1.00", "-", "3.0"],
        "chain(dflash)": ["6", "5", "1.33", "NO", "6.0"],
        "treedspark)": ["6", "4", "2.50", "yes", "6.0"],
    }


def test_equal_texts_of_different_tokens_differ():
    same_text = WRONG._replace(texts=PLAIN.texts)
    entries = report([PLAIN, same_text], ["q", "r"], draft="dspark", on_gpu=False)["runs"]
    assert [entry["same_output"] for entry in entries] == [True, False]


def test_answers_are_printed_once_and_a_different_one_as_well(capsys):
    print_texts([PLAIN, TREE, WRONG], ["first?", "second?"])
    out = capsys.readouterr().out
    assert out.count("one") == 1
    assert out.count("two") == 1
    assert "! dflash answered differently:\ntoo" in out


@pytest.mark.parametrize(("on_gpu", "expected"), [(False, "interpreter"), (True, "near tie")])
def test_the_note_says_what_the_speed_is_of(capsys, on_gpu, expected):
    print_table([PLAIN], draft="dspark", on_gpu=on_gpu)
    assert expected in capsys.readouterr().out


def test_report_names_the_draft_of_each_run():
    entries = report([PLAIN, WRONG, TREE], ["q", "r"], draft="dspark", on_gpu=False)
    assert [(entry["kind"], entry["draft"]) for entry in entries["runs"]] == [
        ("plain", None), ("chain", "dflash"), ("tree", "dspark"),
    ]  # fmt: skip
    assert entries["answers"] == [{"question": "q", "answer": "one"}, {"question": "r", "answer": "two"}]
