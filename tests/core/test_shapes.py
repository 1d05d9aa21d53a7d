"""The guard, its hysteresis, and what probes may cost."""

from itertools import pairwise

import numpy as np
import pytest

from specplug.outlook import Outlook
from specplug.shapes import LONGEST, PROBE_SHARE, SAVED_PROBES, SHORTEST, ShapeChoice


def rates(plain=1.0, **others):
    return {
        shape: Outlook(tokens=rate * 2.0, seconds=2.0) for shape, rate in {"plain": plain, **others}.items()
    }


def chosen(choice, outlooks):
    return choice.choose(outlooks, probes=())


def test_a_costlier_shape_must_gain_and_half_of_it_keeps_it():
    choice = ShapeChoice(min_gain=0.02)
    assert chosen(choice, rates(tree=1.015)) == "tree"  # in use from the start
    assert chosen(choice, rates(tree=1.009)) == "plain"
    assert chosen(choice, rates(tree=1.019)) == "plain"
    assert chosen(choice, rates(tree=1.021)) == "tree"
    assert chosen(choice, rates(tree=1.011)) == "tree"


def test_a_tree_must_match_the_chain_and_is_kept_a_little_below():
    choice = ShapeChoice(min_gain=0.02)
    assert chosen(choice, rates(chain=1.5, tree=1.48)) == "chain"
    assert chosen(choice, rates(chain=1.5, tree=1.495)) == "chain"
    assert chosen(choice, rates(chain=1.5, tree=1.505)) == "tree"
    assert chosen(choice, rates(chain=1.5, tree=1.49)) == "tree"
    assert chosen(choice, rates(chain=1.5, tree=1.48)) == "chain"
    assert chosen(choice, rates(chain=1.03, tree=1.0)) == "chain"
    assert chosen(choice, rates(chain=1.0, tree=1.0)) == "plain"
    assert chosen(choice, rates(chain=0.5, tree=1.2)) == "tree"


@pytest.mark.parametrize("min_gain", [0.02, 0.0])
def test_noise_below_half_of_the_gain_does_not_make_shapes_flap(min_gain):
    """And with no minimum gain, the negative control, it does."""
    choice, noise = ShapeChoice(min_gain=min_gain), np.random.default_rng(0)
    seen = [
        chosen(choice, rates(tree=1 + min_gain * 0.75 + noise.uniform(-0.004, 0.004))) for _ in range(500)
    ]
    switches = sum(a != b for a, b in pairwise(seen))
    assert switches == 0 if min_gain else switches > 100


def probing(choice, outlooks, rounds, *, paid=False, probes=("plain", "chain", "tree")):
    shapes = []
    for _ in range(rounds):
        shape = choice.choose(outlooks, probes=probes)
        if shape != choice.current:
            choice.probed(shape, paid=paid)
        shapes.append(shape)
    return shapes


@pytest.mark.parametrize("poor", [0.9, 0.5, 0.1, 0.01])
def test_probes_cost_less_than_their_share(poor):
    outlooks = rates(tree=poor, chain=poor * 0.9)
    shapes = probing(ShapeChoice(min_gain=0.02), outlooks, 20_000)
    lost = sum(1 - outlooks[shape].rate for shape in shapes)  # in rounds: each takes the same time
    assert shapes.count("tree") > 2
    assert shapes.count("chain") > 2
    assert lost <= PROBE_SHARE * len(shapes)


def test_probes_of_a_shape_become_rarer_and_then_keep_on():
    shapes = probing(ShapeChoice(min_gain=0.02), rates(tree=0.98), 10_000)
    gaps = np.diff(np.flatnonzero(np.array(shapes) == "tree"))
    assert gaps[0] <= 4 * SHORTEST
    assert (np.diff(gaps) >= 0).all()
    assert gaps[-1] == LONGEST


def test_a_probe_that_pays_is_followed_at_once():
    choice = ShapeChoice(min_gain=0.02)
    probing(choice, rates(tree=0.9), 10_000)
    shapes = probing(choice, rates(tree=0.9), 2 * LONGEST + SAVED_PROBES * SHORTEST, paid=True)
    first = shapes.index("tree")
    assert shapes[first : first + (SAVED_PROBES - 1) * SHORTEST].count("tree") >= SAVED_PROBES - 2


def test_only_shapes_worth_a_probe_are_probed():
    shapes = probing(ShapeChoice(min_gain=0.02), rates(chain=0.9, tree=1.5), 5000, probes=("plain",))
    assert "chain" not in shapes
    assert "plain" in shapes


@pytest.mark.parametrize("min_gain", [-0.01, 1.0, float("nan")])
def test_gains_that_are_no_share_are_refused(min_gain):
    with pytest.raises(ValueError, match="min_gain: expected a share"):
        ShapeChoice(min_gain=min_gain)
