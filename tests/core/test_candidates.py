"""Exact, deterministic selection of candidate tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import candidates
from specplug.candidates import CHUNKS, factorised, top_tokens

DEAD = float("-inf")


def best(row: list[float], k: int) -> list[int]:
    """Token ids by (value descending, id ascending), NaN last together with -inf."""
    value = [DEAD if x != x else x for x in row]
    return sorted(range(len(row)), key=lambda token: (-value[token], token))[:k]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from([0.0, -0.0, -1.0, -2.5, 3.0, DEAD, float("nan"), float("inf"), -1e-30, 1e-40]),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 45),
)
def test_order_is_value_then_token_id(row, k):
    scores = torch.tensor([row])
    row = scores[0].tolist()
    values, tokens = top_tokens(scores, k)
    expected = best(row, k)
    assert tokens[0].tolist() == expected
    assert values[0].tolist() == [DEAD if row[t] != row[t] else row[t] for t in expected]


@pytest.mark.parametrize("vocab", [4 * c * k + extra for c in CHUNKS for k in (1, 5) for extra in (-1, 0, 3)])
@pytest.mark.parametrize("kind", ["continuous", "ties", "all equal", "mostly dead", "best at the end"])
def test_chunks_lose_nothing(vocab, kind):
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(2, 3, vocab, generator=generator)
    match kind:
        case "ties":
            x = x.round()
        case "all equal":
            x = torch.zeros_like(x)
        case "mostly dead":
            x[torch.rand(x.shape, generator=generator) < 0.98] = DEAD
            x[torch.rand(x.shape, generator=generator) < 0.3] = float("nan")
        case "best at the end":
            x[..., -1] = 100.0
    for k in (1, 5):
        values, tokens = top_tokens(x, k)
        for row, got_values, got in zip(
            x.flatten(0, 1).tolist(),
            values.flatten(0, 1).tolist(),
            tokens.flatten(0, 1).tolist(),
            strict=True,
        ):
            assert got == best(row, k)
            assert got_values == [DEAD if row[t] != row[t] else row[t] for t in got]


@pytest.mark.parametrize("vocab", [4 * c * k + extra for c in CHUNKS for k in (1, 5) for extra in (0, 3)])
@pytest.mark.parametrize("kind", ["ties", "all equal", "mostly dead", "best at the end"])
def test_chunks_lose_nothing_where_one_sort_would_do(vocab, kind, monkeypatch):
    monkeypatch.setattr(candidates, "SMALL", 0)
    test_chunks_lose_nothing(vocab, kind)


@pytest.mark.parametrize("vocab", [9, 16, 256])
def test_a_wrong_order_of_ties_would_be_noticed(vocab, monkeypatch):
    x = torch.zeros(1, vocab)
    assert top_tokens(x, 1).tokens.tolist() == [best(x[0].tolist(), 1)]
    right = candidates.order_key
    monkeypatch.setattr(candidates, "order_key", lambda values, ids: right(values, vocab - ids))
    assert top_tokens(x, 1).tokens.tolist() != [best(x[0].tolist(), 1)]


def test_other_dtypes_and_negative_k_are_refused():
    with pytest.raises(ValueError, match=r"expected float32, got torch\.bfloat16"):
        top_tokens(torch.zeros(1, 4, dtype=torch.bfloat16), 1)
    with pytest.raises(ValueError, match=r"k: expected 0 or more"):
        top_tokens(torch.zeros(1, 4), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factorised_is_log_softmax_over_the_full_vocabulary(dtype):
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1)).mul(4).to(dtype)
    table = factorised(logits, 8)
    exact = logits.double().log_softmax(-1)
    assert table.tokens.shape == (2, 3, 8)
    assert table.log_probs.shape == (2, 3, 1, 8)
    torch.testing.assert_close(
        table.log_probs[:, :, 0].double(), exact.gather(-1, table.tokens), atol=1e-5, rtol=0
    )
    over_candidates = table.log_probs.exp().sum(-1)
    assert (over_candidates < 0.999).any()  # negative control: not normalised over the candidates


def test_factorised_rows_without_a_normaliser_are_dead():
    logits = torch.zeros(1, 3, 6)
    logits[0, 0, 2] = float("nan")
    logits[0, 1] = DEAD
    live = factorised(logits, 4).log_probs > DEAD
    assert live[0, :, 0].tolist() == [[False] * 4, [False] * 4, [True] * 4]
