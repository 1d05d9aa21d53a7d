"""Trees in a long-lived engine: batches, prefix hits, context limit, early ends, aborts, free blocks."""

import pytest
from comparing import differences
from engine_rig import BLOCK, MAX_MODEL_LEN, engine, tree
from prompts import cut, short

pytestmark = pytest.mark.vllm

BUDGET = 16
# Both drafts and both kinds of scheduling, in two engines instead of four.
SETTINGS = [("dflash", False), ("dspark", True)]
NAMES = ["dflash-sync", "dspark-async"]


@pytest.fixture(scope="module", params=SETTINGS, ids=NAMES)
def trees(rig, request):
    draft, async_scheduling = request.param
    with engine(tree(draft, BUDGET), async_scheduling=async_scheduling) as running:
        running.free_at_start = running.free_blocks
        yield running


@pytest.fixture(scope="module")
def greedy(rig):
    from vllm import SamplingParams

    return lambda tokens, **more: SamplingParams(
        temperature=0, max_tokens=tokens, **{"ignore_eos": True, **more}
    )


@pytest.fixture(scope="module")
def long_run(trees, greedy):
    """A prompt after which the engine accepts a long run at once, so that an end can fall inside it."""
    prompts = short(16)
    with trees.traced() as trace:
        trees.generate(prompts, greedy(24))
    longest, prompt = max(zip(map(max, trace.values()), prompts, strict=True))
    assert longest > 2
    return prompt


def test_batches_of_one_to_eight(plain, trees, greedy):
    expected = plain.generate(short(8), greedy(12))
    for size in range(1, 9):
        assert differences(expected[:size], trees.generate(short(8)[:size], greedy(12))) == [], (
            f"batch of {size}"
        )


def test_second_turn_on_a_prefix_hit(plain, trees, greedy):
    first = [cut(30 + i, 40 + 9 * i) for i in range(4)]
    answers = trees.generate(first, greedy(40))
    second = [
        (*prompt, *answer.ids, *cut(40 + i, 12))
        for i, (prompt, answer) in enumerate(zip(first, answers, strict=True))
    ]
    got = trees.generate(second, greedy(20))
    # The hit reaches past the first prompt into blocks that were decoded, so it covers moved cache rows.
    assert all(output.cached > len(prompt) - BLOCK for output, prompt in zip(got, first, strict=True))
    assert any(output.cached > len(prompt) for output, prompt in zip(got, first, strict=True))
    assert differences(plain.generate(second, greedy(20)), got) == []


def test_prompts_that_end_near_the_context_limit(plain, trees, greedy):
    room = range(1, BUDGET + 3)
    prompts = [cut(50 + i, MAX_MODEL_LEN - left) for i, left in enumerate(room)]
    got = trees.generate(prompts, greedy(MAX_MODEL_LEN))
    assert [len(output.ids) for output in got] == list(room)
    assert {output.finish for output in got} == {"length"}
    assert differences(plain.generate(prompts, greedy(MAX_MODEL_LEN)), got) == []


def test_identical_prompts_in_one_step_equal_the_cold_output(plain, trees, greedy):
    prompt = cut(33, 3 * BLOCK + 5)
    trees.llm.reset_prefix_cache()
    both = trees.generate([prompt] * 3, greedy(20))
    assert differences(plain.generate([prompt] * 3, greedy(20)), both) == []


def test_stop_at_every_token(plain, trees, greedy, long_run):
    """A stop token can fall anywhere in an accepted run; nothing after it may come out."""
    (full,) = plain.generate([long_run], greedy(24))
    params = [greedy(24, stop_token_ids=[token], ignore_eos=False) for token in full.ids]
    got = trees.generate([long_run] * len(params), params)
    for token, output in zip(full.ids, got, strict=True):
        assert output.ids == full.ids[: full.ids.index(token) + 1]
        assert (output.finish, output.stop) == ("stop", token)
    assert differences(plain.generate(short(2), greedy(20)), trees.generate(short(2), greedy(20))) == []


def test_every_max_tokens(plain, trees, greedy, long_run):
    (full,) = plain.generate([long_run], greedy(24))
    got = trees.generate([long_run] * 24, [greedy(tokens) for tokens in range(1, 25)])
    assert [output.ids for output in got] == [full.ids[:tokens] for tokens in range(1, 25)]
    assert {output.finish for output in got} == {"length"}
    assert differences(plain.generate(short(2), greedy(20)), trees.generate(short(2), greedy(20))) == []


def test_an_aborted_request_leaves_nothing(plain, trees, greedy):
    trees.abandon([cut(8 + i, 40) for i in range(3)], greedy(60), steps=4)
    assert differences(plain.generate(short(3), greedy(20)), trees.generate(short(3), greedy(20))) == []
    assert trees.free_blocks == trees.free_at_start


def test_every_cache_block_is_free_again(trees):
    assert trees.core.scheduler.get_request_counts() == (0, 0)
    assert trees.free_blocks == trees.free_at_start
