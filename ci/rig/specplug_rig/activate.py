"""Decides, at the start of every Python process of the environment, whether the rig is visible at all.

Triton and vLLM find plugins through entry points, and neither asks one whether it wants to be found: vLLM's
CPU build turns Triton on as soon as a backend *named* `cpu` exists. So the rig's own distribution has no
entry points. They lie in the folder `visible/`, whose `.dist-info` importlib.metadata sees only while that
folder is on sys.path, and `specplug_rig.pth` calls `activate()` to put it there. Spawned and forked
processes inherit the answer the same way.

Standard library only, and no import at all while the rig is off: this runs in every interpreter start.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

VISIBLE = Path(__file__).parent / "visible"
# Each exists exactly where a driver for CUDA, ROCm or CUDA under WSL is loaded.
GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/usr/lib/wsl/lib/libcuda.so.1"))


def gpu_present(*, torch_version: str | None = None, gpu_files: Iterable[Path] = GPU_FILES) -> bool:
    """True where this environment could use a GPU: a driver is loaded and torch is not a CPU-only build.

    `torch_version` defaults to the installed torch's; an environment without torch counts as able to use one.
    """
    if torch_version is None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            torch_version = version("torch")
        except PackageNotFoundError:
            torch_version = ""
    return not torch_version.endswith("+cpu") and any(path.exists() for path in gpu_files)


def wanted(environ: Mapping[str, str], **gpu: object) -> bool:
    """True when Triton's interpreter is asked for and there is no GPU. `gpu` goes to `gpu_present`."""
    return environ.get("TRITON_INTERPRET") == "1" and not gpu_present(**gpu)


def activate() -> None:
    """Put the rig's entry points on sys.path when they are wanted; idempotent."""
    if wanted(os.environ) and str(VISIBLE) not in sys.path:
        sys.path.append(str(VISIBLE))
