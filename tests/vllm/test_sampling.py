"""A seeded request draws plain decoding's tokens, at any temperature, with top-p and top-k."""

import pytest
from comparing import differences
from engine_rig import engine, tree
from prompts import cut, short

pytestmark = pytest.mark.vllm


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("dflash", 16), id="dflash-16", marks=pytest.mark.slow),
        pytest.param(("dspark", 7), id="dspark-7"),
    ],
)
def trees(rig, request):
    with engine(tree(*request.param), max_num_seqs=12) as running:
        yield running


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.95, "top_k": 50},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
def test_seeded_sampling_equals_plain(plain, trees, settings):
    from vllm import SamplingParams

    params = [SamplingParams(seed=100 + i, max_tokens=16, ignore_eos=True, **settings) for i in range(5)]
    expected = plain.generate(short(5), params)
    before = trees.counters
    assert differences(expected, trees.generate(short(5), params)) == []
    assert trees.counters.since(before).accepted > 0


def test_the_seed_matters(trees):
    from vllm import SamplingParams

    prompt = cut(1, 20)
    one, other, again = trees.generate(
        [prompt] * 3, [SamplingParams(temperature=0.8, seed=seed, max_tokens=12) for seed in (1, 2, 1)]
    )
    assert one.ids == again.ids != other.ids
