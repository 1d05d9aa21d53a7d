"""Several ranks on a CPU: two that share a target (tensor parallel) grow the same trees every round, and two
engines behind one server (data parallel) each serve trees of their own."""

import logging
import multiprocessing
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from comparing import differences
from engine_rig import engine, tree
from prompts import cut, short, varied

from specplug import models, server
from specplug.cost import from_probes, write_cost_table
from specplug.cost_curves import Probe

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

BUDGET = 16
TWO = {"tensor_parallel_size": 2, "worker_extension_cls": "rank_watch.RankWatch"}


@pytest.fixture(scope="module")
def greedy(rig):
    from vllm import SamplingParams

    return lambda tokens, **more: SamplingParams(
        temperature=0, max_tokens=tokens, **{"ignore_eos": True, **more}
    )


def table(folder: Path, *, row_seconds: float) -> str:
    """File of a cost table whose rows cost so much beside 0.1 s a step."""
    rows = [
        Probe(shape="tree", requests=1, tokens=n, context=0.0, median_seconds=0.1 + row_seconds * n)
        for n in (1, 8, 64)
    ]
    write_cost_table(folder / "cost.json", from_probes(rows))
    return str(folder / "cost.json")


class Ranks:
    """The two ranks of a running engine, watched."""

    def __init__(self, running):
        self.call = running.llm.collective_rpc
        self.call("watch_rounds")

    def rounds(self) -> list[tuple[tuple[int, str], tuple[int, str]]]:
        """Of every round since the last call: drafted nodes and hash, a rank each."""
        first, second = self.call("watched_rounds")
        return [(tuple(one), tuple(two)) for one, two in zip(first, second, strict=True)]


def unequal(rounds) -> int:
    return sum(one != two for one, two in rounds)


def test_two_ranks_grow_the_same_trees_whatever_is_decided(plain, greedy, tmp_path):
    """Shapes and node totals are drawn at random by rank 0, which also counts and writes for both.

    The control: one rank that reads its draft's logits a little differently is found out.
    """
    from specplug.step_log import read_steps

    prompts, params = short(6), greedy(28)
    options = tree("dspark", BUDGET, explore=True, record=str(tmp_path))
    with engine(options, **TWO) as running:
        ranks = Ranks(running)
        got = running.generate(prompts, params)
        rounds = ranks.rounds()
        assert ranks.call("duties") == [(True,) * 3, (False,) * 3]
        steps = read_steps(tmp_path)
        ranks.call("plant", args=(1,))
        running.generate(prompts[:2], params)
        planted = ranks.rounds()
    assert differences(plain.generate(prompts, params), got) == []
    assert unequal(rounds) == 0
    drafted = [one[0] for one, _ in rounds]
    assert sum(nodes > 0 for nodes in drafted) >= 8
    assert sum(nodes == 0 for nodes in drafted) >= 2  # rounds without a draft
    assert len({digest for (nodes, digest), _ in rounds if nodes}) >= 8  # no hash of nothing
    assert len(steps) == len(rounds)  # one rank writes
    assert unequal(planted) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "async_scheduling"), [("dflash", False), ("dspark", True)], ids=["dflash-sync", "dspark-async"]
)
def test_whole_trees_on_two_ranks(plain, greedy, draft, async_scheduling):
    """Batches, prompts in pieces, seeds, penalties, a prefix hit, aborts; every block is returned."""
    from vllm import SamplingParams

    drawn = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=seed, max_tokens=20, ignore_eos=True)
        for seed in (7, 8, 9)
    ]
    params = [*drawn, greedy(20, repetition_penalty=1.3), greedy(20, logprobs=2), greedy(20)]
    with engine(
        tree(draft, BUDGET), async_scheduling=async_scheduling, max_num_batched_tokens=96, **TWO
    ) as running:
        free = running.free_blocks
        ranks = Ranks(running)
        prompts = varied()[2::8]
        assert differences(plain.generate(prompts, greedy(20)), running.generate(prompts, greedy(20))) == []
        mixed = running.generate(short(6), params)
        assert differences(plain.generate(short(6), params), mixed) == []
        (first,) = running.generate([cut(30, 70)], greedy(64))
        second = (*cut(30, 70), *first.ids, *cut(41, 10))
        (answer,) = running.generate([second], greedy(20))
        assert answer.cached > 70
        assert differences(plain.generate([second], greedy(20)), [answer]) == []
        running.abandon([cut(8 + i, 40) for i in range(3)], greedy(60), steps=4)
        assert differences(plain.generate(short(3), greedy(20)), running.generate(short(3), greedy(20))) == []
        rounds = ranks.rounds()
        assert running.free_blocks == free
        assert running.counters.accepted > 0
    assert unequal(rounds) == 0
    assert len(rounds) >= 30


@pytest.mark.slow
def test_budgets_from_a_table_follow_rank_0(plain, greedy, tmp_path):
    """Costs are corrected by a clock, and clocks differ between ranks; a rank of its own mind would stop the
    group dead."""
    options = tree("dspark", BUDGET, cost_table=table(tmp_path, row_seconds=1e-3))
    with engine(options, **TWO) as running:
        ranks = Ranks(running)
        got = running.generate(varied()[::3], greedy(32))
        rounds = ranks.rounds()
    assert differences(plain.generate(varied()[::3], greedy(32)), got) == []
    assert unequal(rounds) == 0
    assert sum(one[0] > 0 for one, _ in rounds) >= 5


@pytest.mark.parametrize(("one_rank_decides", "said"), [(True, "corrected online"), (False, "not corrected")])
def test_costs_follow_a_clock_only_where_one_rank_decides(tmp_path, caplog, one_rank_decides, said):
    from specplug.config import TreeOptions
    from specplug.planning import choose_policy
    from specplug.step_log import facts_here

    options = TreeOptions(model="draft", cost_table=table(tmp_path, row_seconds=1e-3))
    here = facts_here(target="target", draft="draft", tensor_parallel=2)
    with caplog.at_level(logging.INFO):
        choose_policy(
            options, here, budget=16, depth=7, one_rank_decides=one_rank_decides, logger=logging.getLogger()
        )
    assert f", {said}" in caplog.text


@pytest.mark.slow
def test_ranks_that_differ_do_not_serve(rig, monkeypatch, capfd):
    monkeypatch.setenv("SPECPLUG_TEST_RANKS_DIFFER", "1")
    with pytest.raises(Exception, match="initialization failed"), engine(tree("dflash", BUDGET), **TWO):
        pass
    said = "".join(capfd.readouterr())
    assert "specplug: rank 1 differs from rank 0" in said


def completion(one: server.Server, prompt: list[int], tokens: int) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return one.post("/v1/completions", body)["choices"][0]["token_ids"]


def counted(one: server.Server) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in one.get("/metrics").splitlines()]
    return {name: float(value) for name, _, value in lines if re.match("specplug:|vllm:spec_decode", name)}


@pytest.mark.parametrize("api_servers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_engines_behind_one_port(plain, greedy, tmp_path, api_servers):
    """Both draft trees, one idles while the other works alone, and their counters are summed."""
    options = tree("dflash", BUDGET, cost_table=table(tmp_path, row_seconds=1e-6), online=False)
    port, target = server.free_port(), models.path("quick", "target")
    command = server.vllm_command(target, port=port, speculative=options, on_gpu=False)
    command += ["--served-model-name", "tiny", "--data-parallel-size", "2"]
    command += ["--api-server-count", str(api_servers)]
    environment = server.engine_environment(on_gpu=False)
    prompts = [list(prompt) for prompt in short(6)]
    with server.running(command, port=port, log=tmp_path / "log", environment=environment) as started:
        started.wait_ready("two engines")
        alone = completion(started, prompts[0], 24)
        with ThreadPoolExecutor(6) as threads:
            together = list(threads.map(lambda prompt: completion(started, prompt, 24), prompts))
        metrics = counted(started)
    expected = [answer.ids for answer in plain.generate(prompts, greedy(24))]
    assert alone == expected[0]
    assert together == expected
    name = "vllm:spec_decode_num_accepted_tokens_total"
    accepted = [value for key, value in metrics.items() if key.startswith(name)]  # an engine each
    assert len(accepted) == 2
    assert min(accepted) > 0
    assert metrics["specplug:nodes_accepted_total"] == sum(accepted)


def counting(path: str, index: int, together: Any) -> None:
    from specplug_vllm.metrics import counters

    engine_counts = counters(path, index)
    together.wait()  # lost updates would need both at once
    for _ in range(1000):
        engine_counts.add("nodes_verified", 1 + index)
    engine_counts.add("steps", 5, "tree")


@pytest.mark.parametrize("api_servers", [1, 2])
def test_counts_of_two_engines_are_summed(monkeypatch, tmp_path, api_servers):
    """By the server itself, or where there are several by prometheus_client. Forked workers, as on CUDA."""
    from prometheus_client import CollectorRegistry, multiprocess

    from specplug_vllm import metrics

    path = metrics.create_file(engines=2)
    if api_servers > 1:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(2)
    workers = [fork.Process(target=counting, args=(path, index, together)) for index in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    collector = metrics.Collector(path) if api_servers == 1 else multiprocess.MultiProcessCollector(None)
    registry = CollectorRegistry()
    registry.register(collector)
    assert registry.get_sample_value("specplug:nodes_verified_total") == 3000
    assert registry.get_sample_value("specplug:steps_total", {"shape": "tree"}) == 10
    assert registry.get_sample_value("specplug:steps_total", {"shape": "plain"}) == 0
    assert registry.get_sample_value("specplug:chain_requests_total", {"reason": "structured_outputs"}) == 0
