"""Entry point of `sglang.srt.plugins` while the rig is visible: the four things that keep stock SGLang from
running DSPARK and DFLASH on a CPU.

- the attention backends: `ReferenceAttention` serves every name the target or a draft may ask for.
- the argument checks that refuse the CPU: they see the device as CUDA, and nothing else of them changes.
- `Tensor.record_stream`, which no CPU tensor has: it does nothing there.
- deterministic inference: its batch-invariant Triton operators stay off. Tests want the seeded sampling that
  comes with them.

SPECPLUG_RIG_SGLANG_LOAD names a Python file to run in every process afterwards, with which a test can tamper
with the engine's processes (negative controls, failure drills). SPECPLUG_RIG_SGLANG_ERRORS names a file to
which every process appends the errors that SGLang logs: an engine whose scheduler dies kills the process it
was started in, and what that process had captured is gone.
"""

import logging
import os
import runpy
from collections.abc import Callable
from typing import Any
from unittest import mock

LOAD = "SPECPLUG_RIG_SGLANG_LOAD"
ERRORS = "SPECPLUG_RIG_SGLANG_ERRORS"
# torch_native is the target's; the others are what the draft worker falls back to.
BACKENDS = ("torch_native", "flashinfer", "triton")


def register() -> None:
    """Run by SGLang in every one of its processes, before any argument is read."""
    import torch
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in BACKENDS:
        ATTENTION_BACKENDS[name] = _reference_attention
    record_stream = torch.Tensor.record_stream
    torch.Tensor.record_stream = lambda tensor, stream: (
        None if tensor.device.type == "cpu" else record_stream(tensor, stream)
    )
    for algorithm in ("dspark", "dflash"):
        HookRegistry.register(
            f"sglang.srt.arg_groups.speculative_hook._handle_{algorithm}", _as_on_cuda, HookType.AROUND
        )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        lambda runner: None,
        HookType.REPLACE,
    )
    if ERRORS in os.environ:
        errors = logging.FileHandler(os.environ[ERRORS], delay=True)
        errors.setLevel(logging.ERROR)
        errors.setFormatter(logging.Formatter("%(asctime)s pid %(process)d %(name)s: %(message)s"))
        logging.getLogger("sglang").addHandler(errors)
    if LOAD in os.environ:
        runpy.run_path(os.environ[LOAD])


def _reference_attention(runner: Any) -> Any:
    from specplug_rig_sglang.attention import ReferenceAttention

    return ReferenceAttention(runner)


def _as_on_cuda(check: Callable[[Any], None], server_args: Any) -> None:
    from sglang.srt.arg_groups import speculative_hook

    view = speculative_hook.resolving_view
    with mock.patch.object(speculative_hook, "resolving_view", lambda args: OnCuda(view(args))):
        check(server_args)


class OnCuda:
    """A view of the server's arguments in which the device is `cuda`."""

    device = "cuda"

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)
