"""Draft trees when memory or rows are short: prompts in pieces, trees cut, requests evicted."""

import pytest
from comparing import differences
from engine_rig import engine, tree
from prompts import cut, short, varied

pytestmark = pytest.mark.vllm

BUDGET = 16
SETTINGS = [("dflash", False), ("dspark", False), ("dflash", True), ("dspark", True)]
NAMES = ["dflash-sync", "dspark-sync", "dflash-async", "dspark-async"]


@pytest.fixture(scope="module")
def greedy(rig):
    from vllm import SamplingParams

    return lambda tokens: SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@pytest.mark.parametrize(("draft", "async_scheduling"), SETTINGS, ids=NAMES)
def test_chunked_prefill(plain, greedy, draft, async_scheduling):
    """64 tokens a step: prompts arrive in pieces, and eight trees of 17 rows do not fit, so some are cut."""
    prompts = varied()[2::4]
    with engine(tree(draft, BUDGET), async_scheduling=async_scheduling, max_num_batched_tokens=64) as running:
        assert max(map(len, prompts)) > 4 * 64
        assert differences(plain.generate(prompts, greedy(20)), running.generate(prompts, greedy(20))) == []
        assert running.counters.accepted > 0


@pytest.mark.parametrize(("draft", "async_scheduling"), SETTINGS, ids=NAMES)
def test_preemption(plain, greedy, draft, async_scheduling):
    """Fewer cache blocks than the batch needs: requests are evicted and start again from their tokens."""
    prompts = [cut(60 + i, 56 + 3 * i) for i in range(10)]
    with engine(
        tree(draft, BUDGET), async_scheduling=async_scheduling, max_model_len=256, blocks=17
    ) as running:
        got = running.generate(prompts, greedy(32))
        assert running.counters.preemptions > 0
        assert differences(plain.generate(prompts, greedy(32)), got) == []
        assert running.free_blocks == 16  # one block is vLLM's own null block


@pytest.mark.parametrize("draft", ["dflash", "dspark"])
def test_two_fresh_engines_accept_alike(greedy, draft):
    """Accepted lengths do not vary from run to run, nor with the batch around a request."""
    traces = []
    for batch in (8, 8, 3):
        with engine(tree(draft, BUDGET), max_num_seqs=batch) as running, running.traced() as trace:
            running.generate(short(8), greedy(20))
            traces.append(dict(trace))
    assert traces[0] == traces[1]
    assert traces[0] == traces[2]
