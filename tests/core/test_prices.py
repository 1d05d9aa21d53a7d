"""Seconds as the budget reads them: the table, corrected, fresh enough, and no more than a few curves."""

import numpy as np
import pytest
from cost_tables import MadeUp, linear

from specplug.prices import KEPT_CURVES, REFRESH_READS, Prices, rounded_context, rounded_requests


def falls_and_rises(rows):
    return 1.0 + 0.1 * np.abs(rows - 20.0)


def test_a_curve_is_the_table_from_the_base_on():
    prices = Prices(MadeUp(falls_and_rises))
    seconds, least = prices.step("tree", 3, 10, 40, 0.0)
    assert seconds.tolist() == falls_and_rises(np.arange(10, 51)).tolist()
    assert (least <= seconds).all()
    assert least[:11].tolist() == [1.0] * 11
    assert least[11:].tolist() == seconds[11:].tolist()
    again = prices.step("tree", 3, 10, 4000, 0.0)  # past what is kept
    assert len(again.seconds) == 4001
    assert again.seconds[:41].tolist() == seconds.tolist()


def test_what_was_observed_is_in_the_next_curves():
    prices = Prices(MadeUp(linear(1.0, 0.01), {"tree": 0.5}))
    for _ in range(300):
        prices.step("tree", 4, 4, 60, 10.0)
        prices.draft("tree", 4, 10.0)
    for _ in range(10):
        prices.observe_step("tree", 4, 40, 10.0, seconds=3 * 1.4)
        prices.observe_draft("tree", 4, 10.0, seconds=0.25)
    for _ in range(REFRESH_READS):
        seconds = prices.step("tree", 4, 4, 60, 10.0).seconds
        drafting = prices.draft("tree", 4, 10.0)
    assert seconds == pytest.approx(3 * (1.0 + 0.01 * np.arange(4, 65)))
    assert drafting == pytest.approx(0.25)


def test_a_table_without_drafts_stays_without():
    prices = Prices(MadeUp(linear(1.0, 0.01)))
    prices.observe_draft("tree", 4, 10.0, seconds=0.25)
    assert prices.draft("tree", 4, 10.0) == 0.0


def test_few_curves_are_kept():
    prices = Prices(MadeUp(linear(1.0, 0.01)))
    for requests in range(1, 500):
        prices.step("tree", requests, requests, 10, 0.0)
    assert len(prices._curves) == KEPT_CURVES


def test_loads_are_rounded_to_four_percent():
    assert [rounded_requests(n) for n in range(17)] == list(range(17))
    assert rounded_context(0.0) == rounded_context(0.9) == 0.0
    for value in range(17, 5000):
        assert rounded_requests(value) == pytest.approx(value, rel=0.05)
        assert rounded_context(value) == pytest.approx(value, rel=0.03)
