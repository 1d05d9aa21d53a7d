"""Features of vLLM that trees do not work with: refused at start, in one sentence, no weight read."""

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from config_rig import DFLASH, Configure, copied, refusal, tree

from specplug import models

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_weights")]


def kv_connector() -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "nnodes is 2"),
        (
            {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2},
            "distributed_executor_backend is 'external_launcher'",
        ),
        ({"enable_lora": True}, "--enable-lora"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"kv_transfer_config": kv_connector}, "--kv-transfer-config"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
        ({"enable_dbo": True}, "--enable-dbo"),
        ({"ubatch_size": 2}, "--ubatch-size"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "--worker-cls"),
        ({"watermark_config": {"algorithm": "kgw"}}, "--watermark-config"),
        ({"enable_trace_replay": True}, "--enable-trace-replay"),
        ({"return_sampling_mask": True}, "--return-sampling-mask"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"enable_batch_sharded_sampling": True}, "--enable-batch-sharded-sampling"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_engine_feature(configure: Configure, engine: dict[str, Any], named: str) -> None:
    engine = {key: value() if callable(value) else value for key, value in engine.items()}
    with mock.patch.dict(os.environ):  # vLLM sets a variable for an external launcher
        check_refused(refusal(configure, tree(), **engine), named)


@pytest.mark.parametrize(
    ("keys", "ranks", "named"),
    [
        ({}, {"tensor_parallel_size": 2, "data_parallel_size": 2}, None),
        ({"draft_tensor_parallel_size": 2}, {"tensor_parallel_size": 2}, None),
        ({"draft_tensor_parallel_size": 1}, {"tensor_parallel_size": 2}, "draft_tensor_parallel_size is 1"),
        ({"record": "/nowhere"}, {"tensor_parallel_size": 2}, None),
        ({"record": "/nowhere"}, {"data_parallel_size": 2}, "record is set"),
    ],
)
def test_several_ranks(
    configure: Configure, keys: dict[str, Any], ranks: dict[str, int], named: str | None
) -> None:
    if named is None:
        assert configure(tree(**keys), **ranks).speculative_config.num_speculative_tokens == 16
    else:
        check_refused(refusal(configure, tree(**keys), **ranks), named)


@pytest.mark.parametrize(
    ("is_moe", "backend", "named"),
    [
        (False, "mp", None),
        (True, "mp", "mixture of experts"),
        (False, "ray", "data_parallel_backend is 'ray'"),
    ],
)
def test_data_parallel_ranks_that_depend_on_each_other(is_moe: bool, backend: str, named: str | None) -> None:
    from types import SimpleNamespace

    from vllm.config import ParallelConfig

    from specplug.config import TreeOptions
    from specplug_vllm.refusals import check_ranks

    parallel = ParallelConfig(data_parallel_size=2)
    parallel.data_parallel_backend = backend
    with contextlib.nullcontext() if named is None else pytest.raises(ValueError, match=named):
        check_ranks(TreeOptions(model=DFLASH), None, SimpleNamespace(is_moe=is_moe), parallel)


@pytest.mark.parametrize("sliding_layers", [4, 2])
def test_sliding_window_target_is_refused(configure: Configure, tmp_path: Path, sliding_layers: int) -> None:
    full = 4 - sliding_layers
    layers = ["full_attention"] * full + ["sliding_attention"] * sliding_layers
    window = {
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": full,
        "layer_types": layers,
    }
    model = copied(str(models.path("quick", "target")), tmp_path / "sliding", weights=False, **window)
    check_refused(refusal(configure, tree(), model=model), "sliding")


def test_v1_runner_is_refused(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    check_refused(refusal(configure, tree()), "VLLM_USE_V2_MODEL_RUNNER=0")


def check_refused(message: str, named: str) -> None:
    assert message.startswith("method ddtree refuses: ")
    assert named in message
    assert "\n" not in message
    assert message.endswith(".")
