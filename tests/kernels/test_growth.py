"""Trees, chains and ancestor words of the kernels against the core, node for node and bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import ddtree
from specplug.candidates import TransitionTable
from specplug.tree import DraftTree, ancestor_mask
from specplug_kernels import growth
from specplug_kernels.growth import Grown, ancestor_words, greedy_chain, grow, grow_kernel

DEAD = float("-inf")
UNIT = 2.0**-28  # halves of it are rounded to even, up to 2^23 of them
STEPS = [0.0, -0.0, 0.5, -0.25, -1.0, -1.5, -63.0, -64.5, -1e30, DEAD, float("nan")]
STEPS += [-0.5 * UNIT, -1.5 * UNIT, -2.5 * UNIT, -8388606.5 * UNIT, -8388607.5 * UNIT, -8388609.0 * UNIT]
FIELDS = ("tokens", "parents", "depths", "scores", "counts")


@st.composite
def tables(draw) -> TransitionTable:
    """Tables with many ties, dead entries and NaN; token 0 is as likely as any."""
    requests, gamma, width = draw(st.integers(0, 2)), draw(st.integers(0, 4)), draw(st.integers(0, 5))
    rows = draw(st.sampled_from([1, width]))
    pool = draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=4)) + draw(
        st.sampled_from([[], [DEAD]])
    )
    size = requests * gamma * rows * width
    values = draw(st.lists(st.sampled_from(pool), min_size=size, max_size=size))
    ids = [draw(st.permutations(range(7)))[:width] for _ in range(requests * gamma)]
    return TransitionTable(
        torch.tensor(ids, dtype=torch.int64).view(requests, gamma, width),
        torch.tensor(values, dtype=torch.float32).view(requests, gamma, rows, width),
    )


def random_table(requests: int, gamma: int, width: int, rows: int, *, seed: int) -> TransitionTable:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(requests, gamma, rows, width, generator=generator).mul(2).log_softmax(-1)
    tokens = torch.rand(requests, gamma, 300, generator=generator).argsort(-1)[..., :width]
    return TransitionTable(tokens + (1 << 22) - 300, log_probs)  # up to the largest id of a table


def on(device: torch.device, table: TransitionTable) -> tuple[torch.Tensor, torch.Tensor]:
    return table.tokens.to(device).contiguous(), table.log_probs.to(device).contiguous()


def assert_same(got: Grown, expected: DraftTree) -> None:
    for name in FIELDS:
        a, b = getattr(got, name).cpu(), getattr(expected, name)
        assert a.dtype == b.dtype
        assert a.tolist() == b.tolist(), name
    assert got.ancestors.tolist() == words_of(expected)


def words_of(tree: DraftTree) -> list[list[int]]:
    """Words out of the core's mask, by summing signed powers of two."""
    requests, budget = tree.tokens.shape
    seen = ancestor_mask(tree.parents, tree.counts, max_depth=budget)[:, 1:, 1:].tolist()
    weight = [1 << j if j < 63 else -(1 << 63) for j in range(budget)]
    return [
        [sum(w for w, s in zip(weight, seen[r][j], strict=True) if s) for j in range(budget)]
        for r in range(requests)
    ]


def guarded_outputs(guarded, requests: int, budget: int, device: torch.device):
    """(out, check) with watched surroundings and nothing plausible inside."""
    dtypes = (torch.int64, torch.int32, torch.int32, torch.float32, torch.int32, torch.int64)
    buffers = [
        guarded((requests,) if name == "counts" else (requests, budget), dtype, device)
        for name, dtype in zip(Grown._fields, dtypes, strict=True)
    ]

    def check() -> None:
        for buffer in buffers:
            buffer.check()

    return Grown(*(buffer.view for buffer in buffers)), check


@settings(max_examples=60, deadline=None)
@given(table=tables(), budget=st.sampled_from([0, 1, 2, 5, 16]))
def test_trees_are_the_cores_node_for_node(device, guarded, table, budget):
    out, check = guarded_outputs(guarded, table.tokens.shape[0], budget, device)
    assert grow(*on(device, table), budget, out=out) is out
    assert_same(out, ddtree.grow(table, budget))
    check()


@settings(max_examples=80, deadline=None)
@given(table=tables())
def test_chains_are_the_cores_node_for_node(device, guarded, table):
    out, check = guarded_outputs(guarded, *table.tokens.shape[:2], device)
    assert greedy_chain(*on(device, table), out=out) is out
    assert_same(out, ddtree.greedy_chain(table))
    check()


@pytest.mark.parametrize(
    ("gamma", "width", "rows", "budget"),
    [(16, 64, 64, 64), (16, 64, 1, 64), (7, 17, 17, 63), (15, 1, 1, 64), (70, 2, 2, 64), (1, 33, 1, 40)],
)
def test_large_tables_give_the_heap(device, gamma, width, rows, budget):
    table = random_table(2, gamma, width, rows, seed=gamma)
    assert_same(grow(*on(device, table), budget), ddtree.grow_reference(table, budget))
    if gamma <= 64:
        assert_same(greedy_chain(*on(device, table)), ddtree.greedy_chain(table))


@pytest.mark.parametrize("rows", [1, 6])
def test_equal_scores_prefer_the_lexicographically_smaller_rank_path(device, rows):
    table = random_table(1, 5, 6, rows, seed=3)
    table.log_probs.fill_(-0.5)
    assert_same(grow(*on(device, table), 61), ddtree.grow_reference(table, 61))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dead", [DEAD, float("nan")])
def test_nothing_stands_below_a_depth_without_a_live_child(device, rows, dead):
    table = random_table(1, 6, 3, rows, seed=4)
    table.log_probs[:, 2] = dead
    assert greedy_chain(*on(device, table)).counts.tolist() == [2]
    assert_same(greedy_chain(*on(device, table)), ddtree.greedy_chain(table))
    assert_same(grow(*on(device, table), 14), ddtree.grow_reference(table, 14))


def test_requests_of_a_batch_do_not_touch_each_other(device):
    table = random_table(4, 5, 9, 9, seed=8)
    table.log_probs[1] = DEAD
    table.log_probs[2, 1:] = float("nan")
    tree = grow(*on(device, table), 20)
    assert tree.counts.tolist() == [20, 0, 9, 20]
    for r in range(4):
        alone = grow(*on(device, TransitionTable(*(x[r : r + 1] for x in table))), 20)
        assert all(a[0].tolist() == t[r].tolist() for a, t in zip(alone, tree, strict=True))


@settings(max_examples=80, deadline=None)
@given(data=st.data(), requests=st.integers(0, 3), budget=st.sampled_from([0, 1, 2, 5, 31, 64]))
def test_words_are_the_cores_mask(device, guarded, data, requests, budget):
    """Nodes past `counts` keep the parents they had, as after pruning: they see themselves alone."""
    chains = data.draw(st.booleans())
    parents = [
        [j - 1 if chains else data.draw(st.integers(-1, j - 1)) for j in range(budget)]
        for _ in range(requests)
    ]
    tree = DraftTree.empty(requests, budget)
    tree.parents.copy_(torch.tensor(parents, dtype=torch.int32).view(requests, budget))
    counts = [data.draw(st.integers(0, budget)) for _ in range(requests)]
    tree.counts.copy_(torch.tensor(counts, dtype=torch.int32))
    out, check = guarded((requests, budget), torch.int64, device)
    assert ancestor_words(tree.parents.to(device), tree.counts.to(device), out=out) is out
    assert out.tolist() == words_of(tree)
    check()


def test_words_of_the_longest_chain(device):
    parents = torch.arange(-1, 63, dtype=torch.int32, device=device)[None]
    words = ancestor_words(parents, torch.full((1,), 64, dtype=torch.int32, device=device))
    assert words.tolist() == [[(1 << j + 1) - 1 for j in range(63)] + [-1]]


def test_the_comparison_sees_a_parent_row_mistaken(device, guarded):
    """Negative control: a conditioned table read as if its depths were independent."""
    table = random_table(2, 4, 5, 5, seed=1)
    out, _ = guarded_outputs(guarded, 2, 12, device)
    tokens, log_probs = on(device, table)
    grow_kernel[(2,)](tokens, log_probs, *out, 4, 1, 5, 12, num_warps=1)
    with pytest.raises(AssertionError, match="tokens"):
        assert_same(out, ddtree.grow(table, 12))


def test_the_comparison_sees_a_tie_broken_the_other_way(device):
    """Negative control: of equal siblings the larger token first."""
    table = random_table(1, 3, 4, 1, seed=2)
    table.log_probs.fill_(-1.0)
    mirrored = TransitionTable((1 << 22) - 1 - table.tokens, table.log_probs)
    tree = grow(*on(device, mirrored), 10)
    other = tree._replace(tokens=((1 << 22) - 1 - tree.tokens))
    assert_same(tree, ddtree.grow(mirrored, 10))
    with pytest.raises(AssertionError, match="tokens"):
        assert_same(other, ddtree.grow(table, 10))


def test_the_guards_see_a_node_too_many(device, guarded):
    table = random_table(1, 3, 4, 1, seed=2)
    out, check = guarded_outputs(guarded, 1, 6, device)
    grow_kernel[(1,)](*on(device, table), *out, 3, 1, 4, 7, num_warps=1)
    with pytest.raises(AssertionError, match="after the output"):
        check()


class Launches:
    """Stands in for a kernel and keeps its grids."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **options: self.grids.append(grid)


@pytest.mark.parametrize("requests", [0, 1, 5])
def test_one_launch_by_host_shapes_alone(monkeypatch, requests):
    """On meta tensors, which hold no values, any host read would raise."""
    launches = Launches()
    for name in ("grow_kernel", "chain_kernel", "ancestor_words_kernel"):
        monkeypatch.setattr(growth, name, launches)
    tokens = torch.empty(requests, 4, 8, dtype=torch.int64, device="meta")
    log_probs = torch.empty(requests, 4, 8, 8, device="meta")
    tree = grow(tokens, log_probs, 16)
    assert greedy_chain(tokens, log_probs).tokens.shape == (requests, 4)
    assert ancestor_words(tree.parents, tree.counts).shape == (requests, 16)
    assert launches.grids == [(requests,)] * 3 if requests else not launches.grids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 65}, r"budget: expected 0\.\.64 nodes, got 65"),
        ({"budget": -1}, r"budget: expected 0\.\.64 nodes, got -1"),
        ({"tokens": torch.zeros(2, 3, 4, dtype=torch.int32)}, "tokens: expected dtype int64"),
        ({"tokens": torch.zeros(2, 3, 5, dtype=torch.int64)}, "log_probs: expected shape"),
        ({"log_probs": torch.zeros(2, 3, 1, 4).half()}, "log_probs: expected dtype float32"),
        ({"log_probs": torch.zeros(2, 3, 2, 4)}, "P = 1 or C = 4, got P = 2"),
        ({"log_probs": torch.zeros(2, 3, 4, 4).mT}, "log_probs: .*contiguous"),
        (
            {"tokens": torch.zeros(2, 3, 65, dtype=torch.int64), "log_probs": torch.zeros(2, 3, 1, 65)},
            "tokens: expected at most 64 candidates, got 65",
        ),
    ],
)
def test_inputs_that_the_kernel_does_not_assume_are_refused(change, message):
    given = {
        "tokens": torch.zeros(2, 3, 4, dtype=torch.int64),
        "log_probs": torch.zeros(2, 3, 1, 4),
        "budget": 8,
    }
    with pytest.raises(ValueError, match=message):
        grow(**(given | change))


def test_outputs_and_depths_that_do_not_fit_are_refused(guarded, device):
    out, _ = guarded_outputs(guarded, 2, 8, device)
    tokens = torch.zeros(2, 65, 4, dtype=torch.int64, device=device)
    log_probs = torch.zeros(2, 65, 1, 4, device=device)
    with pytest.raises(ValueError, match=r"out\.tokens: expected shape \[2, 9\]"):
        grow(tokens, log_probs, 9, out=out)
    with pytest.raises(ValueError, match=r"out\.scores: expected dtype float32"):
        grow(tokens, log_probs, 8, out=out._replace(scores=out.scores.half()))
    with pytest.raises(ValueError, match="expected at most 64 depths, got 65"):
        greedy_chain(tokens, log_probs)
    with pytest.raises(ValueError, match="parents: expected at most 64 nodes"):
        ancestor_words(out.parents.new_zeros(2, 65), out.counts)
    with pytest.raises(ValueError, match="counts: expected shape"):
        ancestor_words(out.parents, out.counts[:1])
