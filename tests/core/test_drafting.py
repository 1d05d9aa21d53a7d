"""One draft in the shape that is asked for, with and without heads and a calibration."""

import pytest
import torch

from specplug.calibration import Calibration, Coefficients, DepthCoefficients, Regime
from specplug.drafting import draft_shape, draft_tree
from specplug.heads import MarkovHead

REQUESTS, DEPTH, VOCABULARY, RANK, BUDGET = 3, 4, 12, 5, 10


@pytest.fixture
def draft():
    noise = torch.Generator().manual_seed(1)
    return {
        "logits": torch.randn(REQUESTS, DEPTH, VOCABULARY, generator=noise) * 2,
        "anchors": torch.tensor([3, 0, 11]),
        "head": MarkovHead(
            w1=torch.randn(VOCABULARY, RANK, generator=noise),
            w2=torch.randn(VOCABULARY, RANK, generator=noise),
        ),
    }


def shaped(draft, shape, **options):
    given = {**draft, **options}
    return draft_shape(shape, given.pop("logits"), BUDGET, candidates=VOCABULARY, **given)


def test_a_tree_is_draft_tree(draft):
    got = shaped(draft, "tree")
    want = draft_tree(
        draft["logits"], BUDGET, head=draft["head"], anchors=draft["anchors"], candidates=VOCABULARY
    )
    assert torch.equal(got.tree.tokens, want.tokens)
    assert torch.equal(got.log_probs, want.scores)


@pytest.mark.parametrize("headed", [False, True])
def test_a_chain_is_the_greedy_path(draft, headed):
    head = draft["head"]
    got = shaped(draft, "chain", head=head if headed else None)
    got.tree.validate()
    assert got.tree.budget == BUDGET
    assert got.tree.counts.tolist() == [DEPTH] * REQUESTS
    for r in range(REQUESTS):
        token, tokens = int(draft["anchors"][r]), []
        for d in range(DEPTH):
            bias = head.w2 @ head.w1[token] if headed else 0.0
            token = int((draft["logits"][r, d] + bias).argmax())
            tokens.append(token)
        assert got.tree.tokens[r, :DEPTH].tolist() == tokens


def test_calibrated_nodes_keep_the_drafts_own_log_probabilities(draft):
    """Rank lowers the estimate, so the order changes; each node's own log-probability goes with it."""
    plain = shaped(draft, "tree")
    depths = [DepthCoefficients(fitted=[1.0, 0.0, 0.0, -1.5, 0.0])] * DEPTH
    fitted = Coefficients.of(Calibration(regimes=[Regime(max_temperature=None, depths=depths)]))
    got = shaped(draft, "tree", calibration=fitted, temperatures=torch.zeros(REQUESTS))
    assert not torch.equal(got.tree.tokens, plain.tree.tokens)
    for r in range(REQUESTS):
        nodes = []
        for drafted in (plain, got):
            paths = [()]
            rows = zip(drafted.tree.parents[r].tolist(), drafted.tree.tokens[r].tolist(), strict=True)
            for parent, token in rows:
                paths.append((*paths[parent + 1], token))
            nodes.append(dict(zip(paths[1:], drafted.log_probs[r].tolist(), strict=True)))
        assert nodes[0] == nodes[1]
