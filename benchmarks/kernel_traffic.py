"""Bytes that the kernels move, counted in Triton's interpreter, against the fewest they can.

    python benchmarks/kernel_traffic.py
    python benchmarks/kernel_traffic.py --only moves

Needs no GPU: every load and store of a launch goes through the interpreter, which knows the addresses.
"moved" counts what the memory system is asked for: each address once in a load or store of a program, whose
lanes share it. "touched" counts an address once a launch: what must come from or go to device memory while
everything that is accessed again stays in a cache. The fewest bytes are every input a launch depends on read
once and every output written once; the formula stands with each case.

Where memory is the bound, "moved" may be 1.1 of the fewest. In-tree attention is held to it by "touched": the
blocks of query rows of a window read the same few keys, which they find in L2 (and the fewest count the keys
once). Trees, walk and budget are bound by the latency of their steps, on tables of a few KiB, and are listed
without a limit. Exit code 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from triton.runtime import interpreter

from specplug_kernels import attention, budget, candidates, compaction, growth, history, markov, moves, walk
from specplug_rig import interpreter as rig

LIMIT = 1.1
BF16, INT32 = torch.bfloat16, torch.int32


@dataclass
class Traffic:
    """Bytes of all launches since counting began."""

    launches: int = 0
    moved: int = 0
    touched: int = 0
    _accesses: list[tuple[bool, int, np.ndarray]] = field(default_factory=list, repr=False)

    def access(
        self, pointers: interpreter.TensorHandle, mask: interpreter.TensorHandle, *, write: bool
    ) -> None:
        width = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = np.asarray(pointers.data)
        active = np.unique(addresses[np.broadcast_to(np.asarray(mask.data, dtype=bool), addresses.shape)])
        self.moved += width * active.size
        self._accesses.append((write, width, active))

    def end_launch(self) -> None:
        self.launches += 1
        for kind in {access[:2] for access in self._accesses}:
            addresses = np.concatenate([access[2] for access in self._accesses if access[:2] == kind])
            self.touched += kind[1] * np.unique(addresses).size
        self._accesses.clear()


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count what every kernel launched inside loads and stores."""
    traffic = Traffic()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, launch = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def counted_load(self, pointers, mask, *rest):
        traffic.access(pointers, mask, write=False)
        return load(self, pointers, mask, *rest)

    def counted_store(self, pointers, value, mask, *rest):
        traffic.access(pointers, mask, write=True)
        return store(self, pointers, value, mask, *rest)

    def counted_launch(self, *args, **kwargs):
        result = launch(self, *args, **kwargs)
        traffic.end_launch()
        return result

    # Unmasked accesses come here too, with a mask of ones.
    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    executor.__call__ = counted_launch
    try:
        yield traffic
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor.__call__ = launch


class Case(NamedTuple):
    """`fewest`: bytes; `bound`: "moved" or "touched" must stay within LIMIT of it, "" = not memory-bound."""

    name: str
    launch: Callable[[], object]
    fewest: int
    bound: str


def candidate_cases() -> Iterator[Case]:
    rows, gamma, vocab, count, rank = 1, 2, 151_936, 32, 256
    logits = torch.randn(rows, gamma, vocab).to(BF16)
    chosen = rows * gamma * (12 * count + 4)
    yield Case(
        f"candidates: factorised, V={vocab} C={count} bf16",
        partial(candidates.factorised, logits, count),
        logits.nbytes + chosen,
        "moved",
    )
    w1, w2 = (torch.randn(vocab, rank).mul(0.1).to(BF16) for _ in range(2))
    anchors = torch.arange(rows)
    scored = count * rank * 2 + 4 * count * count + 20 * count  # w2's rows of the candidates, results, reach
    parents = 1 + (gamma - 1) * count
    yield Case(
        f"markov: conditioned, depth={gamma} V={vocab} C={count} rank={rank} bf16",
        partial(markov.conditioned, logits, w1, w2, 1.0, anchors, count),
        2 * logits.nbytes + chosen + rows * (gamma * scored + parents * rank * 2),
        "moved",
    )


def attention_cases() -> Iterator[Case]:
    requests, heads, kv_heads, size = 4, 8, 2, 128
    for nodes in (16, 64):
        width, total = nodes + 1, requests * (nodes + 1)
        q, output = (torch.randn(total, heads, size).to(BF16) for _ in range(2))
        k, v = (torch.randn(total, kv_heads, size).to(BF16) for _ in range(2))
        counts = torch.full((requests,), nodes, dtype=INT32)
        parents = torch.arange(-1, nodes - 1, dtype=INT32).expand(requests, -1).contiguous()
        prefix_out, prefix_lse = (
            output.view(requests, width, heads, size).clone(),
            torch.randn(requests, width, heads),
        )
        launch = partial(
            attention.in_tree_merged,
            q,
            k,
            v,
            starts=torch.arange(requests, dtype=INT32) * width,
            counts=counts,
            ancestors=growth.ancestor_words(parents, counts),
            scale=size**-0.5,
            prefix_out=prefix_out,
            prefix_lse=prefix_lse,
            output=output,
        )
        fewest = sum(x.nbytes for x in (q, k, v, prefix_out, prefix_lse, output)) + 8 * requests * (nodes + 1)
        yield Case(
            f"attention: merged, W={width} H={heads}/{kv_heads} D={size} bf16", launch, fewest, "touched"
        )


def move_cases() -> Iterator[Case]:
    requests, depth, width, features = 4, 7, 17, 3 * 2048
    starts = torch.arange(requests, dtype=INT32) * width
    path = torch.arange(0, 2 * depth + 1, 2).expand(requests, -1).contiguous()  # every accepted node moves
    accepted = moves.PathMoves(path, torch.full((requests,), depth + 1, dtype=INT32), starts)
    rows = torch.randn(requests * width, features).to(BF16)
    index = requests * ((depth + 1) * 8 + 12)
    moved = requests * depth * 2
    yield Case(
        f"moves: rows, depth={depth} F={features} bf16",
        partial(moves.move_rows, rows, accepted),
        moved * features * 2 + index,
        "moved",
    )
    blocks, block, heads, size, layers = 16, 16, 8, 128, 4
    for layout in ("NHD", "HND"):
        shape = (blocks, block, heads, size) if layout == "NHD" else (blocks, heads, block, size)
        caches = [torch.randn(shape).to(BF16) for _ in range(layers)]
        views = [cache if layout == "NHD" else cache.transpose(1, 2) for cache in caches]
        (group,) = moves.group_views(views)
        slots = torch.randperm(blocks * block)[: requests * width]
        yield Case(
            f"moves: cache {layout}, depth={depth} {layers} x {heads} x {size} bf16",
            partial(moves.move_kv, group, accepted, slots),
            layers * moved * heads * size * 2 + index + moved * 8,
            "moved",
        )


def history_cases() -> Iterator[Case]:
    rows, vocab, gamma = 2, 151_936, 7
    logits = torch.randn(rows, vocab)
    words, counts = torch.zeros(rows, -(-vocab // 32), dtype=INT32), torch.zeros(rows, vocab, dtype=INT32)
    on = torch.full((rows,), 1.1)
    launch = partial(
        history.penalise,
        logits,
        torch.arange(rows),
        torch.zeros(rows, gamma, dtype=torch.int64),
        torch.full((rows,), gamma),
        repetition=on,
        frequency=on,
        presence=on,
        prompt_words=words,
        output_counts=counts,
    )
    fewest = 2 * logits.nbytes + counts.nbytes + words.nbytes + rows * (8 * gamma + 28)
    yield Case(f"history: penalise, V={vocab}", launch, fewest, "moved")


def compaction_cases() -> Iterator[Case]:
    counts = torch.tensor([17, 5, 9, 1], dtype=INT32)
    requests, width, features = counts.shape[0], 17, 4096
    total = int(counts.sum())
    starts = compaction.row_starts(counts)
    padded = torch.randn(requests, width, features).to(BF16)
    ragged = torch.zeros(total, features, dtype=BF16)
    yield Case(
        f"compaction: compact, W={width} F={features} bf16",
        partial(compaction.compact, padded, starts, total, out=ragged),
        2 * ragged.nbytes + starts.nbytes,
        "moved",
    )
    yield Case(
        f"compaction: expand, W={width} F={features} bf16",
        partial(compaction.expand, ragged, starts, width, out=padded),
        ragged.nbytes + padded.nbytes + starts.nbytes,
        "moved",
    )


def tree_cases() -> Iterator[Case]:
    requests, gamma, count, nodes = 4, 7, 32, 16
    tokens = torch.rand(requests, gamma, 4 * count).argsort(-1)[..., :count].contiguous()
    log_probs = torch.randn(requests, gamma, count, count).log_softmax(-1)
    tree = growth.grow(tokens, log_probs, nodes)
    # As far as growth reads at all: the rows of the nodes' parents, and the root's.
    inner = len({(r, int(p)) for r in range(requests) for p in tree.parents[r]})
    yield Case(
        f"growth: tree, depth={gamma} C={count} B={nodes}",
        partial(growth.grow, tokens, log_probs, nodes),
        inner * 12 * count + requests * (28 * nodes + 4),
        "",
    )
    sampled = torch.randint(0, 4 * count, (requests, nodes + 1))
    steps = gamma + 1
    yield Case(
        f"walk: B={nodes} depth={gamma}",
        partial(walk.walk, tree.parents, tree.tokens, tree.counts, sampled, max_depth=gamma),
        requests * (12 * nodes + 8 * (nodes + 1) + 16 * steps + 8),
        "",
    )
    survival = torch.rand(64, nodes).sort(-1, descending=True).values.contiguous()
    yield Case(
        f"budget: admit, R=64 B={nodes}",
        partial(budget.admit, survival, torch.full((64,), nodes, dtype=INT32), 400),
        64 * (4 * nodes + 8),
        "",
    )


CASES = {
    "candidates": candidate_cases,
    "attention": attention_cases,
    "moves": move_cases,
    "compaction": compaction_cases,
    "history": history_cases,
    "trees": tree_cases,
}


class Row(NamedTuple):
    case: Case
    traffic: Traffic

    @property
    def within(self) -> bool:
        bound = self.case.bound
        return not bound or getattr(self.traffic, bound) <= LIMIT * self.case.fewest


def measure(case: Case) -> Row:
    with counting() as traffic:
        case.launch()
    return Row(case, traffic)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=list(CASES), action="append", help="repeatable; default all")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is imported: begin again
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    rig.install()
    torch.manual_seed(0)
    print(
        "| launch | launches | fewest bytes | moved | touched | moved / fewest | touched / fewest | limit |"
    )
    print("|---|---|---|---|---|---|---|---|")
    failed = 0
    for name in options.only or CASES:
        for case in CASES[name]():
            row = measure(case)
            failed += not row.within
            traffic, fewest = row.traffic, case.fewest
            figures = [f"{number:,}" for number in (traffic.launches, fewest, traffic.moved, traffic.touched)]
            ratios = [f"{number / fewest:.2f}" for number in (traffic.moved, traffic.touched)]
            limit = f"{case.bound} {LIMIT}{'' if row.within else ' EXCEEDED'}" if case.bound else "-"
            print(f"| {' | '.join([case.name, *figures, *ratios, limit])} |", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
