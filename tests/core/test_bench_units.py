"""The parts of `specplug bench`: generators' files and command lines, prompts, the law, near ties, memory."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from unittest import mock

import pytest
from transformers import AutoTokenizer

from specplug import bench_law, bench_load, bench_machine, bench_prompts, bench_quality, models
from specplug.bench_load import Counted
from specplug.bench_quality import Answer
from specplug.bench_result import Load
from specplug.local.prompts import Line, data_sets

SAMPLES = Path(__file__).with_name("bench_samples")
OPTIONS = {
    "url": "http://127.0.0.1:1",
    "model": "served",
    "tokenizer": "folder",
    "requests": 6,
    "max_tokens": 24,
    "ignore_eos": False,
    "temperature": 0.0,
    "top_p": 1.0,
    "seed": 5,
}


def test_figures_are_those_of_the_generator():
    ours = bench_load.read(SAMPLES / "vllm.json", requests=6)
    theirs = json.loads((SAMPLES / "vllm.json").read_text())
    assert (ours.output_tokens, ours.input_tokens, ours.completed) == (144, 300, 6)
    assert ours.output_tokens / ours.seconds == pytest.approx(ours.output_tokens_per_second)
    assert ours.ttft.mean_ms == pytest.approx(1000 * sum(theirs["ttfts"]) / 6)
    assert ours.answer.p95_ms == theirs["p95_e2el_ms"]
    ours = bench_load.read(SAMPLES / "sglang.jsonl", requests=6)
    theirs = json.loads((SAMPLES / "sglang.jsonl").read_text())
    assert (ours.output_tokens, ours.input_tokens, ours.completed) == (144, 300, 6)
    assert ours.ttft.mean_ms == pytest.approx(1000 * sum(theirs["ttfts"]) / 6)
    assert ours.answer.p50_ms == theirs["median_e2e_latency_ms"]
    with pytest.raises(RuntimeError, match="wrote no result"):
        bench_load.read(SAMPLES / "absent.json", requests=6)


def test_rounds_are_the_counters_gain():
    gave = {"answers": 6, "output_tokens": 144}
    after = Counted((SAMPLES / "vllm.metrics").read_text())
    before = Counted(
        'vllm:spec_decode_num_drafts_total{engine="0"} 3.0\n'
        "vllm:spec_decode_num_accepted_tokens_total{} 20.0\n"
        "vllm:spec_decode_num_draft_tokens_total{} 48.0\n"
    )
    rounds = bench_load.rounds("vllm", before, after, **gave)
    assert (rounds.drafts, rounds.accepted, rounds.nodes_verified) == (60, 60, 960)
    assert rounds.accepted_length == 2.0
    assert rounds.nodes_per_draft == 16.0
    assert rounds.plain is rounds.chain is rounds.tree is None

    after = Counted((SAMPLES / "sglang.metrics").read_text())
    rounds = bench_load.rounds("sglang", Counted(""), after, **gave)
    assert (rounds.drafts, rounds.nodes_verified, rounds.tree) == (66, 1104, 40)
    assert rounds.accepted_length == pytest.approx((144 - 6) / 66)  # tokens kept of a round

    stock = Counted('sglang:spec_verify_calls_total{a="b"} 10.0\n')
    assert bench_load.rounds("sglang", Counted(""), stock, **gave).nodes_verified is None


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_generator_is_told_load_and_sampling(engine, tmp_path):
    data = bench_prompts.DataFile("custom", tmp_path / "p.jsonl")
    line = bench_load.command(
        engine, Load(rate=2.5), data, output=tmp_path / "o.json", extra=["--x"], **OPTIONS
    )
    words = dict(itertools.pairwise(line))
    assert words["--request-rate"] == "2.5"
    assert words["--temperature"] == "0.0"
    assert words["--seed"] == "5"
    assert "--max-concurrency" not in words
    assert line[-1] == "--x"
    line = bench_load.command(engine, Load(concurrency=8), data, output=tmp_path / "o.json", **OPTIONS)
    words = dict(itertools.pairwise(line))
    assert (words["--max-concurrency"], words["--request-rate"]) == ("8", "inf")


def test_prompts_are_sent_as_the_tokens_of_their_template():
    tokenizer = AutoTokenizer.from_pretrained(models.path("quick", "target"))
    sets = data_sets(["chat", "code", "maths"], files=[], count=2, seed=0)
    prompts = bench_prompts.rendered(sets, tokenizer)
    assert [prompt.data_set for prompt in prompts] == ["chat", "code", "maths"] * 2
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": sets["chat"][0].question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tokenizer(prompts[0].text)["input_ids"] == list(expected)
    assert prompts[0].tokens == len(expected)
    assert len({bench_prompts.digest(prompts[:n]) for n in range(1, 7)}) == 6


class BeginsTexts:
    """A tokenizer that puts a begin-of-text before every text, as Llama's, and whose template has one too."""

    bos_token, chat_template = "<s>", "yes"

    def __call__(self, text, add_special_tokens=True):
        ids = [0 if part == "<s>" else ord(part) for part in text.replace("<s>", "\x00")]
        return {"input_ids": ([0] if add_special_tokens else []) + ids}

    def apply_chat_template(self, turns, **_):
        return f"<s>{turns[0]['content']}"


def test_a_template_with_its_own_begin_of_text_is_not_given_two():
    (prompt,) = bench_prompts.rendered({"chat": [Line(question="hi")]}, BeginsTexts())
    assert prompt == ("hi", 3, "chat")


class Thinks(BeginsTexts):
    """A tokenizer whose template has the switch of Qwen3's."""

    chat_template = "{% if enable_thinking is defined and enable_thinking is false %}"

    def apply_chat_template(self, turns, enable_thinking=None, **_):
        return f"{turns[0]['content']} {enable_thinking}"


@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_switch_of_a_template_is_set_and_one_it_does_not_read_is_refused(thinking):
    sets = {"chat": [Line(question="hi")]}
    with mock.patch.object(Thinks, "__call__", lambda self, text, **_: {"input_ids": list(map(ord, text))}):
        (prompt,) = bench_prompts.rendered(sets, Thinks(), thinking=thinking)
    assert prompt.text == f"hi {thinking}"
    if thinking is not None:
        with pytest.raises(ValueError, match="expected a chat template that reads enable_thinking"):
            bench_prompts.rendered(sets, BeginsTexts(), thinking=thinking)


def test_vllms_reader_without_pandas_refuses_what_it_would_leave_out():
    fits = bench_prompts.Prompt("x", 30, "chat")
    assert bench_prompts.reader("vllm", [fits], 64, pandas=False) == "sharegpt"
    assert bench_prompts.reader("vllm", [fits._replace(tokens=3000)], 64, pandas=True) == "custom"
    for tokens, answer in ((3, 64), (1025, 64), (1000, 1100)):
        with pytest.raises(ValueError, match="pip install pandas"):
            bench_prompts.reader("vllm", [fits, fits._replace(tokens=tokens)], answer, pandas=False)


def _answers(random: Random, weights: list[float], prompts: int, samples: int) -> list[list[list[int]]]:
    tokens = range(len(weights))
    return [[random.choices(tokens, weights, k=4) for _ in range(samples)] for _ in range(prompts)]


def test_one_law_passes_and_a_near_law_does_not():
    """False alarms are as rare as the level says; a shift of 0.1 is found with 4 x 200 samples."""
    random, law = Random(0), [0.4, 0.3, 0.2, 0.05, 0.03, 0.02]
    found = [
        bench_law.compare(
            _answers(random, law, 4, 50), _answers(random, law, 4, 50), positions=4, temperature=1.0
        ).p_value
        for _ in range(200)
    ]
    assert sum(p < 0.05 for p in found) <= 20  # 10 expected at most; 20 has probability 0.002
    assert min(found) >= bench_law.LEVEL
    other = [0.3, 0.4, *law[2:]]
    judged = bench_law.compare(
        _answers(random, law, 4, 200), _answers(random, other, 4, 200), positions=4, temperature=1.0
    )
    assert not judged.same
    assert judged.degrees_of_freedom > 4


def test_answers_without_variety_are_not_tested():
    alike = [[[1, 2, 3, 4]] * 50] * 4
    assert not bench_law.compare(alike, alike, positions=4, temperature=1.0).tested
    varied = [[[1, 2, 3, 4 + i % 2] for i in range(50)]] * 4
    judged = bench_law.compare(varied, varied, positions=4, temperature=1.0)
    assert (judged.tested, judged.same, judged.degrees_of_freedom) == (True, True, 4)
    other = [[[9, 2, 3, 4]] * 50] * 4
    assert not bench_law.compare(alike, other, positions=4, temperature=1.0).same


def test_a_law_that_is_wrong_at_one_position_alone_is_found():
    random, law = Random(2), [0.25] * 4
    right, wrong = (_answers(random, law, 4, 200) for _ in range(2))
    for answers in wrong:
        for answer in answers:
            answer[2] = answer[2] if random.random() < 0.7 else 0
    assert not bench_law.compare(right, wrong, positions=4, temperature=1.0).same
    assert bench_law.compare(right, wrong, positions=2, temperature=1.0).same


def test_chi_square_is_that_of_the_table():
    """Against a table worked out by hand: 30/10 and 20/20 give 2 x (5^2 / 25 + 5^2 / 15) at 1 degree."""
    sides = [[[0]] * 30 + [[1]] * 10], [[[0]] * 20 + [[1]] * 20]
    test = bench_law.at(*sides, 0)
    assert test.chi_square == pytest.approx(2 * (1 + 25 / 15))
    assert test.degrees_of_freedom == 1
    assert test.p_value == pytest.approx(0.02092, abs=1e-4)  # of 5.333 at one degree, tabulated
    # 5 and 6 are pooled, 7 has a cell of its own, 8 goes with it: 30/30, 10/1, 0/9.
    rare = [[[0]] * 30 + [[5]] * 4 + [[6]] * 6], [[[0]] * 30 + [[6]] + [[7]] * 9 + [[8]]]
    assert bench_law.at(*(side[:1] for side in rare), 0) == (pytest.approx(81 / 11 + 10), 2)


def test_a_difference_is_a_near_tie_or_a_fault_by_its_gap():
    base = [Answer([1, 2, 3], [{1: -0.1}, {2: -0.7, 8: -0.7005}, {3: -0.2, 9: -1.2}])] * 4
    arm = [Answer(ids, []) for ids in ([1, 2, 3], [1, 8, 8], [1, 2, 9], [1, 2])]
    judged = bench_quality.agreement(base, arm, near_tie=1e-3)
    assert (judged.answers, judged.identical, judged.tokens, judged.agreeing) == (4, 1, 12, 3 + 1 + 2 + 2)
    assert [(one.prompt, one.position, one.near_tie) for one in judged.divergences] == [
        (1, 1, True),
        (2, 2, False),
        (3, 2, False),  # it ended there
    ]
    assert judged.divergences[1].gap_nats == pytest.approx(1.0)
    assert judged.divergences[2].arm_token is None
    assert bench_quality.agreement(base, arm, near_tie=1e-4).faults == 3
    unknown = bench_quality.agreement(base[:1], [Answer([1, 5], [])], near_tie=1.0).divergences[0]
    assert (unknown.gap_nats, unknown.near_tie) == (None, False)


def test_memory_is_that_of_the_session_alone():
    """A child in a session of its own, which has allocated 64 MiB, and a grandchild with as much."""
    wait = "x = bytearray(64 << 20); print('ready', flush=True); sys.stdin.read()"
    child = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {'import sys; ' + wait!r}]); {wait}"
    )
    command = [sys.executable, "-c", child]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert [running.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        with bench_machine.Peak(running.pid, on_gpu=False) as peak:
            pass
        running.stdin.close()
        assert running.stdout.read() == ""  # its end: both have given back their memory, then closed it
    assert 128 << 20 < peak.host_bytes < 256 << 20
    assert peak.device_bytes is None
    assert bench_machine.resident_bytes(running.pid) == 0
