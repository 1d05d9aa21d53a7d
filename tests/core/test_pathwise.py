"""Trees under heads whose bias depends on the whole path, against enumeration of every path."""

import itertools
import math

import pytest
import torch

from specplug.ddtree import grow
from specplug.drafting import draft_tree
from specplug.heads import MarkovHead, Projection
from specplug.markov import conditioned
from specplug.pathwise import grow_pathwise, grow_pathwise_reference
from specplug.tree import DraftTree
from specplug.vocabulary import DraftVocabulary

HIDDEN, RANK = 4, 3


def inputs(
    vocab: int, gamma: int, *, requests: int = 2, seed: int = 0, draft: int | None = None, kind: str = "rnn"
) -> tuple[torch.Tensor, MarkovHead, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    joint = Projection(
        torch.randn(3 * RANK, 2 * RANK + HIDDEN, generator=g), torch.randn(3 * RANK, generator=g)
    )
    gate = Projection(torch.randn(RANK, HIDDEN + RANK, generator=g), torch.randn(RANK, generator=g))
    head = MarkovHead(
        w1=torch.randn(vocab, RANK, generator=g),
        w2=torch.randn(draft or vocab, RANK, generator=g).mul(2),
        joint=joint if kind == "rnn" else None,
        gate=gate if kind == "gated" else None,
    )
    return (
        torch.randn(requests, gamma, draft or vocab, generator=g),
        head,
        torch.randint(vocab, (requests,), generator=g),
        torch.randn(requests, gamma, HIDDEN, generator=g),
    )


def paths(tree: DraftTree, r: int) -> list[tuple[int, ...]]:
    """Each node as the tokens from the root to it, in node order."""
    found: list[tuple[int, ...]] = []
    for j in range(int(tree.counts[r])):
        parent = int(tree.parents[r, j])
        found.append((() if parent < 0 else found[parent]) + (int(tree.tokens[r, j]),))
    return found


def best_paths(logits, head, anchor, hidden, budget, targets=None, forget=False):
    """The likeliest prefixes by scoring every path of every length in float64, formulas written out."""
    gamma, vocab = logits.shape
    targets = list(range(vocab)) if targets is None else targets
    w1, w2, (weight, bias) = head.w1.double(), head.w2.double(), (x.double() for x in head.joint)
    scored = []
    for length in range(1, gamma + 1):
        for path in itertools.product(range(vocab), repeat=length):
            state = torch.zeros(RANK, dtype=torch.float64)
            before, total = int(anchor), 0.0
            for position, draft_id in enumerate(path):
                z = weight @ torch.cat((state, w1[before], hidden[position].double())) + bias
                row = logits[position].double() + w2 @ torch.tanh(z[2 * RANK :])
                total += float(row[draft_id] - row.logsumexp(-1))
                keep = torch.sigmoid(z[:RANK])
                if not forget:
                    state = keep * state + (1 - keep) * torch.tanh(z[RANK : 2 * RANK])
                before = targets[draft_id]
            scored.append((-total, tuple(targets[i] for i in path)))
    scored.sort()
    return [path for _, path in scored[:budget]], [-cost for cost, _ in scored[:budget]]


@pytest.mark.parametrize(
    ("vocab", "gamma", "budget"), [(3, 4, 1), (3, 4, 17), (4, 3, 40), (5, 2, 30), (2, 5, 62)]
)
def test_nodes_are_the_best_of_all_paths(vocab: int, gamma: int, budget: int) -> None:
    logits, head, anchors, hidden = inputs(vocab, gamma, seed=vocab)
    tree = grow_pathwise(logits, head, anchors, budget, candidates=vocab, hidden=hidden)
    tree.validate()
    reference = grow_pathwise_reference(logits, head, anchors, budget, hidden=hidden)
    reference.validate()
    for r in range(2):
        expected, scores = best_paths(logits[r], head, anchors[r], hidden[r], budget)
        assert paths(tree, r) == expected == paths(reference, r)
        torch.testing.assert_close(
            tree.scores[r, : len(scores)], torch.tensor(scores, dtype=torch.float32), atol=1e-5, rtol=1e-5
        )


def test_forgetting_the_state_would_be_noticed() -> None:
    """Negative control: the same enumeration with the state reset at every node orders paths otherwise."""
    logits, head, anchors, hidden = inputs(4, 3, seed=4)
    tree = grow_pathwise(logits, head, anchors, 40, candidates=4, hidden=hidden)
    assert any(
        paths(tree, r) != best_paths(logits[r], head, anchors[r], hidden[r], 40, forget=True)[0]
        for r in range(2)
    )


def test_a_budget_past_all_paths_takes_them_all() -> None:
    logits, head, anchors, hidden = inputs(3, 2)
    tree = grow_pathwise(logits, head, anchors, 50, candidates=3, hidden=hidden)
    tree.validate()
    assert tree.counts.tolist() == [3 + 9] * 2
    assert {len(set(paths(tree, r))) for r in range(2)} == {12}


def test_smaller_budgets_are_prefixes() -> None:
    logits, head, anchors, hidden = inputs(11, 4, seed=2)
    large = grow_pathwise(logits, head, anchors, 24, candidates=11, hidden=hidden)
    for budget in (1, 5, 23):
        small = grow_pathwise(logits, head, anchors, budget, candidates=11, hidden=hidden)
        for r in range(2):
            assert paths(small, r) == paths(large, r)[:budget]


def test_few_candidates_keep_nearly_all_of_the_mass() -> None:
    """C = 8 of 40: the same formula restricted to candidates; never above the full vocabulary's sum."""
    logits, head, anchors, hidden = inputs(40, 5, requests=8, seed=3)
    few = grow_pathwise(logits, head, anchors, 16, candidates=8, hidden=hidden)
    few.validate()
    full = grow_pathwise_reference(logits, head, anchors, 16, hidden=hidden)
    assert few.counts.tolist() == [16] * 8
    ratio = few.scores.exp().sum() / full.scores.exp().sum()
    assert 0.85 < float(ratio) < 1.05


def test_equal_scores_break_ties_by_rank_path() -> None:
    vocab, gamma = 3, 3
    logits = torch.zeros(1, gamma, vocab)
    _, head, anchors, hidden = inputs(vocab, gamma, requests=1)
    flat = MarkovHead(head.w1, torch.zeros_like(head.w2), joint=head.joint)
    tree = grow_pathwise(logits, flat, anchors, 12, candidates=vocab, hidden=hidden)
    expected = [(i,) for i in range(3)] + list(itertools.product(range(3), repeat=2))
    assert paths(tree, 0) == expected
    assert paths(grow_pathwise_reference(logits, flat, anchors, 12, hidden=hidden), 0) == expected
    assert math.isclose(float(tree.scores[0, 0]), -math.log(3), abs_tol=1e-6)


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_heads_without_a_state_give_the_table_tree(kind: str) -> None:
    """One code path checks the other: with all candidates both are exact."""
    logits, head, anchors, hidden = inputs(9, 4, seed=6, kind=kind)
    table = grow(conditioned(logits, head, anchors, 9, hidden=hidden), 25)
    tree = grow_pathwise(logits, head, anchors, 25, candidates=9, hidden=hidden)
    for r in range(2):
        assert paths(tree, r) == paths(table, r)


def test_reduced_vocabulary() -> None:
    targets = [6, 1, 4]
    logits, head, anchors, hidden = inputs(7, 3, seed=8, draft=3)
    vocabulary = DraftVocabulary(torch.tensor(targets))
    tree = draft_tree(
        logits, 20, head=head, anchors=anchors, hidden=hidden, vocabulary=vocabulary, candidates=3
    )
    tree.validate()
    reference = grow_pathwise_reference(logits, head, anchors, 20, hidden=hidden, vocabulary=vocabulary)
    for r in range(2):
        expected, _ = best_paths(logits[r], head, anchors[r], hidden[r], 20, targets)
        assert paths(tree, r) == expected == paths(reference, r)


def test_nan_kills_its_depth_and_all_below_in_its_own_request_only() -> None:
    logits, head, anchors, hidden = inputs(5, 4, seed=1)
    clean = grow_pathwise(logits, head, anchors, 30, candidates=5, hidden=hidden)
    logits[1, 2, 0] = float("nan")
    tree = grow_pathwise(logits, head, anchors, 30, candidates=5, hidden=hidden)
    assert paths(tree, 0) == paths(clean, 0)
    assert int(tree.depths[1].max()) == 2
    assert int(tree.counts[1]) == 5 + 25


def test_empty_shapes_and_deep_blocks() -> None:
    logits, head, anchors, hidden = inputs(3, 2)
    assert grow_pathwise(logits, head, anchors, 0, candidates=3, hidden=hidden).budget == 0
    none = grow_pathwise(logits[:, :0], head, anchors, 4, candidates=3, hidden=hidden[:, :0])
    assert none.counts.tolist() == [0, 0]
    deep, head, anchors, hidden = inputs(3, 80)  # a dead child's cost is below that of a path this long
    deep[:, 2:] = float("nan")
    tree = grow_pathwise(deep, head, anchors, 6, candidates=3, hidden=hidden)
    assert int(tree.depths.max()) == 2
    with pytest.raises(ValueError, match="budget: expected 0 or more"):
        grow_pathwise(deep, head, anchors, -1, candidates=3, hidden=hidden)


def test_a_table_refuses_an_rnn_head_and_names_the_way() -> None:
    logits, head, anchors, hidden = inputs(3, 2)
    with pytest.raises(ValueError, match=r"whole path.*specplug\.pathwise\.grow_pathwise"):
        conditioned(logits, head, anchors, 3, hidden=hidden)
    with pytest.raises(ValueError, match="hidden: expected"):
        grow_pathwise(logits, head, anchors, 3, candidates=3)
    with pytest.raises(ValueError, match=r"hidden: expected \[2, 2, 4\], one row a row of logits"):
        grow_pathwise(logits, head, anchors, 3, candidates=3, hidden=hidden[:, :1])
    with pytest.raises(ValueError, match="anchors: a Markov head starts"):
        draft_tree(logits, 3, head=head, hidden=hidden)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_nothing_is_read_on_the_host(kind: str) -> None:
    """On the meta device, whose tensors have no data, a host read would raise."""

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    layer = Projection(meta(3 * RANK, 2 * RANK + HIDDEN), meta(3 * RANK))
    gate = Projection(meta(RANK, HIDDEN + RANK), meta(RANK))
    head = MarkovHead(
        meta(60, RANK),
        meta(20, RANK),
        gate=gate if kind == "gated" else None,
        joint=None if kind == "gated" else layer,
    )
    tree = draft_tree(
        meta(3, 4, 20), 9, head=head, anchors=meta(3, dtype=torch.int64), hidden=meta(3, 4, HIDDEN),
        vocabulary=DraftVocabulary(meta(20, dtype=torch.int64)), candidates=5,
    )  # fmt: skip
    assert tree.tokens.shape == (3, 9)
    assert tree.counts.device.type == "meta"
