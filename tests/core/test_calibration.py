"""Calibration: known distortions are undone, order and prefixes are kept, files round-trip, drift is
followed.
"""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.calibration import (
    Calibration,
    Coefficients,
    DepthCoefficients,
    Regime,
    log_acceptance,
    node_log_acceptance,
    read_calibration,
)
from specplug.calibration_fit import Records, fit, predict
from specplug.ddtree import build_tree
from specplug.drift import DriftLog
from specplug.order import by_score, sibling_ranks
from specplug.reliability import ece, ece_by_depth, plot, reliability
from specplug.tree import DraftTree

DEPTHS = 4
# Per depth: A, B, C of the true law logit a = A ln p - B ln(1 - p) + C; over-confident, more so with depth.
TRUTH = [(1.0, 0.7, -0.3), (1.2, 0.7, -0.6), (1.4, 0.6, -0.9), (1.6, 0.6, -1.2)]


def true_acceptance(log_probs, depths, ranks, truth):
    a, b, c = np.array(truth).T[:, depths - 1]
    logit = a * log_probs - b * np.log(-np.expm1(log_probs)) + c - 0.4 * np.log1p(ranks)
    return 1 / (1 + np.exp(-logit))


def synthetic(n: int, seed: int, truth=TRUTH) -> Records:
    random = np.random.RandomState(seed)
    depths = random.randint(1, DEPTHS + 1, n)
    log_probs = np.minimum(-random.exponential(0.5 * depths), -1e-4)
    ranks = random.geometric(0.6, n) - 1
    accepted = random.rand(n) < true_acceptance(log_probs, depths, ranks, truth)
    return Records(log_probs, depths, ranks, accepted)


@pytest.fixture(scope="module")
def fitted() -> Calibration:
    return fit({0.0: synthetic(60_000, 1), None: synthetic(20_000, 2, [(1.0, 1.0, 0.8)] * DEPTHS)})


def test_a_known_distortion_is_recovered(fitted):
    held_out = synthetic(5_000, 3)
    truth = true_acceptance(held_out.log_probs, held_out.depths, held_out.ranks, TRUTH)
    error = np.abs(predict(fitted, held_out, temperature=0.0) - truth)
    assert error.mean() < 0.01
    assert error.max() < 0.06
    for depth, (a, b, c) in zip(fitted.regimes[0].depths, TRUTH, strict=True):
        assert depth.fitted[:4] == pytest.approx([a, b, c, -0.4], abs=0.3)


def test_ece_is_halved_on_held_out_rounds_in_both_regimes(fitted):
    for temperature, truth in ((0.0, TRUTH), (0.8, [(1.0, 1.0, 0.8)] * DEPTHS)):
        held_out = synthetic(20_000, 4, truth)
        before = ece(np.exp(held_out.log_probs), held_out.accepted)
        after = ece(predict(fitted, held_out, temperature=temperature), held_out.accepted)
        assert after < before / 2
        other = 0.8 if temperature == 0 else 0.0
        wrong = ece(predict(fitted, held_out, temperature=other), held_out.accepted)
        assert wrong > 2 * after  # negative control: the other regime's map does not fit


def test_the_fit_reports_each_depths_ece(fitted):
    regime = fitted.regimes[0]
    assert regime.nodes == 60_000
    assert len(regime.ece_before) == len(regime.ece_after) == DEPTHS
    assert all(after < before for before, after in zip(regime.ece_before, regime.ece_after, strict=True))
    records = synthetic(60_000, 1)
    again = ece_by_depth(np.exp(records.log_probs), records.accepted, records.depths, max_depth=DEPTHS)
    assert regime.ece_before == pytest.approx(again)


def test_few_records_stay_near_the_identity():
    """Four rejected nodes say little against the prior, however sure the draft was of them."""
    few = synthetic(4, 9)
    calibration = fit({None: few._replace(accepted=np.zeros(4, dtype=bool))})
    p = np.exp(few.log_probs)
    assert (np.abs(predict(calibration, few, temperature=1.0) - p) < 0.35).all()


def test_confidence_is_used_where_it_says_something():
    random = np.random.RandomState(5)
    records = synthetic(20_000, 6)
    confidence = random.rand(20_000)
    accepted = random.rand(20_000) < confidence * np.exp(records.log_probs) ** 0.5
    with_head = records._replace(confidence=confidence, accepted=accepted)
    calibration = fit({None: with_head})
    blind = fit({None: with_head._replace(confidence=None)})
    assert all(depth.fitted[4] > 0.3 for depth in calibration.regimes[0].depths)

    def brier(model: Calibration, data: Records) -> float:
        return float(np.mean((predict(model, data, temperature=1.0) - data.accepted) ** 2))

    assert brier(calibration, with_head) < 0.9 * brier(blind, with_head._replace(confidence=None))
    with pytest.raises(ValueError, match=r"confidence: expected the confidence head's survival"):
        predict(calibration, records, temperature=1.0)


coefficient_lists = st.tuples(
    st.floats(0, 4), st.floats(0, 4), st.floats(-3, 3), st.floats(-2, 0), st.floats(0, 2)
).map(list)
online_lists = st.tuples(st.floats(0.25, 4), st.floats(0.25, 4), st.floats(-3, 3)).map(list)
depth_maps = st.builds(lambda f, o: DepthCoefficients(fitted=f, online=o), coefficient_lists, online_lists)


@settings(max_examples=60, deadline=None)
@given(st.lists(depth_maps, min_size=1, max_size=4), st.integers(0, 10**6))
def test_acceptance_is_monotone_and_prefixes_stay_closed(depths, seed):
    calibration = Calibration(regimes=[Regime(max_temperature=None, depths=depths, uses_confidence=True)])
    coefficients = Coefficients.of(calibration)
    # along one node's log-probability, confidence and rank
    grid = torch.linspace(-12, 0, 200)
    for depth in range(1, 6):
        at = torch.full_like(grid, depth).long()

        def a(log_probs, confidence, ranks, at=at):
            return node_log_acceptance(
                coefficients,
                log_probs,
                depths=at,
                ranks=ranks,
                temperatures=torch.ones_like(log_probs),
                confidence=confidence,
            )

        still, zero = torch.full_like(grid, 0.6), torch.zeros_like(at)
        assert (a(grid, still, zero).diff() >= -1e-5).all()
        assert (a(torch.full_like(grid, -1.0), torch.linspace(0, 1, 200), zero).diff() >= -1e-5).all()
        assert (a(torch.full_like(grid, -1.0), still, torch.arange(200)).diff() <= 1e-5).all()
    # over trees
    g = torch.Generator().manual_seed(seed)
    tree = build_tree((torch.randn(3, 4, 6, generator=g) * 2).log_softmax(-1), 14)
    log_a = log_acceptance(
        coefficients,
        tree.scores,
        parents=tree.parents,
        depths=tree.depths,
        ranks=sibling_ranks(tree),
        temperatures=torch.tensor([0.0, 0.7, 1.5]),
        confidence=torch.rand(3, 14, generator=g),
        max_depth=4,
    )
    assert (log_a <= 0).all()
    above = torch.nn.functional.pad(log_a, (1, 0)).gather(1, tree.parents.long() + 1)
    assert (log_a <= above).all()
    moved = by_score(tree, log_a)
    moved.tree.validate()
    assert nodes(moved.tree) == nodes(tree)
    assert torch.equal(moved.tree.tokens, tree.tokens.gather(1, moved.order))


def nodes(tree: DraftTree) -> list[set[tuple[int, ...]]]:
    """The paths of each request's tree."""
    result = []
    for parents, tokens, count in zip(
        tree.parents.tolist(), tree.tokens.tolist(), tree.counts.tolist(), strict=True
    ):
        rows: list[tuple[int, ...]] = [()]
        for j in range(count):
            rows.append((*rows[parents[j] + 1], tokens[j]))
        result.append(set(rows))
    return result


def test_without_the_comparison_along_the_path_a_child_would_rise():
    """Negative control: depth 2 is trusted more than depth 1, so single nodes are not prefix-closed."""
    depths = [
        DepthCoefficients(fitted=[1, 1, -2.0, 0, 0]),
        DepthCoefficients(fitted=[1, 1, 2.0, 0, 0]),
    ]
    coefficients = Coefficients.of(Calibration(regimes=[Regime(max_temperature=None, depths=depths)]))
    flat = node_log_acceptance(
        coefficients,
        torch.tensor([[-0.5, -0.6]]),
        depths=torch.tensor([[1, 2]]),
        ranks=torch.zeros(1, 2).long(),
        temperatures=torch.ones(1, 2),
    )
    assert flat[0, 1] > flat[0, 0]


def test_ranks_count_the_siblings_before_a_node():
    tree = build_tree(torch.tensor([[[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]]).log(), 7)
    seen: dict[int, int] = {}
    expected = []
    for parent in tree.parents[0].tolist():
        expected.append(seen.get(parent, 0))
        seen[parent] = expected[-1] + 1
    assert sibling_ranks(tree)[0].tolist() == expected
    padded = dataclasses.replace(tree, counts=torch.tensor([2], dtype=torch.int32))
    assert sibling_ranks(padded)[0, 2:].tolist() == [0] * 5


def test_a_dropped_node_becomes_padding():
    tree = build_tree(torch.tensor([[[0.5, 0.3, 0.2]]]).log(), 3)
    scores = tree.scores.clone()
    scores[0, 1] = float("-inf")
    moved = by_score(tree, scores).tree
    moved.validate()
    assert moved.counts.tolist() == [2]
    assert moved.tokens.tolist() == [[0, 2, 0]]


def test_a_temperature_without_a_regime_keeps_its_scores(fitted):
    greedy_only = Calibration(regimes=fitted.regimes[:1])
    records = synthetic(100, 8)
    plain = np.exp(records.log_probs)
    assert predict(greedy_only, records, temperature=0.8) == pytest.approx(plain, rel=1e-6)
    assert np.abs(predict(greedy_only, records, temperature=0.0) - plain).max() > 0.05
    assert predict(Calibration(), records, temperature=0.0) == pytest.approx(plain, rel=1e-6)


def test_a_calibration_survives_the_disk(fitted, tmp_path):
    fitted.save(tmp_path / "c.json")
    assert read_calibration(tmp_path / "c.json") == fitted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"regime": []}', r"c.json: .*unknown field `regime`.*did you mean 'regimes'\?"),
        (
            '{"regimes": [{"max_temperature": 0, "depths": [{"fited": [1,1,0,0,0]}]}]}',
            r"unknown field `fited`.*did you mean 'fitted'\?",
        ),
        ('{"regimes": [{"max_temperature": 0, "depths": []}]}', r"depths: expected .* at least one depth"),
        (
            '{"regimes": [{"max_temperature": 0, "depths": [{"fitted": [-1,1,0,0,0]}]}]}',
            r"fitted\[0\] \(log_p\): expected at least 0, got -1",
        ),
        (
            '{"regimes": [{"max_temperature": 0, "depths": [{"fitted": [1,1,0,0.5,0]}]}]}',
            r"fitted\[3\] \(log_rank\): expected at most 0, got 0.5",
        ),
        (
            '{"regimes": [{"max_temperature": 1, "depths": [{}]}, {"max_temperature": 0, "depths": [{}]}]}',
            r"regimes: expected strictly rising max_temperature",
        ),
        ('{"regimes": [', r"c.json: "),
        ('{"regimes": [{"max_temperature": "0", "depths": [{}]}]}', r"Expected `float \| null`, got `str`"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text, message, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_calibration(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": np.array([-1.0, 0.5])}, r"records.log_probs\[1\]: expected -inf..0.0, got 0.5"),
        ({"log_probs": np.array([-1.0, np.nan])}, r"records.log_probs\[1\]"),
        ({"depths": np.array([1, 0])}, r"records.depths\[1\]"),
        ({"ranks": np.array([1])}, r"records.ranks: expected shape \[2\]"),
        ({"confidence": np.array([0.1, 1.5])}, r"records.confidence\[1\]"),
    ],
)
def test_malformed_records_are_refused(change, message):
    good = Records(np.array([-1.0, -2.0]), np.array([1, 2]), np.array([0, 0]), np.array([True, False]))
    with pytest.raises(ValueError, match=message):
        fit({None: good._replace(**change)})


def test_empty_records_are_refused():
    none = np.zeros(0)
    with pytest.raises(ValueError, match=r"at least one node for max_temperature None"):
        fit({None: Records(none, none.astype(int), none.astype(int), none.astype(bool))})


# Online.

SHIFTED = [(a, b, c + 1.2) for a, b, c in TRUTH]  # the text became easier


def serve(log: DriftLog, rounds: int, truth, *, seed: int, outliers: float = 0.0) -> None:
    random = np.random.RandomState(seed)
    for i in range(rounds):
        records = synthetic(500, seed * 1000 + i, truth)
        flipped = random.rand(500) < outliers
        log.observe(records._replace(accepted=records.accepted ^ flipped), temperature=0.0)


def served_ece(calibration: Calibration, truth) -> float:
    held_out = synthetic(20_000, 77, truth)
    return ece(predict(calibration, held_out, temperature=0.0), held_out.accepted)


def test_the_online_correction_converges(fitted):
    log = DriftLog(fitted, half_life=5000)
    stale = served_ece(fitted, SHIFTED)
    errors = []
    for step in range(4):
        serve(log, 5 * 4**step, SHIFTED, seed=step + 1)
        errors.append(served_ece(log.corrected(), SHIFTED))
    assert errors[-1] < stale / 4
    assert errors[-1] < 0.02
    # and back again: the old text fades
    serve(log, 250, TRUTH, seed=9)
    assert served_ece(log.corrected(), TRUTH) < 0.02


def test_the_online_correction_leaves_a_true_calibration_alone(fitted):
    log = DriftLog(fitted)
    serve(log, 60, TRUTH, seed=3)
    held_out = synthetic(5_000, 5)
    before = predict(fitted, held_out, temperature=0.0)
    after = predict(log.corrected(), held_out, temperature=0.0)
    assert np.abs(after - before).mean() < 0.015
    assert not any(row.alarm for row in log.report())


def test_outliers_move_the_online_correction_no_more_than_their_share(fitted):
    clean, dirty = DriftLog(fitted), DriftLog(fitted)
    serve(clean, 40, TRUTH, seed=4)
    serve(dirty, 40, TRUTH, seed=4, outliers=0.03)
    held_out = synthetic(5_000, 5)
    a, b = (predict(log.corrected(), held_out, temperature=0.0) for log in (clean, dirty))
    assert np.abs(a - b).mean() < 0.03
    # a burst of impossible outcomes on sure nodes is forgotten
    sure = Records(np.full(500, -1e-6), np.ones(500, int), np.zeros(500, int), np.zeros(500, bool))
    dirty.observe(sure, temperature=0.0)
    serve(dirty, 600, TRUTH, seed=6)
    c = predict(dirty.corrected(), held_out, temperature=0.0)
    assert np.abs(a - c).mean() < 0.02


def test_drift_raises_the_alarm_by_depth_and_a_correction_clears_it(fitted):
    log = DriftLog(fitted)
    deep_only = [*TRUTH[:3], (TRUTH[3][0], TRUTH[3][1], TRUTH[3][2] + 2.5)]
    serve(log, 100, deep_only, seed=8)
    rows = [row for row in log.report() if row.max_temperature == 0.0]
    assert [row.depth for row in rows if row.alarm] == [4]
    assert rows[3].bias < -0.05  # under-confident
    assert rows[3].ece > 0.05
    log.corrected()
    assert not any(row.alarm for row in log.report())


def test_memory_is_bounded_and_other_regimes_are_untouched(fitted):
    log = DriftLog(fitted, half_life=1000)
    serve(log, 40, SHIFTED, seed=2)
    rows = log.report()
    assert all(row.nodes < 1000 / np.log(2) + 500 for row in rows)
    assert all(row.nodes == 0 and not row.alarm for row in rows if row.max_temperature is None)
    assert log.corrected().regimes[1] == msgspec.structs.replace(fitted.regimes[1])


def test_a_log_needs_a_regime(fitted):
    with pytest.raises(ValueError, match=r"calibration: expected at least one regime"):
        DriftLog(Calibration())
    with pytest.raises(ValueError, match=r"temperature: expected one of a fitted regime, got 0.8"):
        DriftLog(Calibration(regimes=fitted.regimes[:1])).observe(synthetic(5, 1), temperature=0.8)


# Reliability.


def test_reliability_by_hand():
    curve = reliability([0.05, 0.05, 0.95, 1.0], [0, 1, 1, 1], bins=10)
    assert curve.counts.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert curve.predicted[[0, 9]].tolist() == pytest.approx([0.05, 0.975])
    assert curve.accepted[[0, 9]].tolist() == [0.5, 1.0]
    assert curve.ece == pytest.approx(0.5 * 0.45 + 0.5 * 0.025)
    with pytest.raises(ValueError, match=r"predicted: expected probabilities in \[0, 1\], got 1.5"):
        ece([1.5], [1])
    with pytest.raises(ValueError, match=r"accepted: expected 2 outcomes"):
        ece([0.5, 0.5], [1])


def test_the_plot_is_a_file_or_an_error_with_the_fix(tmp_path, monkeypatch):
    curves = {"before": reliability([0.2, 0.9], [0, 1])}
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'specplug\[plot\]'"):
        plot(curves, tmp_path / "r.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    plot(curves, tmp_path / "r.png", title="quick")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
