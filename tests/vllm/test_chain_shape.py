"""Requests whose parameters read the tokens before a row: exact on chain-shaped trees, and counted.

The rest of the parameters (logprobs, lengths, allowed tokens) must be exact on true trees.
"""

import re

import pytest
from comparing import differences
from engine_rig import engine, tree
from prompts import short, tokenizer

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
    "repetition penalty": (lambda: {"repetition_penalty": 1.4}, "penalties"),
    "frequency and presence": (lambda: {"frequency_penalty": 0.9, "presence_penalty": 0.8}, "penalties"),
    "penalties, seeded": (
        lambda: {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.9, "max_tokens": 12},
        "penalties",
    ),
    "bad words": (lambda: {"bad_words": ["self", "return", " the", " in"]}, "bad_words"),
    "regex": (
        lambda: {"structured_outputs": _structured(regex=REGEX), "ignore_eos": False},
        "structured_outputs",
    ),
    "json": (
        lambda: {"structured_outputs": _structured(json=JSON), "ignore_eos": False, "max_tokens": 40},
        "structured_outputs",
    ),
    "regex, seeded": (
        lambda: {
            "structured_outputs": _structured(regex=r"[a-z]{4} [0-9]{6}"),
            "temperature": 0.9,
            "seed": 3,
        },
        "structured_outputs",
    ),
    "logprobs": (lambda: {"logprobs": 3}, None),
    "logprobs, seeded": (
        lambda: {"logprobs": 3, "temperature": 0.8, "seed": 5, "top_p": 0.9, "max_tokens": 12},
        None,
    ),
    "logprobs and penalties": (lambda: {"logprobs": 2, "repetition_penalty": 1.2}, "penalties"),
    "prompt logprobs": (lambda: {"prompt_logprobs": 2, "logprobs": 0}, None),
    "min tokens": (
        lambda: {"min_tokens": 16, "stop_token_ids": list(range(10, 130)), "ignore_eos": False},
        None,
    ),
    "stop tokens": (lambda: {"stop_token_ids": list(range(10, 40)), "ignore_eos": False}, None),
    "allowed tokens": (lambda: {"allowed_token_ids": list(range(100, 700))}, None),
    "nothing special": (dict, None),
}


def params_of(name):
    from vllm import SamplingParams

    make, _ = CASES[name]
    return SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **make()})


@pytest.fixture(
    scope="module", params=[("dflash", False), ("dspark", True)], ids=["dflash-sync", "dspark-async"]
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


def test_a_slot_that_held_a_chain_drafts_trees_again(trees):
    """One request at a time: each takes the slot the last one left."""
    lengths = {}
    for name in ("nothing special", "repetition penalty", "nothing special"):
        with trees.traced() as trace:
            trees.generate(PROMPTS[:1], params_of(name))
        shapes = trees.runner.speculator.store.chain_only[:-1].sum()
        lengths.setdefault(name, []).append((next(iter(trace.values())), int(shapes)))
    (first, chains_first), (again, chains_again) = lengths["nothing special"]
    assert first == again
    assert chains_first == chains_again


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
