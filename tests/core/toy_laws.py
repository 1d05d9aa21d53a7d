"""Toy targets and drafts of 3 to 5 tokens, and the law that rounds after rounds emit, computed by
enumeration.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from specplug.tree import DraftTree
from specplug.verify import walk

Prefix = tuple[int, ...]
Law = dict[Prefix, float]


class Sampling(NamedTuple):
    """How the target's logits become p."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __call__(self, logits: torch.Tensor) -> list[float]:
        if self.temperature == 0:
            return [float(t == int(logits.argmax())) for t in range(len(logits))]
        p = (logits / self.temperature).softmax(0).tolist()
        order = sorted(range(len(p)), key=lambda t: -p[t])
        kept, mass = [], 0.0
        for t in order[: self.top_k]:
            if mass < self.top_p:
                kept.append(t)
                mass += p[t]
        return [p[t] / mass if t in kept else 0.0 for t in range(len(p))]


SAMPLINGS = [
    Sampling(0),
    Sampling(0.5),
    Sampling(1),
    Sampling(1.7),
    Sampling(1, top_k=2),
    Sampling(1.3, top_p=0.8),
]


class World(NamedTuple):
    """A target and a draft over one vocabulary."""

    vocabulary: int
    sampling: Sampling = Sampling()

    def logits(self, prefix: Prefix, kind: int) -> torch.Tensor:
        seed = self.vocabulary
        for token in prefix:
            seed = seed * 11 + token + 1
        seed = seed * 2 + kind
        return torch.randn(self.vocabulary, generator=torch.Generator().manual_seed(seed)).double() * 1.3

    def p(self, prefix: Prefix) -> list[float]:
        return self.sampling(self.logits(prefix, 0))

    def q(self, prefix: Prefix) -> torch.Tensor:
        """Half right, half not."""
        return (1.2 * self.logits(prefix, 0) + 1.2 * self.logits(prefix, 1)).softmax(0)

    def probability(self, sequence: Prefix, start: int = 0) -> float:
        return math.prod(self.p(sequence[:k])[sequence[k]] for k in range(start, len(sequence)))


def emitted_law(round_: Callable[[Prefix], Law], length: int) -> Law:
    """Law of the first ``length`` tokens of rounds after rounds."""
    done: Law = defaultdict(float)
    pending: Law = {(): 1.0}
    for _ in range(length):  # a round emits at least one token
        following: Law = defaultdict(float)
        for prefix, weight in pending.items():
            for tokens, probability in round_(prefix).items():
                sequence = (prefix + tokens)[:length]
                (done if len(sequence) == length else following)[sequence] += weight * probability
        pending = following
    assert not pending
    return done


def distance(world: World, round_: Callable[[Prefix], Law], length: int) -> float:
    """Greatest error over all sequences."""
    law = emitted_law(round_, length)
    sequences = itertools.product(range(world.vocabulary), repeat=length)
    return max(abs(law.get(s, 0.0) - world.probability(s)) for s in sequences)


def paths(tree: DraftTree, prefix: Prefix) -> list[Prefix]:
    """Committed tokens plus path of every window row."""
    rows = [prefix]
    for j in range(int(tree.counts[0])):
        rows.append((*rows[int(tree.parents[0, j]) + 1], int(tree.tokens[0, j])))
    return rows


def walked(tree: DraftTree, drawn: torch.Tensor, weights: torch.Tensor, count: int | None = None) -> Law:
    """Law of what the walk emits over all draws [N, W] with their weights [N]."""
    many = len(drawn)
    counts = tree.counts if count is None else tree.counts.clamp_max(count)
    padded = torch.nn.functional.pad(drawn, (0, tree.budget + 1 - drawn.shape[1]))
    result = walk(
        tree.parents.expand(many, -1),
        tree.tokens.expand(many, -1),
        counts.expand(many),
        padded,
        max_depth=3,
    )
    law: Law = defaultdict(float)
    for row, length, weight in zip(
        result.tokens.tolist(), result.num_emitted.tolist(), weights.tolist(), strict=True
    ):
        law[tuple(row[:length])] += weight
    return law


def every(outcomes: Iterable[list[tuple[float, tuple[float, ...]]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """All combinations of independent outcomes: weights [N], values [N, rows, fields]."""
    combined = list(itertools.product(*outcomes))
    weights = torch.tensor([math.prod(w for w, _ in c) for c in combined], dtype=torch.float64)
    return weights, torch.tensor([[v for _, v in c] for c in combined], dtype=torch.float64)


def midpoints(weights: list[float]) -> list[tuple[float, float]]:
    """(weight, uniform in the middle of its interval) of every possible token, in token order."""
    total, below, result = sum(weights), 0.0, []
    for weight in weights:
        if weight > 0:
            result.append((weight / total, (below + weight / 2) / total))
        below += weight
    return result


def expected_emitted(law: Law) -> float:
    return sum(weight * len(tokens) for tokens, weight in law.items())


def slot_outcomes(
    p: list[float], q: list[float], token: int
) -> list[tuple[float, tuple[float, float, float]]]:
    """(weight, (own draw, accept uniform, residual uniform)) at a row with a sampled child."""
    accept = min(1.0, p[token] / q[token])
    outcomes = [(accept, (0.0, accept / 2, 0.5))] if accept > 0 else []
    if accept < 1:
        residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        outcomes += [((1 - accept) * w, (0.0, (1 + accept) / 2, u)) for w, u in midpoints(residual)]
    return outcomes
