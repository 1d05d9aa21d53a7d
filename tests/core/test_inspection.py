"""specplug inspect on toy checkpoints of every format: what it prints, and the commands it names."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specplug.checkpoint import read_draft
from specplug.cli import main
from specplug.inspection import inspect, layer_ids
from specplug.mask_row import read_mask_row
from specplug.recognised import recognise

Toy = Callable[..., Any]


def way(facts: dict[str, Any], engine: str, name: str) -> dict[str, Any]:
    return next(w for w in facts["serving"] if (w["engine"], w["way"]) == (engine, name))


def vllm_options(command: str) -> dict[str, Any]:
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"]
    return json.loads(words[words.index("--speculative-config") + 1])


def write_target(folder: Path, rows: torch.Tensor | None = None) -> Path:
    folder.mkdir()
    config = {"hidden_size": 8, "vocab_size": 32, "num_hidden_layers": 6}
    (folder / "config.json").write_text(json.dumps(config))
    if rows is not None:
        save_file({"model.embed_tokens.weight": rows}, folder / "model.safetensors")
    return folder


def test_layer_ids_in_every_convention() -> None:
    """The embedding is -1 where outputs are counted, 0 where inputs are."""
    ids = layer_ids((-1, 3))
    assert ids["output_of_layer"] == [-1, 3]
    assert ids["speculators"] == ids["sglang_capture"] == ids["hidden_states"] == [0, 4]


def test_conventions_name_the_same_features(toy: Toy) -> None:
    """A target whose layer outputs are distinguishable constants: each convention captures the same ones."""
    wrapped, plain = (
        inspect(str(toy("vanilla", targets=t, name=n).path)) for t, n in ((list(range(16)), "w"), (None, "p"))
    )
    assert wrapped["layer_ids"] == plain["layer_ids"]
    hidden_states = [100.0, *(float(i) for i in range(6))]  # embedding, then the output of each layer
    before_layer = hidden_states[:-1]
    ids = plain["layer_ids"]
    by_output = [hidden_states[0] if i == -1 else float(i) for i in ids["output_of_layer"]]
    assert [hidden_states[i] for i in ids["hidden_states"]] == by_output
    assert [hidden_states[i] for i in ids["speculators"]] == by_output
    assert [before_layer[i] for i in ids["sglang_capture"]] == by_output
    assert [hidden_states[i] for i in ids["output_of_layer"]] != by_output  # the off-by-one would show


@pytest.mark.parametrize(
    ("kind", "method", "algorithm"), [("vanilla", "dspark", "DSPARK"), ("dflash", "dflash", "DFLASH")]
)
def test_commands(toy: Toy, kind: str, method: str, algorithm: str) -> None:
    """K tokens a round: K in vLLM, K + 1 rows in SGLang; a tree of 16 nodes: 16, 17."""
    path = str(toy(kind, name="a draft").path)  # a space: quoting matters
    facts = inspect(path, None)
    assert vllm_options(way(facts, "vLLM", "tree")["command"]) == {
        "method": "ddtree", "model": path, "num_speculative_tokens": 7, "tree_budget": 16,
    }  # fmt: skip
    chain = {"method": method, "model": path, "num_speculative_tokens": 7}
    assert vllm_options(way(facts, "vLLM", "chain")["command"]) == chain
    for name, flag, rows in (("chain", algorithm, "8"), ("tree", "DDTREE", "17")):
        words = shlex.split(way(facts, "SGLang", name)["command"])
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        options = dict(zip(words[3::2], words[4::2], strict=True))
        assert options["--speculative-algorithm"] == flag
        assert options["--speculative-draft-model-path"] == path
        assert options["--speculative-num-draft-tokens"] == rows


def test_printed_vllm_options_are_accepted_by_our_own_parser(toy: Toy) -> None:
    from specplug.config import parse_options, resolve_depth

    path = toy("vanilla").path
    printed = vllm_options(way(inspect(str(path)), "vLLM", "tree")["command"])
    options, host = parse_options(printed)
    assert host == {}
    assert resolve_depth(options, read_draft(path)) == 7


@pytest.mark.parametrize(
    ("kind", "targets", "vllm_tree", "vllm_chain", "sglang_chain"),
    [
        ("vanilla", None, True, True, True),
        ("dflash", None, True, True, True),
        ("gated", None, False, False, True),
        ("rnn", None, False, False, True),
        ("headless", None, False, False, False),
        ("vanilla", list(range(8)), False, True, False),
    ],
)
def test_an_engine_that_cannot_says_why_and_prints_no_command(
    toy: Toy, kind: str, targets: list[int] | None, vllm_tree: bool, vllm_chain: bool, sglang_chain: bool
) -> None:
    facts = inspect(str(toy(kind, targets=targets).path))
    for engine, name, works in (
        ("vLLM", "tree", vllm_tree), ("vLLM", "chain", vllm_chain), ("SGLang", "chain", sglang_chain),
    ):  # fmt: skip
        found = way(facts, engine, name)
        assert (found["command"] is not None, found["reason"] is None) == (works, works)
    assert facts["trees"].startswith("scored by")


def test_how_each_head_scores(toy: Toy) -> None:
    scores = {k: inspect(str(toy(k, name=k).path))["trees"] for k in ("dflash", "headless", "gated", "rnn")}
    assert scores == {
        "dflash": "scored by depth", "headless": "scored by depth",
        "gated": "scored by depth and parent token", "rnn": "scored by the whole path",
    }  # fmt: skip


ZERO = {"embed_tokens.weight": torch.cat((torch.randn(3, 8), torch.zeros(1, 8), torch.randn(28, 8)))}


def test_a_zero_mask_row_is_said_aloud(toy: Toy) -> None:
    good = inspect(str(toy("dflash", name="good").path))["mask_row"]
    assert good["rms"] > 0.1
    assert good["warning"] is None
    bad = inspect(str(toy("dflash", tensors=ZERO, name="bad").path))["mask_row"]
    assert bad["rms"] == 0.0
    assert "expect almost no accepted drafts" in bad["warning"]
    beside = toy("dflash", tensors=ZERO, name="sidecar").path
    (beside / "mask_embedding.pt").write_bytes(b"\x80\x04 a pickle that must never be opened")
    sidecar = inspect(str(beside))["mask_row"]
    assert sidecar["sidecar"]
    assert "mask_embedding.pt" in sidecar["warning"]
    assert "SGLang does not read mask_embedding.pt" in way(inspect(str(beside)), "SGLang", "chain")["notes"]


def test_the_mask_row_of_a_borrowed_embedding_is_the_target_s(toy: Toy, tmp_path: Path) -> None:
    draft = read_draft(toy("dflash", drop=("embed_tokens.weight", "lm_head.weight")).path)
    assert read_mask_row(draft).rms is None
    rows = torch.ones(32, 8).bfloat16()
    rows[3] = 0.5
    target = write_target(tmp_path / "target", rows)
    assert read_mask_row(draft, target).rms == 0.5
    facts = inspect(str(draft.path), str(target))
    assert facts["mask_row"]["source"].endswith("model.embed_tokens.weight")
    assert vllm_options(way(facts, "vLLM", "tree")["command"])["model"] == str(draft.path)
    assert shlex.split(way(facts, "vLLM", "tree")["command"])[2] == str(target)
    short = write_target(tmp_path / "short", rows[:2])
    with pytest.raises(ValueError, match="expected a row for mask token 3"):
        read_mask_row(draft, short)
    (target / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_mask_row(draft, target)


GEMMA = {
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "mask_token_id": 4,
    "final_logit_softcapping": 30.0, "confidence_head_with_markov": True, "enable_confidence_head": True,
    "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "block_size": None,
    "mask_token_id": None, "target_layer_ids": None, "markov_rank": None, "markov_head_type": None,
    "dspark_block_size": 5, "dspark_noise_token_id": 7, "dspark_target_layer_ids": [0, 2],
    "dspark_markov_rank": 4,
}  # fmt: skip


def test_gemma_is_described_and_left_to_vllm(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    path = toy("vanilla", config=GEMMA).path
    with pytest.raises(ValueError, match=r"Gemma4DSparkModel .*recognised"):
        read_draft(path)
    facts = inspect(str(path))
    assert (facts["layout"], facts["depth"], facts["mask_token_id"]) == ("anchor_first", 7, 4)
    assert (facts["markov_head"], facts["markov_rank"], facts["logit_softcap"]) == ("vanilla", 4, 30.0)
    assert facts["trees"].startswith("no: Gemma4DSparkModel caps its logits")
    assert way(facts, "vLLM", "tree")["command"] is None
    assert vllm_options(way(facts, "vLLM", "chain")["command"])["method"] == "dspark"
    with pytest.raises(SystemExit) as done:
        main(["inspect", str(path)])
    assert done.value.code == 0
    assert "logit_softcap" in capsys.readouterr().out


def test_deepseek_v4_is_described(toy: Toy) -> None:
    path = toy("vanilla", config=DEEPSEEK).path
    facts = inspect(str(path))
    assert facts["bundled"]
    assert (facts["depth"], facts["mask_token_id"], facts["target_layer_ids"]) == (5, 7, (0, 2))
    chain = way(facts, "vLLM", "chain")["command"]
    assert shlex.split(chain)[2] == str(path)  # the draft is inside the target
    assert vllm_options(chain) == {"method": "dspark", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GEMMA | {"markov_rank": -1}, "markov_rank or dspark_markov_rank: expected one rank"),
        (DEEPSEEK | {"dspark_markov_rank": None}, "got None"),
        (DEEPSEEK | {"dspark_noise_token_id": None}, "mask_token_id: missing"),
        (DEEPSEEK | {"block_size": 6}, "block_size: the keys .* disagree"),
        (GEMMA | {"final_logit_softcapping": "30"}, "final_logit_softcapping: expected a positive number"),
        (GEMMA | {"block_size": 0}, "block_size: expected"),
    ],
)
def test_a_recognised_draft_that_leaves_a_fact_open(toy: Toy, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect(str(toy("vanilla", config=config).path))


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3OmniDSparkModel", "DFlashDraftModel"])
def test_other_architectures_are_left_to_read_draft(toy: Toy, architecture: str) -> None:
    path = toy("vanilla", config={"architectures": [architecture]}).path
    assert recognise(path) is None


def test_text_output_has_one_fact_a_line(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["inspect", str(toy("gated", confidence="hidden").path)])
    assert done.value.code == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["markov_head"] == "kind gated, rank 4"
    assert lines["layer_ids.speculators"] == "[2, 4]"
    assert lines["rope.theta"] == "1000000.0"
    assert lines["vLLM.tree"].startswith("no: ")
    assert "markov_head_type is 'gated'" in lines["vLLM.tree"]
