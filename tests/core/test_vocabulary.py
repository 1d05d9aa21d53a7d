"""specplug.vocabulary: draft ids to target ids, and trees over a reduced draft vocabulary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.candidates import factorised
from specplug.ddtree import grow, grow_reference
from specplug.drafting import draft_tree
from specplug.heads import MarkovHead, Projection
from specplug.markov import conditioned, conditioned_reference
from specplug.vocabulary import DraftVocabulary

VOCAB, DRAFT, RANK, HIDDEN = 32, 16, 4, 5


def permuted(seed: int = 0) -> torch.Tensor:
    """Target ids of a reduced vocabulary whose ids are not in the target's order."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT]


def offsets(targets: torch.Tensor) -> torch.Tensor:
    return targets - torch.arange(len(targets))


@settings(max_examples=50, deadline=None)
@given(data=st.data(), vocab=st.integers(1, 40))
def test_a_table_maps_draft_ids_by_offset(data: st.DataObject, vocab: int) -> None:
    targets = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=vocab, unique=True))
    d2t = torch.tensor([target - draft for draft, target in enumerate(targets)])
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[torch.tensor(targets)] = True
    vocabulary = DraftVocabulary.from_offsets(d2t, vocab, t2d=mask)
    assert vocabulary.to_target(torch.arange(len(targets))).tolist() == targets


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        ([0, 0, -2], "target token 0 has two draft ids"),
        ([0, 31], "draft id 1 maps to 32, expected 0..31"),
        ([-1, 0], "draft id 0 maps to -1"),
        ([0.0, 1.0], r"d2t: expected \[V_draft\] integers"),
        ([[0, 1]], r"d2t: expected \[V_draft\] integers"),
    ],
)
def test_a_table_that_is_not_one_to_one_is_refused(d2t: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftVocabulary.from_offsets(torch.tensor(d2t), VOCAB)


def test_a_mask_that_names_other_tokens_is_refused() -> None:
    targets = permuted()
    mask = torch.zeros(VOCAB, dtype=torch.int64)
    mask[targets] = 1
    assert (
        DraftVocabulary.from_offsets(offsets(targets), VOCAB, t2d=mask).targets.tolist() == targets.tolist()
    )
    for wrong in (mask.roll(1), mask[:-1], torch.zeros_like(mask)):
        with pytest.raises(ValueError, match="t2d: expected a mask"):
            DraftVocabulary.from_offsets(offsets(targets), VOCAB, t2d=wrong)


def head(kind: str, generator: torch.Generator) -> MarkovHead:
    gate = Projection(
        torch.randn(RANK, HIDDEN + RANK, generator=generator), torch.randn(RANK, generator=generator)
    )
    return MarkovHead(
        w1=torch.randn(VOCAB, RANK, generator=generator),
        w2=torch.randn(DRAFT, RANK, generator=generator),
        gate=gate if kind == "gated" else None,
    )


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_reduced_is_full_with_the_other_tokens_impossible(kind: str) -> None:
    """Node for node: the reduced draft, and a full-vocabulary one whose other logits are minus infinity."""
    generator = torch.Generator().manual_seed(5)
    markov, targets = head(kind, generator), permuted(3)
    vocabulary = DraftVocabulary.from_offsets(offsets(targets), VOCAB)
    logits = torch.randn(3, 4, DRAFT, generator=generator)
    hidden = torch.randn(3, 4, HIDDEN, generator=generator)
    anchors = torch.tensor([1, 30, int(targets[0])])
    full_logits = torch.full((3, 4, VOCAB), float("-inf"))
    full_logits[:, :, targets] = logits
    w2 = torch.zeros(VOCAB, RANK)
    w2[targets] = markov.w2
    full = MarkovHead(markov.w1, w2, gate=markov.gate)
    reduced = conditioned(logits, markov, anchors, DRAFT, hidden=hidden, vocabulary=vocabulary)
    tree = grow(reduced, 20)
    tree.validate()  # siblings are distinct after mapping
    expected = grow_reference(conditioned_reference(full_logits, full, anchors, hidden=hidden), 20)
    assert tree.tokens.tolist() == expected.tokens.tolist()
    assert tree.parents.tolist() == expected.parents.tolist()
    assert set(tree.tokens.flatten().tolist()) <= set(targets.tolist())
    reference = conditioned_reference(logits, markov, anchors, hidden=hidden, vocabulary=vocabulary)
    assert grow_reference(reference, 20).tokens.tolist() == expected.tokens.tolist()
    # The control: reading draft ids as target ids grows another tree.
    wrong = grow(conditioned(logits, markov, anchors, DRAFT, hidden=hidden), 20)
    assert vocabulary.to_target(wrong.tokens).tolist() != expected.tokens.tolist()


def test_factorised_over_a_reduced_vocabulary() -> None:
    targets = permuted(7)
    vocabulary = DraftVocabulary.from_offsets(offsets(targets), VOCAB)
    logits = torch.randn(2, 3, DRAFT, generator=torch.Generator().manual_seed(2))
    full = torch.full((2, 3, VOCAB), float("-inf"))
    full[:, :, targets] = logits
    tree = draft_tree(logits, 12, vocabulary=vocabulary)
    expected = grow_reference(factorised(full, VOCAB), 12)
    tree.validate()
    assert tree.tokens.tolist() == expected.tokens.tolist()
    assert tree.parents.tolist() == expected.parents.tolist()


def test_a_vocabulary_of_another_width_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    vocabulary = DraftVocabulary(permuted()[:-1])
    with pytest.raises(ValueError, match="vocabulary: expected 16 draft ids"):
        conditioned(
            torch.zeros(1, 2, DRAFT), head("vanilla", generator), torch.tensor([0]), 4, vocabulary=vocabulary
        )
