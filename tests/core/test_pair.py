"""Whether a draft was made for a target, and which of vLLM's methods loads it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specplug.checkpoint import check_method, check_pair, read_draft

TARGET = {"hidden_size": 8, "vocab_size": 32, "num_hidden_layers": 6}


def dflash(toy: Callable[..., Any]) -> Path:
    """A draft that names its target's layers and borrows its embedding and lm_head."""
    borrowed = ("embed_tokens.weight", "lm_head.weight")
    return toy("dflash", config={"num_target_layers": 6}, drop=borrowed).path


def test_pair(toy: Callable[..., Any]) -> None:
    draft = read_draft(dflash(toy))
    check_pair(draft, TARGET)
    check_pair(draft, {"vocab_size": 9, "text_config": TARGET})
    check_pair(draft, {"thinker_config": {"text_config": TARGET}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 31}, "vocab_size: expected the draft's 32, the target has 31"),
        ({"vocab_size": 64}, "vocab_size: expected the draft's 32, the target has 64"),
        ({"hidden_size": 16}, "hidden_size: fc takes 2 features of 8, the target gives 16"),
        ({"num_hidden_layers": 3}, "target_layer_ids: 3 is past the target's 3 layers"),
        ({"num_hidden_layers": 7}, "num_target_layers: expected 6 layers, the target has 7"),
        ({"vocab_size": None}, "target's config.json: vocab_size: expected a whole number, got None"),
        ({"hidden_size": "8"}, "target's config.json: hidden_size: expected a whole number, got '8'"),
    ],
)
def test_wrong_pair(toy: Callable[..., Any], change: dict[str, Any], message: str) -> None:
    draft = read_draft(dflash(toy))
    for target in (TARGET | change, {"text_config": TARGET | change}):
        with pytest.raises(ValueError, match=message):
            check_pair(draft, target)


def test_a_narrow_draft_needs_its_own_embedding_and_head(toy: Callable[..., Any]) -> None:
    draft = read_draft(toy("vanilla").path)
    narrow = dataclasses.replace(draft, hidden_size=4)
    check_pair(narrow, TARGET)
    for own in ({"own_embedding": False}, {"own_lm_head": False}):
        with pytest.raises(ValueError, match="borrows the target's embedding or lm_head"):
            check_pair(dataclasses.replace(narrow, **own), TARGET)


def test_method(toy: Callable[..., Any]) -> None:
    draft = read_draft(toy("vanilla").path)
    assert check_method(draft, "ddtree") is None
    assert check_method(draft, "dspark") is None
    for wrong in ("dflash", "mtp", "eagle3", "draft_model"):
        text = check_method(draft, wrong)
        assert text is not None
        assert wrong in text
        assert "a DSpark checkpoint; use 'ddtree' for draft trees or 'dspark' for its chain" in text
