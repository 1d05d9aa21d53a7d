"""Time of specplug.ddtree.build_tree and grow against their heap references, in one run on the CPU.

    python benchmarks/tree_build.py [--vocab 1024] [--gamma 7] [--threads 1] [--repeats 20]
    python benchmarks/tree_build.py --conditioned [--candidates 32] [--gamma 7] [--threads 1] [--repeats 20]

Both sides get the same fp32 log-probabilities [batch, gamma, vocab] and must return the same nodes, which is
checked. "select" is finding the candidate tokens (ours: specplug.candidates.tree_candidates; reference: one
stable sort of the vocabulary), "grow" is the rest. "/topk" compares with a reference whose sort is replaced
by torch.topk: faster, but ties between equal log-probabilities then fall anywhere. The parts take turns, a
few warm runs each, so that a busy spell of the machine hits all of them; every figure is a median. A factor
below 1 means that ours is slower there.

With --conditioned both sides get the same parent-conditioned table [batch, gamma, C, C] instead and grow
trees from it: specplug.ddtree.grow against grow_reference. Making the table is benchmarks/candidates.py.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from specplug.candidates import TransitionTable, tree_candidates
from specplug.ddtree import build_tree, build_tree_reference, grow, grow_reference
from specplug.tree import DraftTree

BATCHES = (1, 8, 32)
BUDGETS = (16, 64, 256)
TURN = 5  # timed runs of one part in a row, after an untimed one


def milliseconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def measure(log_probs: torch.Tensor, budget: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of each part over independent depths, the sides taking turns."""
    check_same(build_tree(log_probs, budget), build_tree_reference(log_probs, budget))
    width = min(budget, log_probs.shape[-1])
    values, tokens = log_probs.topk(width)
    table = TransitionTable(tokens, values[:, :, None])
    parts: dict[str, Callable[[], object]] = {
        "ours": lambda: build_tree(log_probs, budget),
        "ours_select": lambda: tree_candidates(log_probs, budget),
        "reference": lambda: build_tree_reference(log_probs, budget),
        "reference_grow": lambda: grow_reference(table, budget),
        "topk": lambda: log_probs.topk(width),
    }
    return medians(parts, repeats)


def measure_conditioned(table: TransitionTable, budget: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of both sides over a parent-conditioned table."""
    check_same(grow(table, budget), grow_reference(table, budget))
    parts: dict[str, Callable[[], object]] = {
        "ours": lambda: grow(table, budget),
        "reference": lambda: grow_reference(table, budget),
    }
    return medians(parts, repeats)


def check_same(ours: DraftTree, reference: DraftTree) -> None:
    if not (torch.equal(ours.tokens, reference.tokens) and torch.equal(ours.parents, reference.parents)):
        raise SystemExit(f"batch {ours.tokens.shape[0]}, budget {ours.budget}: the trees differ")


def medians(parts: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(0, repeats, TURN):
        for name, action in parts.items():
            action()
            times[name].extend(milliseconds(action) for _ in range(TURN))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vocab", type=int, default=1024, help="vocabulary (default: that of the shipped models)"
    )
    parser.add_argument("--gamma", type=int, default=7, help="draft depth")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, for both sides")
    parser.add_argument(
        "--repeats", type=int, default=20, help=f"timed runs, rounded up to a multiple of {TURN}"
    )
    parser.add_argument("--conditioned", action="store_true", help="grow from a parent-conditioned table")
    parser.add_argument("--candidates", type=int, default=32, help="of that table, a depth")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats: expected 1 or more, got {options.repeats}")
    torch.set_num_threads(options.threads)
    print(f"{processor()}; torch {torch.__version__}, {options.threads} thread(s); {datetime.date.today()}")
    if options.conditioned:
        conditioned_rows(options)
    else:
        independent_rows(options)


def conditioned_rows(options: argparse.Namespace) -> None:
    print(f"{options.candidates} candidates, depth {options.gamma}; milliseconds per batch, medians")
    print()
    print("batch  budget |   ours | reference | factor")
    generator = torch.Generator().manual_seed(0)
    for batch in BATCHES:
        shape = (batch, options.gamma, options.candidates, options.candidates)
        log_probs = (3 * torch.randn(shape, generator=generator)).log_softmax(-1)
        tokens = torch.rand(batch, options.gamma, 4 * options.candidates, generator=generator)
        tokens = tokens.argsort(-1)[..., : options.candidates]  # distinct ids in no order
        for budget in BUDGETS:
            t = measure_conditioned(TransitionTable(tokens, log_probs), budget, options.repeats)
            print(
                f"{batch:5}  {budget:6} | {t['ours']:6.2f} | {t['reference']:9.2f} "
                f"| {t['reference'] / t['ours']:5.1f}x"
            )


def independent_rows(options: argparse.Namespace) -> None:
    print(f"vocabulary {options.vocab}, depth {options.gamma}; milliseconds per batch, medians")
    print()
    print("batch  budget |   ours = select +   grow | reference = select +   grow | factor   /topk")
    generator = torch.Generator().manual_seed(0)
    for batch in BATCHES:
        logits = 3 * torch.randn(batch, options.gamma, options.vocab, generator=generator)
        log_probs = logits.log_softmax(-1)
        for budget in BUDGETS:
            t = measure(log_probs, budget, options.repeats)
            grow, heap = t["ours"] - t["ours_select"], t["reference_grow"]
            print(
                f"{batch:5}  {budget:6} | {t['ours']:6.2f}   {t['ours_select']:6.2f}   {grow:6.2f} "
                f"| {t['reference']:9.2f}   {t['reference'] - heap:6.2f}   {heap:6.2f} "
                f"| {t['reference'] / t['ours']:5.1f}x {(heap + t['topk']) / t['ours']:6.1f}x"
            )


if __name__ == "__main__":
    main()
