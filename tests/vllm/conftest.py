"""Fixtures of the tests that run the real vLLM on a CPU (see ci/test for the environment)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests share modules of this folder

from engine_rig import Reference

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
