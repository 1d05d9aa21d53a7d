"""Cost tables: the curves through the probes, what they promise, and what is refused."""

import math
from bisect import bisect_left
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug.cost import Provenance, check_provenance, from_probes
from specplug.cost_curves import Probe, isotonic

SIZES = (1, 2, 4, 8, 16, 24, 32)


def probe(requests: int, tokens: int, seconds: float, **facts) -> Probe:
    facts = {"shape": "tree", "context": 0.0} | facts
    return Probe(requests=requests, tokens=tokens, median_seconds=seconds, **facts)


def seconds(table, requests, tokens, **where) -> list[float]:
    return table.verify_seconds(requests, np.asarray(tokens), **where).tolist()


def test_between_probes_linear_below_constant_above_the_last_slope():
    table = from_probes([probe(1, 4, 0.10), probe(1, 8, 0.14), probe(1, 16, 0.30)])
    assert seconds(table, 1, [1, 4, 6, 8, 12, 16, 20]) == pytest.approx(
        [0.10, 0.10, 0.12, 0.14, 0.22, 0.30, 0.38]
    )
    assert (table.max_tokens, table.max_requests) == (16, 1)


def test_a_staircase_at_the_graph_sizes():
    """Every row count costs its graph's: brute force over the sizes."""
    table = from_probes([probe(1, size, 0.1 + 0.01 * size) for size in SIZES], graph_sizes=SIZES)
    rows = range(1, SIZES[-1] + 1)
    assert seconds(table, 1, rows) == pytest.approx(
        [0.1 + 0.01 * SIZES[bisect_left(SIZES, row)] for row in rows]
    )


def test_a_probe_inside_a_stair_measures_the_whole_stair():
    table = from_probes([probe(1, 3, 0.2), probe(1, 11, 0.4)], graph_sizes=SIZES)
    assert seconds(table, 1, [3, 4, 9, 16]) == pytest.approx([0.2, 0.2, 0.4, 0.4])
    assert seconds(table, 1, [5, 8]) == pytest.approx([0.2 + 0.2 * (8 - 4) / (16 - 4)] * 2)


def test_above_the_graphs_the_curve_is_smooth_and_may_jump():
    points = [probe(1, 16, 0.2), probe(1, 32, 0.3), probe(1, 40, 0.9), probe(1, 50, 1.0)]
    table = from_probes(points, graph_sizes=SIZES)
    assert seconds(table, 1, [25, 32, 40, 45, 50, 60]) == pytest.approx([0.3, 0.3, 0.9, 0.95, 1.0, 1.1])
    assert seconds(table, 1, [33]) == pytest.approx(
        [0.9 - 0.01 * 7]
    )  # the smooth part's own slope, backwards


def test_requests_and_contexts_mix_linearly():
    table = from_probes(
        [
            probe(r, t, 0.1 * r + 0.01 * t + 0.001 * c, context=float(c))
            for r in (2, 6)
            for t in (6, 10)
            for c in (100, 300)
        ]
    )

    def true(r, t, c):
        return 0.1 * r + 0.01 * t + 0.001 * c

    for r, t, c in [(2, 6, 100), (3, 7, 150), (5, 9, 299), (6, 10, 300), (4, 12, 250)]:
        assert seconds(table, r, [t], context=c) == pytest.approx([true(r, t, c)])
    assert seconds(table, 4, [8], context=500.0) == pytest.approx([true(4, 8, 500)])  # the last slope
    assert seconds(table, 4, [8], context=1.0) == pytest.approx([true(4, 8, 100)])  # the nearest
    assert seconds(table, 1, [8], context=100) == pytest.approx([true(2, 8, 100)])
    assert seconds(table, 99, [8], context=100) == pytest.approx([true(99, 8, 100)])  # the last slope


def test_a_longer_context_than_measured_never_gets_cheaper():
    falling = [probe(1, t, s, context=c) for c, s in ((10.0, 0.2), (20.0, 0.1)) for t in (1, 2)]
    assert seconds(from_probes(falling), 1, [1], context=1000.0) == [0.1]


def test_plain_decoding_has_one_axis():
    """Probes of one row a request are one curve, so that prefill rows of a plain step are not free."""
    table = from_probes([probe(r, r, 0.01 * r, shape="plain") for r in (1, 2, 4)])
    assert seconds(table, 1, [1, 3, 4, 10], shape="plain") == pytest.approx([0.01, 0.03, 0.04, 0.10])


def test_a_shape_that_was_not_measured_takes_the_nearest():
    table = from_probes([probe(1, 1, 0.1, shape="plain"), probe(1, 8, 0.2, shape="chain")])
    assert seconds(table, 1, [8]) == seconds(table, 1, [8], shape="chain") == [0.2]
    assert seconds(table, 1, [1], shape="plain") == [0.1]
    assert table.draft_seconds(4) == 0.0


def test_more_requests_than_measured_keep_the_slope_of_the_last_octave():
    """Not of the last two counts, here 7 and 8, between which there is only noise."""
    by_requests = {1: 0.1, 4: 0.4, 7: 0.9, 8: 0.8}
    table = from_probes([probe(r, 8 + t, s + 0.01 * t) for r, s in by_requests.items() for t in (0, 8)])
    assert seconds(table, 8, [8, 16]) == pytest.approx([0.8, 0.88])
    assert seconds(table, 256, [8, 16]) == pytest.approx([0.8 + 0.1 * 248, 0.88 + 0.1 * 248])
    falling = from_probes([probe(r, t, 0.1 * t / r) for r in (1, 2) for t in (8, 16)])
    assert seconds(falling, 99, [8, 16]) == seconds(falling, 2, [8, 16])


def test_a_curve_that_does_not_rise_takes_the_slope_of_the_nearest_that_does():
    """A chain of one length has one row count; past it, more rows cost what a tree's or another's do."""
    trees = [probe(r, t, 0.1 * r + 0.01 * r * t) for r in (1, 4) for t in (8, 16)]
    chains = [probe(r, 8 * r, 0.5 * r, shape="chain") for r in (1, 4)]
    table = from_probes([*trees, *chains])
    for requests in (1, 4):
        known, far = seconds(table, requests, [8 * requests, 8 * requests + 100], shape="chain")
        assert known == pytest.approx(0.5 * requests)
        assert far == pytest.approx(known + 100 * 0.01 * requests)
    own = from_probes([*trees, *chains, probe(4, 40, 2.4, shape="chain"), probe(4, 48, 2.8, shape="chain")])
    assert seconds(own, 1, [8, 18], shape="chain") == pytest.approx([0.5, 0.5 + 10 * 0.05])  # its own
    assert seconds(table, 4, [16, 17]) == pytest.approx([1.04, 1.08])  # what rises keeps its own
    captured = from_probes([*trees, *chains], graph_sizes=(8, 16, 24, 32, 64))
    assert seconds(captured, 1, [8, 16, 60], shape="chain") == pytest.approx([0.5, 0.58, 0.5 + 0.01 * 56])
    alone = from_probes(chains)
    assert seconds(alone, 1, [8, 1000], shape="chain") == pytest.approx([0.5, 0.5])


@given(st.integers(1, 512), st.floats(0, 4000), st.integers(1, 7))
def test_a_chain_of_many_rows_is_not_cheaper_than_plain_decoding_of_fewer(requests, context, nodes):
    """As measured on a CPU: chains of one length and few requests, plain decoding and trees."""
    plain = [probe(r, r, 4e-3 + 1e-4 * r, shape="plain") for r in (1, 4, 16)]
    chains = [probe(r, 8 * r, 5e-3 + 1e-4 * 8 * r, shape="chain") for r in (1, 4, 16)]
    trees = [probe(r, r * (1 + n), 5e-3 + 1e-4 * r * (1 + n)) for r in (1, 4, 16) for n in (1, 7, 63)]
    table = from_probes([*plain, *chains, *trees])
    rows = requests * (1 + nodes)
    chain = seconds(table, requests, [rows], context=context, shape="chain")[0]
    assert chain >= seconds(table, requests, [requests], context=context, shape="plain")[0]
    if requests > 16 and nodes == 7:
        assert chain == pytest.approx(5e-3 + 1e-4 * rows)


def test_draft_seconds():
    drafts = [probe(r, 0, 0.01 * r, shape=s) for r in (1, 4) for s in ("chain", "tree")]
    drafts[-1] = probe(4, 0, 0.10)
    table = from_probes([probe(1, 1, 0.1)], drafts)
    assert table.draft_seconds(4, shape="chain") == pytest.approx(0.04)
    assert table.draft_seconds(2) == pytest.approx(0.04)  # a third of the way from 0.01 to 0.10
    assert table.draft_seconds(7) == pytest.approx(0.19)  # the last slope
    assert table.draft_seconds(4, shape="plain") == 0.0


def test_any_shape_of_tokens_and_one_call_for_all():
    table = from_probes([probe(1, 1, 0.1), probe(1, 9, 0.9)])
    tokens = np.arange(1, 10).reshape(3, 3)
    assert table.verify_seconds(1, tokens) == pytest.approx(0.1 * tokens)


rows_and_seconds = st.lists(
    st.tuples(st.integers(1, 200), st.floats(1e-6, 10)), min_size=1, max_size=12, unique_by=lambda one: one[0]
)


@given(rows_and_seconds, st.sets(st.integers(1, 128), max_size=6), st.integers(1, 3), st.floats(0, 5000))
def test_more_rows_never_cost_less(points, sizes, requests, context):
    probes = [
        probe(r, t, s * (1 + r * c), context=float(c)) for t, s in points for r in (1, 3) for c in (0, 1000)
    ]
    table = from_probes(probes, graph_sizes=sorted(sizes))
    curve = table.verify_seconds(requests, np.arange(1, 400), context=context)
    assert (np.diff(curve) >= -1e-12 * curve.max()).all()
    assert (curve > 0).all()


@given(rows_and_seconds)
def test_a_monotone_measurement_is_kept_as_it_is(points):
    """The pooling touches nothing but violations: at every probe the table says the median."""
    times = sorted(s for _, s in points)
    probes = [probe(1, t, s) for (t, _), s in zip(sorted(points), times, strict=True)]
    table = from_probes(probes)
    assert seconds(table, 1, [p.tokens for p in probes]) == pytest.approx([p.median_seconds for p in probes])


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=7))
def test_isotonic_is_the_nearest_non_decreasing_sequence(points):
    """Against the closed form max over i <= k of min over j >= k of the mean of i..j."""
    values, weights = np.array([p[0] for p in points]), np.array([float(p[1]) for p in points])
    n = len(points)

    def mean(i, j):
        return np.average(values[i : j + 1], weights=weights[i : j + 1])

    expected = [max(min(mean(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)]
    assert isotonic(values, weights) == pytest.approx(expected)


def test_pooling_weighs_by_repeats():
    table = from_probes([probe(1, 1, 0.4, repeats=3), probe(1, 2, 0.2, repeats=1)])
    assert seconds(table, 1, [1, 2]) == pytest.approx([0.35, 0.35])


@pytest.mark.parametrize(
    ("probes", "informative"),
    [
        ([probe(1, 1, 0.1)], False),
        ([probe(1, 1, 0.1), probe(2, 8, 0.2)], False),  # rows and requests moved together
        ([probe(1, 1, 0.1), probe(1, 8, 0.1)], False),
        ([probe(1, 1, 0.1), probe(1, 8, 0.05)], False),
        ([probe(1, 1, 0.1), probe(1, 8, 0.10001)], False),
        ([probe(1, 1, 0.1, spread_seconds=0.02), probe(1, 8, 0.14, spread_seconds=0.02)], False),
        ([probe(1, 1, 0.1, spread_seconds=0.002), probe(1, 8, 0.14, spread_seconds=0.002)], True),
        ([probe(1, 1, 0.1), probe(1, 8, 0.14)], True),
        ([probe(1, 1, 0.1, shape="plain"), probe(2, 2, 0.2, shape="plain")], True),
    ],
)
def test_what_says_nothing_says_so(probes, informative):
    table = from_probes(probes)
    assert table.informative == informative
    assert (table.reason == "") == informative
    assert informative or table.reason.endswith("trimming off")
    assert "\n" not in table.reason
    assert table.reason.count(".") == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"median_seconds": math.nan}, "median_seconds: expected a finite number above 0"),
        ({"median_seconds": math.inf}, "median_seconds: expected a finite number above 0"),
        ({"median_seconds": 0.0}, "median_seconds: expected a finite number above 0"),
        ({"median_seconds": -1.0}, "median_seconds: expected a finite number above 0"),
        ({"spread_seconds": -1.0}, "spread_seconds: expected a finite number of at least 0"),
        ({"context": math.nan}, "context: expected a finite number of at least 0"),
        ({"requests": 0}, "expected 1 or more requests"),
        ({"repeats": 0}, "expected 1 or more requests and repeats"),
        ({"tokens": -1}, "expected 0 or more tokens"),
        ({"tokens": 1 << 31}, "numbers below 2\\^31"),
    ],
)
def test_impossible_probes_are_refused(change, complaint):
    good = {"shape": "tree", "requests": 1, "tokens": 4, "context": 0.0, "median_seconds": 0.1}
    Probe(**good)
    with pytest.raises(ValueError, match=complaint):
        Probe(**(good | change))


@pytest.mark.parametrize(
    ("verify", "draft", "sizes", "complaint"),
    [
        ([], [], (), "verify: expected one probe or more, got none"),
        ([probe(1, 4, 0.1)] * 2, [], (), "each once"),
        ([probe(1, 0, 0.1)], [], (), "1 token or more"),
        ([probe(1, 4, 0.1)], [probe(1, 4, 0.1)], (), "expected tokens 0"),
        ([probe(1, 4, 0.1)], [probe(1, 0, 0.1, shape="plain")], (), "got plain, which drafts nothing"),
        ([probe(1, 4, 0.1)], [], (4, 2), "graph_sizes: expected rising"),
        ([probe(1, 4, 0.1)], [], (0, 2), "graph_sizes: expected rising"),
    ],
)
def test_impossible_tables_are_refused(verify, draft, sizes, complaint):
    with pytest.raises(ValueError, match=complaint):
        from_probes(verify, draft, graph_sizes=sizes)


HERE = Provenance(
    engine="vllm", engine_version="0.32.0", target="T", target_hash="aa", draft="D", device="GPU",
    dtype="bfloat16", tensor_parallel=1, context=512, date="2026-11-29",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"engine": "sglang"}, "engine: measured for vllm, here it is sglang"),
        ({"engine_version": "0.33.0"}, "engine version"),
        ({"engine_version": "0.32.0+cpu"}, None),
        ({"target_hash": "bb"}, "target: measured for T"),
        ({"target": "other path"}, None),  # the hash says it is the same model
        ({"target_hash": "", "target": "other"}, "target: measured for T, here it is other"),
        ({"draft": "E"}, "draft"),
        ({"device": "other GPU"}, "device"),
        ({"dtype": "float16"}, "dtype"),
        ({"tensor_parallel": 2}, "tensor parallel"),
        ({"tensor_parallel": 0, "device": "", "dtype": ""}, None),
        ({"context": 9, "date": "", "command": "x"}, None),
    ],
)
def test_provenance_is_compared_fact_by_fact(change, named):
    table = from_probes([probe(1, 4, 0.1)], provenance=HERE)
    found = check_provenance(table, msgspec.structs.replace(HERE, **change))
    assert len(found) == (named is not None)
    assert not found or named in found[0]
    assert check_provenance(from_probes([probe(1, 4, 0.1)]), HERE) == []


def test_extrapolation_is_from_the_last_cheaper_probe():
    """Two pooled probes at the end do not make further rows free."""
    table = from_probes([probe(1, 1, 0.1), probe(1, 5, 0.31), probe(1, 6, 0.29)])
    far = seconds(table, 1, [6, 106])
    assert far[0] == pytest.approx(0.30)
    assert far[1] - far[0] == pytest.approx(100 * (0.30 - 0.1) / (6 - 1))
    assert all(a <= b for a, b in pairwise(far))
