"""Sampling parameters on draft trees: penalties and min_new_tokens against an independent oracle, the rest
against plain SGLang; what cannot be right on a tree is served without one and counted, or refused."""

import json
import math
from pathlib import Path

import oracle
import pytest
from comparing import differences
from oracle import PENALTIES
from prompts import varied
from sglang_rig import accepted_length, engine, tree

pytestmark = pytest.mark.sglang

HERE = Path(__file__).parent
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
PROMPTS = varied()[:10]
REGEX = "[a-z]{3,6}( [a-z]{3,6})*\\."  # a grammar that is through ends a request, whatever ignore_eos says
JSON = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a"],
}


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    """A file that breaks the running engine while something is written in it."""
    path = tmp_path_factory.mktemp("fault") / "fault"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def running(fault, tmp_path_factory):
    """Overlapped, ragged windows of random sizes, grammars and custom processors allowed."""
    config = tmp_path_factory.mktemp("config") / "specplug.json"
    config.write_text(json.dumps({"explore": True, "record": str(config.parent / "record")}))
    env = {
        "SPECPLUG_CONFIG": str(config),
        "SPECPLUG_TEST_FAULT": str(fault),
        "SGLANG_RAGGED_VERIFY_MODE": "compact",
    }
    with engine(
        tree("dspark", 16),
        overlap=True,
        env=env,
        load=HERE / "faults.py",
        grammar_backend="xgrammar",
        enable_custom_logit_processor=True,
    ) as one:
        yield one


@pytest.mark.parametrize("penalties", PENALTIES, ids=lambda one: "+".join(one))
def test_penalties_are_those_of_an_independent_oracle(running, penalties):
    got = running.generate(PROMPTS, GREEDY | penalties)
    assert [output.ids for output in got] == [oracle.greedy(prompt, 24, **penalties) for prompt in PROMPTS]
    assert accepted_length(got) > 1.1, "penalised requests draft as well"


def test_a_mixed_batch_penalises_its_own(plain, running):
    params = [GREEDY | (PENALTIES[0] if i % 2 else {}) for i in range(len(PROMPTS))]
    got = running.generate(PROMPTS, params)
    free = plain.generate(PROMPTS, GREEDY)
    for i, prompt in enumerate(PROMPTS):
        assert got[i].ids == (oracle.greedy(prompt, 24, **PENALTIES[0]) if i % 2 else free[i].ids)


@pytest.mark.parametrize("kind", ["siblings", "history"])
def test_a_wrong_past_shows(running, fault, kind):
    strong = {"frequency_penalty": 2.0}  # windows are of random sizes, and a small one may hide the fault
    expected = [oracle.greedy(prompt, 24, **strong) for prompt in PROMPTS]
    assert [output.ids for output in running.generate(PROMPTS, GREEDY | strong)] == expected
    fault.write_text(kind)
    try:
        broken = running.generate(PROMPTS, GREEDY | strong)
    finally:
        fault.write_text("")
    assert [output.ids for output in broken] != expected


def test_min_new_tokens_keeps_stop_tokens_out(plain, running):
    for prompt, free in zip(PROMPTS[:6], plain.generate(PROMPTS[:6], GREEDY), strict=True):
        stops = sorted({free.ids[3], free.ids[6]})
        params = {"temperature": 0, "max_new_tokens": 24, "min_new_tokens": 9, "stop_token_ids": stops}
        (got,) = running.generate([prompt], params)
        assert got.ids == oracle.greedy(prompt, 24, min_new_tokens=9, stop_token_ids=stops)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {"15": 2.5, "274": -5.0}},
        {"stop_token_ids": [15, 29], "ignore_eos": False},
        {"stop": ["self", "name"], "ignore_eos": False},
        {"regex": REGEX, "ignore_eos": False},
        {"json_schema": json.dumps(JSON), "max_new_tokens": 32, "ignore_eos": False},
    ],
    ids=lambda one: next(iter(one)),
)
def test_what_needs_no_past_or_sglangs_own_walk_is_as_in_plain_decoding(plain, running, params):
    wanted = GREEDY | params
    assert differences(plain.generate(PROMPTS, wanted), running.generate(PROMPTS, wanted)) == []


def test_grammars_and_free_requests_share_a_batch(plain, running):
    grammar = {"regex": REGEX, "ignore_eos": False}
    params = [GREEDY | (grammar if i % 2 else {}) for i in range(len(PROMPTS))]
    assert differences(plain.generate(PROMPTS, params), running.generate(PROMPTS, params)) == []


def test_log_probabilities_are_those_of_plain_decoding(plain, running):
    wanted = {"return_logprob": True, "top_logprobs_num": 3}
    expected = plain.generate(PROMPTS, GREEDY, **wanted)
    got = running.generate(PROMPTS, GREEDY, **wanted)
    assert differences(expected, got) == []
    for want, have in zip(expected, got, strict=True):
        assert have.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        assert len(have.logprobs) == len(have.ids)
        for wide, narrow in zip(want.top_logprobs, have.top_logprobs, strict=True):
            assert [token for _, token in wide] == [token for _, token in narrow]


@pytest.mark.parametrize(
    "narrow",
    [{"min_p": 1.0}, {"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0, "top_p": 0.9, "top_k": 50}],
    ids=lambda one: "+".join(one),
)
def test_a_distribution_of_one_token_is_greedy(plain, running, narrow):
    got = running.generate(PROMPTS, {**GREEDY, "temperature": 1.0, **narrow})
    assert [output.ids for output in got] == [output.ids for output in plain.generate(PROMPTS, GREEDY)]


def test_a_custom_processor_is_served_without_drafts_and_counted(running):
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    before = sum(running.state["specplug"]["counted"].values())
    banned = oracle.greedy(PROMPTS[0], 1)
    params = GREEDY | {"custom_params": {"token_ids": banned}}
    processor = DisallowedTokensLogitsProcessor().to_str()
    got = running.generate(PROMPTS[:3], params, custom_logit_processor=processor)
    bias = {str(token): -math.inf for token in banned}
    assert [output.ids for output in got] == [oracle.greedy(p, 24, logit_bias=bias) for p in PROMPTS[:3]]
    assert accepted_length(got) == 1, "nothing was drafted for them"
    assert sum(running.state["specplug"]["counted"].values()) == before + 3
