"""From logged steps to a cost table: what is grouped, what is left out, what is refused."""

import math

import numpy as np
import pytest

from specplug.cost_fit import fit, median, verify_groups
from specplug.provenance import Provenance
from specplug.step_log import EngineFacts, Step, append_steps, read_engine, read_steps, write_engine


def true_seconds(rows: int, context: float) -> float:
    return 0.010 + 0.001 * rows + 1e-5 * context


def engine_log(*, repeats: int = 7, executed=lambda asked: asked) -> list[Step]:
    """Steps of an engine that explores, with noise that the median removes: one in seven takes ten times."""
    steps = []
    for requests in (1, 4):
        for context in (100, 120, 1000, 1020):
            for nodes in (0, 1, 4, 16):
                for i in range(repeats):
                    asked = executed(nodes * requests)
                    shape = "tree" if nodes else "plain"
                    slow = 10 if i == 3 else 1
                    steps.append(
                        Step(
                            requests=requests,
                            rows=requests + asked,
                            nodes=asked,
                            context=context,
                            verify_seconds=slow * true_seconds(requests + asked, context),
                            draft_seconds=slow * 0.002 * requests if nodes else 0.0,
                            verified=shape,
                            drafted=shape,
                            forced=True,
                        )
                    )
    return steps


def test_the_table_of_a_log():
    table = fit(engine_log(), contexts=[100, 1000], provenance=Provenance(engine="vllm"))
    assert {probe.context for probe in table.verify} == {110.0, 1010.0}
    for requests in (1, 4):
        for context in (110, 1010):
            rows = np.array([requests * (1 + n) for n in (1, 4, 16)])
            expected = [true_seconds(row, context) for row in rows]
            # Both contexts of a bin share a median: it is one of the two, 1e-4 s from the middle.
            assert table.verify_seconds(requests, rows, context=context) == pytest.approx(
                expected, abs=1.01e-4
            )
        assert table.draft_seconds(requests) == pytest.approx(0.002 * requests)
    assert table.informative
    assert all(probe.repeats == 14 for probe in table.verify)
    assert {probe.shape for probe in table.draft} == {"tree"}


def test_prefill_steps_and_rare_steps_are_left_out():
    log = engine_log()
    base = {"context": 100.0, "verified": "tree", "verify_seconds": 9.0}
    prefill = [Step(requests=1, rows=105, nodes=4, prefill_rows=100, **base)] * 50
    rare = [Step(requests=1, rows=10, nodes=9, **base)] * 2
    assert fit([*log, *prefill, *rare], contexts=[100, 1000]) == fit(log, contexts=[100, 1000])
    often = [Step(requests=1, rows=10, nodes=9, **base)] * 3
    assert fit([*log, *often], contexts=[100, 1000]) != fit(log, contexts=[100, 1000])


def test_only_the_request_counts_that_were_planned():
    table = fit(engine_log(), contexts=[100], requests=[4])
    assert {probe.requests for probe in (*table.verify, *table.draft)} == {4}


def test_graph_sizes_and_provenance_are_kept():
    facts = Provenance(engine="vllm", device="GPU")
    table = fit(engine_log(), contexts=[100], provenance=facts, graph_sizes=(1, 8, 16))
    assert (table.provenance, table.graph_sizes) == (facts, (1, 8, 16))


def test_an_engine_that_ignores_its_budgets_is_refused():
    """The known fault: every budget runs the full width, and the table looks right."""
    with pytest.raises(RuntimeError, match=r"cannot be told apart.*always ran the same rows.*explore"):
        fit([s for s in engine_log(executed=lambda asked: 64) if s.nodes], contexts=[100])


def test_an_engine_that_runs_other_rows_than_it_says_is_refused():
    steps = engine_log()
    steps[40] = Step(
        requests=1, rows=65, nodes=4, context=100.0, verify_seconds=0.1, verified="tree", forced=True
    )
    with pytest.raises(RuntimeError, match="1 requests and 4 nodes: expected 5 executed rows, got 65"):
        fit(steps, contexts=[100])


@pytest.mark.parametrize("steps", [[], engine_log(repeats=1)[:3]])
def test_too_few_steps_are_refused(steps):
    with pytest.raises(RuntimeError, match="no 3 of them with the same"):
        fit(steps, contexts=[100])


def test_the_error_of_the_median_is_that_of_repeated_medians():
    """Against a simulation: the spread of the medians of many samples of a normal law."""
    random = np.random.default_rng(0)
    samples = random.normal(1.0, 0.1, (4000, 25))
    estimates = [median(row.tolist()).error_seconds for row in samples[:500]]
    assert np.mean(estimates) == pytest.approx(np.std(np.median(samples, axis=1)), rel=0.1)


def test_when_a_median_is_settled():
    sure = median([1.0, 1.0, 1.0, 1.0, 1.0])
    unsure = median([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (sure.seconds, sure.error_seconds, sure.repeats) == (1.0, 0.0, 5)
    assert unsure.error_seconds == pytest.approx(1.2533 * 1.4826 / math.sqrt(5))
    assert sure.settled(spread=0.01, least=5, most=9)
    assert not sure.settled(spread=0.01, least=6, most=9)
    assert not unsure.settled(spread=0.01, least=3, most=9)
    assert unsure.settled(spread=0.01, least=3, most=5)


def test_groups_count_what_ran():
    groups = verify_groups(engine_log(), contexts=[100, 1000], requests=[4])
    assert {(key.shape, key.rows) for key in groups} == {
        ("plain", 4), ("tree", 8), ("tree", 20), ("tree", 68),
    }  # fmt: skip
    assert {len(seconds) for seconds in groups.values()} == {14}


def test_a_log_on_disk(tmp_path):
    facts = EngineFacts(engine="vllm", device="GPU", graph_sizes=(1, 2, 4))
    write_engine(tmp_path / "log", facts)
    assert read_engine(tmp_path / "log") == facts
    assert facts.provenance(date="now") == Provenance(engine="vllm", device="GPU", date="now")
    steps = engine_log()
    append_steps(tmp_path / "log", steps[:5])
    append_steps(tmp_path / "log", steps[5:])
    with (tmp_path / "log" / "steps.jsonl").open("ab") as file:
        file.write(b'{"requests": 3, "ro')  # a step that was being written
    assert read_steps(tmp_path / "log") == steps


def test_a_log_in_the_words_of_an_engine(tmp_path):
    """The line as documented, with a key of a later version."""
    (tmp_path / "steps.jsonl").write_text(
        '{"requests": 2, "rows": 34, "prefill_rows": 0, "nodes": 32, "context": 101.5, '
        '"verify_seconds": 0.05, "draft_seconds": 0.01, "verified": "tree", "drafted": "chain", '
        '"forced": true, "later": 1}\n'
    )
    (tmp_path / "engine.json").write_text('{"engine": "vllm", "tensor_parallel": 1, "later": 1}')
    assert read_steps(tmp_path) == [
        Step(
            requests=2, rows=34, nodes=32, context=101.5, verify_seconds=0.05, draft_seconds=0.01,
            verified="tree", drafted="chain", forced=True,
        )
    ]  # fmt: skip
    assert read_engine(tmp_path).engine == "vllm"


@pytest.mark.parametrize("content", [None, "{", '{"engine": 3}'])
def test_a_folder_without_a_whole_engine_file(tmp_path, content):
    if content is not None:
        (tmp_path / "engine.json").write_text(content)
    with pytest.raises(ValueError, match=r"engine\.json"):
        read_engine(tmp_path)
