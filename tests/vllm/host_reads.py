"""Who reads tensors on the host while rounds run, and which of our kernels are launched.

On a GPU a host read makes the host wait for the device. On this CPU every tensor would be readable for free,
so the reads are counted where Python asks for them. A tensor counts as the device's unless it is the host's
by design: a buffer that vLLM keeps on the host, what is computed from such buffers alone, and the copies that
``.to("cpu", non_blocking=True)`` makes, which nobody waits for: they are read when an event says so.
A read is ours if the nearest caller among specplug, vLLM and Triton (whose interpreter reads everything) is
specplug.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

READS = {
    "item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__",
    "__contains__", "__format__", "__repr__", "nonzero", "argwhere", "masked_select", "unique",
    "unique_consecutive", "equal", "allclose", "is_nonzero", "repeat_interleave", "bincount",
}  # fmt: skip
OURS = ("specplug", "specplug_kernels", "specplug_vllm")
OTHERS = ("vllm", "triton", "specplug_rig")


class HostReads(TorchFunctionMode):
    """Counts the reads of specplug while it is active; ``found`` names function and place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._host: dict[int, torch.Tensor] = {}  # by storage; kept, or an address could come again

    def keep(self, tensor: torch.Tensor) -> None:
        """This one is the host's by design."""
        self._host[tensor.untyped_storage().data_ptr()] = tensor

    def on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        copied = name == "to" and "cpu" in map(str, (*args[1:], *kwargs.values()))
        if copied and kwargs.get("non_blocking"):
            result = func(*args, **kwargs).clone()
            self.keep(result)
            return result
        by_host = bool(tensors) and all(map(self.on_host, tensors))
        if (copied or self._reads(name, args, kwargs)) and not by_host and (place := our_caller()):
            self.found[f"{name} at {place}"] += 1
        result = func(*args, **kwargs)
        if by_host:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.keep(leaf)
        return result

    @staticmethod
    def _reads(name: str, args: Any, kwargs: Any) -> bool:
        if name in ("__getitem__", "__setitem__"):  # as many rows as a mask has true entries, or a number
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index)
        if name == "where":
            return len(args) + len(kwargs) == 1
        return name in READS


def our_caller() -> str:
    """The line of specplug that called, or "" where vLLM or Triton stand between."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package in OURS:
            return f"{module}:{frame.f_lineno}"
        if package in OTHERS:
            return ""
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def host_reads(running: Any) -> Iterator[HostReads]:
    """Count our reads while the engine of a test runs."""
    mode, state = HostReads(), running.state
    stock = state.prepare_attn

    def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode.keep(input_batch.seq_lens_cpu_upper_bound)
        return stock(input_batch, *args, **kwargs)

    with mock.patch.object(state, "prepare_attn", prepare_attn), mode:
        yield mode


@contextlib.contextmanager
def launches(running: Any) -> Iterator[list[Counter[str]]]:
    """Launches of our kernels by name, for each step of the engine from its layout to the next one's."""
    from triton.runtime.interpreter import GridExecutor

    steps: list[Counter[str]] = []
    state, lay_out, launch = running.state, running.state.prepare_attn, GridExecutor.__call__

    def prepare_attn(*args: Any, **kwargs: Any) -> Any:
        steps.append(Counter())
        return lay_out(*args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("specplug_kernels"):
            steps[-1][self.fn.__name__] += 1
        return launch(self, *args, **kwargs)

    with (
        mock.patch.object(state, "prepare_attn", prepare_attn),
        mock.patch.object(GridExecutor, "__call__", call),
    ):
        yield steps
