"""How SGLang is started as a child process, for `specplug.server`: command line, environment, and whether it
can be started here at all."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specplug import server

# How SGLang runs on a CPU: the last two ask for Triton's interpreter and for specplug's test rig, where it is
# installed; SGLang itself drafts on GPUs only.
CPU_SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
    "SPECPLUG_RIG_SGLANG": "1",
}
CPU_FLAGS: dict[str, str | int | bool] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-cuda-graph": True,
    "dtype": "float32",
    "mem-fraction-static": "0.5",
    "max-total-tokens": 16384,
}


def command(
    model: Path | str, *, port: int, flags: Mapping[str, str | int | bool], on_gpu: bool
) -> list[str]:
    """Command line of `sglang.launch_server` by this Python; on a CPU in fp32."""
    line = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    line += ["--host", server.HOST, "--port", str(port)]
    for name, value in {**({} if on_gpu else CPU_FLAGS), **flags}.items():
        line += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return line


def tree_flags(draft: Path | str, *, budget: int) -> dict[str, str | int | bool]:
    """Flags of DDTREE: a window is the root and ``budget`` nodes."""
    return {
        "speculative-algorithm": "DDTREE",
        "speculative-draft-model-path": str(draft),
        "speculative-num-draft-tokens": budget + 1,
    }


def environment(*, on_gpu: bool, config: Path | None = None, ragged: bool = False) -> dict[str, str]:
    """This process's environment plus what SGLang needs; ``config``: the file with specplug's options.

    A variable that the user has set stays as it is, but for the two that say what is to be done.
    """
    wanted = {**server.OFFLINE_SETTINGS, **({} if on_gpu else CPU_SETTINGS), **os.environ}
    if config is not None:
        wanted["SPECPLUG_CONFIG"] = str(config)
    if ragged:
        wanted["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
    return wanted


def write_config(path: Path, options: Mapping[str, Any]) -> Path:
    """The file that SPECPLUG_CONFIG names."""
    path.write_text(json.dumps(options, indent=1) + "\n")
    return path


def missing(*, on_gpu: bool) -> str | None:
    """One sentence saying why SGLang cannot be started here and what to do, or None."""
    if importlib.util.find_spec("sglang") is None:
        return (
            "SGLang is not installed for this Python; run ci/env sglang and .venvs/sglang/bin/specplug in a "
            "clone of specplug, or pip install 'specplug[sglang]'"
        )
    if on_gpu:
        return None
    # Asked in a child: the rig decides when Python starts whether it is visible.
    probe = "from importlib.util import find_spec as f; raise SystemExit(f('sgl_kernel') is None)"
    if subprocess.run([sys.executable, "-c", probe], env=environment(on_gpu=False)).returncode == 0:
        return None
    return (
        "there is no GPU, and SGLang drafts on GPUs only; specplug's test environment has a rig for the CPU: "
        "run ci/env sglang and .venvs/sglang/bin/specplug in a clone of specplug"
    )
