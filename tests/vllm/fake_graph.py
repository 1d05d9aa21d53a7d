"""A CUDA graph's capture and replay, played on a CPU.

A capture runs its work and records every operation under Python: PyTorch's operators and launches of Triton
kernels, with the very tensors and the numbers they were given. A replay runs these again and no Python in
between. So it shows what a graph shows: a tensor that a later step made anew is not read, its predecessor is;
a number that the host computed is the number of the capture; what the host would have to read from the device
is refused. It says nothing of streams, of memory that is freed under a graph (here it stays), of speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

# The result's size, or a number for the host, depends on values.
READING = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "unique",
    "bincount",
    "is_nonzero",
    "equal",
)
UNWRITTEN = ("empty", "new_empty")  # memory of the graph's pool: nothing runs


class FakeGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.launches: list[str] = []  # names of Triton kernels, in order
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode():  # as vLLM's steps
            for again in self.work:
                again()

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any, outputs: Any) -> None:
        """``outputs`` came of ``function``; a replay writes what it gives then into the same tensors."""
        captured = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]

        def again() -> None:
            results = (x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, torch.Tensor))
            for result, output in zip(results, captured, strict=True):
                if result.data_ptr() != output.data_ptr():  # else a view, or written in place
                    output.copy_(result)

        self.work.append(again)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition("::")[2].partition(".")[0]
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if masked or name.startswith(READING):
            raise RuntimeError(f"{func.name()} is not permitted when a stream is capturing")
        outputs = func(*args, **kwargs)
        if not name.startswith(UNWRITTEN):
            self.graph.record(func, args, kwargs, outputs)
        return outputs


_under_way: list[FakeGraph] = []


@contextlib.contextmanager
def capturing(graph: FakeGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Stands for ``torch.cuda.graph``: what runs inside goes into ``graph``."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        graph.launches.append(self.fn.__name__)
        library(launch)(self, *args, **kwargs)

    _under_way.append(graph)
    try:
        with mock.patch.object(GridExecutor, "__call__", recorded), _Recorder(graph):
            yield
    finally:
        _under_way.pop()


def library(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as somebody's kernel: a graph sees its arguments and results, not the inside."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            outputs = function(*args, **kwargs)
        if _under_way:
            _under_way[-1].record(function, args, kwargs, outputs)
        return outputs

    return launch


@contextlib.contextmanager
def full_graphs(running: Any, requests: list[int]) -> Iterator[dict[Any, FakeGraph]]:
    """The target forward of an engine captured for ``requests`` requests each, by vLLM's own manager."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils as stock

    runner = running.runner
    width, config = runner.decode_query_len, runner.compilation_config
    layers = [x for x in config.static_forward_context.values() if hasattr(x, "use_direct_call")]
    with contextlib.ExitStack() as patches:

        def patch(owner: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, value))

        patch(torch.cuda, "CUDAGraph", FakeGraph)
        patch(torch.cuda, "graph", capturing)
        patch(stock, "graph_capture", lambda device: contextlib.nullcontext())
        patch(stock, "capture_pool", lambda pool, config: contextlib.nullcontext())
        patch(stock, "current_stream", lambda: None)
        patch(stock.current_platform, "get_global_graph_pool", lambda: None)
        for layer in layers:  # an opaque operator would hide ours, and run its Python again
            patch(layer, "use_direct_call", True)
        patch(config, "cudagraph_capture_sizes", [width * n for n in requests])
        patch(config, "max_cudagraph_capture_size", width * max(requests))
        manager = stock.ModelCudaGraphManager(
            runner.vllm_config, runner.device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=width
        )
        manager.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            None,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            use_aux_hidden_state_outputs=True,
        )
        patch(runner, "cudagraph_manager", manager)
        yield manager.graphs
