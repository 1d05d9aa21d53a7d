"""specplug.confidence: the linear head over [h; W1[prev]], in whatever shape the caller drafts."""

import pytest
import torch

from specplug.confidence import ConfidenceHead

HIDDEN, RANK, VOCAB = 6, 3, 11


def heads() -> tuple[ConfidenceHead, ConfidenceHead]:
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(1, HIDDEN + RANK, generator=g), torch.randn(1, generator=g)
    w1 = torch.randn(VOCAB, RANK, generator=g)
    return ConfidenceHead(weight, bias, w1), ConfidenceHead(weight[:, :HIDDEN], bias)


@pytest.mark.parametrize("gamma", [0, 1, 3, 5, 7, 16])  # the head knows no block size
def test_shape_follows_the_runtime_depth_and_values_the_formula(gamma: int) -> None:
    with_markov, without = heads()
    g = torch.Generator().manual_seed(gamma)
    hidden = torch.randn(4, gamma, HIDDEN, generator=g)
    previous = torch.randint(VOCAB, (4, gamma), generator=g)
    joined = torch.cat((hidden, with_markov.w1[previous]), -1)
    expected = torch.sigmoid(torch.nn.functional.linear(joined, with_markov.weight, with_markov.bias))[..., 0]
    assert with_markov.confidence(hidden, previous).shape == (4, gamma)
    torch.testing.assert_close(with_markov.confidence(hidden, previous), expected)
    plain = torch.sigmoid(torch.nn.functional.linear(hidden, without.weight, without.bias))[..., 0]
    torch.testing.assert_close(without.confidence(hidden), plain)
    torch.testing.assert_close(without.confidence(hidden, previous), plain)


def test_a_table_has_one_confidence_a_parent() -> None:
    head, _ = heads()
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 3, HIDDEN, generator=g)
    parents = torch.randint(VOCAB, (2, 3, 5), generator=g)
    table = head.confidence(hidden[:, :, None], parents)
    assert table.shape == (2, 3, 5)
    for p in range(5):
        torch.testing.assert_close(table[:, :, p], head.confidence(hidden, parents[:, :, p]))


def test_bfloat16_is_taken_in_fp32() -> None:
    head, _ = heads()
    half = ConfidenceHead(head.weight.bfloat16(), head.bias.bfloat16(), head.w1.bfloat16())
    hidden, previous = torch.randn(2, 3, HIDDEN).bfloat16(), torch.randint(VOCAB, (2, 3))
    wide = ConfidenceHead(half.weight.float(), half.bias.float(), half.w1.float())
    assert half.logits(hidden, previous).dtype == torch.float32
    assert torch.equal(half.logits(hidden, previous), wide.logits(hidden.float(), previous))


def test_mistakes_are_named() -> None:
    head, without = heads()
    with pytest.raises(ValueError, match="reads the token before each position"):
        head.confidence(torch.zeros(1, 2, HIDDEN))
    with pytest.raises(ValueError, match=r"hidden: expected \[..., 6\]"):
        without.confidence(torch.zeros(1, 2, HIDDEN + 1))
    with pytest.raises(ValueError, match=r"expected weight \[1, H \+ 3\]"):
        ConfidenceHead(torch.zeros(1, RANK), torch.zeros(1), torch.zeros(VOCAB, RANK))
    with pytest.raises(ValueError, match=r"expected weight \[1, H\]"):
        ConfidenceHead(torch.zeros(2, HIDDEN), torch.zeros(1))
