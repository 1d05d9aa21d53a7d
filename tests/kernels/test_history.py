"""Penalties and bad words along the paths of trees, against the core's functions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.ddtree import build_tree
from specplug.processors import BadWords, ancestors, ban, penalise
from specplug_kernels import history

GAMMA, VOCAB, SLOTS = 4, 70, 5


def trees(requests, budget, seed):
    """Window rows of random trees: (paths of the core, slot of each flat row)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests, GAMMA, VOCAB, generator=generator) * 3
    logits[:, :, 8:] -= 20  # few tokens, so that they repeat along a path
    tree = build_tree(logits.log_softmax(-1), budget)
    slots = torch.randperm(SLOTS, generator=generator)[:requests]
    path = ancestors(tree.parents, tree.tokens, tree.depths, max_depth=GAMMA)
    return path, slots, generator


def flat(path, device):
    return path.tokens.flatten(0, 1).to(device), path.depths.flatten().to(device)


def packed(bits):
    """[S, V] bool as 32 tokens a word."""
    padded = torch.nn.functional.pad(bits.long(), (0, -bits.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (padded << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def penalties(generator):
    def choose(*values):
        return torch.tensor(values)[torch.randint(len(values), (SLOTS,), generator=generator)]

    return choose(1.0, 1.3, 0.7), choose(0.0, 0.6, -0.4), choose(0.0, 0.9)


def unpenalised():
    """State of slots without penalties, prompts or outputs."""
    return {
        "repetition": torch.ones(SLOTS),
        "frequency": torch.zeros(SLOTS),
        "presence": torch.zeros(SLOTS),
        "prompt_words": torch.zeros(SLOTS, 3, dtype=torch.int32),
        "output_counts": torch.zeros(SLOTS, VOCAB, dtype=torch.int32),
    }


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 3), st.sampled_from([0, 1, 7, 13]), st.integers(0, 1 << 16))
def test_penalties_follow_paths(device, guarded, requests, budget, seed):
    path, slots, generator = trees(requests, budget, seed)
    counts = torch.randint(0, 3, (SLOTS, VOCAB), generator=generator, dtype=torch.int32)
    prompt = torch.rand(SLOTS, VOCAB, generator=generator) < 0.2
    repetition, frequency, presence = penalties(generator)
    logits = torch.randn(requests, budget + 1, VOCAB, generator=generator)
    expected = penalise(
        logits,
        path,
        output_counts=counts[slots],
        in_prompt=prompt[slots],
        repetition=repetition[slots],
        frequency=frequency[slots],
        presence=presence[slots],
    )
    view, check = guarded((requests * (budget + 1), VOCAB), torch.float32, device)
    view.copy_(logits.flatten(0, 1))
    tokens, depths = flat(path, device)
    history.penalise(
        view,
        slots.repeat_interleave(budget + 1).to(device),
        tokens,
        depths,
        repetition=repetition.to(device),
        frequency=frequency.to(device),
        presence=presence.to(device),
        prompt_words=packed(prompt).to(device),
        output_counts=counts.to(device),
    )
    torch.testing.assert_close(view.cpu(), expected.flatten(0, 1), atol=1e-5, rtol=1e-5)
    check()


def test_penalties_of_earlier_rows_instead_of_the_path_show(device):
    """What a linear implementation does to a tree: every row above counts."""
    path, slots, generator = trees(1, 7, 3)
    frequent = {"frequency": torch.ones(SLOTS)}
    logits = torch.randn(8, VOCAB, generator=generator)
    state = {name: tensor.to(device) for name, tensor in (unpenalised() | frequent).items()}
    tokens, depths = flat(path, device)
    of_rows = slots.repeat_interleave(8).to(device)
    right, wrong = logits.to(device), logits.to(device).clone()
    history.penalise(right, of_rows, tokens, depths, **state)
    own = torch.stack([tokens[row, depth - 1] for row, depth in enumerate(depths.tolist())])
    linear = own[1:].expand(8, -1).contiguous()
    history.penalise(wrong, of_rows, linear, torch.arange(8, device=device), **state)
    assert not torch.equal(right, wrong)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 3), st.sampled_from([0, 1, 7, 13]), st.integers(0, 1 << 16))
def test_bad_words_follow_paths(device, guarded, requests, budget, seed):
    path, slots, generator = trees(requests, budget, seed)

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    lengths = [numbers(1, 5, int(numbers(0, 5, 1))).tolist() for _ in range(SLOTS)]
    words = [[numbers(0, 8, length).tolist() for length in row] for row in lengths]
    prompt_lens, output_lens = numbers(1, 4, SLOTS), numbers(0, 6, SLOTS)
    committed = numbers(0, 8, SLOTS, 10)
    recent = torch.stack([committed[s, p : p + 6] for s, p in enumerate(prompt_lens.tolist())])
    recent = torch.stack([row.roll(6 - n) for row, n in zip(recent, output_lens.tolist(), strict=True)])
    logits = torch.randn(requests, budget + 1, VOCAB, generator=generator)
    expected = ban(
        logits,
        path,
        BadWords.of([words[s] for s in slots.tolist()]),
        recent=recent[slots],
        recent_counts=output_lens[slots].int(),
    )
    flat_words = torch.zeros(SLOTS, 20, dtype=torch.int32)
    offsets = torch.zeros(SLOTS, 6, dtype=torch.int32)
    for s, row in enumerate(words):
        tokens_of_slot = [token for word in row for token in word]
        flat_words[s, : len(tokens_of_slot)] = torch.tensor(tokens_of_slot, dtype=torch.int32)
        ends = torch.tensor([0, *(len(word) for word in row)]).cumsum(0)
        offsets[s, : len(ends)] = ends
    view, check = guarded((requests * (budget + 1), VOCAB), torch.float32, device)
    view.copy_(logits.flatten(0, 1))
    tokens, depths = flat(path, device)
    history.ban(
        view,
        slots.repeat_interleave(budget + 1).to(device),
        tokens,
        depths,
        words=flat_words.to(device),
        offsets=offsets.to(device),
        num_words=torch.tensor([len(row) for row in words], dtype=torch.int32, device=device),
        most_words=max(map(len, words)),
        all_tokens=committed.int().to(device),
        prompt_lens=prompt_lens.int().to(device),
        total_lens=(prompt_lens + output_lens).int().to(device),
    )
    assert torch.equal(view.cpu(), expected.flatten(0, 1))
    check()


def test_long_bad_words(device):
    """Longer than a block of the comparison, half of it on the path; one differs in its first token."""
    long = list(range(1, 21))
    words = torch.tensor([long, [30, *long[1:]]], dtype=torch.int32).flatten()[None]
    path = torch.tensor([[18, 19]])
    logits = torch.zeros(1, VOCAB, device=device)
    history.ban(
        logits,
        torch.zeros(1, dtype=torch.int32, device=device),
        path.to(device),
        torch.tensor([2], device=device),
        words=words.to(device),
        offsets=torch.tensor([[0, 20, 40]], dtype=torch.int32, device=device),
        num_words=torch.tensor([2], dtype=torch.int32, device=device),
        most_words=2,
        all_tokens=torch.tensor([[9, 9, *long[:17]]], dtype=torch.int32, device=device),
        prompt_lens=torch.tensor([2], dtype=torch.int32, device=device),
        total_lens=torch.tensor([19], dtype=torch.int32, device=device),
    )
    assert logits.isinf().sum() == 1
    assert logits[0, 20] == float("-inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_counts": torch.zeros(SLOTS, VOCAB - 1, dtype=torch.int32)}, "columns"),
        ({"repetition": torch.ones(SLOTS, dtype=torch.float64)}, "repetition"),
        ({"prompt_words": torch.zeros(SLOTS, 2, dtype=torch.int32)}, "columns"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(change, message):
    rows = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        history.penalise(
            torch.zeros(1, VOCAB),
            rows,
            torch.zeros(1, GAMMA, dtype=torch.int64),
            rows,
            **unpenalised() | change,
        )
