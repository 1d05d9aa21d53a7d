"""Budgets chosen every step: node counts that differ by request and step, rounds without a draft, and the
output of plain decoding all the same."""

import dataclasses
from collections import Counter

import msgspec
import numpy as np
import pytest
from comparing import differences
from engine_rig import engine, tree
from prompts import cut, short, varied

from specplug.cost import from_probes, write_cost_table
from specplug.cost_curves import Probe

pytestmark = pytest.mark.vllm

BUDGET = 16


def probe(rows: int, seconds: float, requests: int = 1, **more) -> Probe:
    return Probe(shape="tree", requests=requests, tokens=rows, context=0.0, median_seconds=seconds, **more)


def draft(requests: int, seconds: float) -> Probe:
    return Probe(shape="tree", requests=requests, tokens=0, context=0.0, median_seconds=seconds)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Files of two tables: every row costs as much as a step, and rows are nearly free."""
    folder = tmp_path_factory.mktemp("tables")
    rows = [1, 2, 8, 64, 1024]
    made = {
        "dear": from_probes([probe(n, 1e-2 * n) for n in rows], [draft(1, 2e-2), draft(8, 2e-2)]),
        "cheap": from_probes([probe(n, 1.0 + 1e-6 * n) for n in rows], [draft(1, 1e-4), draft(8, 1e-4)]),
    }
    for name, table in made.items():
        write_cost_table(folder / f"{name}.json", table)
    return {name: str(folder / f"{name}.json") for name in made}


@pytest.fixture
def said(rig, monkeypatch):
    """What the budget manager logs. vLLM sets up logging anew with an engine, so not by a handler."""
    from specplug_vllm import manager

    lines: list[str] = []
    monkeypatch.setattr(manager.logger, "info", lambda text, *values: lines.append(text % values))
    return lines


@pytest.fixture(scope="module")
def greedy(rig):
    from vllm import SamplingParams

    return lambda tokens, **more: SamplingParams(
        temperature=0, max_tokens=tokens, **{"ignore_eos": True, **more}
    )


class Watch:
    """Node counts a request, step by step, as the device admitted them."""

    def __init__(self, running):
        self.manager = running.runner.adaptive_verification
        self.steps: list[list[int]] = []
        stock = self.manager.reallocate_drafts

        def reallocate(req_ids, idx_mapping):
            result = stock(req_ids, idx_mapping)
            self.steps.append((result[0].diff() - 1).tolist())
            return result

        self.manager.reallocate_drafts = reallocate

    @property
    def kinds(self) -> Counter:
        kinds = Counter()
        for counts in self.steps:
            kinds["zero"] += not any(counts)
            kinds["uneven"] += len(set(counts)) > 1
            kinds["some zero"] += 0 in counts and any(counts)
        return kinds


def counted(running) -> dict[str, float]:
    """Counters by name, as the metrics endpoint shows them."""
    from prometheus_client import REGISTRY

    samples = [s for family in REGISTRY.collect() for s in family.samples if s.name.startswith("specplug:")]
    return {
        s.name.removeprefix("specplug:").removesuffix("_total")
        + "".join(f"/{v}" for v in s.labels.values()): s.value
        for s in samples
    }


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_budgets_at_random(plain, greedy, tmp_path, kind, async_scheduling):
    options = tree(kind, BUDGET, explore=True, record=str(tmp_path))
    prompts = varied()
    with engine(options, async_scheduling=async_scheduling) as running:
        watch = Watch(running)
        got = running.generate(prompts, greedy(24))
        drafts = Counter(counted(running))
    assert differences(plain.generate(prompts, greedy(24)), got) == []
    kinds = watch.kinds
    assert kinds["uneven"] >= 20
    assert kinds["some zero"] >= 5
    assert kinds["zero"] >= 2
    assert min(drafts["drafts/plain"], drafts["drafts/chain"], drafts["drafts/tree"]) >= 4
    assert drafts["steps/plain"] >= 4


def test_budgets_at_random_under_pressure(plain, greedy, tmp_path):
    """Chunked prefill, batches that wait for cache blocks, preemption and resumption."""
    options = tree("dspark", BUDGET, explore=True, record=str(tmp_path))
    prompts = [cut(50 + i, 150 + 17 * i) for i in range(8)]
    with engine(options, blocks=26, max_num_batched_tokens=96, max_num_seqs=8) as running:
        watch = Watch(running)
        got = running.generate(prompts, greedy(48))
        preemptions = running.counters.preemptions
    assert differences(plain.generate(prompts, greedy(48)), got) == []
    assert preemptions >= 1
    assert watch.kinds["uneven"] >= 5


def test_seeded_sampling_under_random_budgets(plain, rig, tmp_path):
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=t, top_p=0.9, seed=100 + i, max_tokens=24, ignore_eos=True)
        for i, t in enumerate([0.8, 0.8, 1.2, 1.2])
    ]
    with engine(tree("dspark", BUDGET, explore=True, record=str(tmp_path))) as running:
        got = running.generate(short(4), params)
    assert differences(plain.generate(short(4), params), got) == []


def test_penalties_under_random_budgets(plain, greedy, tmp_path):
    params = [greedy(32, repetition_penalty=1.3), greedy(32), greedy(32, frequency_penalty=0.9), greedy(32)]
    with engine(tree("dspark", BUDGET, explore=True, record=str(tmp_path))) as running:
        got = running.generate(short(4), params)
    assert differences(plain.generate(short(4), params), got) == []


@pytest.mark.parametrize("fault", ["host counts", "no context"])
def test_what_must_fail(plain, greedy, tmp_path, fault):
    """Windows laid out by what was scheduled, not by what the device admitted, give another text. A plain
    round that leaves the drafter's cache with holes is exact, but costs accepted tokens."""
    options = tree("dspark", BUDGET, explore=True, record=str(tmp_path))
    with engine(options) as running:
        state, speculator = running.state, running.runner.speculator
        if fault == "host counts":
            lay_out = state._lay_out

            def wrong(input_batch, *args, **kwargs):
                scheduled = np.concatenate([[0], np.cumsum(input_batch.num_draft_tokens_per_req + 1)])
                faked = input_batch.cu_num_logits.new_tensor(scheduled)
                return lay_out(dataclasses.replace(input_batch, cu_num_logits=faked), *args, **kwargs)

            state._lay_out = wrong
            expected = plain.generate(short(8), greedy(32))
            try:
                failed = bool(differences(expected, running.generate(short(8), greedy(32))))
            except (IndexError, RuntimeError, ValueError):
                failed = True
            assert failed
        else:
            sound = speculator._precompute_context_kv
            running.generate(short(8), greedy(48))
            before = counted(running)

            def skipping(*args, **kwargs):
                if speculator.shape != "plain":
                    sound(*args, **kwargs)

            speculator._precompute_context_kv = skipping
            got = running.generate(short(8), greedy(48))
            after = counted(running)
            assert differences(plain.generate(short(8), greedy(48)), got) == []
            per_node = [
                c["nodes_accepted"] / c["nodes_verified"]
                for c in (before, {name: after[name] - before[name] for name in after})
            ]
            assert per_node[1] < per_node[0]


def test_dear_rows_give_plain_decoding(plain, greedy, tables, said):
    """Online correction off: this machine's real costs are not the table's."""
    with engine(tree("dspark", BUDGET, cost_table=tables["dear"], online=False)) as running:
        got = running.generate(short(8), greedy(64))
        seen = counted(running)
    assert differences(plain.generate(short(8), greedy(64)), got) == []
    assert seen["steps/plain"] >= 60  # 63 decode steps and the prefill; a round looks in now and then
    assert seen["drafts/plain"] >= 55
    assert seen["nodes_verified"] <= 16
    assert sum("decoding without a draft is worth more" in line for line in said) == 1


def test_cheap_rows_give_full_trees(plain, greedy, tables):
    with engine(tree("dspark", BUDGET, cost_table=tables["cheap"], online=False)) as running:
        got = running.generate(short(8), greedy(64))
        seen = counted(running)
    assert differences(plain.generate(short(8), greedy(64)), got) == []
    assert seen["drafts/plain"] <= 2
    assert seen["steps/tree"] >= 0.9 * sum(seen[f"steps/{shape}"] for shape in ("plain", "chain", "tree")) - 1
    assert seen["nodes_verified"] >= 0.9 * seen["nodes_drafted"]
    # Uncalibrated: at temperature 0 the target follows a draft more often than the draft's own probability.
    assert 0.5 * seen["tokens_emitted"] < seen["tokens_predicted"] < 1.2 * seen["tokens_emitted"]


def test_online_correction_follows_this_machine(plain, greedy, tables):
    """The same two tables with the correction on: exact, whatever is decided."""
    for name, table in tables.items():
        with engine(tree("dspark", BUDGET, cost_table=table)) as running:
            got = running.generate(short(8), greedy(48))
            seen = counted(running)
        assert differences(plain.generate(short(8), greedy(48)), got) == [], name
        assert sum(seen[f"steps/{shape}"] for shape in ("plain", "chain", "tree")) >= 10
        assert name == "dear" or seen["seconds_observed"] > 0


def test_calibrated_survivals(plain, greedy, tables, tmp_path):
    """A calibration changes order and budgets, never the text."""
    from specplug.calibration import Calibration, DepthCoefficients, Regime

    # Odds halved, and a penalty on rank that reorders nodes.
    depths = [DepthCoefficients(fitted=[1.0, 1.0, -0.7, -0.8, 0.0])] * 7
    file = tmp_path / "calibration.json"
    Calibration(regimes=[Regime(max_temperature=None, depths=depths)]).save(file)
    with engine(tree("dspark", BUDGET, cost_table=tables["cheap"], calibration=str(file))) as running:
        got = running.generate(short(8), greedy(32))
        assert running.runner.speculator.coefficients is not None
        assert counted(running)["nodes_accepted"] > 0
    assert differences(plain.generate(short(8), greedy(32)), got) == []


def test_recorded_rounds_are_the_rounds(greedy, tmp_path):
    from specplug.local.records import RoundRecord, read
    from specplug.step_log import read_engine, read_steps

    with engine(tree("dspark", BUDGET, record=str(tmp_path))) as running, running.traced() as trace:
        running.generate(short(4), greedy(32))
    rounds = read(tmp_path / "rounds.jsonl", RoundRecord)
    # A request's last token may come from its root alone: nothing is verified then, and nothing recorded.
    emitted = sorted(sum(tokens) - (tokens[-1] == 1) for tokens in trace.values())
    by_prompt, last = Counter(), {}
    for one in rounds:
        assert len(one.accepted) == len(one.parents) <= BUDGET
        by_prompt[one.prompt] += 1 + sum(one.accepted)
        last[one.prompt] = sum(one.accepted)
    assert sorted(n - (last[prompt] == 0) for prompt, n in by_prompt.items()) == emitted
    steps = read_steps(tmp_path)
    assert sum(step.nodes for step in steps) >= sum(len(one.parents) for one in rounds)
    assert all(step.verify_seconds > 0 for step in steps)
    assert read_engine(tmp_path).engine == "vllm"


def test_a_table_of_something_else_is_refused(tables, tmp_path):
    from specplug.cost import read_cost_table
    from specplug.provenance import Provenance

    other = tmp_path / "other.json"
    foreign = Provenance(engine="vllm", device="NVIDIA H200", dtype="bfloat16")
    write_cost_table(other, dataclasses.replace(read_cost_table(tables["cheap"]), provenance=foreign))
    with (
        pytest.raises(ValueError, match=r"NVIDIA H200.*specplug profile"),
        engine(tree("dspark", BUDGET, cost_table=str(other))),
    ):
        pass
    with engine(tree("dspark", BUDGET, cost_table=str(other), cost_table_mismatch="warn")) as running:
        assert running.runner.adaptive_verification is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cost"),
        (b"{}", "cost"),
        (
            msgspec.json.encode(
                {"sample_batch_tokens": [4, 1], "sample_steps_per_sec": [1.0, 2.0], "max_batch_tokens": 4}
            ),
            "rising",
        ),
    ],
)
def test_a_bad_table_is_refused_before_the_weights(tmp_path, content, message):
    bad = tmp_path / "cost.json"
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=message), engine(tree("dspark", BUDGET, cost_table=str(bad))):
        pass
