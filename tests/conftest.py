"""Toy draft checkpoints with real, random weights, written by the safetensors library; and Triton, loaded as
an interpreter when kernel tests are among those asked for.
"""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import save_file

settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")  # a busy machine is no fault of the code

KERNELS = Path(__file__).resolve().parent / "kernels"
HIDDEN, VOCAB, RANK, LAYERS, TAPS = 8, 32, 4, 2, (1, 3)


def pytest_configure(config: pytest.Config) -> None:
    """Load Triton as an interpreter if tests/kernels may be collected and no GPU is to run them.

    Triton chooses between compiler and interpreter when it is imported, and Transformers imports it: so
    before any test module is. The environment is left as it was; see tests/kernels/conftest.py.
    """
    asked = [Path(config.invocation_params.dir, arg.partition("::")[0]).resolve() for arg in config.args]
    wanted = any(path == KERNELS or KERNELS in path.parents or path in KERNELS.parents for path in asked)
    available = all(importlib.util.find_spec(name) for name in ("triton", "specplug_rig"))
    if not (wanted and available) or os.environ.get("SPECPLUG_KERNEL_DEVICE", "cpu") != "cpu":
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("specplug_rig.interpreter").install()


def _tensors(kind: str, *, draft_vocab: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    tensors = {
        "fc.weight": random(HIDDEN, len(TAPS) * HIDDEN),
        "norm.weight": random(HIDDEN),
        "hidden_norm.weight": random(HIDDEN),
        "embed_tokens.weight": random(VOCAB, HIDDEN),
        "lm_head.weight": random(draft_vocab, HIDDEN),
    }
    for i in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"layers.{i}.{name}.weight"] = random(HIDDEN)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"layers.{i}.self_attn.{name}.weight"] = random(HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"layers.{i}.mlp.{name}.weight"] = random(HIDDEN, HIDDEN)
    if kind in ("vanilla", "gated", "rnn"):
        tensors["markov_head.markov_w1.weight"] = random(VOCAB, RANK)
        tensors["markov_head.markov_w2.weight"] = random(draft_vocab, RANK)
    if kind == "gated":
        tensors["markov_head.gate_proj.weight"] = random(RANK, HIDDEN + RANK)
        tensors["markov_head.gate_proj.bias"] = random(RANK)
    if kind == "rnn":
        tensors["markov_head.joint_proj.weight"] = random(3 * RANK, 2 * RANK + HIDDEN)
        tensors["markov_head.joint_proj.bias"] = random(3 * RANK)
    return tensors


def _config(kind: str) -> dict[str, Any]:
    model = {
        "model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS,
        "rope_theta": 1e6,
    }  # fmt: skip
    if kind == "dflash":
        nested = {"mask_token_id": 3, "target_layer_ids": list(TAPS)}
        return model | {"architectures": ["DFlashDraftModel"], "block_size": 8, "dflash_config": nested}
    head = {"markov_rank": 0} if kind == "headless" else {"markov_rank": RANK, "markov_head_type": kind}
    return model | head | {
        "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 3,
        "target_layer_ids": list(TAPS), "enable_confidence_head": False,
    }  # fmt: skip


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Write a checkpoint; gives its ``path`` and the ``tensors`` that were written.

    ``kind``: dflash, headless (DeepSpec's dflash_*), vanilla, gated or rnn. ``confidence``: a confidence head
    over "hidden" alone or with the "markov" embedding. ``targets``: target ids of a reduced draft vocabulary,
    then wrapped as speculators writes it. ``config``, ``tensors``: what to change or add; a config value None
    takes the key out. ``drop``: tensors to leave out.
    """

    def write(
        kind: str,
        *,
        confidence: str | None = None,
        targets: list[int] | None = None,
        config: dict[str, Any] | None = None,
        tensors: dict[str, torch.Tensor] | None = None,
        drop: tuple[str, ...] = (),
        name: str = "draft",
    ) -> SimpleNamespace:
        written = _tensors(kind, draft_vocab=len(targets or range(VOCAB)), seed=len(kind))
        keys = _config(kind)
        if confidence is not None:
            width = HIDDEN + (RANK if confidence == "markov" else 0)
            written["confidence_head.proj.weight"] = torch.randn(1, width)
            written["confidence_head.proj.bias"] = torch.randn(1)
            keys |= {"enable_confidence_head": True, "confidence_head_with_markov": confidence == "markov"}
        if targets is not None:
            mask = torch.zeros(VOCAB, dtype=torch.bool)
            mask[targets] = True
            written |= {"d2t": torch.tensor(targets) - torch.arange(len(targets)), "t2d": mask}
            inner = {key: keys.pop(key) for key in ("model_type", "hidden_size", "vocab_size", "rope_theta")}
            inner["num_hidden_layers"] = keys.pop("num_hidden_layers")
            layer_ids = [i + 1 for i in keys.pop("target_layer_ids")]
            keys |= {
                "speculators_model_type": "dspark", "transformer_layer_config": inner,
                "aux_hidden_state_layer_ids": layer_ids, "draft_vocab_size": len(targets),
                "sample_from_anchor": True,
            }  # fmt: skip
        keys = {key: value for key, value in (keys | (config or {})).items() if value is not None}
        written = {key: value for key, value in (written | (tensors or {})).items() if key not in drop}
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(keys))
        save_file(written, folder / "model.safetensors")
        return SimpleNamespace(path=folder, tensors=written)

    return write
