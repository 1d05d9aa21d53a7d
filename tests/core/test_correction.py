"""Corrections converge, shrug off outliers, and keep their size."""

import math

import numpy as np
import pytest

from specplug.correction import AcceptanceCorrection, CostCorrection


def factor(correction, tokens, *, shape="tree", requests=4):
    return correction.factor(shape, requests=requests, tokens=np.asarray(tokens))


def fill(correction, ratio, *, tokens=64, times=40, shape="tree", requests=4):
    for _ in range(times):
        correction.observe(shape, requests=requests, tokens=tokens, observed=ratio, tabled=1.0)


def test_nothing_seen_changes_nothing():
    assert factor(CostCorrection(), [1, 100, 10_000]).tolist() == [1.0, 1.0, 1.0]
    assert AcceptanceCorrection().factor("tree") == 1.0


@pytest.mark.parametrize("ratio", [3.0, 1 / 3])
def test_a_wrong_table_is_put_right_everywhere(ratio):
    correction = CostCorrection()
    fill(correction, ratio, times=8)
    assert factor(correction, [1, 64, 5000]) == pytest.approx(ratio)
    assert factor(correction, [7], shape="plain", requests=100) == pytest.approx(ratio)


def test_one_outlier_in_a_hundred_moves_little():
    clean, dirty = CostCorrection(), CostCorrection()
    noise = np.random.default_rng(0)
    largest = 0.0
    for step in range(2000):
        ratio = float(noise.lognormal(0, 0.05))
        slow = 100.0 if noise.random() < 0.01 else 1.0
        clean.observe("tree", requests=4, tokens=64, observed=ratio, tabled=1.0)
        dirty.observe("tree", requests=4, tokens=64, observed=ratio * slow, tabled=1.0)
        if step > 10:
            moved = float(factor(dirty, [64])[0] / factor(clean, [64])[0])
            largest = max(largest, abs(math.log(moved)))
    assert largest < 0.05


def test_the_mean_instead_of_the_median_would_fail():
    """The negative control of the outliers: with them, the mean log ratio of a window is off by 15 %."""
    ratios = np.ones(31)
    ratios[7] = 100.0
    assert math.exp(np.log(ratios).mean()) > 1.15
    correction = CostCorrection()
    for ratio in ratios:
        correction.observe("tree", requests=4, tokens=64, observed=float(ratio), tabled=1.0)
    assert factor(correction, [64]).tolist() == [1.0]


def test_regions_are_joined_without_a_jump():
    correction = CostCorrection()
    fill(correction, 1.0, tokens=32)
    fill(correction, 2.0, tokens=128)
    values = factor(correction, np.arange(1, 300))
    assert values[32 - 1] == pytest.approx(1.0)
    assert values[128 - 1] == pytest.approx(2.0)
    assert (np.diff(values) >= 0).all()
    assert np.diff(values).max() < 0.02


def test_shapes_and_loads_are_kept_apart():
    correction = CostCorrection()
    fill(correction, 3.0, shape="tree")
    fill(correction, 1.0, shape="plain")
    fill(correction, 2.0, shape="plain", requests=64, tokens=64)
    assert factor(correction, [64]) == pytest.approx(3.0)
    assert factor(correction, [64], shape="plain") == pytest.approx(1.0)
    assert factor(correction, [64], shape="plain", requests=64) == pytest.approx(2.0)


def test_a_lasting_change_is_followed():
    correction = CostCorrection()
    fill(correction, 1.0, times=500)
    fill(correction, 2.0, times=17)
    assert factor(correction, [64]) == pytest.approx(2.0)


def arrays(thing):
    return [value for value in vars(thing).values() if isinstance(value, np.ndarray)]


def test_memory_is_constant():
    correction, acceptance = CostCorrection(), AcceptanceCorrection()
    before = [array.nbytes for array in arrays(correction) + arrays(acceptance)]
    assert before
    noise = np.random.default_rng(1)
    for _ in range(2000):
        requests = int(2 ** noise.uniform(0, 14))
        tokens = int(requests * 2 ** noise.uniform(0, 7))
        correction.observe("chain", requests=requests, tokens=tokens, observed=1.5, tabled=1.0)
        acceptance.observe("chain", predicted=5.0, accepted=4.0)
    assert [array.nbytes for array in arrays(correction) + arrays(acceptance)] == before
    assert len(vars(correction)) == len(arrays(correction))  # nothing else grows
    assert sum(before) < 250_000


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_duration_is_refused(seconds):
    for observed, tabled in ((seconds, 1.0), (1.0, seconds)):
        with pytest.raises(ValueError, match="expected seconds above 0"):
            CostCorrection().observe("tree", requests=1, tokens=1, observed=observed, tabled=tabled)
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        CostCorrection().observe("tree", requests=0, tokens=1, observed=1.0, tabled=1.0)


@pytest.mark.parametrize("truth", [0.5, 1.0, 1.5])
def test_acceptance_follows_what_is_accepted(truth):
    """Predictions already hold the factor, as the budget's do."""
    acceptance = AcceptanceCorrection()
    for _ in range(500):
        acceptance.observe("tree", predicted=10.0 * acceptance.factor("tree"), accepted=10.0 * truth)
    assert acceptance.factor("tree") == pytest.approx(truth, rel=0.02)
    assert acceptance.factor("chain") == pytest.approx(truth, rel=0.02)  # until it has its own
    for _ in range(500):
        acceptance.observe("chain", predicted=10.0 * acceptance.factor("chain"), accepted=10.0)
    assert acceptance.factor("chain") == pytest.approx(1.0, rel=0.05)
    assert acceptance.factor("tree") == pytest.approx(truth, rel=0.05)
    for _ in range(1000):
        acceptance.observe("tree", predicted=10.0 * acceptance.factor("tree"), accepted=10.0)
    assert acceptance.factor("tree") == pytest.approx(1.0, rel=0.1)
