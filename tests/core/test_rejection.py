"""Where draws and acceptances change with their uniform numbers; what surrounds the coupling.

test_enumeration gives the interval of each outcome one point in its middle. Here are the ends of the
intervals.
"""

import pytest
import torch

from specplug.hybrid import HybridTree, attach, expand
from specplug.rejection import Draw, accept_chain, coupled, draw, sample
from specplug.tree import DraftTree


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_change_exactly_at_the_cumulative_sums(dtype):
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.25, 0.6, 0.0]], dtype=dtype)
    exact = weights.double()
    edges = exact.cumsum(1)[0] / exact.sum()
    for t, start, end in [(1, 0.0, edges[1]), (3, edges[1], edges[3]), (4, edges[3], 1.0)]:
        inside = torch.tensor([float(start) + 1e-12, float(end) - 1e-12], dtype=torch.float64)
        assert draw(weights.expand(2, -1), inside).tolist() == [t, t]
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights.expand(2, -1), ends).tolist() == [1, 4]


def test_acceptance_changes_exactly_at_the_ratio():
    p, q = torch.tensor([[[0.2, 0.5, 0.3]], [[0.7, 0.2, 0.1]]], dtype=torch.float64)
    accept = torch.tensor([0.0, 0.2 / 0.7 - 1e-12, 0.2 / 0.7 + 1e-12, 1 - 2**-53], dtype=torch.float64)
    y = Draw(torch.zeros(4, dtype=torch.int64), q.expand(4, -1))
    got = coupled(p.expand(4, -1), y, accept_uniform=accept, residual_uniform=torch.full((4,), 0.9).double())
    assert got.tolist() == [0, 0, 2, 2]


def test_sampled_tokens_come_with_the_law_they_came_from():
    """Half-precision logits with near-ties: the law is that of the rounded logits, in fp32."""
    logits = torch.tensor([[3.0, 3.001, 2.999, -1.0]]).to(torch.bfloat16)
    uniform = torch.tensor([0.4]).double()
    result = sample(logits, uniform, temperature=torch.tensor([0.9]))
    assert result.probabilities.dtype == torch.float32
    assert torch.equal(result.probabilities, (logits.float() / 0.9).softmax(-1))
    assert torch.equal(result.tokens, draw(result.probabilities, uniform))


def test_half_precision_probabilities_are_refused():
    half = torch.full((1, 4), 0.25, dtype=torch.bfloat16)
    u = torch.tensor([0.5]).double()
    with pytest.raises(
        ValueError, match=r"proposal: expected fp32 or fp64 probabilities, got torch.bfloat16"
    ):
        coupled(half.float(), Draw(torch.tensor([0]), half), accept_uniform=u, residual_uniform=u)


def test_an_exhausted_or_absent_proposal_draws_from_the_target():
    p = torch.tensor([[0.0, 1.0], [0.25, 0.75]]).double()
    u = torch.tensor([0.1, 0.1]).double()
    nothing = Draw(torch.tensor([0, 0]), torch.zeros(2, 2).double())
    assert coupled(p, nothing, accept_uniform=u, residual_uniform=u).tolist() == [1, 0]
    hybrid = HybridTree.of(DraftTree.empty(1, 0), 2)
    q = torch.tensor([[[1.0, 0.0]]])
    grown = expand(hybrid, q, at=torch.zeros(1, 1).long(), children=2)
    assert grown.tree.counts.tolist() == [1]  # a token without mass is no child
    full = attach(grown, q, at=torch.zeros(1, 1).long(), uniform=u[:1, None])
    assert not full.live.any()
    assert full.tree.counts.tolist() == [1]


def test_drafted_tokens_past_the_count_do_not_exist():
    p = torch.full((2, 3, 4), 0.25).double()
    proposal = Draw(torch.tensor([[1, 2], [1, 2]]), torch.full((2, 2, 4), 0.25).double())
    result = accept_chain(
        proposal,
        torch.tensor([2, 1], dtype=torch.int32),
        p,
        accept_uniform=torch.full((2, 2), 0.5).double(),
        draw_uniform=torch.full((2, 3), 0.9).double(),
    )
    assert result.tokens.tolist() == [[1, 2, 3], [1, 3, -1]]
    assert result.path.tolist() == [[0, 1, 2], [0, 1, 0]]
    with pytest.raises(ValueError, match=r"target: expected \[R, G \+ 1, V\]"):
        accept_chain(
            proposal,
            torch.tensor([2, 1], dtype=torch.int32),
            p[:, :2],
            accept_uniform=torch.full((2, 2), 0.5).double(),
            draw_uniform=torch.full((2, 3), 0.9).double(),
        )


def test_a_row_gets_one_sampled_child_and_only_rows_that_exist():
    hybrid = HybridTree.of(DraftTree.empty(1, 0), 5)
    q = torch.full((1, 3, 5), 0.2)
    u = torch.tensor([[0.1, 0.5, 0.9]]).double()
    once = attach(hybrid, q, at=torch.tensor([[0, 0, 1]]), uniform=u)
    assert once.live.tolist() == [[True, False, False]]
    assert once.sampled_rows.tolist() == [[1, -1, -1]]
    again = attach(once, q, at=torch.tensor([[0, -1, 1]]), uniform=u)
    assert again.live.tolist() == [[True, False, False, False, False, True]]
    assert again.tree.depths[0, :2].tolist() == [1, 2]
    assert again.tree.counts.tolist() == [2]
    assert expand(again, q[:, :1], at=torch.zeros(1, 1).long(), children=2).tree.counts.tolist() == [2]
    again.tree.validate()


def test_slots_must_agree_in_shape():
    hybrid = HybridTree.of(DraftTree.empty(2, 0), 5)
    with pytest.raises(ValueError, match=r"HybridTree.live: expected \[R, S\]"):
        HybridTree(hybrid.tree, hybrid.rows, torch.ones(2, 1).bool(), hybrid.proposal)
