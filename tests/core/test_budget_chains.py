"""The budget of a host that drafts chains alone: long-run rate, plain rounds, and what is only guessed."""

import numpy as np
import pytest
from cost_tables import MadeUp, linear
from served_rounds import falling, serve

from specplug.budget import Planner, best_total

DEPTH = 8


def planner(table, **options):
    return Planner(table, budget=DEPTH, depth=DEPTH, trees=False, **options)


def same(rows):
    """Chains of a made-up draft; the tree beside them is never asked for."""
    return lambda requests, noise: (None, np.repeat(rows[None], requests, 0))


def test_only_chains_and_plain_rounds_are_drafted():
    table = MadeUp(linear(1.0, 0.001), {"chain": 0.1})
    served = serve(planner(table), table, same(falling(0.9, 0.9, DEPTH)), rounds=300, requests=4)
    assert set(served.shapes) <= {"chain", "plain"}
    assert served.shapes.count("chain") > 0.96 * 300
    assert served.shapes[0] == "chain"


def test_dear_rows_are_decoded_plainly_and_probed_rarely():
    table = MadeUp(linear(0.1, 1.0), {"chain": 0.4})
    served = serve(planner(table), table, same(falling(0.9, 0.9, DEPTH)), rounds=400, requests=4)
    assert 0.9 * 400 < served.shapes.count("plain") < 400


def test_the_price_of_time_is_the_long_run_rate():
    """Rich and poor chains in turn: the long-run best, which every round's own rate misses."""
    table = MadeUp(linear(1.0, 0.25), {"chain": 0.6})
    kinds = [falling(1.0, 0.98, DEPTH), falling(0.45, 0.9, DEPTH), falling(0.45, 0.9, DEPTH)]
    turn = iter(range(10**6))

    def draw(requests, noise):
        return None, kinds[next(turn) % 3][None]

    def long_run(counts):
        tokens = sum(1 + rows[:nodes].sum() for rows, nodes in zip(kinds, counts, strict=True))
        return tokens / sum(1.6 + 0.25 * (1 + nodes) for nodes in counts)

    def own(rows):
        return best_total(1 + np.concatenate([[0.0], rows.cumsum()]), 1.6 + 0.25 * (1 + np.arange(DEPTH + 1)))

    served = serve(planner(table), table, draw, rounds=3000)
    best = max(long_run((a, b, b)) for a in range(DEPTH + 1) for b in range(DEPTH + 1))
    assert served.rate(300) > 0.985 * best
    assert long_run([own(rows.astype(np.float64)) for rows in kinds]) < 0.98 * best


@pytest.mark.parametrize("known", [True, False])
def test_a_guess_teaches_nothing(known):
    """Poor drafts that are known end the drafting; the same numbers as a guess do not."""
    table = MadeUp(linear(1.0, 0.3), {"chain": 0.3})
    ours = planner(table)
    serve(ours, table, same(falling(0.95, 0.95, DEPTH)), rounds=200, requests=2)
    poor = np.repeat(falling(0.05, 0.5, DEPTH)[None], 2, 0)
    for _ in range(400):
        ours.verify(
            poor,
            np.full(2, DEPTH, np.int32),
            base_tokens=2,
            emitting=2,
            context=100.0,
            shape="chain",
            known=np.full(2, known),
        )
    shapes = [ours.draft(2, context=100.0) for _ in range(64)]
    assert (shapes.count("plain") > 32) == known
