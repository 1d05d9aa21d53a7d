"""Per-path logits processing against plain Python on every path, and against Transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.processors import Ancestors, BadWords, add_bias, ancestors, ban, penalise

VOCAB, GAMMA, HISTORY = 7, 4, 5


def random_round(seed: int, requests: int, budget: int):
    """Random trees and, row by row, the tokens on each path."""
    g = torch.Generator().manual_seed(seed)
    parents = torch.full((requests, budget), -1, dtype=torch.int32)
    tokens = torch.zeros(requests, budget, dtype=torch.int64)
    depths = torch.zeros(requests, budget, dtype=torch.int32)
    paths = []
    for r in range(requests):
        rows: list[list[int]] = [[]]
        for j in range(int(torch.randint(budget + 1, (1,), generator=g))):
            open_rows = [i for i, path in enumerate(rows) if len(path) < GAMMA]
            above = open_rows[int(torch.randint(len(open_rows), (1,), generator=g))]
            token = int(torch.randint(VOCAB, (1,), generator=g))
            rows.append([*rows[above], token])
            parents[r, j], tokens[r, j], depths[r, j] = above - 1, token, len(rows[-1])
        paths.append(rows + [[]] * (budget + 1 - len(rows)))
    logits = torch.randn(requests, budget + 1, VOCAB, generator=g) * 3
    return ancestors(parents, tokens, depths, max_depth=GAMMA), paths, logits, g


def as_lists(path: Ancestors) -> list[list[list[int]]]:
    return [
        [row[:depth] for row, depth in zip(rows, depths, strict=True)]
        for rows, depths in zip(path.tokens.tolist(), path.depths.tolist(), strict=True)
    ]


cases = given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 8))


@settings(max_examples=60, deadline=None)
@cases
def test_ancestors_are_the_tokens_on_the_path(seed, requests, budget):
    path, paths, _, _ = random_round(seed, requests, budget)
    assert path.tokens.shape == (requests, budget + 1, GAMMA)
    assert as_lists(path) == paths


def committed(g: torch.Generator, requests: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompt and output tokens of each request."""
    lengths = torch.randint(0, HISTORY + 1, (requests, 2), generator=g).tolist()
    return tuple(
        [torch.randint(VOCAB, (length[i],), generator=g).tolist() for length in lengths] for i in range(2)
    )


def counted(outputs: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[row.count(t) for t in range(VOCAB)] for row in outputs], dtype=torch.int32)


def penalised_by_hand(logits, history, prompt, repetition, frequency, presence):
    out = []
    for t, value in enumerate(logits):
        if t in history or t in prompt:
            value = value / repetition if value > 0 else value * repetition
        out.append(value - frequency * history.count(t) - presence * (t in history))
    return out


@settings(max_examples=60, deadline=None)
@cases
def test_penalties_are_those_of_the_path(seed, requests, budget):
    path, paths, logits, g = random_round(seed, requests, budget)
    prompts, outputs = committed(g, requests)
    repetition = 0.5 + torch.rand(requests, generator=g)
    frequency, presence = (torch.randn(requests, generator=g) for _ in range(2))
    result = penalise(
        logits,
        path,
        output_counts=counted(outputs),
        in_prompt=counted(prompts) > 0,
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )
    for r in range(requests):
        for w in range(budget + 1):
            expected = penalised_by_hand(
                logits[r, w].tolist(),
                outputs[r] + paths[r][w],
                prompts[r],
                float(repetition[r]),
                float(frequency[r]),
                float(presence[r]),
            )
            assert result[r, w].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_penalties_at_rest_change_nothing():
    path, _, logits, _ = random_round(3, 2, 6)
    ones, zeros = torch.ones(2), torch.zeros(2)
    same = penalise(
        logits,
        path,
        output_counts=torch.ones(2, VOCAB, dtype=torch.int32),
        in_prompt=torch.ones(2, VOCAB).bool(),
        repetition=ones,
        frequency=zeros,
        presence=zeros,
    )
    assert torch.equal(same, logits)


def test_a_linear_history_would_be_noticed():
    """Negative control: taking the rows before a node for its past, as an engine does on a chain."""
    parents = torch.tensor([[-1, -1]], dtype=torch.int32)  # siblings 3 and 5
    tokens, depths = torch.tensor([[3, 5]]), torch.tensor([[1, 1]], dtype=torch.int32)
    tree = ancestors(parents, tokens, depths, max_depth=2)
    line = Ancestors(torch.tensor([[[0, 0], [3, 0], [3, 5]]]), torch.tensor([[0, 1, 2]]))
    logits = torch.ones(1, 3, VOCAB)

    def at(path: Ancestors) -> torch.Tensor:
        return penalise(
            logits,
            path,
            output_counts=torch.zeros(1, VOCAB, dtype=torch.int32),
            in_prompt=torch.zeros(1, VOCAB).bool(),
            repetition=torch.ones(1),
            frequency=torch.ones(1),
            presence=torch.zeros(1),
        )

    assert at(tree)[0, 2].tolist() == [1, 1, 1, 1, 1, 0, 1]
    assert not torch.equal(at(tree), at(line))


def test_repetition_and_bad_words_agree_with_transformers():
    processors = pytest.importorskip("transformers.generation.logits_process")
    path, paths, logits, g = random_round(11, 3, 8)
    prompts, outputs = committed(g, 3)
    prompts = [[1, *prompt] for prompt in prompts]  # never empty
    repeated = penalise(
        logits,
        path,
        output_counts=counted(outputs),
        in_prompt=counted(prompts) > 0,
        repetition=torch.full((3,), 1.3),
        frequency=torch.zeros(3),
        presence=torch.zeros(3),
    )
    words = [[4], [2, 3], [0, 1, 5]]
    recent = [(prompt + output)[-2:] for prompt, output in zip(prompts, outputs, strict=True)]
    banned = ban(
        logits,
        path,
        BadWords.of([words] * 3),
        recent=torch.tensor([[0] * (2 - len(row)) + row for row in recent]),
        recent_counts=torch.tensor([len(row) for row in recent]),
    )
    repetition = processors.RepetitionPenaltyLogitsProcessor(1.3)
    bad = processors.NoBadWordsLogitsProcessor(words)
    for r in range(3):
        for w in range(9):
            ids = torch.tensor([prompts[r] + outputs[r] + paths[r][w]])
            torch.testing.assert_close(repeated[r, w], repetition(ids, logits[r, w][None])[0])
            torch.testing.assert_close(banned[r, w], bad(ids, logits[r, w][None])[0])


@settings(max_examples=80, deadline=None)
@cases
def test_bad_words_are_those_of_the_path(seed, requests, budget):
    path, paths, logits, g = random_round(seed, requests, budget)
    _, outputs = committed(g, requests)
    words = [
        [
            torch.randint(VOCAB, (int(torch.randint(1, 4, (1,), generator=g)),), generator=g).tolist()
            for _ in range(int(torch.randint(0, 4, (1,), generator=g)))
        ]
        for _ in range(requests)
    ]
    result = ban(
        logits,
        path,
        BadWords.of(words),
        recent=torch.tensor([[0] * (HISTORY - len(row)) + row for row in outputs]),
        recent_counts=torch.tensor([len(row) for row in outputs], dtype=torch.int32),
    )
    for r in range(requests):
        for w in range(budget + 1):
            history = outputs[r] + paths[r][w]
            banned = {
                word[-1]
                for word in words[r]
                if len(word) == 1
                or (len(history) >= len(word) - 1 and history[len(history) - len(word) + 1 :] == word[:-1])
            }
            expected = [
                float("-inf") if t in banned else value for t, value in enumerate(logits[r, w].tolist())
            ]
            assert result[r, w].tolist() == expected


def test_bias_is_added_where_it_counts():
    logits = torch.zeros(2, 3, VOCAB, dtype=torch.bfloat16)
    result = add_bias(
        logits,
        tokens=torch.tensor([[1, 4], [6, 2]]),
        values=torch.tensor([[0.5, float("-inf")], [-2.0, 9.0]]),
        counts=torch.tensor([2, 1]),
    )
    assert result.dtype == torch.float32
    first, second = [0, 0.5, 0, 0, float("-inf"), 0, 0], [0, 0, 0, 0, 0, 0, -2.0]
    assert result.tolist() == [[first] * 3, [second] * 3]


def test_a_short_history_and_an_empty_word_are_refused():
    path, _, logits, _ = random_round(1, 1, 2)
    with pytest.raises(ValueError, match=r"recent: expected at least 2 committed tokens"):
        ban(
            logits,
            path,
            BadWords.of([[[1, 2, 3]]]),
            recent=torch.zeros(1, 1, dtype=torch.int64),
            recent_counts=torch.tensor([1]),
        )
    with pytest.raises(ValueError, match=r"bad words: expected at least one token"):
        BadWords.of([[[1], []]])
