"""specplug.checkpoint: what a draft is, decided from keys and shapes; everything else refused by name."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specplug.checkpoint import DraftCheckpoint, MarkovHeadInfo, check_method, read_draft

HIDDEN, VOCAB, RANK, TAPS, LAYERS = 8, 32, 4, (1, 3), 2
BITS = {"BF16": 16, "F32": 32, "I64": 64}
Shapes = dict[str, tuple[int, ...]]


def write_safetensors(file: Path, shapes: Shapes, dtype: str = "BF16") -> None:
    """The format written by hand, so that the reader is not judged by its own code."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def backbone() -> Shapes:
    shapes: Shapes = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
        "norm.weight": (HIDDEN,),
        "hidden_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            shapes[f"layers.{i}.{name}.weight"] = (HIDDEN,)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
            shapes[f"layers.{i}.{name}.weight"] = (HIDDEN, HIDDEN)
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            shapes[f"layers.{i}.{name}.weight"] = (HIDDEN, HIDDEN)
    return shapes


MODEL = {"model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS}
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
MARKOV: Shapes = {W1: (VOCAB, RANK), W2: (VOCAB, RANK)}
CONFIDENCE: Shapes = {"confidence_head.proj.weight": (1, HIDDEN + RANK), "confidence_head.proj.bias": (1,)}
OWN: Shapes = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
TARGET = MODEL | {"num_hidden_layers": 6}


def dflash() -> dict[str, Any]:
    nested = {"mask_token_id": 3, "target_layer_ids": list(TAPS)}
    return MODEL | {
        "architectures": ["DFlashDraftModel"], "block_size": 8, "num_target_layers": 6, "dflash_config":
    nested, }  # fmt: skip


def dspark() -> dict[str, Any]:
    return MODEL | {
        "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 3, "target_layer_ids":
        list(TAPS), "markov_rank": RANK, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip


def wrapped(kind: str, **keys: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": kind, "transformer_layer_config": dict(MODEL), "block_size": 8,
        "aux_hidden_state_layer_ids": [i + 1 for i in TAPS], "mask_token_id": 3, "draft_vocab_size": VOCAB,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 7}]},
    } | ({"markov_rank": RANK, "markov_head_type": "vanilla"} if kind == "dspark" else {}) | keys  # fmt: skip


DSPARK_TENSORS = backbone() | MARKOV | CONFIDENCE


@pytest.fixture
def make(tmp_path: Path) -> Callable[[dict[str, Any], Shapes], Path]:
    def write(config: dict[str, Any], shapes: Shapes) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        write_safetensors(tmp_path / "model.safetensors", shapes)
        return tmp_path

    return write


def test_plain_dflash(make: Callable[..., Path]) -> None:
    folder = make(dflash(), backbone())
    assert read_draft(folder) == DraftCheckpoint(
        path=folder, kind="dflash", layout="fill_in", block_size=8, depth=7, mask_token_id=3,
        target_layer_ids=TAPS, hidden_size=HIDDEN, target_hidden_size=HIDDEN, num_target_layers=6,
        vocab_size=VOCAB, draft_vocab_size=None, num_layers=LAYERS, markov_head=None, confidence_head=False,
        own_embedding=False, own_lm_head=False, base_method="dflash", wrapper="plain",
    )  # fmt: skip


def test_plain_dspark(make: Callable[..., Path]) -> None:
    folder = make(dspark(), DSPARK_TENSORS | OWN)
    assert read_draft(str(folder)) == DraftCheckpoint(
        path=folder, kind="dspark", layout="anchor_first", block_size=7, depth=7, mask_token_id=3,
        target_layer_ids=TAPS, hidden_size=HIDDEN, target_hidden_size=HIDDEN, num_target_layers=None,
        vocab_size=VOCAB, draft_vocab_size=None, num_layers=LAYERS, markov_head=MarkovHeadInfo("vanilla",
        RANK), confidence_head=True, own_embedding=True, own_lm_head=True, base_method="dspark",
    wrapper="plain", )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layout", "depth"),
    [
        (dspark(), "anchor_first", 7),
        (dspark() | {"sample_from_anchor": True}, "anchor_first", 7),
        (dspark() | {"sample_from_anchor": False}, "fill_in", 6),
        (dspark() | {"sample_from_anchor": False, "dspark_bonus_anchor": True}, "fill_in", 6),
        (dspark() | {"dspark_bonus_anchor": False}, "anchor_first", 7),
        (wrapped("dspark", sample_from_anchor=True), "anchor_first", 8),
        (wrapped("dspark", sample_from_anchor=False), "fill_in", 7),
        (wrapped("dflash", sample_from_anchor=False), "fill_in", 7),
        (dflash() | {"sample_from_anchor": False}, "fill_in", 7),
    ],
)
def test_layout_and_depth(make: Callable[..., Path], config: dict[str, Any], layout: str, depth: int) -> None:
    tensors = backbone()
    if config.get("markov_rank"):
        tensors |= MARKOV
    if config.get("enable_confidence_head"):
        tensors |= CONFIDENCE
    draft = read_draft(make(config, tensors))
    assert (draft.layout, draft.depth) == (layout, depth)
    assert draft.wrapper == ("speculators" if "speculators_model_type" in config else "plain")
    assert draft.target_layer_ids == TAPS  # one convention, whatever the wrapper counts


@pytest.mark.parametrize(
    "config",
    [
        wrapped("dspark"),
        wrapped("dflash"),
        wrapped(
            "dspark", transformer_layer_config=MODEL | {"sample_from_anchor": True}
        ),  # nobody reads it there
    ],
)
def test_wrapped_layout_is_never_guessed(make: Callable[..., Path], config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sample_from_anchor is absent"):
        read_draft(make(config, backbone() | (MARKOV if "markov_rank" in config else {})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True, "dspark_bonus_anchor": True}, "dspark_bonus_anchor: True contradicts"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor: True contradicts sample_from_anchor .absent"),
        ({"dflash_config": {"sample_from_anchor": False}}, "sample_from_anchor: None at top level but False"),
        ({"block_size": 0}, "block_size: expected a depth of 1"),
        ({"block_size": -1}, "block_size: expected a depth of 1"),
        ({"block_size": 1, "sample_from_anchor": False}, "block_size: expected a depth of 1"),
        ({"block_size": 10**9}, "block_size: expected a depth of 1"),
        ({"block_size": None}, "block_size: missing"),
        ({"block_size": "7"}, r"Expected `int.*`, got `str` - at `\$.block_size`"),
        ({"mask_token_id": None}, "mask_token_id: missing"),
        ({"mask_token_id": VOCAB}, f"mask_token_id: expected 0..{VOCAB - 1}, got {VOCAB}"),
        ({"mask_token_id": -1}, "mask_token_id: expected"),
        ({"dflash_config": {"mask_token_id": 4}}, "mask_token_id: the keys .* disagree"),
        ({"target_layer_ids": None}, "target_layer_ids: missing"),
        ({"target_layer_ids": []}, "target_layer_ids: expected rising"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids: expected rising"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids: expected rising"),
        ({"target_layer_ids": [-2, 1]}, "target_layer_ids: expected rising"),
        ({"eagle_aux_hidden_state_layer_ids": list(TAPS)}, "target_layer_ids: the keys .* disagree"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "target_layer_ids: the keys .* disagree"),
        (
            {"target_layer_ids": [1, 2, 3]},
            r"fc.weight: expected shape \(8, 24\) from config.json, got \(8, 16\)",
        ),
        ({"target_hidden_size": 5}, r"fc.weight: expected shape \(8, 10\)"),
        ({"hidden_size": 4, "target_hidden_size": 8}, "expected shape .* from config.json"),
        ({"hidden_size": 0}, "hidden_size: expected at least 1"),
        ({"num_hidden_layers": 3}, "missing tensor layers.2.input_layernorm.weight .and 10 more"),
        ({"num_hidden_layers": 1}, "tensor that the config does not explain: layers.1"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: expected 1"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state: expected true"),
        ({"markov_rank": RANK + 1}, r"markov_w1.weight: expected shape \(32, 5\)"),
        ({"markov_rank": 0}, "markov_w1.weight is present, but markov_rank is 0"),
        ({"markov_rank": None}, "markov_w1.weight is present, but markov_rank is None"),
        ({"markov_rank": -1}, "markov_rank: expected 0 or more"),
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated', but markov_head.gate_proj is absent"),
        ({"markov_head_type": "mlp"}, "markov_head_type: expected vanilla, gated, rnn, got 'mlp'"),
        ({"enable_confidence_head": False}, "is present, but enable_confidence_head is not true"),
        ({"confidence_head_with_markov": False}, r"confidence_head.proj.weight: expected shape \(1, 8\)"),
        ({"draft_vocab_size": 16}, "missing tensor d2t"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size: expected"),
        ({"architectures": ["Qwen3DSparkModel", "DFlashDraftModel"]}, "name a DFlash and a DSpark draft"),
    ],
)
def test_dspark_contradictions_name_the_key(
    make: Callable[..., Path], change: dict[str, Any], message: str
) -> None:
    assert read_draft(make(dspark(), DSPARK_TENSORS)).depth == 7  # the control: without the change it reads
    config = {key: value for key, value in (dspark() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        read_draft(make(config, DSPARK_TENSORS))


GATE: Shapes = {
    "markov_head.gate_proj.weight": (RANK, HIDDEN + RANK),
    "markov_head.gate_proj.bias": (RANK,),
}
JOINT: Shapes = {
    "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN),
    "markov_head.joint_proj.bias": (3 * RANK,),
}
GATED, RNN = dspark() | {"markov_head_type": "gated"}, dspark() | {"markov_head_type": "rnn"}
HEADLESS = dspark() | {"markov_rank": 0, "enable_confidence_head": False}
WRAPPED_DSPARK = wrapped("dspark", sample_from_anchor=True)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (dspark(), backbone() | CONFIDENCE, "markov_rank is 4, but there is no markov_head tensor"),
        (dspark(), backbone() | MARKOV, "missing tensor confidence_head.proj.bias"),
        (dspark(), DSPARK_TENSORS | {"midlayer.weight": (1,)}, "does not explain: midlayer.weight"),
        (dspark(), DSPARK_TENSORS | {"lm_head.weight": (33, HIDDEN)}, "lm_head.weight: expected shape"),
        (dspark(), DSPARK_TENSORS | GATE, "is 'vanilla', but markov_head.gate_proj is present"),
        (GATED, DSPARK_TENSORS | JOINT, "'gated', but markov_head.gate_proj is absent"),
        (GATED, DSPARK_TENSORS | GATE | JOINT, "'gated', but markov_head.joint_proj is present"),
        (
            GATED,
            DSPARK_TENSORS | {"markov_head.gate_proj.weight": (RANK, HIDDEN + RANK)},
            "missing tensor markov_head.gate_proj.bias",
        ),
        (
            GATED,
            DSPARK_TENSORS | GATE | {"markov_head.gate_proj.weight": (RANK, HIDDEN)},
            r"gate_proj.weight: expected shape \(4, 12\)",
        ),
        (
            RNN,
            DSPARK_TENSORS | JOINT | {"markov_head.joint_proj.weight": (RANK, HIDDEN + RANK)},
            r"joint_proj.weight: expected shape \(12, 16\)",
        ),
        (HEADLESS, backbone() | MARKOV, "markov_w1.weight is present, but markov_rank is 0"),
        (HEADLESS | {"markov_rank": None}, backbone(), "markov_rank: missing"),
        (
            HEADLESS | {"enable_confidence_head": True},
            backbone() | CONFIDENCE,
            "confidence_head_with_markov is true, but the draft has no Markov head",
        ),
        (
            dspark() | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            DSPARK_TENSORS,
            "rope_parameters and rope_theta and rope_scaling disagree",
        ),
        (dflash(), backbone() | MARKOV, "markov_w1.weight is present, but markov_rank is None"),
        (dflash() | {"markov_rank": 4}, backbone() | MARKOV, "a DFlash draft has no Markov head"),
        (dflash() | {"sample_from_anchor": True}, backbone(), "sample_from_anchor: true on a DFlash draft"),
        (dflash(), {}, "hold no tensor"),
        (dflash() | {"hidden_size": None}, backbone(), r"at `\$.hidden_size`"),
        (
            wrapped("dflash", sample_from_anchor=True),
            backbone(),
            "sample_from_anchor: true on a DFlash draft",
        ),
        (wrapped("eagle3"), backbone(), "not a block drafter.*speculators_model_type is 'eagle3'"),
        (wrapped("dspark", speculators_model_type=["dspark"]), backbone(), "not a block drafter"),
        (
            WRAPPED_DSPARK | {"transformer_layer_config": None},
            backbone(),
            "transformer_layer_config: expected an object",
        ),
        (
            WRAPPED_DSPARK | {"aux_hidden_state_layer_ids": None},
            backbone() | MARKOV,
            "target_layer_ids: missing; expected one of aux_hidden_state_layer_ids",
        ),
        (
            MODEL | {"architectures": ["Qwen3ForCausalLM"]},
            backbone(),
            "not a block drafter: architectures is .'Qwen3ForCausalLM'",
        ),
        (MODEL | {"architectures": ["LlamaForCausalLMEagle3"]}, backbone(), "not a block drafter"),
        (MODEL, backbone(), "not a block drafter: architectures is None"),
        (
            MODEL | {"architectures": ["Gemma4DSparkModel"]},
            backbone(),
            "Gemma4DSparkModel .*recognised, but trees do not support it",
        ),
        (
            MODEL | {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5},
            backbone(),
            "dspark_block_size marks a DSpark draft inside",
        ),
    ],
)
def test_refused(make: Callable[..., Path], config: dict[str, Any], tensors: Shapes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_draft(make(config, tensors))


def test_reduced_draft_vocabulary(make: Callable[..., Path]) -> None:
    config = wrapped("dspark", sample_from_anchor=True, draft_vocab_size=16)
    tensors = backbone() | {
        W1: (VOCAB, RANK),
        W2: (16, RANK),
        "lm_head.weight": (16, HIDDEN),
        "d2t": (16,),
        "t2d": (VOCAB,),
    }
    draft = read_draft(make(config, tensors))
    assert (draft.vocab_size, draft.draft_vocab_size, draft.own_lm_head) == (VOCAB, 16, True)
    assert "draft_vocab_size is 16 of 32" in (check_method(draft, "ddtree") or "")
    assert check_method(draft, "dspark") is None
    with pytest.raises(ValueError, match=r"missing tensor lm_head\.weight"):
        read_draft(make(config, {name: shape for name, shape in tensors.items() if name != "lm_head.weight"}))
    with pytest.raises(ValueError, match=r"markov_w2.weight: expected shape \(16, 4\)"):
        read_draft(make(config, tensors | {W2: (VOCAB, RANK)}))


def test_d2t_without_a_reduced_vocabulary_is_refused(make: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="does not explain: d2t"):
        read_draft(make(dspark(), DSPARK_TENSORS | {"d2t": (VOCAB,)}))


def test_attention_bias_is_explained_by_its_key(make: Callable[..., Path]) -> None:
    biased = backbone() | {f"layers.{i}.self_attn.q_proj.bias": (HIDDEN,) for i in range(LAYERS)}
    assert read_draft(make(dflash() | {"attention_bias": True}, biased)).kind == "dflash"
    with pytest.raises(ValueError, match="does not explain"):
        read_draft(make(dflash(), biased))


def test_embedding_layer_is_layer_minus_one(make: Callable[..., Path]) -> None:
    config = wrapped("dflash", sample_from_anchor=False, aux_hidden_state_layer_ids=[0, 4])
    assert read_draft(make(config, backbone())).target_layer_ids == (-1, 3)


def test_mask_sidecar_counts_for_dflash_only(make: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mask_embedding.pt").write_bytes(b"\x80\x04 a pickle that must never be opened")
    assert read_draft(make(dflash(), backbone())).kind == "dflash"  # vLLM itself loads it
    with pytest.raises(ValueError, match=r"mask_embedding.pt beside a DSpark draft"):
        read_draft(make(dspark(), DSPARK_TENSORS))


def test_missing_files(tmp_path: Path, make: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"missing file .*config.json"):
        read_draft(tmp_path)
    folder = make(dflash(), backbone())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"missing weights .*found only pytorch_model.bin, and pickle"):
        read_draft(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"missing weights .*found none"):
        read_draft(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "null", "[" * 100_000, '{"a": 1e999999}', "\xff"])
def test_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config.json|not a block drafter"):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    "name", ["/no/such/draft", "./no-such-draft", "../no-such-draft", "no-such-draft", "~/no-such-draft"]
)
def test_a_path_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"missing file: {name} does not exist"):
        read_draft(name)


def test_a_relative_path_under_a_real_folder_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="missing file: models/dspark does not exist"):
        read_draft("models/dspark")


def test_a_file_is_not_a_checkpoint(make: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="expected a checkpoint folder, got a file"):
        read_draft(make(dflash(), backbone()) / "model.safetensors")
