"""What the candidates of a parent-conditioned tree lose against the full vocabulary, and what they cost.

    python benchmarks/candidates.py                      both tables below
    python benchmarks/candidates.py --only length --set deep-thin --windows 64
    python benchmarks/candidates.py --only time --batch 32 --budget 64 --vocab 32768 --rank 256

Accepted length: shipped DSpark drafts on windows of held-out library source, temperature 0. The target's own
continuation of each window is decoded first; a block is then drafted at every position of it, every method
builds its tree from that one block, and the walk down the known continuation says what the target would
accept. All methods see the same positions, so differences are paired; standard errors are over windows. The
best-n tree is the first n nodes of the best-64 tree, so one tree a method serves every budget. "base" takes
the C best of the base logits, "mix" adds the expected Markov bias (specplug.markov), "full" scores every
token of the vocabulary under every parent (specplug.pathwise.grow_pathwise with C = V).

Time: synthetic weights, one process. "table" is specplug.markov.conditioned, "tree" adds
specplug.ddtree.grow. The full vocabulary's time is that of the rows alone which any exact best-first growth
must compute: one softmax over the vocabulary, and its best B tokens, for the root and for every node above
the last, B in all, one after the other. No growth is added to it.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from specplug import models
from specplug.candidates import TransitionTable, top_tokens
from specplug.checkpoint import read_draft
from specplug.ddtree import grow
from specplug.local.draft import Draft, Proposal
from specplug.local.figures import Estimate
from specplug.local.library import windows
from specplug.local.loop import generate
from specplug.local.method import Method
from specplug.local.pair import load_pair
from specplug.local.report import processor
from specplug.local.target import Target
from specplug.markov import MarkovHead, conditioned
from specplug.pathwise import grow_pathwise
from specplug.tree import DraftTree
from specplug.verify import walk

BUDGETS = (16, 32, 64)
CANDIDATES = (8, 16, 32, 64)
FP32, CPU = torch.float32, torch.device("cpu")


class Anchors(NamedTuple):
    """Blocks drafted along one continuation."""

    proposal: Proposal  # of R positions
    ahead: torch.Tensor  # [R, gamma + 1] int64, the target's tokens after each anchor


def base_table(proposal: Proposal, head: MarkovHead, candidates: int) -> TransitionTable:
    """As ``conditioned`` with C = the best base logits; the normaliser is corrected in the same way."""
    logits = proposal.logits.float()
    parents = proposal.anchors[:, None]
    tokens, tables = [], []
    for depth in range(logits.shape[1]):
        base = logits[:, depth]
        values, chosen = top_tokens(base, candidates)
        scores = values[:, None] + head.scale * head.w1[parents] @ head.w2[chosen].transpose(1, 2)
        outside = base.scatter(1, chosen, float("-inf")).logsumexp(-1)[:, None, None]
        log_z = torch.logaddexp(scores.logsumexp(-1, keepdim=True), outside)
        rows = (scores - log_z).clamp_max(0.0)
        tables.append(
            torch.nn.functional.pad(rows, (0, 0, 0, candidates - rows.shape[1]), value=float("-inf"))
        )
        tokens.append(chosen)
        parents = chosen
    return TransitionTable(torch.stack(tokens, 1), torch.stack(tables, 1))


def builders(head: MarkovHead) -> dict[str, Callable[[Proposal], DraftTree]]:
    """Every method's best trees of the largest budget."""
    largest = max(BUDGETS)

    def mix(c: int) -> Callable[[Proposal], DraftTree]:
        return lambda p: grow(conditioned(p.logits, head, p.anchors, c), largest)

    def base(c: int) -> Callable[[Proposal], DraftTree]:
        return lambda p: grow(base_table(p, head, c), largest)

    made = {f"{kind} {c}": build(c) for kind, build in (("base", base), ("mix", mix)) for c in CANDIDATES}
    return made | {
        "full": lambda p: grow_pathwise(p.logits, head, p.anchors, largest, candidates=len(head.w2))
    }


def accepted(tree: DraftTree, ahead: torch.Tensor, budget: int) -> torch.Tensor:
    """Tokens emitted from each position, [R] int64, bonus counted, by the first ``budget`` nodes."""
    rows = torch.nn.functional.pad(tree.depths[:, :budget].long(), (1, 0))
    step = walk(
        tree.parents[:, :budget],
        tree.tokens[:, :budget],
        tree.counts.clamp_max(budget),
        ahead.gather(1, rows),
        max_depth=ahead.shape[1] - 1,
    )
    return step.num_emitted.long()


@torch.inference_mode()
def anchors_of(target: Target, draft: Draft, prompt: list[int], *, tokens: int, every: int) -> Anchors:
    """Draft at every ``every``-th of ``tokens`` positions after a prompt."""
    limit = tokens + draft.depth + 1
    answer = generate(target, [prompt], method=Method("plain"), limit=limit).tokens[0]
    whole = torch.tensor([prompt + answer])
    column = torch.arange(whole.shape[1])
    features = target.forward(
        whole,
        starts=torch.zeros(1, dtype=torch.int64),
        depths=column[None],
        mask=(column[:, None] >= column)[None],
        cache=target.cache(1, len(column)),
        live=len(column),
        last_only=True,
    ).features
    assert features is not None
    roots = torch.arange(len(prompt) - 1, len(prompt) - 1 + tokens, every)
    cache = draft.cache(len(roots), len(column) + draft.block)
    draft.extend(cache, features.expand(len(roots), -1, -1), torch.zeros_like(roots))
    proposal = draft.propose(cache, whole[0, roots], roots, live=int(roots.max()) + draft.block)
    return Anchors(proposal, whole[0, roots[:, None] + torch.arange(1, draft.depth + 2)])


def loss(mine: list[float], full: list[float]) -> Estimate:
    """1 - mean(mine) / mean(full), paired by window, with its standard error."""
    ratio = sum(mine) / sum(full)
    n = len(mine)
    residuals = [(m - ratio * f) / sum(full) for m, f in zip(mine, full, strict=True)]
    return Estimate(1 - ratio, (n / (n - 1) * sum(d * d for d in residuals)) ** 0.5)


def length_report(name: str, options: argparse.Namespace) -> None:
    checkpoint = read_draft(models.path(name, "dspark"))
    folder = models.path(name, "target")
    target, draft, _ = load_pair(folder, checkpoint, dtype=FP32, device=CPU)
    assert draft.head is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sums: dict[tuple[str, int], list[float]] = {}
    positions = 0
    for text in tqdm(windows(options.windows, options.seed), desc=name):
        prompt = tokenizer(text)["input_ids"]
        at = anchors_of(target, draft, prompt, tokens=options.tokens, every=options.every)
        positions += len(at.ahead)
        for label, build in builders(draft.head).items():
            tree = build(at.proposal)
            for budget in BUDGETS:
                emitted = accepted(tree, at.ahead, budget)
                sums.setdefault((label, budget), []).append(float(emitted.sum()))
    print(f"\n{name}, library text, temperature 0: {options.windows} windows, {positions} positions")
    print("| candidates | " + " | ".join(f"accepted, {b} nodes | lost, % (s.e.)" for b in BUDGETS) + " |")
    print("|---|" + "---|---|" * len(BUDGETS))
    for label in dict.fromkeys(label for label, _ in sums):
        cells = []
        for budget in BUDGETS:
            mine, full = sums[label, budget], sums["full", budget]
            lost = loss(mine, full)
            cells += [f"{sum(mine) / positions:.3f}", f"{100 * lost.value:.2f} ({100 * (lost[1] or 0):.2f})"]
        print(f"| {label} | " + " | ".join(cells) + " |")


def full_rows(proposal: Proposal, head: MarkovHead, budget: int) -> None:
    """The exact rows of ``budget`` parents a request, one after the other as best-first growth pops them."""
    token = proposal.anchors
    for node in range(budget):
        logits = proposal.logits[:, node % proposal.logits.shape[1]] + head.project(head.w1[token])
        values, tokens = top_tokens(logits, budget)
        values = values - logits.logsumexp(-1, keepdim=True)
        token = tokens[:, 0]


def time_report(options: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch, depth, vocab, rank = options.batch, options.depth, options.vocab, options.rank
    head = MarkovHead(normal(vocab, rank), normal(vocab, rank) * rank**-0.5)
    anchors = torch.randint(vocab, (batch,), generator=generator)
    proposal = Proposal(anchors, normal(batch, depth, 1), 3 * normal(batch, depth, vocab))
    parts: dict[str, Callable[[], object]] = {
        "full vocabulary, rows alone": lambda: full_rows(proposal, head, options.budget)
    }
    for c in CANDIDATES:
        parts[f"table, C = {c}"] = lambda c=c: conditioned(proposal.logits, head, anchors, c)
        parts[f"table and tree, C = {c}"] = lambda c=c: grow(
            conditioned(proposal.logits, head, anchors, c), options.budget
        )
    seconds: dict[str, list[float]] = {label: [] for label in parts}
    for turn in range(options.repeats + 1):  # the first turn is not counted
        for label, action in parts.items():
            start = time.perf_counter()
            action()
            if turn:
                seconds[label].append(time.perf_counter() - start)
    medians = {label: statistics.median(values) for label, values in seconds.items()}
    full = next(iter(medians.values()))
    print(
        f"\nbatch {batch}, depth {depth}, budget {options.budget}, vocabulary {vocab}, rank {rank}; "
        f"medians of {options.repeats}"
    )
    print("| | ms | of the full vocabulary's time, % |\n|---|---|---|")
    for label, value in medians.items():
        print(f"| {label} | {1e3 * value:.1f} | {100 * value / full:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["length", "time"], help="one of the two reports")
    parser.add_argument("--set", nargs="+", choices=models.sets(), default=list(models.sets()))
    parser.add_argument("--windows", type=int, default=32, help="pieces of text, 2 or more")
    parser.add_argument("--tokens", type=int, default=48, help="positions after each piece")
    parser.add_argument("--every", type=int, default=2, help="draft at every n-th position")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of text")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.windows < 2:
        parser.error(f"--windows: expected 2 or more, got {options.windows}")
    torch.set_num_threads(options.threads)
    print(f"{processor()}; torch {torch.__version__}, {options.threads} thread(s); {datetime.date.today()}")
    if options.only != "time":
        for name in options.set:
            length_report(name, options)
    if options.only != "length":
        time_report(options)


if __name__ == "__main__":
    main()
