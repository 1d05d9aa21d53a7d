"""Survivals that arrive late: whose they are, what shape they were, and what is made of the rest."""

import math

import numpy as np
import pytest
import torch

from specplug.budget import Plan
from specplug.ddtree import build_tree
from specplug.relay import FADE, SHAPES, SurvivalRelay

BUDGET, DEPTH, VOCABULARY = 6, 3, 11
HOPE = [1.0] * DEPTH + [0.0] * (BUDGET - DEPTH)


class Asked:
    """A policy that remembers what it was asked and verifies every node."""

    def __init__(self):
        self.calls = []

    def verify(self, survival, caps, **facts):
        self.calls.append({"survival": survival.copy(), "caps": caps.copy(), **facts})
        return Plan(caps, int(caps.sum()), math.nan, math.nan, math.nan)


def trees(requests, seed=0):
    logits = torch.randn(requests, DEPTH, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return build_tree(logits.log_softmax(-1), BUDGET)


def plan(relay, packed, *, shape="tree", owned=None):
    policy = Asked()
    rows = np.asarray(packed, dtype=np.float32).copy()
    owned = np.ones(len(rows), bool) if owned is None else owned
    relay.plan(policy, rows, owned, shape=shape, context=7.0)
    return policy.calls


def test_what_is_packed_is_what_is_planned_with():
    relay, tree = SurvivalRelay(budget=BUDGET, depth=DEPTH), trees(4)
    (call,) = plan(relay, relay.pack(tree, "tree"))
    assert np.array_equal(call["survival"], tree.scores.exp().numpy())
    assert call["known"].all()
    assert call["caps"].tolist() == tree.counts.tolist()
    assert (call["base_tokens"], call["emitting"], call["context"], call["shape"]) == (4, 4, 7.0, "tree")
    assert np.array_equal(call["chain"][:, 0], call["survival"][:, 0])


def test_a_request_nobody_has_seen_is_the_usual_one():
    relay, tree = SurvivalRelay(budget=BUDGET, depth=DEPTH), trees(3)
    packed = relay.pack(tree, "tree")
    owned = np.array([True, False, True])
    (call,) = plan(relay, packed, owned=owned)
    mean = tree.scores.exp().numpy()[owned].mean(0)
    usual = FADE * np.array(HOPE) + (1 - FADE) * mean
    assert call["survival"][1] == pytest.approx(usual, rel=1e-6)
    assert call["known"].tolist() == owned.tolist()


def test_drafts_of_another_shape_are_learned_from_as_what_they_were():
    relay, tree = SurvivalRelay(budget=BUDGET, depth=DEPTH), trees(2)
    learned, planned = plan(relay, relay.pack(tree, "tree"), shape="chain")
    assert (learned["shape"], planned["shape"]) == ("tree", "chain")
    assert learned["known"].all()
    assert not planned["known"].any()
    assert planned["survival"].tolist() == [HOPE] * 2


def test_a_step_that_drafted_nothing_teaches_nothing():
    relay, tree = SurvivalRelay(budget=BUDGET, depth=DEPTH), trees(2)
    plan(relay, relay.pack(tree, "tree"))
    before = {shape: relay._usual[shape].copy() for shape in SHAPES}
    (call,) = plan(relay, relay.pack(tree, "plain"))
    assert not call["known"].any()
    assert all(np.array_equal(relay._usual[shape], before[shape]) for shape in SHAPES)


def test_a_row_that_nothing_has_written_yet_is_survived():
    relay = SurvivalRelay(budget=BUDGET, depth=DEPTH)
    garbage = np.array([[np.nan] * 10, [np.inf] * 10, [-3e30] * 10, [2.0] + [9e9] * 8 + [2.0]], np.float32)
    for shape in SHAPES:
        for call in plan(relay, garbage, shape=shape):
            assert ((call["survival"] >= 0) & (call["survival"] <= 1)).all()
            assert (np.diff(call["survival"], axis=1) <= 0).all()
