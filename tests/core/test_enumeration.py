"""Exactness computed, not sampled: every outcome of all noise goes through the production code, with its
weight.

Toy targets and drafts over 3 to 5 tokens whose laws depend on the whole prefix. A round builds its trees from
the draft at the committed prefix, verifies, and emits; rounds follow until enough tokens are there. The law
of the emitted sequence must be the target's to 1e-9. Rules known to be biased must fail the same comparison.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from toy_laws import (
    SAMPLINGS,
    Law,
    Prefix,
    Sampling,
    World,
    distance,
    every,
    expected_emitted,
    midpoints,
    paths,
    slot_outcomes,
    walked,
)

from specplug.ddtree import build_tree
from specplug.hybrid import HybridTree, attach, couple, expand
from specplug.rejection import Draw, accept_chain
from specplug.tree import DraftTree

# The walk.


def deterministic_tree(world: World, prefix: Prefix, budget: int, gamma: int = 3) -> DraftTree:
    """DDTree over marginals that the draft gives for this prefix."""
    ahead = torch.stack([world.q((*prefix, *[0] * d)) for d in range(gamma)])
    return build_tree(ahead.log().float()[None], budget)


RowRule = Callable[[World, Prefix, list[int]], list[float]]  # law of a row's draw, given its children


def target_draw(world: World, path: Prefix, children: list[int]) -> list[float]:
    return world.p(path)


def ratio_rule(world: World, path: Prefix, children: list[int]) -> list[float]:
    """Speculative sampling on children that were chosen, not drawn: min(1, p/q) one after the other."""
    p, q = world.p(path), world.q(path).tolist()
    law, alive = [0.0] * len(p), 1.0
    for child in children:
        accept = min(1.0, p[child] / q[child])
        law[child] += alive * accept
        alive *= 1 - accept
        rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        p = [r / sum(rest) for r in rest] if sum(rest) > 0 else p
        q = [0.0 if t == child else value for t, value in enumerate(q)]
        q = [value / sum(q) for value in q]
    return [a + alive * b for a, b in zip(law, p, strict=True)]


def walk_round(world: World, budget: int, rule: RowRule = target_draw) -> Callable[[Prefix], Law]:
    @cache
    def round_(prefix: Prefix) -> Law:
        tree = deterministic_tree(world, prefix, budget)
        rows = paths(tree, prefix)
        outcomes = []
        for row, path in enumerate(rows):
            children = [
                int(tree.tokens[0, j]) for j in range(len(rows) - 1) if int(tree.parents[0, j]) == row - 1
            ]
            law = rule(world, path, children)
            outcomes.append([(weight, (float(t),)) for t, weight in enumerate(law) if weight > 0])
        weights, values = every(outcomes)
        return walked(tree, values[..., 0].long(), weights)

    return round_


WORLDS = [(3, 4, 4), (3, 6, 4), (4, 4, 3), (5, 3, 3)]  # vocabulary, budget, tokens


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(("vocabulary", "budget", "length"), WORLDS)
def test_the_walk_emits_the_targets_law(sampling, vocabulary, budget, length):
    world = World(vocabulary, sampling)
    assert distance(world, walk_round(world, budget), length) < 1e-9


def test_the_trees_have_three_levels_and_branch():
    """Or the tests would show less than they say."""
    tree = deterministic_tree(World(3), (), 6)
    assert int(tree.depths.max()) == 3
    assert len(set(tree.parents[0].tolist())) < 6


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("prefix", [(), (1,), (2, 0)])
def test_expected_accepted_is_the_sum_of_p_over_the_tree(sampling, prefix):
    world = World(4, sampling)
    rows = paths(deterministic_tree(world, prefix, 5), prefix)
    expected = sum(world.probability(path, start=len(prefix)) for path in rows[1:])
    law = walk_round(world, 5)(prefix)
    assert expected_emitted(law) - 1 == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1.7)], ids=str)
def test_the_ratio_rule_on_chosen_children_is_caught(sampling):
    """Negative control: biased, and visibly so."""
    world = World(3, sampling)
    assert distance(world, walk_round(world, 4, ratio_rule), 3) > 1e-3


# The hybrid: k - 1 deterministic children and a sampled one, on three levels (two over 4 tokens).


def q_rows(world: World, hybrid: HybridTree, prefix: Prefix, at: list[int]) -> torch.Tensor:
    rows = paths(hybrid.tree, prefix)
    return torch.stack([world.q(rows[row]) for row in at])[None]


def drawn_children(
    world: World, hybrid: HybridTree, prefix: Prefix, at: list[int]
) -> Iterator[tuple[float, HybridTree]]:
    """The trees after ``attach``, with the probability of each."""
    q = q_rows(world, hybrid, prefix, at)
    rows = paths(hybrid.tree, prefix)
    choices = []
    for row in at:
        children = {path[-1] for path in rows if path[:-1] == rows[row] and len(path) > len(prefix)}
        choices.append(
            midpoints([0.0 if t in children else w for t, w in enumerate(world.q(rows[row]).tolist())])
        )
    for choice in itertools.product(*choices):
        uniform = torch.tensor([[u for _, u in choice]], dtype=torch.float64)
        yield math.prod(w for w, _ in choice), attach(hybrid, q, at=torch.tensor([at]), uniform=uniform)


def hybrid_trees(world: World, prefix: Prefix, deterministic: int) -> Iterator[tuple[float, HybridTree]]:
    """Every tree a round can have: root and its best child get deterministic and sampled children, and the
    root's sampled child one deterministic and one sampled child more, which has a sampled child."""
    empty = HybridTree.of(DraftTree.empty(1, 0), world.vocabulary)
    base = expand(
        empty, q_rows(world, empty, prefix, [0]), at=torch.zeros(1, 1).long(), children=deterministic
    )
    for weight, tree in drawn_children(world, base, prefix, [0, 1] if deterministic else [0]):
        below = int(tree.sampled_rows[0, 0])
        q = q_rows(world, tree, prefix, [below])
        grown = expand(tree, q, at=torch.tensor([[below]]), children=1)
        row = int(grown.sampled_rows[0, 0])
        for second, deep in drawn_children(world, grown, prefix, [row]):
            if world.vocabulary > 3:  # or there are too many outcomes
                yield weight * second, deep
                continue
            last = int(deep.sampled_rows[0, -1])
            for third, final in drawn_children(world, deep, prefix, [last]):
                yield weight * second * third, final


Admission = Callable[[HybridTree], tuple[torch.Tensor, int]]  # slots that stay live, nodes that stay


def admit_all(hybrid: HybridTree) -> tuple[torch.Tensor, int]:
    return hybrid.live, int(hybrid.tree.counts[0])


def hybrid_round(world: World, deterministic: int, admit: Admission = admit_all) -> Callable[[Prefix], Law]:
    @cache
    def round_(prefix: Prefix) -> Law:
        total: Law = defaultdict(float)
        for chance, drawn in hybrid_trees(world, prefix, deterministic):
            drawn.tree.validate()
            live, count = admit(drawn)
            hybrid = HybridTree(drawn.tree, drawn.rows, live, drawn.proposal)
            rows = paths(hybrid.tree, prefix)
            slot_of = {int(r): s for s, r in enumerate(hybrid.rows[0]) if bool(live[0, s])}
            outcomes = []
            for row, path in enumerate(rows):
                p = world.p(path)
                if row in slot_of:
                    children = {
                        other[-1] for other in rows if other[:-1] == path and len(other) > len(prefix)
                    } - {int(hybrid.proposal.tokens[0, slot_of[row]])}
                    q = [0.0 if t in children else w for t, w in enumerate(world.q(path).tolist())]
                    q = [w / sum(q) for w in q]
                    outcomes.append(slot_outcomes(p, q, int(hybrid.proposal.tokens[0, slot_of[row]])))
                else:
                    outcomes.append([(w, (float(t), 0.5, 0.5)) for t, w in enumerate(p) if w > 0])
            weights, values = every(outcomes)
            many = len(weights)
            wide = HybridTree(
                hybrid.tree,
                *(x.expand(many, *x.shape[1:]) for x in (hybrid.rows, hybrid.live)),
                Draw(*(x.expand(many, *x.shape[1:]) for x in hybrid.proposal)),
            )
            uniforms = values.gather(1, wide.rows[..., None].clamp_max(len(rows) - 1).expand(-1, -1, 3))
            target = torch.tensor([world.p(path) for path in rows], dtype=torch.float64)
            coupled_draws = couple(
                wide,
                values[..., 0].long(),
                target.expand(many, -1, -1),
                accept_uniform=uniforms[..., 1],
                residual_uniform=uniforms[..., 2],
            )
            for tokens, weight in walked(hybrid.tree, coupled_draws, weights, count).items():
                total[tokens] += chance * weight
        return total

    return round_


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    ("vocabulary", "deterministic", "length"), [(3, 0, 3), (3, 1, 3), (4, 1, 2), (4, 2, 2)]
)
def test_the_hybrid_emits_the_targets_law(sampling, vocabulary, deterministic, length):
    world = World(vocabulary, sampling)
    assert distance(world, hybrid_round(world, deterministic), length) < 1e-9


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("deterministic", [0, 1, 2])
def test_the_hybrids_acceptance_is_its_formula(sampling, deterministic):
    """Row by row p(D) + sum over the rest of min(p, q'), chained over the levels."""
    world, prefix = World(4, sampling), (2,)

    def accepted(hybrid: HybridTree, row: int, rows: list[Prefix]) -> float:
        """Expected nodes below a row, the sampled child known."""
        p, value = world.p(rows[row]), 0.0
        sampled = dict(zip(hybrid.rows[0].tolist(), hybrid.sampled_rows[0].tolist(), strict=True))
        children = [j + 1 for j in range(len(rows) - 1) if int(hybrid.tree.parents[0, j]) == row - 1]
        chosen = [rows[c][-1] for c in children if c != sampled.get(row)]
        for child in children:
            token = rows[child][-1]
            if child == sampled.get(row):
                q = world.q(rows[row]).tolist()
                rest = q[token] / sum(w for t, w in enumerate(q) if t not in chosen)
                chance = min(1.0, p[token] / rest)
            else:
                chance = p[token]
            value += chance * (1 + accepted(hybrid, child, rows))
        return value

    expected = sum(
        weight * accepted(tree, 0, paths(tree.tree, prefix))
        for weight, tree in hybrid_trees(world, prefix, deterministic)
    )
    # The first level alone is the formula of the design.
    p, q = world.p(prefix), world.q(prefix).tolist()
    best = sorted(range(4), key=lambda t: -q[t])[:deterministic]
    rest = [t for t in range(4) if t not in best]
    mass = sum(q[t] for t in rest)
    first = sum(p[t] for t in best) + sum(min(p[t], q[t] / mass) for t in rest)
    law = hybrid_round(world, deterministic)(prefix)
    descended = sum(weight for tokens, weight in law.items() if len(tokens) > 1)
    assert descended == pytest.approx(first, abs=1e-9)
    assert expected_emitted(law) - 1 == pytest.approx(expected, abs=1e-9)


def test_a_prefix_by_score_is_admissible():
    """Budgets of every size, taken after all draws: scores of sampled children do not look at their draw."""
    world = World(4, Sampling(1.7))
    for count in range(5):
        exact = hybrid_round(world, 1, lambda hybrid, count=count: (hybrid.live, count))
        assert distance(world, exact, 2) < 1e-9


def test_a_sampled_child_admitted_by_its_own_draw_is_caught():
    """Negative control: the root falls back to its plain draw unless the sampled token is a likely one."""
    world = World(4, Sampling(1.7))

    def peek(hybrid: HybridTree) -> tuple[torch.Tensor, int]:
        q = world.q(())
        likely = q[hybrid.proposal.tokens] >= q.median()
        return hybrid.live & likely, int(hybrid.tree.counts[0])

    assert distance(world, hybrid_round(world, 1, peek), 2) > 1e-3


def test_a_row_admitted_by_the_draw_below_it_is_caught():
    """Negative control: everything is verified only if the sampled child of the best child pleases."""
    world = World(4, Sampling(1.7))

    def peek(hybrid: HybridTree) -> tuple[torch.Tensor, int]:
        pleases = int(hybrid.proposal.tokens[0, 1]) == 3
        return hybrid.live, int(hybrid.tree.counts[0]) if pleases else 0

    assert distance(world, hybrid_round(world, 1, peek), 2) > 1e-3


# Chains of sampled tokens.


def chain_round(world: World, ratio_dtype: torch.dtype = torch.float64) -> Callable[[Prefix], Law]:
    """Two tokens sampled from q one after the other; ``ratio_dtype`` rounds the q of the ratio."""

    @cache
    def round_(prefix: Prefix) -> Law:
        law: Law = defaultdict(float)
        for drafted in itertools.product(range(world.vocabulary), repeat=2):
            rows = [(*prefix, *drafted[:k]) for k in range(3)]
            q = [world.q(path) for path in rows[:2]]
            chance = math.prod(float(q[k][drafted[k]]) for k in range(2))
            rounded = [x.to(ratio_dtype).double().tolist() for x in q]
            rounded = [[value / sum(row) for value in row] for row in rounded]
            p = [world.p(path) for path in rows]
            outcomes = [slot_outcomes(p[k], rounded[k], drafted[k]) for k in range(2)]
            outcomes.append([(w, (0.0, 0.5, u)) for w, u in midpoints(p[2])])
            weights, values = every(outcomes)
            many = len(weights)
            result = accept_chain(
                Draw(
                    torch.tensor([drafted]).expand(many, -1),
                    torch.tensor(rounded, dtype=torch.float64).expand(many, -1, -1),
                ),
                torch.full((many,), 2, dtype=torch.int32),
                torch.tensor(p, dtype=torch.float64).expand(many, -1, -1),
                accept_uniform=values[:, :2, 1],
                draw_uniform=values[..., 2],
            )
            for row, length, weight in zip(
                result.tokens.tolist(), result.num_emitted.tolist(), weights.tolist(), strict=True
            ):
                law[tuple(row[:length])] += chance * weight
        return law

    return round_


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("vocabulary", [3, 4])
def test_a_chain_of_sampled_tokens_emits_the_targets_law(sampling, vocabulary):
    world = World(vocabulary, sampling)
    assert distance(world, chain_round(world), 3) < 1e-9
    p, q = world.p((1,)), world.q((1,)).tolist()
    law = chain_round(world)((1,))
    accepted = sum(w for tokens, w in law.items() if len(tokens) > 1)
    assert accepted == pytest.approx(sum(map(min, p, q)), abs=1e-9)


def test_a_ratio_with_another_q_than_the_one_sampled_from_is_caught():
    """Negative control: q rounded to bfloat16 in the ratio only."""
    world = World(4)
    assert distance(world, chain_round(world, torch.bfloat16), 3) > 1e-5
