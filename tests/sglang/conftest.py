"""Fixtures of the tests that run the real SGLang on a CPU (see ci/test for the environment)."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sglang_rig import Reference

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "vllm")]  # tests share modules, the prompts with those of vLLM

if importlib.util.find_spec("sglang") is None:  # another engine's environment, where these are deselected
    collect_ignore_glob = ["test_*.py"]
elif missing := {"SPECPLUG_RIG_SGLANG", "SGLANG_USE_CPU_ENGINE"} - os.environ.keys():
    raise pytest.UsageError(
        f"{' and '.join(sorted(missing))} must be 1 before Python starts; run `ci/test sglang`"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test may be the one that starts the session's reference, beside another that starts an engine."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def plain() -> Iterator[Reference]:
    """Stock SGLang, plain decoding."""
    from sglang_rig import Reference

    reference = Reference()
    yield reference
    reference.close()
