"""Batched tree growth against the heap, node for node, and against a float64 heap sharing nothing with it."""

import heapq
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import ddtree
from specplug.candidates import STEP_NATS, TransitionTable, factorised
from specplug.ddtree import build_tree, build_tree_reference, greedy_chain, grow, grow_reference
from specplug.tree import DraftTree

DEAD = float("-inf")
STEPS = [0.0, -0.0, -0.25, -0.5, -1.0, -1.5, -3.0, -63.0, -70.0, -1000.0, DEAD, float("nan")]


def assert_same(got: DraftTree, expected: DraftTree) -> None:
    got.validate()
    for field in fields(DraftTree):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        assert a.dtype == b.dtype
        assert a.tolist() == b.tolist(), field.name


def float_heap(log_probs: list[list[float]], budget: int) -> list[tuple[int, int, int]]:
    """(token, parent, depth) of each node, by float64 sums over the vocabulary; for inputs without ties."""
    heap, nodes = [], []
    for token, step in enumerate(log_probs[0]):
        heapq.heappush(heap, (-step, token, -1, 0))
    while heap and len(nodes) < budget:
        cost, token, parent, depth = heapq.heappop(heap)
        nodes.append((token, parent, depth + 1))
        if depth + 1 < len(log_probs):
            for child, step in enumerate(log_probs[depth + 1]):
                heapq.heappush(heap, (cost - step, child, len(nodes) - 1, depth + 1))
    return nodes


def nodes_of(tree: DraftTree, request: int) -> list[tuple[int, int, int]]:
    count = int(tree.counts[request])
    columns = (tree.tokens[request], tree.parents[request], tree.depths[request])
    return list(zip(*(column[:count].tolist() for column in columns), strict=True))


@st.composite
def depth_scores(draw) -> torch.Tensor:
    """[R, gamma, V] with many ties, dead entries and NaN."""
    requests, gamma, vocab = draw(st.integers(1, 3)), draw(st.integers(0, 5)), draw(st.integers(1, 7))
    pool = draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=4))
    size = requests * gamma * vocab
    values = draw(st.lists(st.sampled_from(pool), min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.float32).view(requests, gamma, vocab)


@st.composite
def tables(draw) -> TransitionTable:
    requests, gamma, width = draw(st.integers(1, 2)), draw(st.integers(0, 4)), draw(st.integers(1, 5))
    rows = draw(st.sampled_from([1, width]))
    pool = draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=4))
    size = requests * gamma * rows * width
    values = draw(st.lists(st.sampled_from(pool), min_size=size, max_size=size))
    ids = [draw(st.permutations(range(7)))[:width] for _ in range(requests * gamma)]
    return TransitionTable(
        torch.tensor(ids, dtype=torch.int64).view(requests, gamma, width),
        torch.tensor(values, dtype=torch.float32).view(requests, gamma, rows, width),
    )


@settings(max_examples=150, deadline=None)
@given(depth_scores(), st.sampled_from([0, 1, 2, 3, 7, 16, 40]))
def test_build_tree_is_the_heap_node_for_node(log_probs, budget):
    assert_same(build_tree(log_probs, budget), build_tree_reference(log_probs, budget))


@settings(max_examples=150, deadline=None)
@given(tables(), st.sampled_from([0, 1, 2, 3, 7, 16, 40]))
def test_grow_is_the_heap_node_for_node(table, budget):
    assert_same(grow(table, budget), grow_reference(table, budget))


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(0, 20))
def test_the_best_n_nodes_are_a_prefix_of_the_best_n_plus_1(table, budget):
    smaller, larger = grow(table, budget), grow(table, budget + 1)
    for request in range(table.tokens.shape[0]):
        nodes = nodes_of(larger, request)
        assert nodes_of(smaller, request) == nodes[:budget]


@settings(max_examples=60, deadline=None)
@given(tables())
def test_greedy_chain_descends_to_the_best_child(table):
    chain = greedy_chain(table)
    chain.validate()
    requests, gamma, _ = table.tokens.shape
    assert chain.budget == gamma
    for r in range(requests):
        row, expected = 0, []
        for depth in range(gamma):
            children = zip(
                table.log_probs[r, depth, row].tolist(), table.tokens[r, depth].tolist(), strict=True
            )
            live = [
                (min(-p, STEP_NATS), token, column) for column, (p, token) in enumerate(children) if p > DEAD
            ]
            if not live:
                break
            _, token, column = min(live)
            expected.append((token, depth - 1, depth + 1))
            row = column if table.log_probs.shape[2] > 1 else 0
        assert nodes_of(chain, r) == expected


@pytest.mark.parametrize(
    "shape", [(3, 7, 50, 64), (2, 1, 300, 16), (4, 15, 9, 33), (1, 3, 5, 300), (2, 7, 1100, 40)]
)
def test_continuous_scores_give_the_float64_heap(shape):
    requests, gamma, vocab, budget = shape
    generator = torch.Generator().manual_seed(budget)
    log_probs = torch.randn(requests, gamma, vocab, generator=generator).mul(3).log_softmax(-1)
    tree = build_tree(log_probs, budget)
    tree.validate()
    scored = log_probs.double()
    for r in range(requests):
        expected = float_heap(log_probs[r].tolist(), budget)
        assert nodes_of(tree, r) == expected
        path_scores: list[float] = []
        for token, parent, depth in expected:
            above = path_scores[parent] if parent >= 0 else 0.0
            path_scores.append(above + float(scored[r, depth - 1, token]))
        torch.testing.assert_close(
            tree.scores[r, : len(expected)], torch.tensor(path_scores), atol=1e-5, rtol=1e-6
        )


@pytest.mark.parametrize("budget", [1, 16, 64])
def test_large_conditioned_tables_give_the_heap(budget):
    generator = torch.Generator().manual_seed(budget)
    log_probs = torch.randn(3, 7, 20, 20, generator=generator).mul(2).log_softmax(-1)
    tokens = torch.rand(3, 7, 900, generator=generator).argsort(-1)[..., :20]
    table = TransitionTable(tokens, log_probs)
    assert_same(grow(table, budget), grow_reference(table, budget))


@pytest.mark.parametrize("vocab", [64, 501, 1500])
@pytest.mark.parametrize("budget", [1, 5, 33])
@pytest.mark.parametrize("kind", ["ties", "all equal", "saturated", "mostly dead", "certain", "shifted"])
def test_selection_over_all_depths_loses_nothing(vocab, budget, kind):
    generator = torch.Generator().manual_seed(vocab + budget)
    x = -torch.rand(2, 5, vocab, generator=generator) * 8
    match kind:
        case "ties":
            x = x.round()
        case "all equal":
            x = torch.full_like(x, -1.0)
        case "saturated":
            x = x * 20 - 40
        case "mostly dead":
            x = x.round()
            x[torch.rand(x.shape, generator=generator) < 0.99] = DEAD
            x[torch.rand(x.shape, generator=generator) < 0.1] = float("nan")
        case "certain":  # the best tokens cost nothing, so whole chains tie
            x = x.round()
            x[:, ::2, vocab // 2 :] = 0.0
        case "shifted":  # depths of very different cost
            x = (x.round() / 8) - torch.tensor([0.0, 5.0, 0.0, 1.0, 9.0])[:, None]
    assert_same(build_tree(x, budget), build_tree_reference(x, budget))


def test_equal_scores_prefer_the_lexicographically_smaller_rank_path():
    tree = build_tree(torch.zeros(1, 3, 2), 6)
    assert nodes_of(tree, 0) == [(0, -1, 1), (0, 0, 2), (0, 1, 3), (1, 1, 3), (1, 0, 2), (0, 4, 3)]
    assert_same(tree, build_tree_reference(torch.zeros(1, 3, 2), 6))


def test_token_0_is_a_real_token():
    log_probs = torch.full((1, 2, 3), DEAD)
    log_probs[..., 0] = -0.5
    tree = build_tree(log_probs, 4)
    assert tree.counts.tolist() == [2]
    assert nodes_of(tree, 0) == [(0, -1, 1), (0, 0, 2)]


def test_requests_of_a_batch_do_not_touch_each_other():
    log_probs = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(7)).log_softmax(-1)
    log_probs[1] = DEAD
    log_probs[2, 1:] = float("nan")
    together = build_tree(log_probs, 20)
    assert together.counts.tolist() == [20, 0, 12, 20]
    for r in range(4):
        alone = build_tree(log_probs[r : r + 1], 20)
        assert nodes_of(alone, 0) == nodes_of(together, r)


@pytest.mark.parametrize(
    ("shape", "budget", "width"), [((2, 3, 4), 0, 0), ((2, 0, 4), 5, 5), ((0, 3, 4), 5, 5), ((2, 3, 0), 5, 5)]
)
def test_nothing_to_draft_leaves_the_root_alone(shape, budget, width):
    tree = build_tree(torch.zeros(shape), budget)
    tree.validate()
    assert tree.budget == width
    assert tree.counts.tolist() == [0] * shape[0]


def test_a_budget_above_all_prefixes_takes_every_prefix():
    tree = build_tree(torch.randn(1, 3, 2, generator=torch.Generator().manual_seed(0)).log_softmax(-1), 40)
    assert tree.counts.tolist() == [2 + 4 + 8]


def test_the_tree_has_the_greatest_expected_acceptance_of_its_size():
    """Against every prefix-closed set of 4 nodes: the sum of the nodes' probabilities is largest."""
    log_probs = torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(5)).mul(2).log_softmax(-1)
    steps = log_probs[0].exp().tolist()

    def grown(paths: frozenset[tuple[int, ...]]) -> set[frozenset[tuple[int, ...]]]:
        stems = [()] + [path for path in paths if len(path) < 3]
        return {paths | {(*stem, t)} for stem in stems for t in range(3) if (*stem, t) not in paths}

    def probability(path: tuple[int, ...]) -> float:
        value = 1.0
        for depth, token in enumerate(path):
            value *= steps[depth][token]
        return value

    trees = {frozenset[tuple[int, ...]]()}
    for _ in range(4):
        trees = {larger for paths in trees for larger in grown(paths)}
    best = max(sum(map(probability, paths)) for paths in trees)
    assert build_tree(log_probs, 4).scores.exp().sum().item() == pytest.approx(best, rel=1e-6)


def test_a_wrong_tie_order_would_be_noticed(monkeypatch):
    """Negative control: without the lexicographic part of the key the comparison with the heap fails."""
    log_probs = torch.zeros(1, 4, 3)
    assert_same(build_tree(log_probs, 12), build_tree_reference(log_probs, 12))
    argsort = torch.Tensor.argsort
    monkeypatch.setattr(torch.Tensor, "argsort", lambda x, dim: argsort(x, dim, descending=True))
    with pytest.raises((AssertionError, ValueError)):
        assert_same(build_tree(log_probs, 12), build_tree_reference(log_probs, 12))


def test_too_few_pairs_would_be_noticed(monkeypatch):
    """Negative control: dropping one needed pair of parent and rank loses a node."""
    log_probs = torch.zeros(1, 2, 8)
    pairs = ddtree._pairs(8, 8, torch.device("cpu"))
    assert_same(build_tree(log_probs, 8), build_tree_reference(log_probs, 8))
    needed = (pairs[0] != 1) | (pairs[1] != 6)
    monkeypatch.setattr(ddtree, "_pairs", lambda *_: (pairs[0][needed], pairs[1][needed]))
    with pytest.raises(AssertionError):
        assert_same(build_tree(log_probs, 8), build_tree_reference(log_probs, 8))


def test_factorised_logits_and_build_tree_agree():
    logits = torch.randn(3, 7, 200, generator=torch.Generator().manual_seed(3)).mul(3)
    tree, direct = grow(factorised(logits, 32), 32), build_tree(logits.log_softmax(-1), 32)
    assert [nodes_of(tree, r) for r in range(3)] == [nodes_of(direct, r) for r in range(3)]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="budget: expected 0 or more nodes, got -1"):
        build_tree(torch.zeros(1, 2, 3), -1)
    with pytest.raises(ValueError, match="lower the budget or the candidates"):
        build_tree(torch.zeros(1, 16, 4096), 4096)
    with pytest.raises(ValueError, match=r"expected depth\^2 \* vocabulary below"):
        build_tree(torch.zeros(1, 1000, 600), 4)
    with pytest.raises(ValueError, match=r"expected float32, got torch\.float16"):
        build_tree(torch.zeros(1, 2, 3, dtype=torch.float16), 4)
    with pytest.raises(ValueError, match="P = 1 or C"):
        grow(TransitionTable(torch.zeros(1, 2, 4, dtype=torch.int64), torch.zeros(1, 2, 3, 4)), 4)
