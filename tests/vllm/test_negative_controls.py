"""Each part of the adapter that exactness rests on, switched off in turn: the equality checks must then fail.

The engine under the control is the one of the positive checks; only the named part is replaced.
"""

from unittest import mock

import pytest
import torch
from comparing import differences
from engine_rig import engine, tree
from prompts import short

pytestmark = pytest.mark.vllm

PROMPTS = short(8)
TOKENS = 28


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def trees(rig, request):
    # No prefix cache: a damaged block must not outlive its control.
    with engine(tree(request.param, 16), enable_prefix_caching=False) as running:
        yield running


@pytest.fixture(scope="module")
def greedy(rig):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(plain, greedy):
    return plain.generate(PROMPTS, greedy)


@pytest.fixture(scope="module")
def untouched(trees, greedy, expected):
    """Accepted lengths of the untouched engine, which is exact."""
    with trees.traced() as trace:
        assert differences(expected, trees.generate(PROMPTS, greedy)) == []
    return list(trace.values())


def steps(trace):
    return sum(map(len, trace))


@pytest.mark.usefixtures("untouched")
def test_without_moving_the_cache_rows(trees, greedy, expected):
    still = [lambda commit, slots: None for _ in trees.state.cache_movers]
    with mock.patch.object(trees.state, "cache_movers", still):
        assert differences(expected, trees.generate(PROMPTS, greedy))


@pytest.mark.usefixtures("untouched")
def test_with_a_wrong_parent_in_the_mask(trees, greedy, expected):
    """Rows that see the root and themselves only, while acceptance follows the true parents."""
    from specplug_vllm import model_state

    stock = model_state.lay_out_windows

    def orphaned(*, parents, **kwargs):
        return stock(parents=torch.full_like(parents, -1), **kwargs)

    with mock.patch.object(model_state, "lay_out_windows", orphaned):
        assert differences(expected, trees.generate(PROMPTS, greedy))


@pytest.mark.usefixtures("untouched")
def test_with_a_wrong_depth_in_the_store(trees, greedy, expected):
    from specplug_vllm.store import TreeStore

    stock = TreeStore.write

    def deeper(self, slots, drafted):
        stock(self, slots, drafted)
        self.depths[slots] = drafted.depths + 1

    with mock.patch.object(TreeStore, "write", deeper):
        assert differences(expected, trees.generate(PROMPTS, greedy))


def test_a_wrong_parent_of_the_right_depth_only_costs_acceptance(trees, greedy, expected, untouched):
    """Mask and walk read one store, so any well-formed tree is exact; only a useful one is accepted."""
    from specplug_vllm.store import TreeStore

    stock = TreeStore.write

    def adopted(self, slots, drafted):
        stock(self, slots, drafted)
        node = torch.arange(drafted.budget)
        second = torch.where((drafted.depths == 1) & (node > 0), node, drafted.budget).amin(1, keepdim=True)
        other = torch.where((drafted.parents == 0) & (second < node), second, 0).to(torch.int32)
        self.parents[slots] = torch.where(drafted.depths == 2, other, drafted.parents)

    with mock.patch.object(TreeStore, "write", adopted), trees.traced() as trace:
        assert differences(expected, trees.generate(PROMPTS, greedy)) == []
    assert steps(list(trace.values())) > steps(untouched)


@pytest.mark.usefixtures("untouched")
def test_with_row_order_for_positions(trees, greedy, expected):
    from specplug.window import Windows

    with mock.patch.object(Windows, "positions", lambda self, linear: linear):
        assert differences(expected, trees.generate(PROMPTS, greedy))


def test_without_moving_the_features(trees, greedy, expected, untouched):
    """Verification does not read them, so the text stays; the next draft does, so it accepts less."""
    from specplug.window import Commit

    with mock.patch.object(Commit, "move", return_value=None), trees.traced() as trace:
        assert differences(expected, trees.generate(PROMPTS, greedy)) == []
    assert steps(list(trace.values())) > steps(untouched)


def test_with_row_order_for_the_samplers_noise(plain, trees):
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True) for i in range(4)]
    expected = plain.generate(PROMPTS[:4], params)
    assert differences(expected, trees.generate(PROMPTS[:4], params)) == []

    state = trees.state

    def linear(rows):
        windows = state.step.windows
        offset = torch.arange(windows.rows.shape[1]) - windows.depths  # row order minus depth
        return (
            state._tree_positions[rows]
            + torch.where(windows.in_window, offset.flatten()[windows.column_of_row], 0)[rows]
        )

    with mock.patch.object(state, "tree_positions", linear):
        assert differences(expected, trees.generate(PROMPTS[:4], params))


def test_without_reordering_the_logprobs(plain, trees):
    from vllm import SamplingParams

    from specplug_vllm import acceptance

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=3)
    expected = plain.generate(PROMPTS, params)

    def row_order(path, num_emitted, width):
        return torch.arange(width).expand(path.shape[0], -1)

    with mock.patch.object(acceptance, "path_permutation", row_order):
        got = trees.generate(PROMPTS, params)
    assert differences(expected, got) == []
    assert any(
        set(want) != set(have)
        for a, b in zip(expected, got, strict=True)
        for want, have in zip(a.logprobs, b.logprobs, strict=True)
    )


def test_penalties_on_branches(plain, trees):
    """Stock penalties take earlier rows for history: wrong on branches, so such requests get chains."""
    from vllm import SamplingParams

    from specplug_vllm import model_state

    params = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        ignore_eos=True,
        repetition_penalty=1.4,
        presence_penalty=0.8,
        frequency_penalty=0.9,
    )
    expected = plain.generate(PROMPTS[:5], params)
    assert differences(expected, trees.generate(PROMPTS[:5], params)) == []
    with mock.patch.object(model_state, "chain_reasons", return_value=[]):
        assert differences(expected, trees.generate(PROMPTS[:5], params))
