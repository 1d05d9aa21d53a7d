"""The emitted law on a trained model: chi-square of sampled sequences against the target's exact law.

Target: the shipped quick set. Draft: the target's own next-token laws along its greedy path at another
temperature, a factorised draft that is often wrong. Fixed seeds, so the outcome never varies.
"""

import itertools
import math
from collections import Counter

import pytest
import torch

from specplug import models
from specplug.ddtree import build_tree
from specplug.hybrid import HybridTree, attach, couple
from specplug.verify import walk

LENGTH, TOP_K, TEMPERATURE, SAMPLES = 3, 6, 0.8, 20_000

Prefix = tuple[int, ...]


@pytest.fixture(scope="module")
def world() -> tuple[dict[Prefix, torch.Tensor], torch.Tensor]:
    """p after every prefix of up to 2 tokens, over the few tokens that can occur, and the draft [2, V]."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models.path("quick", "target"), dtype=torch.float32
    )
    prompt = torch.randint(4, 1024, (12,), generator=torch.Generator().manual_seed(5)).tolist()
    known: dict[Prefix, torch.Tensor] = {}
    level: list[Prefix] = [()]
    for _ in range(LENGTH):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *prefix] for prefix in level])).logits[:, -1]
        known |= zip(level, logits, strict=True)
        level = [
            (*prefix, t)
            for prefix, row in zip(level, logits, strict=True)
            for t in row.topk(TOP_K).indices.tolist()
        ]
    vocabulary = sorted({t for prefix in level for t in prefix})
    compact = {t: i for i, t in enumerate(vocabulary)}
    laws = {}
    for prefix, row in known.items():
        kept = row.double().where(row >= row.topk(TOP_K).values[-1], float("-inf"))
        laws[tuple(compact[t] for t in prefix)] = (kept / TEMPERATURE).softmax(0)[vocabulary]
    greedy: Prefix = ()
    draft = []
    for _ in range(LENGTH - 1):
        draft.append((known[greedy][vocabulary] / 1.5).softmax(0))
        greedy = (*greedy, int(known[greedy].argmax()))
    return laws, torch.stack(draft)


def simulate(laws, draft, rule: str) -> Counter[Prefix]:
    """Rounds after rounds for many sequences at once; a prefix's sequences share their deterministic tree."""
    g = torch.Generator().manual_seed(17)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    done: Counter[Prefix] = Counter()
    pending: Counter[Prefix] = Counter({(): SAMPLES})
    for length in range(LENGTH):
        for prefix in [p for p in pending if len(p) == length]:
            many, depth = pending.pop(prefix), LENGTH - 1 - length
            tree = build_tree(draft[None, :depth].log().float(), 6 if depth else 0)
            one = HybridTree.of(tree, draft.shape[1])
            hybrid = HybridTree(
                type(tree)(**{k: v.expand(many, *v.shape[1:]) for k, v in vars(tree).items()}),
                *(x.expand(many, *x.shape[1:]) for x in (one.rows, one.live)),
                type(one.proposal)(*(x.expand(many, *x.shape[1:]) for x in one.proposal)),
            )
            if rule == "hybrid" and depth:
                root = torch.zeros(many, 1, dtype=torch.int64)
                q = draft[:1].expand(many, -1, -1)
                hybrid = attach(hybrid, q, at=root, uniform=uniform(many, 1))
            tokens, parents = hybrid.tree.tokens, hybrid.tree.parents
            # p at every row of every sequence: sampled children make the trees differ
            target = torch.zeros(many, hybrid.tree.budget + 1, draft.shape[1], dtype=torch.float64)
            target[:, 0] = laws[prefix]
            keys = torch.nn.functional.pad(
                torch.stack([parents, tokens], 2).flatten(1), (1, 0)
            )  # never empty
            trees, which = keys.unique(dim=0, return_inverse=True)
            for cell, row in enumerate(trees[:, 1:].reshape(len(trees), -1, 2).tolist()):
                rows: list[Prefix] = [prefix]
                for j, (parent, token) in enumerate(row):
                    rows.append((*rows[parent + 1], token))
                    if (
                        rows[-1] in laws
                    ):  # a drafted token that the target cannot emit has no law and no visit
                        target[which == cell, j + 1] = laws[rows[-1]]
            target[..., 0] += target.sum(-1) == 0
            sampled = torch.multinomial(target.flatten(0, 1), 1, generator=g).view(many, -1)
            if rule == "hybrid" and depth:
                u = uniform(2, many, 1)
                sampled = couple(hybrid, sampled, target, accept_uniform=u[0], residual_uniform=u[1])
            if rule == "ratio" and depth:
                child = int(tree.tokens[0, 0])
                p, q = laws[prefix], draft[0]
                accepted = uniform(many) < p[child] / q[child]
                residual = torch.multinomial((p - q).clamp_min(0).expand(many, -1), 1, generator=g)[:, 0]
                sampled = torch.cat([torch.where(accepted, child, residual)[:, None], sampled[:, 1:]], 1)
            result = walk(parents, tokens, hybrid.tree.counts, sampled, max_depth=depth)
            for row, count in zip(result.tokens.tolist(), result.num_emitted.tolist(), strict=True):
                sequence = (*prefix, *row[:count])
                (done if len(sequence) == LENGTH else pending)[sequence] += 1
    return done


def z_score(counts: Counter[Prefix], laws) -> float:
    """Chi-square as a standard normal (Wilson and Hilferty 1931); cells below 8 expected are merged."""
    expected: dict[Prefix, float] = {}
    for sequence in itertools.product(range(len(laws[()])), repeat=1):
        if laws[()][sequence[0]] > 0:
            for rest in itertools.product(*[range(len(laws[()]))] * 2):
                full = (*sequence, *rest)
                if full[:2] in laws:
                    expected[full] = SAMPLES * math.prod(
                        float(laws[full[:k]][full[k]]) for k in range(LENGTH)
                    )
    assert sum(expected.values()) == pytest.approx(SAMPLES)
    big = {s: e for s, e in expected.items() if e >= 8}
    statistic = sum((counts[s] - e) ** 2 / e for s, e in big.items())
    other = SAMPLES - sum(big.values())
    statistic += (SAMPLES - sum(counts[s] for s in big) - other) ** 2 / other
    freedom = len(big)
    assert freedom > 20
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("rule", ["walk", "hybrid"])
def test_sampled_sequences_have_the_targets_law(world, rule):
    laws, draft = world
    counts = simulate(laws, draft, rule)
    assert counts.total() == SAMPLES
    z = z_score(counts, laws)
    assert abs(z) < 3.5


def test_the_ratio_rule_on_the_best_child_fails_the_same_test(world):
    """Negative control."""
    laws, draft = world
    z = z_score(simulate(laws, draft, "ratio"), laws)
    assert z > 8
