"""The budget equals brute force over every way to cut the trees, on any cost curve."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from cost_tables import MadeUp, linear, stairs
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.budget import Planner, allocate, best_total

# Multiples of 1/64: sums of them are exact, so equal values are equal.
GRID = st.integers(0, 64).map(lambda n: n / 64)


@st.composite
def batches(draw, requests=4, budget=4):
    """Survivals [R, B] and caps [R]."""
    number, width = draw(st.integers(1, requests)), draw(st.integers(1, budget))
    rows = [sorted(draw(st.lists(GRID, min_size=width, max_size=width)), reverse=True) for _ in range(number)]
    caps = draw(st.lists(st.integers(0, width + 2), min_size=number, max_size=number))
    return np.array(rows, np.float32), np.array(caps, np.int32)


def cuts(survival, caps):
    """Every prefix-closed subset: node counts of each request, over nodes that are there."""
    there = [min(int(cap), int((row > 0).sum())) for row, cap in zip(survival, caps, strict=True)]
    return itertools.product(*(range(n + 1) for n in there))


def best_worths(survival, caps):
    """Most 64ths of expected drafted tokens of any cut, by its number of nodes."""
    sums = [[0, *np.rint(row * 64).astype(int).cumsum().tolist()] for row in survival]
    best = {}
    for counts in cuts(survival, caps):
        total = sum(counts)
        worth = sum(row[n] for row, n in zip(sums, counts, strict=True))
        best[total] = max(best.get(total, 0), worth)
    return best


def planner(step, *, draft=0.0, budget=8, plain=None):
    return Planner(MadeUp(step, {"tree": draft, "chain": draft}, plain), budget=budget, depth=budget)


def decide(step, survival, caps, *, draft=0.0, prefill=0, plain=None):
    number = len(survival)
    return planner(step, draft=draft, plain=plain).verify(
        survival, caps, base_tokens=number + prefill, emitting=number, context=0.0, shape="tree"
    )


@st.composite
def curves(draw):
    """Seconds by rows, multiples of 1/16: flat stretches, jumps and falls, all above 0."""
    heights = draw(st.lists(st.integers(8, 80), min_size=30, max_size=30))
    if draw(st.booleans()):
        heights = sorted(heights)
    seconds = np.array(heights) / 16
    return lambda rows: seconds[np.asarray(rows, np.int64).clip(0, 29)]


@given(batches(), curves(), st.integers(0, 16), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_the_budget_is_the_best_of_all_cuts(batch, step, draft, prefill):
    survival, caps = batch
    number = len(survival)
    plan = decide(step, survival, caps, draft=draft / 16, prefill=prefill)

    def rate(nodes, worth):
        seconds = Fraction(float(step(number + prefill + nodes))) + Fraction(draft, 16)
        return (number + Fraction(worth, 64)) / seconds

    rates = {nodes: rate(nodes, worth) for nodes, worth in best_worths(survival, caps).items()}
    best = max(rates.values())
    got = sum(round(float(row[:n].sum()) * 64) for row, n in zip(survival, plan.counts, strict=True))
    assert plan.nodes == plan.counts.sum()
    assert got == best_worths(survival, caps)[plan.nodes]  # no better cut of so many nodes
    assert float(rates[plan.nodes]) == pytest.approx(float(best), rel=1e-12)
    fewest = min(nodes for nodes, value in rates.items() if float(value) == float(best))
    assert plan.nodes >= fewest
    assert plan.tokens == number + got / 64
    assert plan.seconds == float(step(number + prefill + plan.nodes)) + draft / 16


@given(batches(), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_allocate_takes_the_best_nodes_lower_request_and_node_first(batch, nodes):
    survival, caps = batch
    ranked = sorted(
        (-float(a), r, i)
        for r, row in enumerate(survival)
        for i, a in enumerate(row)
        if i < caps[r] and a > 0
    )
    expected = [0] * len(survival)
    for _, request, _ in ranked[:nodes]:
        expected[request] += 1
    counts = allocate(survival, caps, nodes)
    assert counts.dtype == np.int32
    assert counts.tolist() == expected


@given(batches(), curves(), st.integers(1, 300), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_large_batches_agree_with_the_whole_curve(batch, step, repeat, stretch):
    """Blocks of sums, against `best_total` over all prefix sums."""
    survival, _ = batch
    survival = np.tile(survival, (repeat, 1))
    number = len(survival)
    caps = np.full(number, survival.shape[1], np.int32)

    def wide(rows):
        return step(np.asarray(rows) // (stretch * 16))

    plan = decide(wide, survival, caps, draft=0.25)
    best = -np.sort(-survival[survival > 0].astype(np.float64))
    tokens = number + np.concatenate([[0.0], best.cumsum()])
    seconds = wide(number + np.arange(len(tokens))) + 0.25
    assert plan.nodes == best_total(tokens, seconds)
    assert plan.tokens == tokens[plan.nodes]


def first_descent(tokens, seconds):
    """What is wrong on stairs: stop where the rate first falls."""
    rate = tokens / seconds
    falls = np.flatnonzero(np.diff(rate) < 0)
    return int(falls[0]) if len(falls) else len(rate) - 1


STAIRS = stairs([4, 16], [1.0, 1.5], 0.5)


def test_the_search_goes_past_the_first_descent():
    survival = np.array([[0.9, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5]], np.float32)
    caps = np.array([8], np.int32)
    plan = decide(STAIRS, survival, caps)
    tokens = 1 + np.concatenate([[0], survival[0].astype(np.float64).cumsum()])
    seconds = STAIRS(1 + np.arange(9))
    assert plan.nodes == best_total(tokens, seconds) == 8
    # The negative control: the same curve fools a search that stops early.
    assert first_descent(tokens, seconds) == 3


def test_equal_rates_take_fewer_nodes():
    survival = np.array([[1.0, 1.0]], np.float32)
    plan = decide(linear(0.0, 1.0), survival, np.array([2], np.int32))
    assert plan.nodes == 0  # 1 / 1, 2 / 2 and 3 / 3
    assert best_total(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])) == 0
    assert best_total(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]), rate=1.0) == 0


def test_survivals_of_one_and_zero():
    ones, zeros = np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32)
    caps = np.full(3, 4, np.int32)
    assert decide(linear(10.0, 0.1), ones, caps).counts.tolist() == [4, 4, 4]
    assert decide(linear(10.0, 0.0), zeros, caps).counts.tolist() == [0, 0, 0]
    assert allocate(zeros, caps, 5).tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_no_requests_or_no_nodes(shape):
    survival, caps = np.zeros(shape, np.float32), np.zeros(shape[0], np.int32)
    assert allocate(survival, caps, 4).shape == shape[:1]
    plan = planner(linear(1.0, 0.1)).verify(
        survival, caps, base_tokens=shape[0], emitting=shape[0], context=5.0, shape="tree"
    )
    assert (plan.nodes, plan.tokens, plan.gain) == (0, shape[0], 1.0)


def test_a_node_above_its_parent_counts_as_its_parent():
    survival = np.array([[0.25, 0.9], [0.5, 0.5]], np.float32)
    assert allocate(survival, np.array([2, 2], np.int32), 2).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("survival", "caps", "nodes", "message"),
    [
        ([[0.5, math.nan]], [2], 1, "survival: expected numbers in"),
        ([[0.5, math.nan]], [1], 1, "survival: expected numbers in"),
        ([[math.inf, 0.5]], [2], 1, "survival: expected numbers in"),
        ([[1.5, 0.5]], [2], 1, "survival: expected numbers in"),
        ([[0.5, -0.5]], [2], 1, "survival: expected numbers in"),
        ([[0.5, 0.5]], [-1], 1, "caps: expected at least 0, got -1"),
        ([[0.5, 0.5]], [2], -1, "nodes: expected at least 0, got -1"),
        ([0.5, 0.5], [2], 1, "survival, caps: expected"),
        ([[0.5, 0.5]], [2, 2], 1, "survival, caps: expected"),
    ],
)
def test_bad_numbers_are_refused(survival, caps, nodes, message):
    with pytest.raises(ValueError, match=message):
        allocate(np.array(survival, np.float32), np.array(caps, np.int32), nodes)


def test_bad_curves_and_settings_are_refused():
    with pytest.raises(ValueError, match="curves: expected two of one length"):
        best_total(np.ones(3), np.ones(2))
    with pytest.raises(ValueError, match="curves: expected numbers"):
        best_total(np.array([1.0, math.nan]), np.ones(2))
    with pytest.raises(ValueError, match="seconds above 0"):
        best_total(np.ones(2), np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match="budget and depth: expected at least 1"):
        Planner(MadeUp(linear(1.0, 0.1)), budget=0, depth=4)
    with pytest.raises(ValueError, match="min_gain: expected"):
        Planner(MadeUp(linear(1.0, 0.1)), budget=4, depth=4, min_gain=-0.1)
    with pytest.raises(ValueError, match="emitting: expected 0 to base_tokens 1, got 2"):
        planner(linear(1.0, 0.1)).verify(
            np.ones((2, 2), np.float32),
            np.ones(2, np.int32),
            base_tokens=1,
            emitting=2,
            context=0.0,
            shape="tree",
        )


@pytest.mark.parametrize(
    ("width", "chain", "message"),
    [(9, None, "survival: expected at most budget 8 nodes, got 9"), (8, 1, r"chain: expected \[2, gamma\]")],
)
def test_drafts_that_do_not_fit_are_refused(width, chain, message):
    with pytest.raises(ValueError, match=message):
        planner(linear(1.0, 0.1)).verify(
            np.ones((2, width), np.float32),
            np.ones(2, np.int32),
            base_tokens=2,
            emitting=2,
            context=0.0,
            shape="tree",
            chain=None if chain is None else np.ones((chain, 4), np.float32),
        )


def test_without_information_everything_is_verified():
    table = MadeUp(linear(1.0, 0.0), informative=False, reason="one probe: trimming off")
    blind = Planner(table, budget=4, depth=4)
    assert blind.reason == "one probe: trimming off"
    assert blind.draft(8, context=100.0) == "tree"
    survival = np.array([[0.5, 0.25, 0.0], [0.125, 0.125, 0.125]], np.float32)
    plan = blind.verify(
        survival, np.array([3, 2], np.int32), base_tokens=2, emitting=2, context=9.0, shape="tree"
    )
    assert plan.counts.tolist() == [2, 2]
    assert plan.tokens == pytest.approx(3.0)
    assert math.isnan(plan.seconds)
    assert math.isnan(plan.gain)


def test_gain_is_the_rate_over_plain_decoding():
    survival = np.array([[0.5, 0.5]], np.float32)
    plan = decide(linear(4.0, 0.125), survival, np.array([2], np.int32), draft=0.5, plain=linear(4.0, 0.0))
    assert plan.gain == pytest.approx((2.0 / (4.0 + 3 * 0.125 + 0.5)) / (1 / 4.0))


def test_a_step_without_nodes_costs_what_plain_decoding_does():
    """Trees cost 10 % more than plain steps whatever their nodes: a poor tree is not worth it."""
    survival = np.array([[0.05]], np.float32)
    caps = np.array([1], np.int32)
    assert decide(linear(1.1, 0.0), survival, caps, plain=linear(1.0, 0.0)).nodes == 0
    assert decide(linear(1.1, 0.0), survival, caps).nodes == 1
