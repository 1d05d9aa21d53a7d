"""The acceptance walk against plain Python, and its emitted law against the target's by enumeration."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.ddtree import build_tree
from specplug.verify import path_permutation, walk

VOCAB = 3


def walk_by_hand(parents, tokens, count, sampled, max_depth, blocked):
    """(emitted tokens, window rows that drew them) of one request."""
    row, emitted, rows = 0, [], []
    while True:
        emitted.append(sampled[row])
        rows.append(row)
        children = [
            j for j in range(count) if parents[j] == row - 1 and tokens[j] == sampled[row] and not blocked[j]
        ]
        if not children or len(rows) > max_depth:
            return emitted, rows
        row = children[0] + 1


@st.composite
def rounds(draw):
    """A batch of random trees (siblings distinct) with a draw at every row."""
    requests, width = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    parents, tokens, counts, sampled, blocked = [], [], [], [], []
    for _ in range(requests):
        counts.append(draw(st.integers(0, width)))
        chosen: list[tuple[int, int]] = []
        for j in range(width):
            free = [(p, t) for p in range(-1, j) for t in range(VOCAB) if (p, t) not in chosen]
            chosen.append(draw(st.sampled_from(free)))
        parents.append([p for p, _ in chosen])
        tokens.append([t for _, t in chosen])
        sampled.append(draw(st.lists(st.integers(0, VOCAB - 1), min_size=width + 1, max_size=width + 1)))
        blocked.append(draw(st.lists(st.sampled_from([False, False, True]), min_size=width, max_size=width)))
    shape = (requests, width)
    return (
        torch.tensor(parents, dtype=torch.int32).view(shape),
        torch.tensor(tokens, dtype=torch.int64).view(shape),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(sampled, dtype=torch.int64),
        torch.tensor(blocked, dtype=torch.bool).view(shape),
    )


def check_round(round_, max_depth, use_blocked=True):
    parents, tokens, counts, sampled, blocked = round_
    result = walk(
        parents, tokens, counts, sampled, max_depth=max_depth, blocked=blocked if use_blocked else None
    )
    assert result.tokens.shape == result.path.shape == (len(counts), max_depth + 1)
    if not use_blocked:
        blocked = torch.zeros_like(blocked)
    for r in range(len(counts)):
        emitted, rows = walk_by_hand(
            parents[r].tolist(),
            tokens[r].tolist(),
            int(counts[r]),
            sampled[r].tolist(),
            max_depth,
            blocked[r],
        )
        fill = max_depth + 1 - len(emitted)
        assert result.num_emitted[r] == len(emitted)
        assert result.tokens[r].tolist() == emitted + [-1] * fill
        assert result.path[r].tolist() == rows + [0] * fill
    return result


@settings(max_examples=150, deadline=None)
@given(rounds(), st.integers(0, 9), st.booleans())
def test_walk_is_the_walk_by_hand(round_, max_depth, use_blocked):
    check_round(round_, max_depth, use_blocked)


@settings(max_examples=100, deadline=None)
@given(rounds())
def test_permutation_puts_the_path_first_and_keeps_the_rest_in_order(round_):
    result = check_round(round_, 9)
    width = round_[3].shape[1]
    permutation = path_permutation(result.path, result.num_emitted, width)
    for r, emitted in enumerate(result.num_emitted.tolist()):
        path = result.path[r, :emitted].tolist()
        rest = [row for row in range(width) if row not in path]
        assert permutation[r].tolist() == path + rest


def chain_of_three() -> tuple[torch.Tensor, ...]:
    parents = torch.tensor([[-1, 0, 1]], dtype=torch.int32)
    tokens = torch.tensor([[5, 0, 7]])
    return parents, tokens, torch.tensor([3], dtype=torch.int32), torch.tensor([[5, 0, 7, 9]])


def test_whole_chain_is_accepted_also_over_token_0():
    result = walk(*chain_of_three(), max_depth=3)
    assert result.tokens.tolist() == [[5, 0, 7, 9]]
    assert result.path.tolist() == [[0, 1, 2, 3]]


def test_a_planted_wrong_parent_would_be_noticed():
    """Negative control."""
    parents, tokens, counts, sampled = chain_of_three()
    parents[0, 1] = -1
    result = walk(parents, tokens, counts, sampled, max_depth=3)
    assert result.tokens.tolist() == [[5, 0, -1, -1]]


def test_nodes_past_the_count_are_not_entered_whatever_they_hold():
    parents, tokens, _, sampled = chain_of_three()
    parents[0, 2] = 99
    result = walk(parents, tokens, torch.tensor([1], dtype=torch.int32), sampled, max_depth=3)
    assert result.tokens.tolist() == [[5, 0, -1, -1]]


def test_draws_of_another_width_are_refused():
    parents, tokens, counts, sampled = chain_of_three()
    with pytest.raises(ValueError, match=r"sampled: expected"):
        walk(parents, tokens, counts, sampled[:, :3], max_depth=3)


# The emitted law. A target over 3 tokens and 3 positions; plain decoding continues what a round emitted.

TARGET = {
    prefix: torch.rand(VOCAB, generator=torch.Generator().manual_seed(len(prefix) * 31 + sum(prefix) + 1))
    .double()
    .softmax(0)
    .tolist()
    for length in range(3)
    for prefix in itertools.product(range(VOCAB), repeat=length)
}


def target_probability(sequence, given_tokens=0):
    value = 1.0
    for k in range(given_tokens, 3):
        value *= TARGET[sequence[:k]][sequence[k]]
    return value


def distance_from_target(emitted_law: dict[tuple[int, ...], float]) -> float:
    """Greatest error in the law of the first three tokens."""
    law = dict.fromkeys(itertools.product(range(VOCAB), repeat=3), 0.0)
    for emitted, probability in emitted_law.items():
        for sequence in law:
            if sequence[: len(emitted)] == emitted[:3]:
                law[sequence] += probability * target_probability(sequence, min(len(emitted), 3))
    return max(abs(law[sequence] - target_probability(sequence)) for sequence in law)


def enumerated_walk(tree, wrong_rows=False):
    """Emitted law and expected number of accepted nodes, by every combination of draws at every row."""
    count = int(tree.counts[0])
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for j in range(count):
        paths.append((*paths[parents[j] + 1], tokens[j]))
    if wrong_rows:
        paths[1], paths[2] = paths[2], paths[1]
    draws = list(itertools.product(range(VOCAB), repeat=count + 1))
    many = len(draws)
    result = walk(
        tree.parents.expand(many, -1),
        tree.tokens.expand(many, -1),
        tree.counts.expand(many),
        torch.tensor(draws),
        max_depth=2,
    )
    law: dict[tuple[int, ...], float] = {}
    accepted = 0.0
    for draw, row, length in zip(draws, result.tokens.tolist(), result.num_emitted.tolist(), strict=True):
        probability = 1.0
        for path, token in zip(paths, draw, strict=True):
            probability *= TARGET[path][token]
        law[tuple(row[:length])] = law.get(tuple(row[:length]), 0.0) + probability
        accepted += probability * (length - 1)
    return law, accepted, paths[1:]


DRAFT = torch.tensor([[[0.7, 0.2, 0.1], [0.15, 0.6, 0.25]]])


@pytest.mark.parametrize("budget", range(7))
def test_the_walk_emits_the_targets_law_and_accepts_the_sum_of_p(budget):
    law, accepted, paths = enumerated_walk(build_tree(DRAFT.log(), budget))
    assert distance_from_target(law) < 1e-9
    expected = 0.0
    for path in paths:
        probability = 1.0
        for k, token in enumerate(path):
            probability *= TARGET[path[:k]][token]
        expected += probability
    assert accepted == pytest.approx(expected, abs=1e-9)


def test_draws_at_the_wrong_rows_would_be_noticed():
    """Negative control: rows of two nodes exchanged, as by a wrong mask or position."""
    law, _, _ = enumerated_walk(build_tree(DRAFT.log(), 5), wrong_rows=True)
    assert distance_from_target(law) > 1e-3


def test_the_ratio_rule_on_a_deterministic_child_is_biased():
    """Negative control: accept the best token with min(1, p/q), else draw from the positive part of p - q."""
    p, q = TARGET[()], DRAFT[0, 0].tolist()
    best = max(range(VOCAB), key=lambda token: q[token])
    accept = min(1.0, p[best] / q[best])
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    law = {(token,): (1 - accept) * rest[token] / sum(rest) for token in range(VOCAB)}
    law[best,] += accept
    assert sum(law.values()) == pytest.approx(1.0)
    assert distance_from_target(law) > 1e-3
