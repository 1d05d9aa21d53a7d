"""Candidates and Markov tables: what is compiled ahead of time and what is timed on a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from aot import Case

from specplug_kernels.candidates import factorised, scan_kernel, select, select_kernel
from specplug_kernels.markov import conditioned, score_kernel

SCAN = {
    "maxima_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "gamma": "i32",
    "vocab": "i32",
    "chunks": "i32",
    "scale": "fp32",
}
STRIDES = {"logits_request": "i32", "logits_depth": "i32", "bias_request": "i32", "bias_depth": "i32"}
SELECT = {
    "tokens_ptr": "*i64",
    "log_probs_ptr": "*fp32",
    "log_z_ptr": "*fp32",
    "blocks": "i32",
    "candidates": "i32",
}
SCORE = {
    "chosen_ptr": "*i64",
    "mixed_ptr": "*fp32",
    "log_z_ptr": "*fp32",
    "reach_ptr": "*fp32",
    "rows_ptr": "*i64",
    "tokens_ptr": "*i64",
    "log_probs_ptr": "*fp32",
    "next_reach_ptr": "*fp32",
    "parents": "i32",
    "candidates": "i32",
    "others": "i32",
    "rank": "i32",
    "scale": "fp32",
    "base_request": "i32",
    "rows_request": "i32",
    "table_row": "i32",
    "w2_row": "i32",
    "tokens_request": "i32",
    "log_probs_request": "i32",
}


def _case(
    name: str, kernel: Any, types: dict[str, str | None], values: dict[str, Any], **options: int
) -> Case:
    """A case whose parameters of type None are passed as None, which compiles their use away."""
    absent = {key: None for key, type_ in types.items() if type_ is None}
    signature = {key: type_ for key, type_ in types.items() if type_ is not None}
    constants = dict.fromkeys(values | absent, "constexpr")
    return Case(name, kernel, signature | constants, values | absent, options)


def cases_markov() -> list[Case]:
    """The largest blocks that the launchers choose, narrow and wide inputs."""
    cases = []
    for logits, bias in (("*bf16", None), ("*fp32", "*fp32")):
        what = f"{logits[1:]} logits, " + (f"{bias[1:]} bias" if bias else "no bias")
        inputs = {"logits_ptr": logits, "bias_ptr": bias} | SCAN | STRIDES
        blocks = {"CHUNK": 64, "CHUNKS": 32}
        name = f"candidates: scan, {what}"
        cases.append(_case(name, scan_kernel, inputs, blocks, num_warps=4, enable_fp_fusion=False))
        blocks = {"CHUNK": 64, "N_CHUNKS": 4096, "N_BLOCKS": 128, "N_BEST": 64}
        name = f"candidates: select, {what}, C=64 V=262144"
        types = inputs | SELECT
        cases.append(_case(name, select_kernel, types, blocks, num_warps=8, enable_fp_fusion=False))
    for what, w1, w2, mean, targets in (
        ("vanilla head, bf16", "*bf16", "*bf16", "*bf16", None),
        ("vanilla head, fp32, reduced vocabulary", "*fp32", "*fp32", "*fp32", "*i64"),
        ("gated head, bf16 W2", "*fp32", "*bf16", None, None),
    ):
        same = w1 == w2 != "*fp32"
        inputs = {
            "base_ptr": w2,
            "table_ptr": w1,
            "w2_ptr": w2,
            "mean_ptr": mean,
            "targets_ptr": targets,
        } | SCORE
        blocks = {"SAME": same, "BLOCK": 64, "BLOCK_RANK": 32 if same else 16}
        name = f"markov: score, {what}, C=64"
        cases.append(_case(name, score_kernel, inputs, blocks, num_warps=8, enable_fp_fusion=True))
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
