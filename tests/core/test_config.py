"""specplug.config: every mistake in a ddtree config is one sentence with the key, before a weight is read."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug.checkpoint import DraftCheckpoint
from specplug.config import MAX_CANDIDATES, MAX_TREE_BUDGET, TreeOptions, parse_options, resolve_depth

DRAFT = DraftCheckpoint(
    path=Path("draft"),
    kind="dspark",
    layout="anchor_first",
    block_size=7,
    depth=7,
    mask_token_id=3,
    target_layer_ids=(1, 2),
    hidden_size=8,
    target_hidden_size=8,
    num_target_layers=4,
    vocab_size=16,
    draft_vocab_size=None,
    num_layers=1,
    markov_head=None,
    confidence_head=False,
    own_embedding=False,
    own_lm_head=False,
    base_method="dspark",
    wrapper="plain",
)


def test_defaults_and_method_key() -> None:
    options, host = parse_options({"method": "ddtree", "model": "draft"})
    assert options == TreeOptions(model="draft", num_speculative_tokens=None, tree_budget=16, candidates=32)
    assert host == {}


def test_host_keys_pass_untouched_and_only_those_named() -> None:
    quantization = object()
    raw = {"model": "d", "quantization": quantization, "draft_tensor_parallel_size": 2, "tree_budget": 7}
    options, host = parse_options(raw, passthrough=frozenset({"quantization", "draft_tensor_parallel_size"}))
    assert options.tree_budget == 7
    assert host == {"quantization": quantization, "draft_tensor_parallel_size": 2}
    with pytest.raises(ValueError, match="unknown key 'draft_tensor_parallel_size'"):
        parse_options(raw, passthrough=frozenset({"quantization"}))


def test_our_key_stays_ours_when_the_host_has_it_too() -> None:
    options, host = parse_options(
        {"model": "d", "num_speculative_tokens": 3},
        passthrough=frozenset({"num_speculative_tokens", "model"}),
    )
    assert options.num_speculative_tokens == 3
    assert host == {}


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("tree_buget", "tree_budget"),
        ("budget", "tree_budget"),
        ("candidate", "candidates"),
        ("num_speculative_token", "num_speculative_tokens"),
        ("Model", "model"),
        ("quantisation", "quantization"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key '{key}'.*did you mean '{nearest}'"):
        parse_options({"model": "d", key: 1}, passthrough=frozenset({"quantization"}))


def test_unknown_key_without_a_neighbour_lists_the_known_ones() -> None:
    known = (
        "known keys: calibration, candidates, cost_table, cost_table_mismatch, explore, full_graphs, "
        "kernels, method, min_gain, model, num_speculative_tokens, online, record, tree_budget$"
    )
    with pytest.raises(ValueError, match=known):
        parse_options({"model": "d", "zzzz": 1})


def test_missing_model() -> None:
    with pytest.raises(ValueError, match=r"^model: expected"):
        parse_options({"tree_budget": 4})
    with pytest.raises(ValueError, match=r"^model: .*empty"):
        parse_options({"model": " "})


@pytest.mark.parametrize(
    ("key", "value", "expected", "got"),
    [
        ("model", 7, "a string", "int 7"),
        ("model", None, "a string", "NoneType None"),
        ("tree_budget", "16", "a whole number", "str '16'"),
        ("tree_budget", True, "a whole number", "bool True"),
        ("tree_budget", 16.0, "a whole number", "float 16.0"),
        ("tree_budget", None, "a whole number", "NoneType None"),
        ("candidates", [32], "a whole number", r"list \[32\]"),
        ("num_speculative_tokens", "7", "a whole number", "str '7'"),
        ("num_speculative_tokens", False, "a whole number", "bool False"),
    ],
)
def test_wrong_type_names_expected_and_got(key: str, value: object, expected: str, got: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: expected {expected}, got {got}"):
        parse_options({"model": "d"} | {key: value})


@given(budget=st.integers(-(2**70), 2**70))
def test_budget_range(budget: int) -> None:
    raw = {"model": "d", "tree_budget": budget}
    if 1 <= budget <= MAX_TREE_BUDGET:
        assert parse_options(raw)[0].tree_budget == budget
    else:
        with pytest.raises(ValueError, match=rf"^tree_budget: expected 1..{MAX_TREE_BUDGET}"):
            parse_options(raw)


@pytest.mark.parametrize("budget", [0, -1])
def test_no_budget_says_that_no_tree_means_no_method(budget: int) -> None:
    with pytest.raises(ValueError, match="budget 0 would mean no tree: leave the method out instead"):
        parse_options({"model": "d", "tree_budget": budget})


@pytest.mark.parametrize(("candidates", "fine"), [(0, False), (1, True), (1024, True), (1025, False)])
def test_candidates_range(candidates: int, fine: bool) -> None:
    raw = {"model": "d", "candidates": candidates}
    if fine:
        assert parse_options(raw)[0].candidates == candidates
    else:
        with pytest.raises(ValueError, match=rf"^candidates: expected 1..{MAX_CANDIDATES}"):
            parse_options(raw)


@pytest.mark.parametrize("depth", [0, -3])
def test_depth_below_one(depth: int) -> None:
    with pytest.raises(ValueError, match=r"^num_speculative_tokens: expected a depth of at least 1"):
        parse_options({"model": "d", "num_speculative_tokens": depth})


def test_depth_defaults_to_the_checkpoint_and_may_be_smaller() -> None:
    assert resolve_depth(TreeOptions(model="d"), DRAFT) == 7
    for depth in range(1, 8):
        assert resolve_depth(TreeOptions(model="d", num_speculative_tokens=depth), DRAFT) == depth


@pytest.mark.parametrize(("layout", "depth"), [("anchor_first", 7), ("fill_in", 6)])
def test_depth_above_the_checkpoint(layout: str, depth: int) -> None:
    draft = dataclasses.replace(DRAFT, layout=layout, depth=depth)
    pattern = (
        rf"^num_speculative_tokens: expected 1..{depth} .*block_size 7, {layout} layout.*got {depth + 1}"
    )
    with pytest.raises(ValueError, match=pattern):
        resolve_depth(TreeOptions(model="d", num_speculative_tokens=depth + 1), draft)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("min_gain", "0.1", "min_gain: expected a number, got str '0.1'"),
        ("min_gain", 1.0, "min_gain: expected a fraction, 0 up to 1, got 1.0"),
        ("min_gain", float("nan"), "min_gain: expected a fraction"),
        ("online", 1, "online: expected true or false, got int 1"),
        ("cost_table", 3, "cost_table: expected a string, got int 3"),
        (
            "cost_table_mismatch",
            "ignore",
            "cost_table_mismatch: expected one of refuse, warn, got str 'ignore'",
        ),
        ("explore", True, "explore: expected a folder under the key record"),
        ("cost_table", "", "cost_table: expected a file, got an empty string"),
        ("calibration", " ", "calibration: expected a file, got an empty string"),
        ("record", "", "record: expected a folder, got an empty string"),
    ],
)
def test_budget_options_say_what_they_take(option, value, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options({"model": "d", option: value})


def test_exploring_excludes_a_cost_table() -> None:
    with pytest.raises(ValueError, match="explore: expected no cost_table"):
        parse_options({"model": "d", "explore": True, "record": "r", "cost_table": "c"})


@pytest.mark.parametrize(
    ("more", "planned"), [({}, False), ({"cost_table": "c"}, True), ({"record": "r"}, True)]
)
def test_steps_are_planned_where_somebody_looks(more, planned) -> None:
    options, _ = parse_options({"model": "d", "min_gain": 0, **more})
    assert options.planned is planned
