"""Fixtures of the tests that run the real SGLang on a CPU (see ci/test for the environment)."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
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


ERRORS = "SPECPLUG_RIG_SGLANG_ERRORS"


def pytest_configure() -> None:
    """One file for the errors of all engines: what xdist's workers start inherits its name."""
    if ERRORS not in os.environ:
        os.environ[ERRORS] = tempfile.mkstemp(prefix="specplug-sglang-", suffix=".log")[1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show them where a test failed: of a worker that an engine took along nothing else is left."""
    text = Path(os.environ.get(ERRORS, os.devnull)).read_text(errors="replace")
    if text and terminalreporter.stats.get("failed"):
        terminalreporter.section("errors that SGLang logged, of failure drills too")
        terminalreporter.write_line(text[-12000:])


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
