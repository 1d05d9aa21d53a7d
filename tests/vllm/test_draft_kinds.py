"""Drafts that specplug's core reads and this adapter does not serve: refused before vLLM sees them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def create(method: str, path: str) -> Any:
    from specplug_vllm.config import check_stock_method, create_tree_config

    def vllm_s_own(*args: Any) -> Any:
        raise AssertionError("reached vLLM's own configuration")

    args = SimpleNamespace(
        speculative_config={"method": method, "model": path},
        spec_method=None,
        spec_model=None,
        spec_tokens=None,
    )
    if method != "ddtree":
        return check_stock_method(args)
    return create_tree_config(vllm_s_own, args, SimpleNamespace(hf_config=None), SimpleNamespace())


@pytest.mark.parametrize(
    ("kind", "targets", "message"),
    [
        ("gated", None, "markov_head_type is 'gated', and vLLM's DSpark has the vanilla head alone"),
        ("rnn", None, "markov_head_type is 'rnn'"),
        ("headless", None, "markov_rank is 0 under Qwen3DSparkModel"),
        ("vanilla", list(range(8)), "draft_vocab_size is 8 of 32"),
    ],
)
def test_trees_refuse_by_name(
    toy: Callable[..., Any], kind: str, targets: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        create("ddtree", str(toy(kind, targets=targets).path))


def test_a_vanilla_draft_gets_past_that_check(toy: Callable[..., Any]) -> None:
    """The control: the next thing looked at is the target, which here has no config."""
    with pytest.raises(AttributeError, match="to_dict"):
        create("ddtree", str(toy("vanilla").path))


@pytest.mark.parametrize("kind", ["gated", "rnn", "headless"])
def test_stock_methods_that_would_fail_on_a_weight_are_named(toy: Callable[..., Any], kind: str) -> None:
    with pytest.raises(ValueError, match="'dspark' cannot load this draft, nor can any other"):
        create("dspark", str(toy(kind).path))
    assert create("dspark", str(toy("vanilla", name="fine").path)) is None
