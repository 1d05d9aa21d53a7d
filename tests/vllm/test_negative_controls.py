"""Each part of the adapter that exactness rests on, switched off in turn: the equality checks must then fail.

The engine under the control is the one of the positive checks; only the named part is replaced.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
from comparing import differences
from engine_rig import engine, tree
from prompts import short, tokenizer

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


def frequent_triples(outputs):
    """The texts of the three tokens in a row that occur most often. Of two, a row holds all the history."""
    triples = Counter()
    for one in outputs:
        triples.update(zip(one.ids, one.ids[1:], one.ids[2:], strict=False))
    return [tokenizer().decode(list(triple)) for triple, _ in triples.most_common(6)]


@pytest.mark.parametrize("name", ["penalties", "bad words"])
def test_stages_that_do_not_follow_paths(plain, trees, greedy, expected, name):
    """Penalties and bad words with no path at all, as if every row were the root's; penalties also as vLLM
    has them, with the rows above for history.
    """
    from vllm import SamplingParams

    from specplug_vllm.history import Paths, RowPaths

    stage = {"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 0.9}
    if name == "bad words":
        stage = {"bad_words": frequent_triples(expected[:4])}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **stage)
    wanted = plain.generate(PROMPTS[:4], params)
    assert differences(wanted, expected[:4])
    assert differences(wanted, trees.generate(PROMPTS[:4], params)) == []
    of = RowPaths.of

    def rootless(*args):
        return of(*args)._replace(depths=torch.zeros_like(of(*args).depths))

    with mock.patch.object(RowPaths, "of", rootless):
        assert differences(wanted, trees.generate(PROMPTS[:4], params))
    if name == "penalties":
        with mock.patch.object(Paths, "wanted", return_value=False):
            assert differences(wanted, trees.generate(PROMPTS[:4], params))


def test_a_grammar_that_follows_rows_instead_of_paths(plain, trees):
    """vLLM's own masks advance the grammar from row to row: wrong on branches."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager

    from specplug_vllm.grammar import TreeStructuredOutput

    strict = StructuredOutputsParams(regex=r"[a-z_ =.()\n]{20}#[0-9]{3}\n")
    params = SamplingParams(temperature=0, max_tokens=TOKENS, structured_outputs=strict)
    expected = plain.generate(PROMPTS, params)
    assert differences(expected, trees.generate(PROMPTS, params)) == []
    linear = StructuredOutputManager.grammar_bitmask
    with mock.patch.object(TreeStructuredOutput, "grammar_bitmask", linear):
        assert differences(expected, trees.generate(PROMPTS, params))
