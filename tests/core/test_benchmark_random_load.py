"""The judges of benchmarks/random_load.py: each planted fault is found, and a clean run passes."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import load_judge as judge
from load_chaos import Death
from load_client import Part, Reply
from load_report import Outcome, table
from load_requests import Ask, Requests
from load_watch import Sample, processes

from specplug import models

SCRIPT = Path(judge.__file__).with_name("random_load.py")
PART = Part((5, 6, 7), " a b", "length", None, (-0.5, -1.0, -0.25))
REPLY = Reply(200, (PART,), left=False, error="")


def ask(manner: str = "whole", **body: object) -> Ask:
    return Ask(1, manner, {"temperature": 0, "max_tokens": 3, **body}, 0.0, 0, seeded=True)


def with_part(**changes: object) -> Reply:
    return REPLY._replace(parts=(PART._replace(**changes),))


def test_equal_answers_are_equal():
    assert judge.compare(ask(), REPLY, REPLY) == []
    near = with_part(logprobs=(-0.5001, -1.0, -0.25))
    assert judge.compare(ask(), REPLY, near) == []


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (5, 9, 7)},
        {"token_ids": (5, 6)},
        {"token_ids": (5, 6, 7, 8)},
        {"text": " a c"},
        {"finish": "stop"},
        {"stop": 7},
        {"logprobs": (-0.5, -1.01, -0.25)},
        {"logprobs": (-0.5, -1.0)},
    ],
    ids=str,
)
def test_a_planted_mismatch_is_found(change):
    (found,) = judge.compare(ask(), REPLY, with_part(**change))
    assert found.number == 1


def test_a_second_answer_is_looked_at_too():
    want, have = Reply(200, (PART, PART), left=False, error=""), Reply(200, (PART,), left=False, error="")
    assert len(judge.compare(ask(n=2), want, have)) == 1
    (found,) = judge.compare(ask(n=2), want, want._replace(parts=(PART, PART._replace(token_ids=(5, 6, 8)))))
    assert (found.part, found.at, found.plain, found.ours) == (1, 2, 7, 8)


def test_what_a_client_read_before_it_left_is_the_beginning():
    read = with_part(token_ids=(5, 6), text=" a", finish=None, logprobs=())._replace(left=True)
    assert judge.compare(ask("leave"), REPLY, read) == []
    (found,) = judge.compare(ask("leave"), REPLY, read._replace(parts=(PART._replace(token_ids=(5, 8)),)))
    assert found.what == "token 1: 6 became 8"
    assert judge.compare(ask("leave"), REPLY, read._replace(parts=(PART._replace(token_ids=(5, 6, 7, 8)),)))


def test_plain_decoding_that_fails_is_no_match():
    assert judge.compare(ask(), Reply(500, (), left=False, error="oh"), REPLY) != []


def test_only_a_token_with_a_small_gap_is_excused():
    (token,) = judge.compare(ask(), REPLY, with_part(token_ids=(5, 9, 7)))
    assert judge.is_near_tie(token, {6: -0.7000, 9: -0.7002})
    assert not judge.is_near_tie(token, {6: -0.70, 9: -0.71})
    assert not judge.is_near_tie(token, {6: -0.70})
    (end,) = judge.compare(ask(), REPLY, with_part(finish="stop"))
    assert not judge.is_near_tie(end, {6: -0.7, 9: -0.7})


@pytest.mark.parametrize(
    ("one", "reply"),
    [
        (ask(), REPLY._replace(status=500, parts=(), error="EngineDeadError")),
        (ask(), REPLY._replace(status=None, parts=(), error="ConnectionResetError")),
        (ask("stream"), REPLY._replace(error="the stream ended without [DONE]")),
        (ask(n=2), REPLY),
        (ask(max_tokens=2), REPLY),
        (ask(), with_part(finish=None)),
        (ask("refused"), REPLY),
        (ask("refused"), REPLY._replace(status=500)),
        (ask("refused"), REPLY._replace(status=None)),
    ],
    ids=lambda value: value.manner if isinstance(value, Ask) else str(value.status),
)
def test_a_wrong_reply_is_found(one, reply):
    assert "request 1: " in judge.wrong_reply(one, reply)


def test_right_replies_pass():
    assert judge.wrong_reply(ask(), REPLY) == ""
    assert judge.wrong_reply(ask("leave"), Reply(None, (), left=True, error="")) == ""
    assert judge.wrong_reply(ask("refused"), Reply(404, (), left=False, error="no")) == ""


def samples(*, growth: float = 0.0, used: float = 0.0, running: int = 0) -> list[Sample]:
    """Half an hour of a look every 20 s: caches fill for five minutes, then `growth` MiB a second."""
    found = []
    for at in range(0, 1800, 20):
        own = 3000.0 + min(at, 300) + growth * max(0, at - 300) + 7 * (at // 20 % 3)
        found.append(Sample(float(at), own, 90, 0, 0, 0.0, idle=False))
    return [*found, Sample(1800.0, found[-1].own_mib, 90, running, 0, used, idle=True)]


def test_flat_memory_is_flat_and_a_leak_is_found():
    assert judge.leaks(samples()) == []
    assert abs(judge.slope(samples())) < 0.005
    (found,) = judge.leaks(samples(growth=0.1))  # 90 MiB in the second half
    assert found.startswith("memory grew by 9")
    assert judge.slope(samples(growth=0.1)) == pytest.approx(0.1, abs=0.005)


def test_a_short_run_has_no_slope():
    short = [one._replace(seconds=one.seconds / 10) for one in samples(growth=1)]
    assert judge.slope(short) is None
    assert judge.leaks(short) == []


def test_a_block_or_a_request_that_stays_is_found():
    (found,) = judge.leaks(samples(used=0.025))
    assert "2.50% of the cache in use" in found
    assert len(judge.leaks(samples(running=1))) == 1
    busy = samples(used=0.025)
    busy[-1] = busy[-1]._replace(idle=False)
    assert judge.leaks(busy) == []


def test_errors_in_a_log(tmp_path):
    log = tmp_path / "server.log"
    fine = ["(APIServer pid=1) INFO 11-30 it works", "(EngineCore pid=2) WARNING 11-30 an ERROR that was not"]
    log.write_text("\n".join(fine))
    assert judge.log_errors(log) == []
    bad = ["(EngineCore pid=2) ERROR 11-30 02:00:00 [core.py:1] oh", "Traceback (most recent call last):"]
    log.write_text("\n".join(fine + bad))
    assert judge.log_errors(log) == bad


def test_a_death_nobody_was_told_of_is_wrong():
    good = Death(8, 7, 1, 0, True, 1, 1.2, ())
    assert good.wrong == []
    for change in (
        {"told": 0, "dropped": 8},
        {"told": 6},
        {"health_fails": False},
        {"exit_code": None},
        {"exit_code": 0},
        {"left_over": ("VLLM::Worker",)},
    ):
        assert len(good._replace(**change).wrong) == 1


def test_the_table_counts_what_is_wrong():
    outcome = Outcome()
    outcome.note_comparison(3, [judge.Divergence(4, 0, "token 1: 2 became 3", 1, 2, 3)], [])
    assert outcome.wrong == ["mismatch: request 4, answer 0: token 1: 2 became 3"]
    assert "| mismatches | 1 |" in table(outcome)
    assert "| wrong | 1 |" in table(outcome)
    empty = Outcome()
    empty.note_comparison(0, [], [])
    assert empty.wrong == ["no answer was compared with plain decoding"]


def test_a_process_is_seen_with_what_it_holds(tmp_path):
    """Memory of its own and open files; 64 MiB more, and one file more."""

    def look():
        (found,) = (one for one in processes(os.getpgid(0)) if one.pid == os.getpid())
        return found

    gc.collect()  # what earlier tests left: memory, and files that are closed with it
    before = look()
    with (tmp_path / "file").open("w"):
        held = bytearray(os.urandom(1 << 20) * 64)
        after = look()
    assert after.own_mib - before.own_mib == pytest.approx(len(held) / 2**20, abs=8)
    assert after.files == before.files + 1


def requests(seed: int) -> list[Ask]:
    tokenizer = models.path("quick", "target") / "tokenizer.json"
    source = Requests(seed, model="tiny", tokenizer=tokenizer, max_model_len=512)
    return [source.draw() for _ in range(400)]


def test_requests_cover_what_clients_do():
    drawn = requests(0)
    assert drawn == requests(0)
    assert drawn != requests(1)
    assert {one.manner for one in drawn} == {"whole", "stream", "leave", "refused"}
    bodies = [one.body for one in drawn if one.manner != "refused"]
    lengths = [(body["prompt"], body["max_tokens"]) for body in bodies if isinstance(body["prompt"], list)]
    assert any(len(prompt) + answer == 512 for prompt, answer in lengths)
    assert all(len(prompt) + answer <= 512 for prompt, answer in lengths)
    assert all(body.get("min_tokens", 0) <= body["max_tokens"] for body in bodies)
    assert any(answer == 1 for _, answer in lengths)
    asked = {name for body in bodies for name in body}
    assert asked >= {"seed", "top_k", "top_p", "min_p", "n", "logprobs", "logit_bias", "bad_words", "stop"}
    assert asked >= {"structured_outputs", "allowed_token_ids", "stop_token_ids", "min_tokens"}
    assert asked >= {"repetition_penalty", "presence_penalty", "frequency_penalty"}
    unseeded = [one for one in drawn if not one.seeded]
    assert 0 < len(unseeded) < 0.1 * len(drawn)
    assert all(one.body["temperature"] and "seed" not in one.body for one in unseeded)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--minutes", "0", "--minutes and --requests: expected more than 0"),
        ("--blocks", "17", "--blocks: expected 18 or more"),
        ("--options", '{"tree_buget": 4}', "did you mean 'tree_budget'"),
    ],
)
def test_mistakes_are_refused(tmp_path, option, value, said):
    command = [
        sys.executable,
        str(SCRIPT),
        "--out",
        str(tmp_path / "out"),
        option,
        value,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert said in done.stderr
