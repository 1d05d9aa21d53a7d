"""Steps watched on a made-up engine: what the policy, the counters and the log get of them."""

import numpy as np
import pytest
import torch

from specplug.ddtree import build_tree
from specplug.drafting import Drafted
from specplug.policies import FullTrees
from specplug.recording_source import read_recording
from specplug.round_log import RoundLog, Rounds
from specplug.step_clock import StepClock
from specplug.step_log import EngineFacts, read_engine, read_steps
from specplug.step_watch import StepWatch
from specplug.verify import walk

BUDGET, DEPTH, VOCABULARY = 6, 3, 9
FACTS = EngineFacts(
    engine="made up",
    engine_version="1",
    target="target",
    draft="draft",
    target_hash="",
    draft_hash="",
    device="cpu",
    dtype="float32",
    tensor_parallel=1,
)


class Observing(FullTrees):
    def __init__(self):
        self.seen = []

    def observe(self, **facts):
        self.seen.append(facts)


def drafted(requests, seed):
    logits = torch.randn(requests, DEPTH, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    tree = build_tree(logits.log_softmax(-1), BUDGET)
    return Drafted(tree, tree.scores)


def walked(one, seed):
    draws = torch.randint(
        VOCABULARY, (len(one.tree.counts), BUDGET + 1), generator=torch.Generator().manual_seed(seed)
    )
    draws[:, 0] = one.tree.tokens[:, 0]  # something is accepted
    return walk(one.tree.parents, one.tree.tokens, one.tree.counts, draws, max_depth=DEPTH)


def test_rounds_are_read_back_as_they_went(tmp_path):
    policy, told = Observing(), []
    log = RoundLog(tmp_path, FACTS)
    watch = StepWatch(policy, on_gpu=False, log=log, count=lambda *one: told.append(one))
    requests, expected = ["a", "b"], {"a": [], "b": []}
    for number in range(5):
        one, contexts = drafted(2, number), np.array([10.0 + number, 30.0])
        result = walked(one, 100 + number)
        assert watch.begin(requests, contexts) == contexts.mean()
        watch.drafted("tree")
        temperatures = torch.tensor([0.0, 0.7])
        rounds = Rounds.of(one, one.tree.counts, temperatures, result)
        step = watch.done(plan=None, nodes=2 * BUDGET, rounds=rounds)
        alive = [True, number < 3]  # b had ended before its fourth step
        watch.landed(step, result.num_emitted.numpy(), alive)
        for place, name in enumerate(requests):
            if alive[place]:
                taken = result.path[place, 1 : result.num_emitted[place]].tolist()
                expected[name].append((one.tree, place, {row - 1 for row in taken}))
    recording = read_recording(tmp_path)
    assert recording.about.source == f"engine, tree {BUDGET}"
    by_temperature = {round(float(t), 3): q for q, t in enumerate(recording.requests.temperature)}
    for name, temperature in (("a", 0.0), ("b", 0.7)):
        mine = np.flatnonzero(recording.request == by_temperature[temperature])
        assert len(mine) == len(expected[name])
        for row, (tree, place, taken) in zip(mine, expected[name], strict=True):
            assert recording.parents[row].tolist() == tree.parents[place].tolist()
            assert recording.log_probs[row] == pytest.approx(tree.scores[place].numpy())
            assert set(np.flatnonzero(recording.accepted[row])) == taken
    assert read_engine(tmp_path).engine == "made up"
    steps = read_steps(tmp_path)
    assert [(s.requests, s.rows, s.nodes, s.verified, s.drafted) for s in steps] == [
        (2, 2 + 2 * BUDGET, 2 * BUDGET, "tree", "tree")
    ] * 5
    accepted = sum(facts["emitted"] - 2 for facts in policy.seen)
    assert watch.totals == {
        "steps_tree": 5,
        "drafts_tree": 5,
        "nodes_verified": 10 * BUDGET,
        "nodes_accepted": accepted,
    }
    assert sum(value for name, value, shape in told if (name, shape) == ("steps", "tree")) == 5


def test_a_step_without_nodes_is_plain_and_an_interrupted_one_is_dropped():
    policy = Observing()
    watch = StepWatch(policy, on_gpu=False)
    watch.begin(["a"], np.array([4.0]))
    watch.drafted("tree")
    watch.landed(watch.done(plan=None, nodes=0), np.array([1]), [True])
    (facts,) = policy.seen
    assert (facts["verified"], facts["drafted"], facts["tokens"], facts["emitted"]) == ("plain", "tree", 1, 1)
    watch.begin(["a"], np.array([5.0]))
    watch.interrupted()
    assert watch.done(plan=None, nodes=1) is None


def test_a_wait_that_is_booked_late_makes_no_negative_time(monkeypatch):
    """Found in service: a short draft, then 5 ms of waiting for the core that the kernel books with it."""
    from specplug import step_clock

    waits = iter([0.0, 0.0, 5.0, 5.0])
    monkeypatch.setattr(step_clock, "waited_seconds", lambda: next(waits))
    policy = Observing()
    watch = StepWatch(policy, on_gpu=False)
    watch.begin(["a"], np.array([4.0]))
    watch.drafted("tree")
    watch.landed(watch.done(plan=None, nodes=1), np.array([1]), [True])
    assert policy.seen[0]["verify_seconds"] is None
    clock = StepClock(on_gpu=False)
    waits = iter([0.0, 0.0])
    assert clock.seconds(clock.stamp(), clock.stamp()) > 0
