"""The candidate kernels give what specplug.candidates gives: ids, order and ties exactly, floats to 1e-5."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.candidates import factorised, top_tokens
from specplug_kernels import candidates as kernels

NAN, INF = float("nan"), float("inf")
AWKWARD = (1, 2, 15, 16, 17, 63, 129, 2047, 2048, 2049, 4097)  # around chunks and blocks


def same_table(got, logits, count):
    """Compare with the core, on the CPU; ids exactly, which entries are dead exactly, the others to 1e-5."""
    expected = factorised(logits.cpu(), count)
    tokens, log_probs = (x.cpu() for x in got)
    assert torch.equal(tokens, expected.tokens)
    assert torch.equal(log_probs.isinf(), expected.log_probs.isinf())
    torch.testing.assert_close(log_probs, expected.log_probs, rtol=0, atol=1e-5)


def grid(seed, shape, values):
    """Logits from a short list of values: full of ties."""
    random = torch.Generator().manual_seed(seed)
    return torch.tensor(values)[torch.randint(len(values), shape, generator=random)]


def noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from(AWKWARD),
    st.integers(1, 64),
    st.sampled_from(
        ([0.0, 1.0], [-1.5, -INF, 2.0, 0.0, -0.0], [NAN, 1.0, 3.0], [7.0], [-INF], [INF, NAN, 1.0, 2.0])
    ),
    st.integers(0, 1000),
)
def test_ties_and_dead_entries_are_those_of_the_core(device, requests, gamma, vocab, count, values, seed):
    logits = grid(seed, (requests, gamma, vocab), values)
    same_table(kernels.factorised(logits.to(device), count), logits, count)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(AWKWARD), st.integers(1, 64), st.integers(0, 1000))
def test_random_logits_of_every_type(device, vocab, count, seed):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logits = noise(seed, 2, 1, vocab).to(dtype)
        same_table(kernels.factorised(logits.to(device), count), logits, count)


def test_order_by_value_then_by_the_smaller_id(device):
    """Against NumPy's sort, which knows nothing of keys or chunks."""
    logits = grid(5, (1, 3, 5000), [0.0, 1.0, 2.0, -4.0])
    tokens, _ = kernels.factorised(logits.to(device), 48)
    for row, got in zip(logits[0].numpy(), tokens[0].cpu().numpy(), strict=True):
        assert got.tolist() == np.lexsort((np.arange(5000), -row))[:48].tolist()


@pytest.mark.parametrize("vocab", [100_003, 151_936, kernels.MAX_VOCAB])
def test_whole_vocabularies(device, vocab):
    logits = noise(vocab, 1, 1, vocab).bfloat16()  # rounded: many ties
    same_table(kernels.factorised(logits.to(device), 64), logits, 64)
    logits = torch.full((1, 1, vocab), -2.5)
    logits[0, 0, -1] = -2.0
    tokens, _ = kernels.factorised(logits.to(device), 7)
    assert tokens[0, 0].tolist() == [vocab - 1, 0, 1, 2, 3, 4, 5]


def test_best_tokens_all_in_one_chunk_or_one_in_each(device):
    logits = noise(1, 1, 2, 8192)
    logits[0, 0, 4064:4128] += 50
    logits[0, 1, ::128] += 50
    same_table(kernels.factorised(logits.to(device), 64), logits, 64)


def test_rows_cut_out_of_wider_ones(device):
    """Padded columns and other requests' rows around the logits are not read."""
    wide = torch.full((5, 4, 700), NAN)
    wide[1:4, 1:3, :613] = noise(2, 3, 2, 613)
    cut = wide.to(device)[1:4, 1:3, :613]
    assert not cut.is_contiguous()
    same_table(kernels.factorised(cut, 9), wide[1:4, 1:3, :613], 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_a_bias_is_added_as_torch_adds_it(device, dtype, scale):
    """Not fused: the ids of nearly equal sums are those of two roundings."""
    logits, bias = noise(3, 4, 3, 3001), noise(4, 4, 3001).to(dtype)[:, None].expand(4, 3, 3001)
    got = kernels.select(logits.to(device), 40, bias=bias.to(device), scale=scale)
    mixed = logits + scale * bias.float()
    values, tokens = top_tokens(mixed, 40)
    log_z = mixed.double().logsumexp(-1).float()
    assert torch.equal(got.tokens.cpu(), tokens)
    torch.testing.assert_close(got.log_z.cpu(), log_z, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.log_probs.cpu(), values - log_z[:, :, None], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("requests", "gamma", "vocab", "count"), [(3, 2, 77, 5), (1, 1, 3000, 33), (2, 1, 9, 64)]
)
def test_nothing_is_written_beside_the_outputs(device, guarded, requests, gamma, vocab, count):
    logits = noise(6, requests, gamma, vocab)
    rows = (requests, gamma, min(count, vocab))
    buffers = [guarded(rows, torch.int64, device), guarded(rows, torch.float32, device)]
    buffers.append(guarded(rows[:2], torch.float32, device))
    out = kernels.Candidates(*(buffer.view for buffer in buffers))
    got = kernels.select(logits.to(device), count, out=out)
    for buffer in buffers:
        buffer.check()
    assert [x.data_ptr() for x in got] == [x.data_ptr() for x in out]
    same_table((out.tokens, out.log_probs[:, :, None]), logits, count)


@pytest.mark.parametrize(("requests", "gamma"), [(0, 7), (3, 0), (0, 0)])
def test_no_rows_no_launch(device, requests, gamma):
    tokens, log_probs = kernels.factorised(torch.empty(requests, gamma, 50, device=device), 8)
    assert tokens.shape == (requests, gamma, 8)
    assert tokens.dtype == torch.int64
    assert log_probs.shape == (requests, gamma, 1, 8)
    assert log_probs.dtype == torch.float32


def test_the_comparison_sees_a_wrong_table(device):
    """Negative control: one other logit, one swapped pair, ties to the larger id."""
    logits = grid(7, (1, 2, 300), [0.0, 1.0, 2.0])
    got = kernels.factorised(logits.to(device), 8)
    same_table(got, logits, 8)
    raised = logits.clone()
    raised[0, 1, 299] = 2.5
    swapped = got[0].clone()
    swapped[0, 0, [0, 1]] = swapped[0, 0, [1, 0]]
    backwards = kernels.factorised(logits.flip(-1).to(device), 8)
    for wrong in ((swapped, got[1]), (299 - backwards[0], backwards[1])):
        with pytest.raises(AssertionError):
            same_table(wrong, logits, 8)
    with pytest.raises(AssertionError):
        same_table(got, raised, 8)


def test_what_the_kernels_do_not_take(device):
    logits = torch.zeros(2, 3, 100, device=device)
    for count in (0, 65):
        with pytest.raises(ValueError, match=rf"candidates: expected 1..64, got {count}"):
            kernels.factorised(logits, count)
    with pytest.raises(ValueError, match=r"got 262145"):
        kernels.factorised(torch.empty(1, 1, 262_145, device=device), 4)
    with pytest.raises(ValueError, match=r"logits: expected \[R, gamma, V\] float32.*got torch.float64"):
        kernels.factorised(logits.double(), 4)
    with pytest.raises(ValueError, match="contiguous last dimension"):
        kernels.factorised(logits.transpose(1, 2), 3)
    with pytest.raises(ValueError, match=r"bias: expected \[2, 3, 100\]"):
        kernels.select(logits, 4, bias=logits[:, :1])
    out = kernels.select(logits, 5)
    with pytest.raises(ValueError, match=r"out.tokens: expected contiguous torch.int64 \[2, 3, 4\]"):
        kernels.select(logits, 4, out=out)
