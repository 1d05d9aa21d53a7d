"""Prefix pass and in-tree pass, merged, against one masked softmax over all keys."""

import pytest
import torch

from specplug.attention import masked_attention, merge, partial_attention
from specplug.ddtree import build_tree
from specplug.tree import ancestor_mask

GAMMA, SIZE = 4, 8
TOLERANCE = {"atol": 2e-6, "rtol": 2e-5}  # fp32, sums of at most 60 terms of order 1


def problem(prefix_lengths, budget, heads, kv_heads, seed=0):
    """Random q, and k, v of [prefix | window] with prefix lengths that differ, and a tree a request."""
    generator = torch.Generator().manual_seed(seed)
    requests, longest, rows = len(prefix_lengths), max(prefix_lengths), budget + 1
    log_probs = torch.randn(requests, GAMMA, 9, generator=generator).mul(2).log_softmax(-1)
    log_probs[0, 1:] = float("-inf")  # a tree of another shape and size
    tree = build_tree(log_probs, budget)
    q = torch.randn(requests, rows, heads, SIZE, generator=generator)
    k, v = torch.randn(2, requests, longest + rows, kv_heads, SIZE, generator=generator)
    in_prefix = torch.arange(longest) < torch.tensor(prefix_lengths)[:, None]
    prefix_mask = in_prefix[:, None].expand(-1, rows, -1)
    tree_mask = ancestor_mask(tree.parents, tree.counts, max_depth=GAMMA)
    return q, k, v, prefix_mask, tree_mask


def two_passes(q, k, v, prefix_mask, tree_mask, scale):
    longest = prefix_mask.shape[2]
    prefix = partial_attention(q, k[:, :longest], v[:, :longest], prefix_mask, scale)
    window = partial_attention(q, k[:, longest:], v[:, longest:], tree_mask, scale)
    return merge(*prefix, *window)


@pytest.mark.parametrize("prefix_lengths", [[5, 0, 17, 33], [0, 0], [1], [40, 39, 1]])
@pytest.mark.parametrize("budget", [0, 1, 7, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_two_passes_are_one_masked_softmax(prefix_lengths, budget, heads, kv_heads):
    q, k, v, prefix_mask, tree_mask = problem(prefix_lengths, budget, heads, kv_heads)
    expected = masked_attention(q, k, v, torch.cat((prefix_mask, tree_mask), 2), 0.35)
    got = two_passes(q, k, v, prefix_mask, tree_mask, 0.35)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, **TOLERANCE)


def test_a_causal_window_instead_of_the_tree_would_be_noticed():
    """Negative control."""
    q, k, v, prefix_mask, tree_mask = problem([5, 0, 17], 16, 6, 2)
    expected = masked_attention(q, k, v, torch.cat((prefix_mask, tree_mask), 2), 0.35)
    causal = torch.ones_like(tree_mask).tril()
    error = (two_passes(q, k, v, prefix_mask, causal, 0.35) - expected).abs()
    assert error.max() > 0.1


def test_another_grouping_of_heads_would_be_noticed():
    """Negative control: query head h reading key head h % Hkv."""
    q, k, v, prefix_mask, tree_mask = problem([5, 9], 7, 6, 2)
    mask = torch.cat((prefix_mask, tree_mask), 2)
    expected = masked_attention(q, k, v, mask, 0.35)
    interleaved = masked_attention(q, k.repeat(1, 1, 3, 1), v.repeat(1, 1, 3, 1), mask, 0.35)
    assert (interleaved - expected).abs().max() > 0.1


def test_masked_attention_is_softmax_over_the_seen_keys():
    q, k, v, prefix_mask, tree_mask = problem([3, 6], 5, 4, 2)
    mask = torch.cat((prefix_mask, tree_mask), 2)
    out = masked_attention(q, k, v, mask, 0.5)
    for r, row, head in [(0, 0, 0), (0, 4, 3), (1, 5, 1), (1, 2, 2)]:
        seen = mask[r, row].nonzero()[:, 0]
        keys, values = k[r, seen, head // 2].double(), v[r, seen, head // 2].double()
        weight = (keys @ q[r, row, head].double() * 0.5).softmax(0)
        torch.testing.assert_close(out[r, row, head].double(), weight @ values, **TOLERANCE)


def test_log_sum_exp_is_natural_and_unshifted():
    q, k, v, prefix_mask, _ = problem([4, 0], 3, 4, 2)
    _, lse = partial_attention(q, k[:, :4], v[:, :4], prefix_mask, 0.5)
    exact = (k[0, :4, 1].double() @ q[0, 2, 3].double() * 0.5).exp().sum().log()
    assert lse[0, 2, 3].item() == pytest.approx(exact.item(), abs=1e-5)
    assert (lse[1] == float("-inf")).all()


@pytest.mark.parametrize("empty", [float("-inf"), float("inf")])
def test_a_side_without_keys_weighs_nothing_whatever_it_holds(empty):
    out = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    lse = torch.randn(2, 3)
    garbage, nothing = torch.full_like(out, float("nan")), torch.full_like(lse, empty)
    assert torch.equal(merge(garbage, nothing, out, lse), out)
    assert torch.equal(merge(out, lse, garbage, nothing), out)
    assert torch.equal(merge(garbage, nothing, garbage, nothing), torch.zeros_like(out))


def test_large_scores_do_not_overflow():
    q, k, v, prefix_mask, tree_mask = problem([5, 9], 7, 4, 2)
    expected = masked_attention(q, k, v, torch.cat((prefix_mask, tree_mask), 2), 300.0)
    torch.testing.assert_close(
        two_passes(q, k, v, prefix_mask, tree_mask, 300.0), expected, atol=1e-3, rtol=0
    )


def test_half_precision_inputs_are_computed_in_fp32():
    inputs = problem([5, 9], 7, 4, 2)
    q, k, v = (x.bfloat16() for x in inputs[:3])
    expected = masked_attention(q.float(), k.float(), v.float(), torch.cat(inputs[3:], 2), 0.35)
    torch.testing.assert_close(two_passes(q, k, v, *inputs[3:], 0.35), expected, **TOLERANCE)


def test_heads_that_do_not_divide_are_refused():
    q, k = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 2, 4)
    with pytest.raises(ValueError, match="multiple of the 2 key heads, got 5"):
        partial_attention(q, k, k, torch.ones(1, 2, 2, dtype=torch.bool), 1.0)
