"""Policies without a cost table: everything, and everything at random."""

import numpy as np

from specplug.policies import Explorer, FullTrees

SURVIVAL = np.array([[0.9, 0.8, 0.3, 0.0], [0.7, 0.2, 0.1, 0.05], [0.0, 0.0, 0.0, 0.0]], np.float32)
CAPS = np.array([4, 3, 4], np.int32)


def verify(policy):
    return policy.verify(SURVIVAL, CAPS, base_tokens=3, emitting=3, context=10.0, shape="tree")


def test_full_trees_verify_every_node_there_is():
    plan = verify(FullTrees())
    assert plan.counts.tolist() == [3, 3, 0]
    assert plan.nodes == 6
    assert np.isclose(plan.tokens, 3 + 0.9 + 0.8 + 0.3 + 0.7 + 0.2 + 0.1)
    assert FullTrees().draft(8, context=0.0) == "tree"


def test_an_explorer_covers_shapes_and_totals_and_repeats_under_a_seed():
    explorer = Explorer(seed=3)
    shapes = [explorer.draft(4, context=1.0) for _ in range(200)]
    plans = [verify(explorer) for _ in range(200)]
    assert set(shapes) == {"plain", "chain", "tree"}
    assert {plan.nodes for plan in plans} == {0, 3, 6}  # 0, 1 and 2 or more a request, as far as they go
    assert all(plan.nodes == plan.counts.sum() for plan in plans)
    again = Explorer(seed=3)
    assert [again.draft(4, context=1.0) for _ in range(200)] == shapes
    assert [verify(again).nodes for _ in range(200)] == [plan.nodes for plan in plans]
