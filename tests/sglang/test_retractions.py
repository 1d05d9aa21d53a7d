"""Sampling on draft trees while requests are retracted every few steps. A file of its own: beside another
engine, which is never quite idle, this takes three times as long.
"""

import oracle
import pytest
from comparing import differences
from oracle import PENALTIES
from prompts import varied
from sglang_rig import Reference, engine, tree

pytestmark = pytest.mark.sglang

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
PROMPTS = varied()[:10]
SEEDED = [
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 1.1, "top_p": 0.8},
    # One kind of penalty at a time: without overlap SGLang applies several in the order of a set of classes.
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.15},
]


# SGLang serves seeds with a few backends only; the rig answers for each of them.
DETERMINISTIC = {"enable_deterministic_inference": True, "attention_backend": "triton"}


@pytest.fixture(scope="module")
def drawn():
    """Plain decoding's draws, a list of answers for each of SEEDED."""
    reference = Reference(DETERMINISTIC)
    try:
        return [reference.generate(PROMPTS, _seeded(params)) for params in SEEDED]
    finally:
        reference.close()


@pytest.fixture(scope="module")
def retracting(drawn):
    """Requests are retracted every few steps."""
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    with engine(tree("dspark", 16), env=env, **DETERMINISTIC) as one:
        yield one


@pytest.mark.parametrize("number", range(len(SEEDED)))
def test_seeded_draws_are_those_of_plain_decoding_through_retractions(drawn, retracting, number):
    """The noise is keyed by seed and position, so every token is the very one plain decoding draws."""
    got = retracting.generate(PROMPTS, _seeded(SEEDED[number]))
    assert differences(drawn[number], got) == []
    assert sum(output.retractions for output in got) > 0


def test_penalties_go_on_where_they_were_after_a_retraction(retracting):
    penalised = retracting.generate(PROMPTS, GREEDY | PENALTIES[3])
    assert [o.ids for o in penalised] == [oracle.greedy(p, 24, **PENALTIES[3]) for p in PROMPTS]
    assert sum(output.retractions for output in penalised) > 0


def test_min_p_under_deterministic_inference_is_refused(retracting):
    with pytest.raises(ValueError, match="min_p does not work with --enable-deterministic-inference"):
        retracting.generate(PROMPTS[:1], {"temperature": 1.0, "min_p": 0.1, "max_new_tokens": 2})


def _seeded(params):
    return [GREEDY | params | {"sampling_seed": 100 + i} for i in range(len(PROMPTS))]
