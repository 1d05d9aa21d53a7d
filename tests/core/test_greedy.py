"""The greedy chain of a grown tree is the chain that greedy drafting makes."""

import pytest
import torch

from specplug.ddtree import build_tree
from specplug.greedy import greedy_survival


@pytest.mark.parametrize("budget", [1, 3, 400])
def test_it_is_the_product_of_the_best_probabilities(budget):
    gamma = 4
    log_probs = torch.randn(6, gamma, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    tree = build_tree(log_probs, budget)
    chain = greedy_survival(tree.scores.exp(), tree.parents, max_depth=gamma)
    expected = log_probs.max(-1).values.cumsum(1).exp()
    held = chain > 0
    assert chain.shape == (6, gamma)
    assert held[:, 0].all()
    assert not (held[:, 1:] & ~held[:, :-1]).any()
    torch.testing.assert_close(chain[held], expected[held])
    if budget == 400:
        assert held.all()


def test_no_nodes_no_chain():
    chain = greedy_survival(torch.zeros(2, 3), torch.full((2, 3), -1, dtype=torch.int32), max_depth=2)
    assert chain.tolist() == [[0.0, 0.0], [0.0, 0.0]]
