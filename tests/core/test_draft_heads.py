"""Draft kinds beyond the vanilla DSpark head: what read_draft decides, and heads read from weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specplug.checkpoint import MarkovHeadInfo, check_method, read_draft
from specplug.confidence import ConfidenceHead
from specplug.draft_heads import build_heads, read_heads
from specplug.drafting import draft_tree
from specplug.heads import block_bias

Toy = Callable[..., Any]
REDUCED = [9, 30, 2, 17, 4, 31, 0, 25]  # not in order: a permuted d2t


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_gated_and_rnn_heads_are_read_and_kept_from_vllm(toy: Toy, kind: str) -> None:
    draft = read_draft(toy(kind).path)
    assert draft.markov_head == MarkovHeadInfo(kind, 4)
    assert (draft.kind, draft.layout, draft.depth, draft.base_method) == ("dspark", "anchor_first", 7, None)
    assert f"markov_head_type is '{kind}'" in (check_method(draft, "ddtree") or "")
    assert "nor can any other" in (check_method(draft, "dspark") or "")
    vanilla = read_draft(toy("vanilla", name="other").path)
    assert check_method(vanilla, "ddtree") is None
    assert check_method(vanilla, "dspark") is None


def test_deepspec_dflash_is_an_anchor_first_dflash_draft(toy: Toy) -> None:
    """dflash_*_block7: architecture Qwen3DSparkModel, markov_rank 0, all seven rows predict."""
    draft = read_draft(toy("headless").path)
    assert (draft.kind, draft.layout, draft.depth, draft.markov_head) == ("dflash", "anchor_first", 7, None)
    assert draft.base_method is None
    for method in ("ddtree", "dflash", "dspark"):
        assert "neither vLLM nor SGLang loads" in (check_method(draft, method) or "")
    plain = read_draft(toy("dflash", name="other").path)  # block_size 8: the same depth, fill-in
    assert (plain.depth, plain.layout, plain.base_method) == (7, "fill_in", "dflash")
    assert read_heads(draft) == read_heads(plain) == (None, None, None)


@pytest.mark.parametrize("confidence", ["markov", "hidden"])
def test_an_absent_confidence_key_is_decided_by_the_shape(toy: Toy, confidence: str) -> None:
    absent = {"confidence_head_with_markov": None}
    draft = read_draft(toy("vanilla", confidence=confidence, config=absent).path)
    head = read_heads(draft).confidence
    assert isinstance(head, ConfidenceHead)
    assert (head.w1 is not None) == (confidence == "markov")
    wrong = {"confidence_head_with_markov": confidence != "markov"}
    with pytest.raises(ValueError, match=r"confidence_head.proj.weight: expected shape"):
        read_draft(toy("vanilla", confidence=confidence, config=wrong, name="wrong").path)
    other = {"confidence_head.proj.weight": torch.zeros(1, 9)}
    with pytest.raises(ValueError, match=r"expected shape \(1, 12\) or \(1, 8\) from config.json"):
        read_draft(toy("vanilla", confidence=confidence, config=absent, tensors=other, name="odd").path)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_heads_are_the_checkpoint_s_tensors(toy: Toy, kind: str) -> None:
    written = toy(kind, confidence="markov")
    heads = read_heads(read_draft(written.path))
    assert heads.markov is not None
    assert heads.markov.kind == kind
    assert torch.equal(heads.markov.w1, written.tensors["markov_head.markov_w1.weight"])
    assert torch.equal(heads.markov.w2, written.tensors["markov_head.markov_w2.weight"])
    for layer, name in ((heads.markov.gate, "gate_proj"), (heads.markov.joint, "joint_proj")):
        stored = written.tensors.get(f"markov_head.{name}.weight")
        assert (layer is None) == (stored is None)
        assert layer is None or torch.equal(layer.weight, stored)
    assert heads.confidence is not None
    assert heads.confidence.w1 is heads.markov.w1
    again = build_heads(read_draft(written.path), written.tensors)
    tokens, hidden = torch.randint(32, (2, 5)), torch.randn(2, 5, 8)
    assert torch.equal(block_bias(heads.markov, tokens, hidden), block_bias(again.markov, tokens, hidden))
    half = read_heads(read_draft(written.path), dtype=torch.bfloat16).markov
    assert half is not None
    assert half.w2.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_trees_from_a_reduced_vocabulary_checkpoint(toy: Toy, kind: str) -> None:
    """End to end: heads as read, a depth below the checkpoint's, tokens in the target's vocabulary."""
    draft = read_draft(toy(kind, targets=REDUCED).path)
    assert (draft.draft_vocab_size, draft.target_layer_ids) == (8, (1, 3))
    heads = read_heads(draft)
    assert heads.vocabulary is not None
    assert heads.vocabulary.targets.tolist() == REDUCED
    for gamma in (3, 7):
        tree = draft_tree(
            torch.randn(2, gamma, 8), 20, head=heads.markov, anchors=torch.tensor([9, 5]),
            hidden=torch.randn(2, gamma, 8), vocabulary=heads.vocabulary, candidates=6,
        )  # fmt: skip
        tree.validate()
        assert tree.counts.tolist() == [20, 20]
        assert set(tree.tokens.flatten().tolist()) <= set(REDUCED)
        assert int(tree.depths.max()) <= gamma


def test_tables_that_lie_are_refused_when_weights_are_read(toy: Toy) -> None:
    twice = torch.tensor([0, -1, 0, 0, 0, 0, 0, 0])  # draft ids 0 and 1 both mean target 0
    with pytest.raises(ValueError, match="target token 0 has two draft ids"):
        read_heads(read_draft(toy("vanilla", targets=REDUCED, tensors={"d2t": twice}).path))
    mask = torch.zeros(32, dtype=torch.bool)
    with pytest.raises(ValueError, match="t2d: expected a mask"):
        read_heads(read_draft(toy("vanilla", targets=REDUCED, tensors={"t2d": mask}, name="mask").path))
    short = torch.zeros(31, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"t2d: expected shape \(32,\)"):
        read_draft(toy("vanilla", targets=REDUCED, tensors={"t2d": short}, name="short").path)
