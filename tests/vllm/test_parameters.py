"""Every sampling parameter on true trees equals plain decoding; what needs chain-shaped ones is counted."""

import re
from unittest import mock

import pytest
from comparing import differences
from engine_rig import engine, tree
from prompts import short, tokenizer

from specplug_vllm import model_state

pytestmark = pytest.mark.vllm

TOKENS = 24
PROMPTS = short(12)


def _structured(**grammar):
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(**grammar)


REGEX = r"[a-z_ =.()\n]{12}#[0-9]{3}\n"
JSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
# name -> (parameters, the reason counted for chain shape, or None where trees serve)
CASES = {
    "repetition penalty": (lambda: {"repetition_penalty": 1.4}, None),
    "frequency and presence": (lambda: {"frequency_penalty": 0.9, "presence_penalty": 0.8}, None),
    "penalties, seeded": (
        lambda: {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.9, "max_tokens": 12},
        None,
    ),
    "bad words": (lambda: {"bad_words": ["self", "return", " the", " in"]}, None),
    "regex": (
        lambda: {"structured_outputs": _structured(regex=REGEX), "ignore_eos": False},
        None,
    ),
    "json": (
        lambda: {"structured_outputs": _structured(json=JSON), "ignore_eos": False, "max_tokens": 40},
        None,
    ),
    "regex, seeded": (
        lambda: {
            "structured_outputs": _structured(regex=r"[a-z]{4} [0-9]{6}"),
            "temperature": 0.9,
            "seed": 3,
        },
        None,
    ),
    "logprobs": (lambda: {"logprobs": 3}, None),
    "logprobs, seeded": (
        lambda: {"logprobs": 3, "temperature": 0.8, "seed": 5, "top_p": 0.9, "max_tokens": 12},
        None,
    ),
    "logprobs and penalties": (lambda: {"logprobs": 2, "repetition_penalty": 1.2}, None),
    "prompt logprobs": (lambda: {"prompt_logprobs": 2, "logprobs": 0}, None),
    "min tokens": (
        lambda: {"min_tokens": 16, "stop_token_ids": list(range(10, 130)), "ignore_eos": False},
        None,
    ),
    "stop tokens": (lambda: {"stop_token_ids": list(range(10, 40)), "ignore_eos": False}, None),
    "allowed tokens": (lambda: {"allowed_token_ids": list(range(100, 700))}, None),
    "logit bias": (lambda: {"logit_bias": {11: 4.0, 200: -100.0, 300: 2.5}}, None),
    "min p, seeded": (lambda: {"min_p": 0.1, "temperature": 1.1, "seed": 4, "max_tokens": 12}, None),
    "nothing special": (dict, None),
}


def params_of(name):
    from vllm import SamplingParams

    make, _ = CASES[name]
    return SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **make()})


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("dflash", False), id="dflash-sync", marks=pytest.mark.slow),
        pytest.param(("dspark", True), id="dspark-async"),
    ],
)
def trees(rig, request):
    draft, async_scheduling = request.param
    with engine(tree(draft, 16), async_scheduling=async_scheduling) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_parameters_equal_plain(plain, trees, name):
    prompts, (_, reason) = PROMPTS[:5], CASES[name]
    expected = plain.generate(prompts, params_of(name))
    counted, before = trees.state.chain_requests.copy(), trees.counters
    got = trees.generate(prompts, params_of(name))
    assert differences(expected, got) == []
    assert_same_logprobs(expected, got)
    assert trees.state.chain_requests - counted == ({reason: len(prompts)} if reason else {})
    assert trees.counters.since(before).drafts > 0


def test_mixed_batch_equals_plain(plain, trees):
    """Chains and trees verified side by side."""
    names = [name for name in CASES if name != "prompt logprobs"]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(names))]
    params = [params_of(name) for name in names]
    expected = plain.generate(prompts, params)
    got = trees.generate(prompts, params)
    assert differences(expected, got) == []
    assert_same_logprobs(expected, got)


def test_grammar_is_obeyed(trees):
    texts = [tokenizer().decode(output.ids) for output in trees.generate(PROMPTS[:5], params_of("regex"))]
    assert all(re.fullmatch(REGEX, text) for text in texts), texts


def test_a_slot_that_held_a_chain_drafts_trees_again(plain, trees):
    """One request at a time: each takes the slot the last one left."""
    prompt, params = PROMPTS[:1], params_of("nothing special")
    expected, traces = plain.generate(prompt, params), []
    for reasons in ([], ["for the test"], []):
        counted = trees.state.chain_requests["for the test"]
        with trees.traced() as trace, mock.patch.object(model_state, "chain_reasons", return_value=reasons):
            assert differences(expected, trees.generate(prompt, params)) == []
        assert trees.state.chain_requests["for the test"] - counted == len(reasons)
        traces.append(next(iter(trace.values())))
    first, chain, again = traces
    assert first == again
    assert chain != first


def assert_same_logprobs(expected, got):
    """Same tokens at every position, log-probabilities within fp32 noise, ranks equal but for near ties."""
    for want, have in zip(expected, got, strict=True):
        for field in ("logprobs", "prompt_logprobs"):
            positions, others = getattr(want, field), getattr(have, field)
            assert (positions is None) == (others is None)
            for position, other in zip(positions or [], others or [], strict=True):
                if position is None or other is None:
                    assert position is other
                    continue
                assert set(position) == set(other)
                for token, (value, rank) in position.items():
                    assert other[token][0] == pytest.approx(value, abs=1e-4)
                    assert other[token][1] == rank
