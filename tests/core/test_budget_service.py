"""The budget on a made-up engine: shapes, long-run rate, wrong tables, changing drafts and loads."""

import numpy as np
import pytest
from cost_tables import MadeUp, linear, stairs
from served_rounds import falling, serve

from specplug.budget import Planner, allocate, best_total

WIDTH, DEPTH = 16, 4


def drafts(first, spread=0.0):
    """Trees and chains whose best node is accepted with ``first``, give or take ``spread``."""

    def draw(requests, noise):
        heads = np.clip(first + spread * (2 * noise.random(requests) - 1), 0.01, 1.0)
        return tuple(
            np.stack([falling(head, ratio, width) for head in heads])
            for ratio, width in ((0.8, WIDTH), (0.65, DEPTH))
        )

    return draw


def planner(table, **options):
    return Planner(table, budget=WIDTH, depth=DEPTH, **options)


CHEAP = MadeUp(linear(1.0, 0.00005), {"tree": 0.1, "chain": 0.08})
DEAR = MadeUp(linear(0.1, 1.0), {"tree": 0.5, "chain": 0.4})


@pytest.mark.parametrize("requests", [1, 32])
def test_cheap_rows_give_full_trees_and_dear_rows_plain_decoding(requests):
    served = serve(planner(CHEAP), CHEAP, drafts(0.9), rounds=400, requests=requests)
    assert served.shapes.count("tree") > 0.96 * 400
    full = [nodes for nodes, shape in zip(served.nodes, served.shapes, strict=True) if shape == "tree"]
    assert np.mean(full) > 0.95 * WIDTH * requests

    served = serve(planner(DEAR), DEAR, drafts(0.9), rounds=400, requests=requests)
    assert served.shapes.count("plain") > 0.95 * 400
    plain = requests / DEAR.verify_seconds(requests, np.array(requests))
    assert served.rate() > 0.99 * plain


def test_chains_are_drafted_where_trees_cost_more_than_they_bring():
    table = MadeUp(linear(1.0, 0.02), {"tree": 2.0, "chain": 0.1})
    served = serve(planner(table), table, drafts(0.8), rounds=600)
    assert served.shapes.count("chain") > 0.95 * 600


class OwnRate:
    """Every round as if all were like it: the plain ratio, the negative control of the objective."""

    def __init__(self, table):
        self.table = table

    def nodes(self, survival, requests, drafting):
        best = -np.sort(-survival[survival > 0].astype(np.float64))
        tokens = requests + np.concatenate([[0.0], best.cumsum()])
        rows = requests + np.arange(len(tokens))
        return best_total(tokens, self.table.verify_seconds(requests, rows) + drafting)


def test_the_price_of_time_is_the_long_run_rate():
    """Rich and poor drafts in turn: the planner comes to the best long-run rate, a round's own does not."""
    table = MadeUp(linear(1.0, 0.25), {"tree": 0.6, "chain": 0.6})
    rich, poor = falling(1.0, 0.98, WIDTH), falling(0.45, 0.9, WIDTH)
    turn = iter(range(10**6))

    def draw(requests, noise):
        rows = rich if next(turn) % 3 == 0 else poor
        return rows[None], rows[None, :1]

    served = serve(planner(table), table, draw, rounds=3000)

    def long_run(decide):
        tokens = seconds = 0.0
        for rows in (rich, poor, poor):
            nodes = decide(rows)
            tokens += 1 + rows[:nodes].sum()
            seconds += 1.0 + 0.25 * (1 + nodes) + 0.6
        return tokens / seconds

    best = max(
        long_run(lambda rows, a=a, b=b: a if rows is rich else b)
        for a in range(WIDTH + 1)
        for b in range(WIDTH + 1)
    )
    own = long_run(lambda rows: OwnRate(table).nodes(rows[None], 1, 0.6))
    assert served.rate(300) > 0.985 * best
    assert own < 0.98 * best


def test_prefill_rows_do_not_make_time_cheap():
    """Rows that run anyway change nothing of what a node must bring, once there is a long-run rate."""
    table = MadeUp(linear(1.0, 0.1), {"tree": 0.1, "chain": 0.1})
    ours = planner(table)
    serve(ours, table, drafts(0.8), rounds=200, requests=4)
    survival = np.stack([falling(0.8, 0.8, WIDTH)] * 4)
    caps = np.full(4, WIDTH, np.int32)

    def nodes(planner_, base):
        return planner_.verify(
            survival,
            caps,
            base_tokens=base,
            emitting=4,
            context=100.0,
            shape="tree",
            chain=survival[:, :DEPTH],
        ).nodes

    assert 0 < nodes(ours, 4) == nodes(ours, 504)
    assert nodes(planner(table), 504) > 2 * nodes(ours, 504)  # the round's own rate, the negative control


def test_chains_are_not_drafted_where_no_chain_is_told():
    table = MadeUp(linear(1.0, 0.02), {"tree": 2.0, "chain": 0.1})
    ours = planner(table)
    survival = falling(0.9, 0.8, WIDTH)[None]
    for _ in range(100):
        shape = ours.draft(1, context=9.0)
        assert shape != "chain"
        if shape == "tree":
            ours.verify(survival, np.array([WIDTH]), base_tokens=1, emitting=1, context=9.0, shape=shape)


def test_chains_and_trees_are_compared_on_the_same_drafts():
    """A request of easy tokens, then one of hard ones, and so on: trees gain 30 % in either, so they stay."""
    table = MadeUp(linear(1.0, 0.0001), {"tree": 0.1, "chain": 0.1})
    state = {"round": 0}

    def draw(count, noise):
        head = 0.95 if state["round"] // 150 % 2 else 0.3
        tree = np.repeat(falling(head, 0.8, WIDTH), 1)[None]
        return tree, tree[:, :2]

    def load(number):
        state["round"] = number
        return 1

    served = serve(planner(table), table, draw, rounds=2000, requests=load)
    assert served.shapes.count("tree") > 0.97 * 2000


def test_per_request_counts_are_those_of_allocate():
    noise = np.random.default_rng(3)
    survival = -np.sort(-noise.random((9, 12)).astype(np.float32), axis=1)
    caps = noise.integers(0, 13, 9).astype(np.int32)
    plan = planner(MadeUp(stairs([8, 32, 64], [1.0, 1.5, 2.5], 0.1))).verify(
        survival, caps, base_tokens=9, emitting=9, context=0.0, shape="tree"
    )
    assert (plan.counts <= caps).all()
    assert plan.counts.tolist() == allocate(survival, caps, plan.nodes).tolist()


def test_a_change_of_load_is_answered_at_once():
    table = MadeUp(stairs([8, 64], [1.0, 1.2], 0.05), {"tree": 0.1, "chain": 0.1})
    ours = planner(table)

    def load(number):
        return 128 if 300 <= number < 500 else 2

    served = serve(ours, table, drafts(0.8), rounds=800, requests=load)
    assert served.shapes[290:300].count("plain") <= 1
    assert served.shapes[301:330].count("plain") >= 25
    assert served.shapes[501:530].count("tree") >= 25


@pytest.mark.parametrize("requests", [1, 16])
def test_better_drafts_are_noticed_while_plain(requests):
    table = MadeUp(linear(1.0, 0.1 / requests), {"tree": 0.5, "chain": 0.5})
    state = {"round": 0}

    def draw(count, noise):
        return drafts(0.1 if state["round"] < 2000 else 0.95)(count, noise)

    def load(number):
        state["round"] = number
        return requests

    served = serve(planner(table), table, draw, rounds=4500, requests=load)
    plain = requests / float(table.verify_seconds(requests, np.array(requests)))
    assert served.shapes[1000:2000].count("plain") > 970
    assert sum(served.tokens[:2000]) / sum(served.seconds[:2000]) > 0.985 * plain
    assert served.shapes[-500:].count("plain") < 25


def test_worse_drafts_are_left():
    table = MadeUp(linear(1.0, 0.1), {"tree": 0.5, "chain": 0.5})
    state = {"round": 0}

    def draw(count, noise):
        return drafts(0.95 if state["round"] < 500 else 0.1)(count, noise)

    def load(number):
        state["round"] = number
        return 1

    served = serve(planner(table), table, draw, rounds=2500, requests=load)
    assert served.shapes[300:500].count("plain") < 10
    assert served.shapes[1200:].count("plain") > 0.97 * 1300


@pytest.mark.parametrize("outliers", [0.0, 0.01])
@pytest.mark.parametrize("online", [True, False])
def test_a_table_that_thinks_trees_are_cheap_is_put_right(online, outliers):
    """The machine takes 3 times as long for trees as tabled. Off, the negative control, nobody notices."""
    table = MadeUp(linear(0.7, 0.1), {"tree": 0.1, "chain": 0.1}, linear(1.0, 0.0))
    machine = MadeUp(linear(2.1, 0.3), {"tree": 0.3, "chain": 0.3}, linear(1.0, 0.0))
    served = serve(
        planner(table, online=online), machine, drafts(0.6), rounds=1500, outliers=outliers, seed=5
    )
    late = served.shapes[500:].count("plain")
    assert late > 950 if online else late < 50
    if online:
        assert served.rate(500) > 0.985


@pytest.mark.parametrize("online", [True, False])
def test_over_confident_drafts_are_put_right(online):
    table = MadeUp(linear(1.0, 0.05), {"tree": 0.3, "chain": 0.3})
    served = serve(planner(table, online=online), table, drafts(0.6), rounds=2000, accept=0.12)
    late = served.shapes[1000:].count("plain")
    assert late > 950 if online else late < 50


def test_shapes_do_not_flap_near_the_guard():
    """Trees at nearly the rate of plain decoding, drafts of varying quality."""
    table = MadeUp(linear(1.0, 0.05), {"tree": 1.45, "chain": 1.45})
    served = serve(planner(table), table, drafts(0.8, 0.2), rounds=3000)
    assert served.switches < 20


class LongContextsCost(MadeUp):
    """A second a row and a second a committed token."""

    def verify_seconds(self, requests, tokens, *, context=0.0, shape="tree"):
        return np.asarray(tokens, np.float64) + context


@pytest.mark.parametrize(
    ("emitted_context", "drafted", "expected"),
    [(None, "tree", "tree"), (100.0, "tree", "tree"), (10.0, "tree", "plain"), (10.0, "plain", "tree")],
)
def test_plain_decoding_is_priced_at_the_context_of_a_token(emitted_context, drafted, expected):
    """Trees bring twice plain's tokens at a mean request's context, and less than plain decoding has where
    its tokens are: at requests of a tenth of that. What plain steps emit says nothing.
    """
    ours = planner(LongContextsCost(linear(0, 1)))
    rows = np.full((1, 1), 0.99, np.float32)
    caps = np.ones(1, np.int32)
    for _ in range(200):
        shape = ours.draft(1, context=100.0)
        if shape != "plain":
            ours.verify(rows, caps, base_tokens=1, emitting=1, context=100.0, shape="tree", chain=rows)
        ours.observe(
            requests=1, tokens=2, context=100.0, verified="tree", verify_seconds=None, drafted=drafted,
            emitted_context=emitted_context,
        )  # fmt: skip
    assert ours._choice.current in (("chain", "tree") if expected == "tree" else ("plain",))


def test_observing_nothing_measured_is_allowed():
    ours = planner(CHEAP)
    ours.observe(requests=3, tokens=3, context=1.0, verified="plain", verify_seconds=None)
    with pytest.raises(ValueError, match="observed: expected seconds above 0, got -1"):
        ours.observe(requests=3, tokens=3, context=1.0, verified="plain", verify_seconds=-1.0)


def test_no_requests_draft_nothing():
    assert planner(CHEAP).draft(0, context=0.0) == "plain"


def test_memory_is_bounded():
    """Every load and context there is, and what is kept has a fixed number of entries."""
    ours = planner(CHEAP)
    noise = np.random.default_rng(0)
    for _ in range(400):
        count = int(2 ** noise.uniform(0, 8))
        shape = ours.draft(count, context=float(10 ** noise.uniform(0, 5)))
        if shape != "plain":
            survival = drafts(0.8)(count, noise)[shape == "chain"]
            ours.verify(
                survival,
                np.full(count, survival.shape[1], np.int32),
                base_tokens=count,
                emitting=count,
                context=float(10 ** noise.uniform(0, 5)),
                shape=shape,
            )
    assert len(ours._prices._curves) <= 32
    assert len(ours._prices._drafts) <= 32
    assert len(ours._prospects._seen) <= 64
