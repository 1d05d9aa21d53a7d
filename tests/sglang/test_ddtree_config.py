"""User mistakes are refused with the reason before any weight is read; what is given is what runs."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from specplug import models
from specplug.config import TreeOptions
from specplug_sglang.config import CONFIG, Flags, resolve
from specplug_sglang.refusals import check_backend, check_engine

pytestmark = pytest.mark.sglang

TARGET = json.loads((models.path("quick", "target") / "config.json").read_text())


def flags(draft="dspark", **changes):
    given = {"rows": None, "depth": None, "cost_table": None, **changes}
    return Flags(
        model=str(models.path("quick", "target")),
        draft=str(models.path("quick", draft)),
        revision="main",
        **given,
    )


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write the file that SPECPLUG_CONFIG names."""
    resolve.cache_clear()

    def write(content):
        file = tmp_path / "specplug.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv(CONFIG, str(file))

    yield write
    resolve.cache_clear()


@pytest.mark.parametrize(("draft", "query_rows"), [("dspark", 7), ("dflash", 8)])
def test_settings_of_the_shipped_drafts(written, draft, query_rows):
    settings = resolve(flags(draft))
    assert (settings.budget, settings.width, settings.depth) == (16, 17, 7)
    assert settings.query_rows == query_rows


def test_flags_and_file_together(written):
    written({"tree_budget": 24, "candidates": 8})
    settings = resolve(flags(rows=25, depth=5))
    assert (settings.budget, settings.depth, settings.options.candidates) == (24, 5, 8)


def test_a_small_tree_is_as_deep_as_it_has_nodes(written):
    settings = resolve(flags("dflash", rows=4))
    assert (settings.budget, settings.depth, settings.query_rows) == (3, 3, settings.width)


@pytest.mark.parametrize(
    ("content", "changes", "reason"),
    [
        ({"tree_bugdet": 9}, {}, "did you mean 'tree_budget'"),
        ({"tree_budget": "16"}, {}, "whole number"),
        ({"tree_budget": 9}, {"rows": 17}, "says 16; keep one"),
        ({"num_speculative_tokens": 3}, {"depth": 4}, "keep one"),
        ({"num_speculative_tokens": 8}, {}, "got 8"),
        ({"model": "x"}, {}, "--speculative-draft-model-path"),
        ("[1]", {}, "expected a JSON object"),
        ("{", {}, "is not JSON"),
        ({"cost_table": "/no/such/table.json"}, {}, "no/such/table"),
        ({"explore": True}, {}, "record"),
        ({}, {"draft": None}, "--speculative-draft-model-path"),
    ],
)
def test_mistakes_name_the_key_and_the_fix(written, content, changes, reason):
    written(content)
    with pytest.raises(ValueError, match=reason):
        resolve(flags()._replace(**changes))


@pytest.mark.parametrize(
    ("kind", "targets", "reason"),
    [
        (None, None, "not a block drafter"),
        ("headless", None, "SGLang requires a rank above 0"),
        ("vanilla", list(range(8)), "draft_vocab_size is 8 of 32"),
    ],
)
def test_drafts_that_trees_cannot_use_are_refused(toy, kind, targets, reason):
    draft = models.path("quick", "target") if kind is None else toy(kind, targets=targets).path
    with pytest.raises(ValueError, match=reason):
        resolve(flags()._replace(draft=str(draft)))


def test_a_missing_file_is_refused(written, monkeypatch):
    monkeypatch.setenv(CONFIG, "/no/such/file.json")
    with pytest.raises(ValueError, match="cannot read /no/such/file"):
        resolve(flags())


def arguments(**changes):
    """What ServerArgs say of an ordinary GPU server."""
    plain = {
        "device": "cuda",
        "attention_backend": "triton",
        "decode_attention_backend": None,
        "prefill_attention_backend": None,
        "pp_size": 1,
        "dp_size": 1,
        "attn_cp_size": 1,
        "dcp_size": 1,
        "disaggregation_mode": "null",
        "kv_cache_dtype": "auto",
        "speculative_dspark_confidence_sts_path": None,
        "disable_cuda_graph": True,
    }
    return SimpleNamespace(**{**plain, **changes})


def refused(args, target=TARGET, mode="static", **options):
    check_engine(args, target, mode=mode, options=TreeOptions(model="draft", **options))


def test_an_ordinary_server_is_accepted():
    refused(arguments())
    refused(arguments(attention_backend="flashinfer"), mode="compact")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "npu"}, "npu"),
        ({"attention_backend": "fa3"}, "chain instead of a tree"),
        ({"decode_attention_backend": "trtllm_mha"}, "chain instead of a tree"),
        ({"pp_size": 2}, "--pp-size is 2"),
        ({"dp_size": 2}, "--dp-size is 2"),
        ({"disaggregation_mode": "decode"}, "disaggregation"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ({"enable_lora": True}, "LoRA"),
        ({"enable_dp_attention": True}, "data parallelism"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"speculative_dspark_confidence_sts_path": "sts.json"}, "calibration"),
        ({"attn_cp_size": 2}, "--attn-cp-size is 2"),
        ({"lora_paths": ["a=b"]}, "LoRA"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_pdmux": True}, "multiplexed"),
        ({"enable_unified_memory": True}, "unified memory"),
        ({"enable_return_hidden_states": True}, "hidden states"),
        ({"enable_return_routed_experts": True}, "routed experts"),
        ({"speculative_use_block_verification": True}, "block verification"),
        ({"speculative_adaptive": True}, "adaptive"),
        ({"speculative_draft_window_size": 64}, "draft window"),
        ({"speculative_token_map": "map.pt"}, "token map"),
        ({"enable_torch_compile": True}, "compiled"),
        ({"speculative_num_steps": 5}, "--speculative-num-steps is 5"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk is 4"),
    ],
)
def test_engine_features_are_refused_in_one_sentence(changes, reason):
    from sglang.srt.server_args import ServerArgs

    assert all(hasattr(ServerArgs, name) for name in changes), "SGLang has no such setting to refuse"
    with pytest.raises(ValueError, match=reason) as raised:
        refused(arguments(**changes))
    text = str(raised.value)
    assert text.startswith("DDTREE refuses: ")
    assert text.endswith(".")
    assert ";" in text  # what is wrong; what to do


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent"),
        ({"layer_types": ["sliding_attention"]}, "sliding window"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"vision_config": {}}, "multi-modal"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_targets_are_refused(target, reason):
    with pytest.raises(ValueError, match=reason):
        refused(arguments(), {**TARGET, **target})


def test_kernels_that_sglang_does_not_run_are_refused():
    refused(arguments(), kernels="torch")
    with pytest.raises(ValueError, match="kernels: our Triton kernels are not wired into SGLang"):
        refused(arguments(), kernels="triton")
    with pytest.raises(ValueError, match="full_graphs: SGLang's own flags decide what it captures"):
        refused(arguments(), full_graphs=True)


def test_ragged_verification_is_not_captured_in_graphs():
    for backend in ("triton", "flashinfer"):
        refused(arguments(attention_backend=backend), mode="compact")
        with pytest.raises(ValueError, match="--disable-cuda-graph"):
            refused(arguments(attention_backend=backend, disable_cuda_graph=False), mode="compact")


@pytest.mark.parametrize("name", ["TritonAttnBackend", "FlashInferAttnBackend"])
def test_backends_that_follow_masks_are_accepted(name):
    check_backend(type(name, (), {})())
    check_backend(type("Ours", (), {"takes_tree_masks": True})())


@pytest.mark.parametrize("name", ["FlashAttentionBackend", "TRTLLMHAAttnBackend", "TorchNativeAttnBackend"])
def test_backends_that_ignore_masks_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} verifies a chain"):
        check_backend(type(name, (), {})())


def test_active_only_where_asked():
    """In a process of its own: an engine that ran in this one leaves its arguments published."""
    script = "from specplug_sglang import config as c; print(c.active()); c.request(); print(c.active())"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split()[-2:] == ["False", "True"]
