"""What a user can get wrong with `method: ddtree`: one clear ValueError before any weight is read.

The target of these tests has no weight file at all, and reading any other weight is a failure. What the
message must name is checked against the mistake, not against our wording.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from config_rig import DFLASH, DSPARK, Configure, copied, refusal, tree

from specplug import models
from specplug.config import MAX_TREE_BUDGET

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_weights")]

DEPTH = 7
TARGET_FACTS = json.loads((models.path("quick", "target") / "config.json").read_text())


@pytest.mark.parametrize(
    ("draft", "method", "markov"),
    [(DFLASH, "dflash", False), (DSPARK, "dspark", True)],
    ids=["dflash", "dspark"],
)
def test_valid_config_needs_no_weights(configure: Configure, draft: str, method: str, markov: bool) -> None:
    """The negative control of every refusal below: the same call without the mistake is accepted."""
    config = configure(tree(draft)).speculative_config
    assert (config.method, config.tree_depth, config.num_speculative_tokens) == (method, DEPTH, 16)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"tree_buget": 8}, ["tree_buget", "did you mean 'tree_budget'"]),
        ({"tree-buget": 8}, ["tree_buget", "did you mean 'tree_budget'"]),
        ({"num_speculative_token": 3}, ["did you mean 'num_speculative_tokens'"]),
        ({"colour": "red"}, ["colour", "tree_budget", "num_speculative_tokens"]),
        ({"prompt_lookup_max": 3}, ["prompt_lookup_max"]),  # vLLM's own, and of no meaning for a tree
        ({"tree_budget": 0}, ["tree_budget", f"1..{MAX_TREE_BUDGET}", "got 0"]),
        ({"tree_budget": -3}, ["tree_budget", f"1..{MAX_TREE_BUDGET}", "got -3"]),
        ({"tree_budget": MAX_TREE_BUDGET + 1}, ["tree_budget", f"lower it to {MAX_TREE_BUDGET}"]),
        ({"tree_budget": "16"}, ["tree_budget", "a whole number", "str '16'"]),
        ({"tree_budget": True}, ["tree_budget", "a whole number", "bool True"]),
        ({"tree_budget": 16.5}, ["tree_budget", "a whole number", "float 16.5"]),
        ({"tree_budget": None}, ["tree_budget", "a whole number", "None"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "got 0"]),
        (
            {"num_speculative_tokens": DEPTH + 1},
            ["num_speculative_tokens", f"1..{DEPTH}", f"got {DEPTH + 1}"],
        ),
        ({"num_speculative_tokens": "7"}, ["num_speculative_tokens", "a whole number", "str '7'"]),
        ({"candidates": 0}, ["candidates", "got 0"]),
        ({"tree_budget": 4, "tree-budget": 8}, ["tree-budget", "twice"]),
    ],
    ids=lambda value: (
        " ".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, dict) else ""
    ),
)
@pytest.mark.parametrize("draft", [DFLASH, DSPARK], ids=["dflash", "dspark"])
def test_option_mistakes(configure: Configure, draft: str, keys: dict[str, Any], named: list[str]) -> None:
    message = refusal(configure, tree(draft, **keys))
    assert [part for part in named if part not in message] == []


def test_no_draft_named(configure: Configure) -> None:
    assert "model" in refusal(configure, {"method": "ddtree"})


def test_draft_that_is_the_target(configure: Configure) -> None:
    message = refusal(configure, tree(str(models.path("quick", "target"))))
    assert "not a block drafter" in message
    assert "Qwen3ForCausalLM" in message
    assert "DFlashDraftModel" in message


def test_missing_draft_folder(configure: Configure, tmp_path: Path) -> None:
    message = refusal(configure, tree(str(tmp_path / "nowhere")))
    assert str(tmp_path / "nowhere") in message
    assert "does not exist" in message


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_missing_draft_file(configure: Configure, tmp_path: Path, missing: str) -> None:
    draft = copied(DFLASH, tmp_path / "draft", weights=True)
    (Path(draft) / missing).unlink()
    message = refusal(configure, tree(draft))
    assert "missing" in message
    assert missing in message


def test_truncated_draft(configure: Configure, tmp_path: Path) -> None:
    draft = copied(DFLASH, tmp_path / "draft", weights=True)
    weights = Path(draft) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "truncated" in refusal(configure, tree(draft))


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", 2048), ("hidden_size", 256), ("num_hidden_layers", 6), ("num_hidden_layers", 2)],
)
@pytest.mark.parametrize("draft", [DFLASH, DSPARK], ids=["dflash", "dspark"])
def test_draft_of_another_target(
    configure: Configure, tmp_path: Path, draft: str, key: str, value: int
) -> None:
    changes: dict[str, Any] = {key: value}
    if key == "num_hidden_layers":
        changes["layer_types"] = ["full_attention"] * value
    other = copied(str(models.path("quick", "target")), tmp_path / "other", weights=False, **changes)
    message = refusal(configure, tree(draft), model=other)
    assert "was not made for this target" in message
    assert str(value) in message  # what the target has
    assert draft in message
    if key != "num_hidden_layers":
        assert key in message
        assert str(TARGET_FACTS[key]) in message  # what the draft expects


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 2048), ("hidden_size", 256), ("block_size", 1)])
def test_draft_config_that_contradicts_itself(
    configure: Configure, tmp_path: Path, key: str, value: int
) -> None:
    message = refusal(configure, tree(copied(DFLASH, tmp_path / "draft", weights=True, **{key: value})))
    assert str(tmp_path / "draft") in message
    assert str(value) in message


@pytest.mark.parametrize(
    ("draft", "method", "right"),
    [
        (DSPARK, "dflash", "dspark"),
        (DSPARK, "eagle", "dspark"),
        (DSPARK, "eagle3", "dspark"),
        (DFLASH, "dspark", "dflash"),
        (DFLASH, "eagle3", "dflash"),
    ],
    ids=[
        "dspark under dflash",
        "dspark under eagle",
        "dspark under eagle3",
        "dflash under dspark",
        "dflash under eagle3",
    ],
)
@pytest.mark.parametrize("by_flag", [False, True], ids=["config", "flags"])
def test_stock_method_of_the_wrong_kind(
    configure: Configure, draft: str, method: str, right: str, by_flag: bool
) -> None:
    keys = {"method": method, "model": draft, "num_speculative_tokens": DEPTH}
    flags = {"spec_method": method, "spec_model": draft, "spec_tokens": DEPTH}
    message = refusal(configure, None, **flags) if by_flag else refusal(configure, keys)
    assert message.count("\n") == 0
    assert [part for part in (repr(method), draft, "'ddtree'", repr(right)) if part not in message] == []


@pytest.mark.parametrize(
    ("draft", "method", "chosen"),
    [
        (DFLASH, "dflash", "dflash"),
        (DSPARK, "dspark", "dspark"),
        (DSPARK, "mtp", "dspark"),  # vLLM corrects this one itself
        (DFLASH, "draft_model", "dflash"),
        (DSPARK, None, "dspark"),
        (None, "ngram", "ngram"),
    ],
)
def test_stock_methods_stay_as_they_are(
    configure: Configure, draft: str | None, method: str | None, chosen: str
) -> None:
    given = {"method": method, "model": draft, "num_speculative_tokens": 4}
    extra = {"prompt_lookup_max": 3} if method == "ngram" else {}
    config = configure({key: value for key, value in given.items() if value is not None} | extra)
    assert config.speculative_config.method == chosen
    assert type(config.speculative_config).__name__ == "SpeculativeConfig"
    assert config.num_speculative_tokens == 4
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


def test_draft_we_cannot_read_is_left_to_vllm(configure: Configure, tmp_path: Path) -> None:
    """A stock method on a draft that our reader refuses: vLLM's own answer, whatever it is."""
    draft = copied(DSPARK, tmp_path / "draft", weights=True, markov_head_type="gated")
    assert "markov_head_type" in refusal(configure, tree(draft))
    config = configure({"method": "dspark", "model": draft, "num_speculative_tokens": 4})
    assert config.speculative_config.method == "dspark"


def parsed(*arguments: str) -> Any:
    """Engine configuration from a command line, as `vllm serve` reads it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    common = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    return EngineArgs.from_cli_args(parser.parse_args([*common, *arguments])).create_engine_config()


@pytest.mark.usefixtures("configure")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-config", json.dumps(tree(DSPARK, **{"tree-budget": 9, "num-speculative-tokens": 5}))],
        [
            *("--speculative-config.method", "ddtree", "--speculative-config.model", DSPARK),
            *("--speculative-config.tree_budget", "9", "--speculative-config.num_speculative_tokens", "5"),
        ],
        [
            *("--spec-model", DSPARK, "--spec-tokens", "5"),
            *("--speculative-config", json.dumps({"method": "ddtree", "tree_budget": 9})),
        ],
    ],
    ids=["dashes", "dotted", "model and tokens by flag"],
)
def test_spellings_on_the_command_line(bare_target: str, arguments: list[str]) -> None:
    config = parsed("--model", bare_target, *arguments).speculative_config
    assert (config.tree_depth, config.num_speculative_tokens) == (5, 9)


@pytest.mark.usefixtures("configure")
def test_method_flag_of_the_command_line_is_vllms_own(
    bare_target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """argparse knows vLLM's own methods, so `--spec-method ddtree` ends there; EngineArgs takes it."""
    with pytest.raises(SystemExit):
        parsed("--model", bare_target, "--spec-method", "ddtree", "--spec-model", DSPARK)
    assert "invalid choice: 'ddtree'" in capsys.readouterr().err


def test_method_by_engine_args(configure: Configure) -> None:
    config = configure({"tree_budget": 9}, spec_method="ddtree", spec_model=DSPARK, spec_tokens=5)
    assert (config.speculative_config.tree_depth, config.num_speculative_tokens) == (5, 9)
    assert configure(None, spec_method="ddtree", spec_model=DSPARK).num_speculative_tokens == 16


@pytest.mark.parametrize(
    ("flag", "value", "key"),
    [
        ("spec_method", "ddtree", "method"),
        ("spec_method", "dflash", "method"),
        ("spec_model", DFLASH, "model"),
        ("spec_tokens", 3, "num_speculative_tokens"),
    ],
)
def test_flag_and_config_key_both_given(configure: Configure, flag: str, value: Any, key: str) -> None:
    message = refusal(configure, tree(DSPARK, num_speculative_tokens=3), **{flag: value})
    assert "both given" in message
    assert f"--{flag.replace('_', '-')}" in message
    assert f"['{key}']" in message


@pytest.mark.parametrize("depth", [None, 1, 6])
@pytest.mark.parametrize("budget", [1, 6, 7, 8, MAX_TREE_BUDGET])
@pytest.mark.parametrize(("draft", "extra_rows"), [(DFLASH, 1), (DSPARK, 0)], ids=["fill_in", "anchor_first"])
def test_room_for_every_row(
    configure: Configure, draft: str, extra_rows: int, budget: int, depth: int | None
) -> None:
    """A budget below the depth lowers the depth, and vLLM reserves what the drafter writes.

    The drafter writes one cache row a depth, and one more for the anchor in the fill-in layout.
    """
    keys = {} if depth is None else {"num_speculative_tokens": depth}
    config = configure(tree(draft, tree_budget=budget, **keys))
    expected_depth = min(DEPTH if depth is None else depth, budget)
    written = expected_depth + extra_rows
    assert config.speculative_config.tree_depth == expected_depth
    assert config.num_speculative_tokens == budget
    assert config.num_lookahead_tokens >= written
    # The scheduler charges a request its own rows, one at least, plus these.
    assert config.speculative_config.max_num_new_slots_for_drafting >= written - 1


def test_compile_cache_tells_trees_apart(configure: Configure) -> None:
    """Depth, budget and candidates each change the key; the same settings give the same one."""
    variants = [{}, {"tree_budget": 17}, {"num_speculative_tokens": 6}, {"candidates": 8}]
    hashes = [configure(tree(DSPARK, **keys)).compute_hash() for keys in variants]
    assert len(set(hashes)) == len(variants)
    assert configure(tree(DSPARK)).compute_hash() == hashes[0]
