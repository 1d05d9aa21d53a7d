"""The hot path never reads a tensor on the host and makes every tensor on its input's device.

Shown on the meta device: its tensors have no data, so a host read or a mix of devices raises.
"""

import pytest
import torch

from specplug import attention, candidates, ddtree, markov, ragged, tree, verify

META = torch.device("meta")
REQUESTS, GAMMA, VOCAB = 3, 4, 600


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.fixture
def draft() -> tree.DraftTree:
    return ddtree.build_tree(meta(REQUESTS, GAMMA, VOCAB), 7)


@pytest.mark.parametrize("budget", [0, 1, 7, 64])
def test_growth_over_independent_depths(budget):
    grown = ddtree.build_tree(meta(REQUESTS, GAMMA, VOCAB), budget)
    assert grown.tokens.device == grown.counts.device == META
    assert grown.tokens.shape == (REQUESTS, budget)
    table = candidates.factorised(meta(REQUESTS, GAMMA, VOCAB), 5)
    assert ddtree.grow(table, budget).scores.device == META
    assert ddtree.greedy_chain(table).tokens.shape == (REQUESTS, GAMMA)


@pytest.mark.parametrize("budget", [0, 1, 7, 64])
def test_growth_with_a_markov_head(budget):
    head = markov.MarkovHead(meta(VOCAB, 6), meta(VOCAB, 6))
    anchors = meta(REQUESTS, dtype=torch.int64)
    table = markov.conditioned(meta(REQUESTS, GAMMA, VOCAB), head, anchors, 5)
    assert table.log_probs.shape == (REQUESTS, GAMMA, 5, 5)
    assert ddtree.grow(table, budget).parents.device == META
    assert ddtree.greedy_chain(table).parents.device == META


def test_verification(draft):
    mask = tree.ancestor_mask(draft.parents, draft.counts, max_depth=GAMMA)
    assert mask.device == META
    sampled = meta(REQUESTS, 8, dtype=torch.int64)
    blocked = meta(REQUESTS, 7, dtype=torch.bool)
    result = verify.walk(draft.parents, draft.tokens, draft.counts, sampled, max_depth=GAMMA, blocked=blocked)
    assert verify.path_permutation(result.path, result.num_emitted, 8).device == META
    assert draft.select(meta(REQUESTS, dtype=torch.bool), draft).tokens.device == META
    index, _ = ragged.window_index(draft.counts, draft.counts, 8)
    assert index.device == META
    q, k = meta(REQUESTS, 8, 4, 16), meta(REQUESTS, 8, 2, 16)
    part = attention.partial_attention(q, k, k, mask, 0.25)
    assert attention.merge(*part, *part).device == META


def test_a_host_read_would_be_noticed(draft):
    """Negative control."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        draft.validate()
