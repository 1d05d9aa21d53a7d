"""Fixtures of the tests that run the real vLLM on a CPU (see ci/test for the environment)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests share modules of this folder

from config_rig import Configure, copied
from engine_rig import Reference

from specplug import models

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test may be the one that starts the session's reference, beside another that starts an engine."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def rig() -> None:
    """vLLM's V2 runner needs Triton's interpreter, which is chosen when the process starts."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("TRITON_INTERPRET=1 must be set before Python starts; run `ci/test vllm`")


@pytest.fixture(scope="session")
def plain(rig: None) -> Iterator[Reference]:
    """Stock vLLM, plain decoding."""
    reference = Reference()
    yield reference
    reference.close()


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a weight is a failure."""
    import safetensors
    import torch
    import vllm.model_executor.model_loader.weight_utils as weight_utils

    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"a weight was read: {args}")

    for holder, name in ((safetensors, "safe_open"), (weight_utils, "safe_open"), (torch, "load")):
        monkeypatch.setattr(holder, name, read)


@pytest.fixture(scope="module")
def bare_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return copied(
        str(models.path("quick", "target")), tmp_path_factory.mktemp("target") / "bare", weights=False
    )


@pytest.fixture(scope="module")
def configure(bare_target: str) -> Configure:
    """Engine configuration with our plugin loaded as vLLM loads it; no engine is started."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    def create(speculative: dict[str, Any] | None, **engine: Any) -> Any:
        settings = {"model": bare_target, "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
        return EngineArgs(**{**settings, "speculative_config": speculative, **engine}).create_engine_config()

    return create
