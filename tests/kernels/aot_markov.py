"""Candidates and Markov tables: what is compiled ahead of time and what is timed on a GPU."""

from collections.abc import Callable
from functools import partial

import torch
from aot import Case, launched

from specplug_kernels.candidates import factorised, scan_kernel, select, select_kernel
from specplug_kernels.markov import conditioned, score_kernel

VOCAB, COUNT, RANK = 1 << 18, 64, 256  # the largest that are served


def _of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cases_markov() -> list[Case]:
    """The largest blocks that the launchers choose, narrow and wide inputs."""
    half, full = torch.bfloat16, torch.float32
    cases = []
    for what, dtype, bias in (
        ("bf16 logits, no bias", half, None),
        ("fp32 logits, fp32 bias", full, _of(full, 1, 1, VOCAB)),
    ):
        launch = partial(select, _of(dtype, 1, 1, VOCAB), COUNT, bias=bias)
        cases.append(launched(f"candidates: scan, {what}", scan_kernel, launch))
        cases.append(launched(f"candidates: select, {what}, C=64 V=262144", select_kernel, launch))
    anchors, targets = _of(torch.int64, 1), _of(torch.int64, VOCAB)
    for what, w1, w2, more in (
        ("vanilla head, bf16", half, half, {}),
        ("vanilla head, fp32, reduced vocabulary", full, full, {"targets": targets}),
        (
            "gated head, bf16 W2",
            full,
            half,
            {"latents": lambda tokens, at: _of(full, *tokens.shape, RANK)},
        ),
    ):
        weights = _of(w1, VOCAB, RANK), _of(w2, VOCAB, RANK)
        launch = partial(conditioned, _of(w2, 1, 2, VOCAB), *weights, 1.0, anchors, COUNT, **more)
        cases.append(launched(f"markov: score, {what}, C=64", score_kernel, launch))
    return cases


def timings(device: torch.device | str) -> list[tuple[str, Callable[[], object], int]]:
    """(name, launch, ideal bytes). A Qwen3 vocabulary in bf16, rank 256; tiny in the interpreter.

    A conditioned table is timed with the library's product of every depth, which reads all of W2.
    """
    gpu = torch.device(device).type != "cpu"
    vocab, gamma, rank = (151_936, 7, 256) if gpu else (300, 2, 16)
    half = {"dtype": torch.bfloat16, "device": device}
    w1, w2 = torch.randn(vocab, rank, **half), torch.randn(vocab, rank, **half) / rank**0.5
    launches: list[tuple[str, Callable[[], object], int]] = []
    for requests, count in ((1, 16), (16, 16), (64, 16), (64, 64)) if gpu else ((2, 4),):
        logits = torch.randn(requests, gamma, vocab, **half)
        anchors = torch.arange(requests, device=device)
        shape = f"R={requests} depth={gamma} V={vocab} C={count}"
        rows = requests * gamma
        moved = logits.nbytes + rows * (12 * count + 4)
        out = select(logits, count)
        launches.append((f"factorised {shape}", partial(factorised, logits, count, out=out), moved))
        first = logits[:, :1]
        moved = 2 * first.nbytes + requests * (12 * count + 4)
        best = select(first, count, bias=first)
        launches.append(
            (f"biased select {shape}", partial(select, first, count, bias=first, out=best), moved)
        )
        table = conditioned(logits, w1, w2, 1.0, anchors, count)
        moved = 2 * logits.nbytes + gamma * w2.nbytes  # base and bias, and W2 in the product
        moved += rows * (3 * count * rank * w2.itemsize + 4 * count**2 + 40 * count)
        launch = partial(conditioned, logits, w1, w2, 1.0, anchors, count, out=table)
        launches.append((f"conditioned {shape} rank={rank}", launch, moved))
    return launches
