"""Penalties along the paths of trees, against a loop over requests, rows and tokens."""

import pytest
import torch

from specplug.ddtree import build_tree
from specplug.penalties import Asked, PenaltyHistory
from specplug.processors import Ancestors, ancestors

VOCABULARY, DEPTH, BUDGET = 13, 3, 7
ASKED = [
    Asked(5, 0.7, 0.0, 1.0, 0, []),
    Asked(2, 0.0, 0.9, 1.3, 4, [1, 8]),
    Asked(9, 0.3, 0.2, 0.8, 2, [3]),
]
OUTPUTS = [[1, 1, 4], [], [7, 3, 7, 7]]


def reference(logits, output, one):
    """One row: the past is ``output``; SGLang's order."""
    row = logits.double().clone()
    for token in set(output):
        row[token] -= one.frequency * output.count(token) + one.presence
    for token in set(output):
        row[token] = row[token] / one.repetition if row[token] > 0 else row[token] * one.repetition
    if len(output) < one.minimum:
        row[list(one.stops)] = float("-inf")
    return row


@pytest.fixture
def batch():
    noise = torch.Generator().manual_seed(3)
    tree = build_tree(torch.randn(3, DEPTH, VOCABULARY, generator=noise).log_softmax(-1), BUDGET)
    return tree, torch.randn(3, BUDGET + 1, VOCABULARY, generator=noise) * 3


def paths(tree, request):
    """Tokens of the path to each row of a window."""
    lines = [[]]
    for parent, token in zip(tree.parents[request].tolist(), tree.tokens[request].tolist(), strict=True):
        lines.append([*lines[parent + 1], token])
    return lines


def test_every_row_by_its_own_path(batch):
    tree, logits = batch
    history = PenaltyHistory(VOCABULARY, "cpu")
    asked = history.read(ASKED)
    history.begin(asked, OUTPUTS)
    path = ancestors(tree.parents, tree.tokens, tree.depths, max_depth=DEPTH)
    got = history.apply(logits, path, asked)
    for r, one in enumerate(ASKED):
        for row, line in enumerate(paths(tree, r)):
            want = reference(logits[r, row], OUTPUTS[r] + line, one)
            torch.testing.assert_close(got[r, row].double(), want, rtol=1e-5, atol=1e-5)


def test_the_order_of_rows_is_not_the_past(batch):
    """Negative control: the nodes in front of a row as its path give other numbers."""
    tree, logits = batch
    history = PenaltyHistory(VOCABULARY, "cpu")
    asked = history.read(ASKED)
    places = torch.arange(BUDGET, dtype=torch.int32).expand_as(tree.parents)
    linear = ancestors(places - 1, tree.tokens, (places + 1).clamp_max(DEPTH), max_depth=DEPTH)
    right = history.apply(logits, ancestors(tree.parents, tree.tokens, tree.depths, max_depth=DEPTH), asked)
    assert not torch.allclose(right, history.apply(logits, linear, asked))


def test_history_grows_by_slot_and_is_that_of_its_request():
    history = PenaltyHistory(VOCABULARY, "cpu")
    first = history.read(ASKED[:1])
    history.begin(first, [[2, 2]])
    both = history.read([ASKED[1], ASKED[0]])
    history.begin(history.read(ASKED[1:2]), [[6]])
    history.add(both, torch.tensor([[6, -1, 4], [0, -1, -1]]))
    root = Ancestors(torch.zeros(2, 1, 0, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64))
    got = history.apply(torch.ones(2, 1, VOCABULARY), root, both)
    for r, (one, output) in enumerate(((ASKED[1], [6, 6, 4]), (ASKED[0], [2, 2, 0]))):
        torch.testing.assert_close(
            got[r, 0].double(), reference(torch.ones(VOCABULARY), output, one), rtol=1e-5, atol=1e-5
        )


def test_standing_penalties_are_those_of_the_next_token():
    history = PenaltyHistory(VOCABULARY, "cpu")
    asked = history.read(ASKED)
    history.begin(asked, OUTPUTS)
    added, factor = history.standing(asked)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 3
    adjusted = logits + added
    adjusted = torch.where(adjusted > 0, adjusted / factor, adjusted * factor)
    for r, one in enumerate(ASKED):
        torch.testing.assert_close(
            adjusted[r].double(), reference(logits[r], OUTPUTS[r], one), rtol=1e-5, atol=1e-5
        )
