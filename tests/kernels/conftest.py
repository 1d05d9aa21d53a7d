"""Kernel tests: the kernels run in Triton's interpreter on the CPU, or as they are on a GPU.

`SPECPLUG_KERNEL_DEVICE=cuda pytest tests/kernels` runs the same tests on a GPU. Without it, tests/conftest.py
has loaded Triton as an interpreter before anything else could import it, and this file keeps
TRITON_INTERPRET=1 set while modules of this folder are imported and while their tests run, and at no other
time: the tests of other folders, in the same process, see the environment as it was.
"""

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests share modules of this folder

import guards

DEVICE = os.environ.get("SPECPLUG_KERNEL_DEVICE", "cpu")
NEEDED = ("triton", "specplug_kernels") + (("specplug_rig",) if DEVICE == "cpu" else ())
MISSING = [name for name in NEEDED if find_spec(name) is None]


def interpreted(patch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Import the modules of this folder under the interpreter; skip them where there is no Triton at all."""
    if MISSING and isinstance(collector, pytest.Module):
        reason = f"Skipped: kernel tests need {', '.join(MISSING)}; `ci/env vllm` installs it"
        yield
        return pytest.CollectReport(collector.nodeid, "skipped", (str(collector.path), 0, reason), [])
    with pytest.MonkeyPatch.context() as patch:
        interpreted(patch)
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpreted(patch)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels under test run: "cpu" means in the interpreter."""
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def guarded() -> Callable[..., guards.Guarded]:
    """`view, check = guarded(shape, dtype, device)`: an output buffer whose surroundings are watched."""
    return guards.guarded
