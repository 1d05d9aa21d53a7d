"""Greedy decoding with draft trees gives the tokens of plain decoding: every draft, budget and prompt shape.

What makes these checks able to fail is in test_negative_controls.py.
"""

import pytest
from comparing import differences
from engine_rig import BLOCK, engine, tree
from prompts import varied

pytestmark = pytest.mark.vllm

TOKENS = 24
# budget -> requests decoded together; the two smallest trees take the two extremes
BATCHES = {1: 8, 7: 1, 16: 8, 33: 3, 64: 2}


@pytest.fixture(scope="module")
def greedy(rig):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


def test_prompts_are_what_the_tests_claim():
    lengths = [len(prompt) for prompt in varied()]
    assert len(set(varied())) == len(lengths) >= 40
    assert 1 in lengths
    assert {length - block for block in (16, 32) for length in lengths} >= {-1, 0, 1}
    assert sum(length // BLOCK != (length + TOKENS) // BLOCK for length in lengths) >= 20


@pytest.mark.parametrize("draft", ["dflash", "dspark"])
@pytest.mark.parametrize("budget", BATCHES)
def test_greedy_equals_plain(plain, greedy, draft, budget):
    expected = plain.generate(varied(), greedy)
    with engine(tree(draft, budget), max_num_seqs=BATCHES[budget]) as running:
        assert differences(expected, running.generate(varied(), greedy)) == []
        # Trees were drafted and entered, and a node is never counted twice.
        assert running.counters.accepted > 0
        assert running.counters.accepted_length <= 1 + min(budget, 7)


@pytest.mark.parametrize("draft", ["dflash", "dspark"])
def test_greedy_equals_plain_under_async_scheduling(plain, greedy, draft):
    expected = plain.generate(varied(), greedy)
    with engine(tree(draft, 16), async_scheduling=True) as running:
        assert differences(expected, running.generate(varied(), greedy)) == []
        assert running.counters.accepted > 0


def test_other_block_size(plain, greedy):
    expected = plain.generate(varied()[::2], greedy)
    with engine(tree("dspark", 16), block_size=64, blocks=96) as running:
        assert differences(expected, running.generate(varied()[::2], greedy)) == []


def test_the_cpu_backend_takes_no_smaller_block(rig):
    """Blocks of 16 cannot be served on a CPU by vLLM itself; when this fails, add 16 to the tests above."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    (sizes,) = CPUAttentionBackend.get_supported_kernel_block_sizes()
    assert isinstance(sizes, MultipleOf)
    assert sizes.base == BLOCK


@pytest.mark.parametrize("depth", [1, 3])
def test_shallower_trees(plain, greedy, depth):
    expected = plain.generate(varied()[::3], greedy)
    with engine(tree("dspark", 16, num_speculative_tokens=depth)) as running:
        assert differences(expected, running.generate(varied()[::3], greedy)) == []
        assert 1 < running.counters.accepted_length <= 1 + depth
