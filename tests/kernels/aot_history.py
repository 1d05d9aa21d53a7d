"""Penalties and bad words: what is compiled ahead of time and what is timed on a GPU."""

from collections.abc import Callable

import torch
from aot import Case

from specplug_kernels import history

ROWS = {"logits_ptr": "*fp32", "slots_ptr": "*i32", "path_ptr": "*i64", "depths_ptr": "*i64"}
PENALISE = ROWS | {
    "repetition_ptr": "*fp32",
    "frequency_ptr": "*fp32",
    "presence_ptr": "*fp32",
    "prompt_ptr": "*i32",
    "counts_ptr": "*i32",
    "logits_stride": "i32",
    "path_stride": "i32",
    "prompt_stride": "i32",
    "counts_stride": "i32",
    "vocabulary": "i32",
    "BLOCK": "constexpr",
}
BAN = ROWS | {
    "words_ptr": "*i32",
    "offsets_ptr": "*i32",
    "num_words_ptr": "*i32",
    "all_ptr": "*i32",
    "prompt_lens_ptr": "*i32",
    "total_lens_ptr": "*i32",
    "logits_stride": "i32",
    "path_stride": "i32",
    "words_stride": "i32",
    "offsets_stride": "i32",
    "all_stride": "i32",
    "BLOCK": "constexpr",
}


def cases_history() -> list[Case]:
    four = {"num_warps": 4}
    return [
        Case(
            "history: penalise", history._penalise_kernel, PENALISE, {"BLOCK": history.VOCABULARY_BLOCK}, four
        ),
        Case("history: ban", history._ban_kernel, BAN, {"BLOCK": history.WORD_BLOCK}, four),
    ]


def timings(device: torch.device) -> list[tuple[str, Callable[[], None], int]]:
    """(name, launch, ideal bytes): 16 requests of 17 rows, V = 151936; tiny in the interpreter."""
    gpu = torch.device(device).type != "cpu"
    requests, width, gamma, vocabulary = (16, 17, 8, 151936) if gpu else (2, 3, 2, 300)
    rows = requests * width
    logits = torch.randn(rows, vocabulary, device=device)
    slots = torch.arange(requests, dtype=torch.int32, device=device).repeat_interleave(width)
    path = torch.randint(vocabulary, (rows, gamma), device=device)
    depths = torch.randint(gamma + 1, (rows,), device=device)
    state = {
        "repetition": torch.full((requests,), 1.1, device=device),
        "frequency": torch.full((requests,), 0.1, device=device),
        "presence": torch.full((requests,), 0.1, device=device),
        "prompt_words": torch.zeros(requests, -(-vocabulary // 32), dtype=torch.int32, device=device),
        "output_counts": torch.zeros(requests, vocabulary, dtype=torch.int32, device=device),
    }

    def penalise() -> None:
        history.penalise(logits, slots, path, depths, **state)

    moved = rows * vocabulary * 8 + requests * (vocabulary * 4 + vocabulary // 8)  # a request's state once
    return [(f"penalise rows={rows} V={vocabulary}", penalise, moved)]
