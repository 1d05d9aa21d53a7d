"""Parent-conditioned tables with "mix" candidates, against loops over the full vocabulary in float64."""

import math

import pytest
import torch

from specplug.ddtree import grow, grow_reference
from specplug.markov import MarkovHead, conditioned, conditioned_reference

REQUESTS, GAMMA, VOCAB, RANK = 3, 4, 23, 5


def inputs(seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, MarkovHead, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    head = MarkovHead(
        w1=torch.randn(VOCAB, RANK, generator=generator),
        w2=torch.randn(VOCAB, RANK, generator=generator),
        scale=scale,
    )
    logits = torch.randn(REQUESTS, GAMMA, VOCAB, generator=generator).mul(2)
    return logits, head, torch.randint(VOCAB, (REQUESTS,), generator=generator)


def mix_by_loops(logits, head, anchor, candidates, use_reach=True):
    """Candidates and log-probabilities of one request, straight from the module's formulas, in float64."""
    w1, w2 = head.w1.double(), head.w2.double()
    parents, reach = [int(anchor)], [0.0]
    result = []
    for depth in range(logits.shape[0]):
        base = logits[depth].double()
        weights = torch.softmax(torch.tensor(reach, dtype=torch.float64), 0)
        if not use_reach:
            weights = torch.full_like(weights, 1 / len(weights))
        mean = sum(weight * w1[parent] for weight, parent in zip(weights, parents, strict=True))
        mixed = base + head.scale * (w2 @ mean)
        chosen = sorted(range(len(base)), key=lambda t: (-float(mixed[t]), t))[:candidates]
        outside = sum(math.exp(mixed[t]) for t in range(len(base)) if t not in chosen)
        table = []
        for parent in parents:
            scores = [float(base[t] + head.scale * (w2[t] @ w1[parent])) for t in chosen]
            log_z = math.log(outside + sum(map(math.exp, scores)))
            table.append([score - log_z for score in scores])
        result.append((chosen, table))
        reach = [
            math.log(sum(math.exp(r + row[c]) for r, row in zip(reach, table, strict=True)))
            for c in range(len(chosen))
        ]
        parents = chosen
    return result


@pytest.mark.parametrize("candidates", [1, 4, 16, VOCAB, VOCAB + 9])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_table_is_the_mix_rule(candidates, scale):
    logits, head, anchors = inputs(candidates, scale)
    table = conditioned(logits, head, anchors, candidates)
    width = min(candidates, VOCAB)
    assert table.tokens.shape == (REQUESTS, GAMMA, width)
    assert table.log_probs.shape == (REQUESTS, GAMMA, width, width)
    for r in range(REQUESTS):
        for depth, (chosen, rows) in enumerate(mix_by_loops(logits[r], head, anchors[r], candidates)):
            assert table.tokens[r, depth].tolist() == chosen
            torch.testing.assert_close(
                table.log_probs[r, depth, : len(rows)], torch.tensor(rows), atol=2e-5, rtol=1e-5
            )
            assert (table.log_probs[r, depth, len(rows) :] == float("-inf")).all()


def test_another_mixture_would_be_noticed():
    """Negative control: weighting the parents equally instead of by reach chooses other candidates."""
    logits, head, anchors = inputs(4)
    table = conditioned(logits, head, anchors, 4)
    equal = [mix_by_loops(logits[r], head, anchors[r], 4, use_reach=False) for r in range(REQUESTS)]
    assert table.tokens.tolist() != [[chosen for chosen, _ in depths] for depths in equal]


def test_all_candidates_give_the_full_vocabulary_reference():
    logits, head, anchors = inputs(1)
    table, reference = conditioned(logits, head, anchors, VOCAB), conditioned_reference(logits, head, anchors)
    for r in range(REQUESTS):
        for depth in range(GAMMA):
            parents = (
                table.tokens[r, depth - 1] if depth else torch.tensor([0])
            )  # depth 0: row 0 is the anchor
            exact = reference.log_probs[r, depth][parents][:, table.tokens[r, depth]]
            torch.testing.assert_close(table.log_probs[r, depth, : len(parents)], exact, atol=2e-5, rtol=1e-5)
    tree, exact_tree = grow(table, 24), grow_reference(reference, 24)
    assert tree.tokens.tolist() == exact_tree.tokens.tolist()
    assert tree.parents.tolist() == exact_tree.parents.tolist()


def test_reference_is_softmax_given_the_parent():
    logits, head, anchors = inputs(2)
    reference = conditioned_reference(logits, head, anchors)
    exact = (logits[1, 2].double() + head.w2.double() @ head.w1[5].double()).log_softmax(-1)
    torch.testing.assert_close(reference.log_probs[1, 2, 5].double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(reference.log_probs[1, 2].exp().sum(-1), torch.ones(VOCAB))


def test_the_bias_moves_children_of_different_parents_apart():
    logits, head, anchors = inputs(3)
    table = conditioned(logits, head, anchors, 8)
    assert not torch.equal(table.log_probs[0, 1, 0], table.log_probs[0, 1, 1])
    flat = conditioned(logits, MarkovHead(head.w1, torch.zeros_like(head.w2)), anchors, 8)
    assert torch.equal(flat.log_probs[0, 1, 0], flat.log_probs[0, 1, 1])


def test_large_logits_do_not_overflow():
    logits, head, anchors = inputs(5)
    expected = conditioned(logits, head, anchors, 6)
    moved = conditioned(logits + 3e4, head, anchors, 6)
    assert moved.log_probs[:, 1:].isfinite().all()
    assert (moved.log_probs <= 0).all()
    torch.testing.assert_close(moved.log_probs[:, 1:], expected.log_probs[:, 1:], atol=0.1, rtol=0)


def test_nan_kills_its_depth_and_all_below_in_its_own_request_only():
    logits, head, anchors = inputs(6)
    clean = conditioned(logits, head, anchors, 6)
    logits[1, 2, 0] = float("nan")
    table = conditioned(logits, head, anchors, 6)
    assert torch.equal(table.log_probs[0], clean.log_probs[0])
    assert torch.equal(table.log_probs[1, :2], clean.log_probs[1, :2])
    assert (table.log_probs[1, 2:] == float("-inf")).all()
    assert grow(table, 16).depths[1].max() == 2


def test_no_depth_is_legal():
    logits, head, anchors = inputs()
    table = conditioned(logits[:, :0], head, anchors, 6)
    assert table.tokens.shape == (REQUESTS, 0, 6)
    assert grow(table, 5).counts.tolist() == [0] * REQUESTS


def test_shapes_that_do_not_belong_together_are_refused():
    logits, head, anchors = inputs()
    with pytest.raises(ValueError, match="cut the padding off"):
        conditioned(torch.zeros(REQUESTS, GAMMA, VOCAB + 1), head, anchors, 4)
    with pytest.raises(ValueError, match="cut the padding off"):
        conditioned(logits[..., :-1], head, anchors, 4)
    with pytest.raises(ValueError, match="anchors: expected"):
        conditioned(logits, head, anchors[:-1], 4)
    with pytest.raises(ValueError, match="of one rank"):
        MarkovHead(torch.zeros(9, 4), torch.zeros(9, 3))
    with pytest.raises(ValueError, match="w1 knows only 8 tokens"):
        MarkovHead(torch.zeros(8, 4), torch.zeros(9, 4))
