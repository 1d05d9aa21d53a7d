"""Trees, chains and ancestor words: what is compiled ahead of time and what is timed on a GPU."""

from collections.abc import Callable
from functools import partial

import torch
from aot import Case

from specplug_kernels.growth import (
    ancestor_words,
    ancestor_words_kernel,
    chain_kernel,
    greedy_chain,
    grow,
    grow_kernel,
)

TABLE = {"tokens_ptr": "*i64", "log_probs_ptr": "*fp32"}
OUT = {
    "out_tokens_ptr": "*i64",
    "out_parents_ptr": "*i32",
    "out_depths_ptr": "*i32",
    "out_scores_ptr": "*fp32",
    "out_counts_ptr": "*i32",
    "out_ancestors_ptr": "*i64",
}
WIDTHS = {"gamma": "i32", "rows": "i32", "candidates": "i32"}
ONE_WARP = {"num_warps": 1}


def cases_growth() -> list[Case]:
    """Blocks have one size, so each kernel has one binary for all shapes up to 64 nodes and candidates."""
    words = {"parents_ptr": "*i32", "counts_ptr": "*i32", "words_ptr": "*i64", "budget": "i32"}
    return [
        Case("growth: tree", grow_kernel, TABLE | OUT | WIDTHS | {"budget": "i32"}, {}, ONE_WARP),
        Case("growth: greedy chain", chain_kernel, TABLE | OUT | WIDTHS, {}, ONE_WARP),
        Case("growth: ancestor words", ancestor_words_kernel, words, {}, ONE_WARP),
    ]


def timings(device: torch.device | str) -> list[tuple[str, Callable[[], object], int]]:
    """(name, launch, ideal bytes). Shapes of a DSpark draft, and the largest; tiny in the interpreter."""
    gpu = torch.device(device).type != "cpu"
    shapes = [(1, 7, 16, 16), (64, 7, 16, 16), (64, 7, 1, 16), (256, 16, 64, 64)] if gpu else [(1, 2, 4, 4)]
    launches: list[tuple[str, Callable[[], object], int]] = []
    for requests, gamma, rows, candidates in shapes:
        log_probs = torch.randn(requests, gamma, rows, candidates, device=device).mul(2).log_softmax(-1)
        order = torch.rand(requests, gamma, 4 * candidates, device=device).argsort(-1)
        tokens = order[..., :candidates].contiguous()
        shape = f"R={requests} depth={gamma} P={rows} C={candidates}"
        for budget in (16, 64) if gpu else (3,):
            tree = grow(tokens, log_probs, budget)
            moved = tokens.nbytes + log_probs.nbytes + requests * (28 * budget + 4)
            launches.append(
                (f"tree {shape} B={budget}", partial(grow, tokens, log_probs, budget, out=tree), moved)
            )
        chain = greedy_chain(tokens, log_probs)
        moved = requests * (12 * gamma * candidates + 28 * gamma + 4)
        launches.append((f"greedy chain {shape}", partial(greedy_chain, tokens, log_probs, out=chain), moved))
    words = partial(ancestor_words, tree.parents, tree.counts, out=tree.ancestors)
    moved = requests * (12 * budget + 4)
    launches.append((f"ancestor words R={requests} B={budget}", words, moved))
    return launches
