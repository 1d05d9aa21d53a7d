"""Predicted rounds equal brute force over the rows they are made of."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.outlook import ROWS, ROWS_A_ROUND, RecentRows, outlook


def best_rate(rows, requests, seconds, draft):
    """Long-run rate of the best budgets: bisection on the price of time."""
    groups = [rows[i : i + requests] for i in range(0, len(rows) - requests + 1, requests)]
    curves = [
        requests + np.concatenate([[0.0], -np.sort(-g[g > 0].astype(np.float64)).cumsum()]) for g in groups
    ]
    low, high = 0.0, 1e3
    for _ in range(100):
        rate = (low + high) / 2
        gain = sum((curve - rate * (seconds(np.arange(len(curve))) + draft)).max() for curve in curves)
        low, high = (rate, high) if gain > 0 else (low, rate)
    return low


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3), st.floats(0.0, 0.5))
@settings(max_examples=50, deadline=None)
def test_the_rate_is_that_of_the_best_budgets(seed, requests, groups, slope):
    noise = np.random.default_rng(seed)
    rows = -np.sort(-noise.random((requests * groups, 5)).astype(np.float32), axis=1)
    jumps = 1.0 + noise.random(requests * 5 + 1).cumsum() * slope

    def seconds(nodes):
        return jumps[nodes]

    typical = outlook(rows, requests=requests, scale=1.0, step_seconds=seconds, draft_seconds=0.25)
    assert typical.rate == pytest.approx(best_rate(rows, requests, seconds, 0.25), rel=1e-5)


def test_a_larger_batch_than_the_sample_is_the_sample_many_times():
    rows = np.array([[0.75, 0.5, 0.0], [0.5, 0.25, 0.125]], np.float32)
    small = outlook(
        rows, requests=2, scale=1.0, step_seconds=lambda nodes: 1.0 + 0.25 * nodes, draft_seconds=0.1
    )
    large = outlook(
        rows, requests=200, scale=1.0, step_seconds=lambda nodes: 1.0 + 0.0025 * nodes, draft_seconds=0.1
    )
    assert large.tokens == pytest.approx(100 * small.tokens)
    assert large.seconds == pytest.approx(small.seconds)


def test_the_scale_multiplies_what_is_accepted():
    rows = np.ones((1, 4), np.float32)
    half = outlook(rows, requests=1, scale=0.5, step_seconds=lambda n: np.ones(len(n)), draft_seconds=0.0)
    assert half.tokens == 3.0


def test_nodes_that_are_not_there_are_not_bought_for_a_lower_stair():
    rows = np.array([[0.5, 0.0]], np.float32)
    seconds = np.array([2.0, 2.0, 1.0])
    typical = outlook(rows, requests=1, scale=1.0, step_seconds=lambda n: seconds[n], draft_seconds=0.0)
    assert typical == (1.5, 2.0)


def test_the_sample_keeps_the_newest_rows_in_order():
    sample = RecentRows(3)
    expected: list[float] = []
    for number in range(3 * ROWS):
        sample.add(np.full((1 + number % 2, 2), number % 97, np.float32))
        expected = ([number % 97] * (1 + number % 2) + expected)[:ROWS]
    rows = sample.newest()
    assert len(sample) == ROWS
    assert rows[:, 0].tolist() == rows[:, 1].tolist() == expected
    assert not rows[:, 2].any()
    sample.keep(5)
    assert sample.newest()[:, 0].tolist() == expected[:5]


def test_a_large_round_is_thinned_evenly():
    sample = RecentRows(1)
    sample.add(np.arange(300, dtype=np.float32)[:, None])
    rows = sample.newest()[:, 0]
    assert len(rows) <= ROWS_A_ROUND
    assert set(np.diff(rows)) == {-10.0}


def test_a_short_sample_is_filled_up():
    sample = RecentRows(3)
    sample.add(np.array([[0.5, 0.25, 0.125]], np.float32))
    rows = sample.newest(at_least=3, otherwise=np.ones((1, 2), np.float32))
    assert rows.tolist() == [[0.5, 0.25, 0.125], [1, 1, 0], [1, 1, 0]]
