"""`specplug profile`, end to end on the quick set with the local loop, and what it and `doctor` refuse."""

import importlib.util
import json

import msgspec
import pytest
import torch
from commands import run

pytest.importorskip("transformers", reason="--engine local needs the extra `local`")

from specplug import doctor, models
from specplug.calibration import Calibration
from specplug.config import TreeOptions
from specplug.cost import from_probes, read_cost_table, write_cost_table
from specplug.cost_curves import Probe
from specplug.heads import Chain
from specplug.local.bench import LocalBench, OwnClock, ShortChain
from specplug.local.method import Method, chain
from specplug.profile import use
from specplug.provenance import Provenance, config_hash
from specplug.run_delay import waited_seconds
from specplug.step_log import read_steps
from specplug.table_check import judge

LOCAL = (
    "profile", "--engine", "local", "--target", "quick", "--device", "cpu", "--budget", "64",
    "--nodes", "1", "64", "--requests", "1", "2", "--contexts", "16", "--repeats", "3", "6",
)  # fmt: skip
EACH = 6  # points of a batch size: plain, three chains, two trees
POINTS = 2 * EACH


def a_quiet_machine(monkeypatch, seconds) -> None:
    """Rounds really run, and their verification then took ``seconds(rows)``."""
    true_sample = LocalBench.sample

    def timed(self, point):
        step = true_sample(self, point)
        assert step.verify_seconds > 0
        return msgspec.structs.replace(step, verify_seconds=seconds(step.rows))

    monkeypatch.setattr(LocalBench, "sample", timed)


def test_a_whole_run(tmp_path, monkeypatch, capsys):
    a_quiet_machine(monkeypatch, lambda rows: 0.01 + 0.001 * rows)
    out = tmp_path / "cost.json"
    assert run(*LOCAL, "--out", out, "--graph-sizes", "1", "2", "4", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    table = read_cost_table(out)
    assert {(p.shape, p.requests, p.tokens) for p in table.verify} == {
        (shape, r, r * (1 + nodes))
        for r in (1, 2)
        for shape, each in (("plain", [0]), ("chain", [1, 4, 7]), ("tree", [1, 64]))
        for nodes in each
    }
    assert {(p.shape, p.requests) for p in table.draft} == {(s, r) for s in ("chain", "tree") for r in (1, 2)}
    assert all(p.median_seconds == 0.01 + 0.001 * p.tokens and p.repeats == 3 for p in table.verify)
    assert all(p.median_seconds > 0 for p in table.draft)
    assert table.informative
    assert table.graph_sizes == (1, 2, 4)
    facts = table.provenance
    assert (facts.engine, facts.target, facts.draft) == ("local", "quick", "quick dspark")
    assert facts.target_hash == config_hash(models.path("quick", "target"))
    assert (facts.dtype, facts.context, facts.tensor_parallel) == ("float32", 16, 1)
    assert (summary["verify_probes"], summary["draft_probes"], summary["max_tokens"]) == (12, 4, 130)
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]


def test_a_short_chain_is_the_upper_part_of_the_whole(monkeypatch):
    whole = chain(Chain(torch.tensor([[3, 1, 4], [1, 5, 9]]), torch.randn(2, 3, 8)))
    monkeypatch.setattr(Method, "build", lambda self, draft, proposal: whole)
    part = ShortChain("chain", 2).build(None, None)
    part.validate()
    assert part.counts.tolist() == [2, 2]
    assert part.tokens.tolist() == [[3, 1], [1, 5]]
    assert (part.parents.tolist(), part.depths.tolist()) == ([[-1, 0]] * 2, [[1, 2]] * 2)
    assert (part.scores == whole.scores[:, :2]).all()


def test_the_clock_stands_still_while_others_run(monkeypatch):
    """Two waits: one inside a step, one between the two readings that a step ends with."""
    walls, waits = iter([10.0, 11.0, 15.0, 18.5]), iter([2.0, 2.0, 2.75, 2.75, 2.75, 5.75, 5.75])
    monkeypatch.setattr("specplug.local.bench.waited_seconds", lambda: next(waits))
    monkeypatch.setattr("specplug.local.bench.time.perf_counter", lambda: next(walls))
    clock = OwnClock(torch.device("cpu"), last=8.0)
    clock.waited = 0.5
    for step in ("prefill", "draft", "verify"):
        clock.charge(step)
    assert (clock.seconds["prefill"], clock.seconds["draft"]) == (0.5, 0.25)
    assert clock.seconds["verify"] == 18.5 - 11.0 - 3.0


def test_the_wait_for_a_core_only_grows():
    before = waited_seconds()
    assert before >= 0
    assert waited_seconds() >= before


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, capsys):
    out, samples = tmp_path / "cost.json", []
    true_sample = LocalBench.sample

    def counting(self, point):
        if len(samples) == counting.stop:
            raise KeyboardInterrupt
        samples.append(point)
        return true_sample(self, point)

    counting.stop = EACH + 3 * EACH + 2  # in the middle of the second batch size
    monkeypatch.setattr(LocalBench, "sample", counting)
    arguments = (*LOCAL[:-2], "3", "3", "--out", out)  # three repeats of every point
    assert run(*arguments) == 130
    assert not out.exists()
    assert len(read_steps(tmp_path / "cost.steps")) == 3 * EACH
    assert run(*arguments) == 2
    assert "has an interrupted run; add --resume" in capsys.readouterr().err
    assert run(*arguments, "--resume", "--budget", "128") == 2
    assert "--resume: budget: the run in" in capsys.readouterr().err
    counting.stop = None
    samples.clear()
    assert run(*arguments, "--resume") in (0, 1)  # three samples may not be enough to tell rows apart
    assert {point.requests for point in samples} == {2}
    assert all(probe.repeats == 3 for probe in read_cost_table(out).verify)


def test_a_table_that_says_nothing_says_so(tmp_path, monkeypatch, capsys):
    a_quiet_machine(monkeypatch, lambda rows: 0.01)
    out = tmp_path / "cost.json"
    assert run(*LOCAL, "--out", out) == 1
    assert capsys.readouterr().out.rstrip().endswith("trimming off")
    assert not read_cost_table(out).informative


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--engine", "tgi"], "invalid choice: 'tgi'"),
        (["--budget", "0"], "--budget: expected 1..256 nodes, got 0"),
        (["--budget", "257"], "--budget: expected 1..256"),
        (["--candidates", "0"], "--candidates: expected 1..1024"),
        (["--nodes", "4"], "--nodes: vLLM draws its own"),
        (["--engine", "local", "--nodes", "64"], "--nodes: expected numbers of 1..32, got 64"),
        (["--requests", "0"], "--requests: expected numbers of 1"),
        (["--contexts", "0"], "--contexts: expected numbers of 1"),
        (["--graph-sizes", "0"], "--graph-sizes: expected numbers of 1"),
        (["--repeats", "2", "9"], "--repeats: expected LEAST of 3"),
        (["--repeats", "9", "3"], "--repeats: expected LEAST of 3"),
        (["--spread", "0"], "--spread: expected a number above 0"),
        (["--max-minutes", "nan"], "--max-minutes: expected a number above 0"),
        (["--url", "http://h"], "--url and --record: expected both"),
        (["--record", "d"], "--url and --record: expected both"),
        (["--url", "u", "--record", "d", "--resume"], "leave --engine local, --resume and --engine-args out"),
        (["--url", "u", "--record", "d"], "expected engine.json of an engine that records there"),
        (["--engine", "local", "--port", "8000"], "--engine-args and --port: belong to --engine vllm"),
        (["--requests", "4097"], "--requests: expected numbers of 1..4096, got 4097"),
        (["--engine", "local", "--contexts", "4096"], "(an answer of 64 and a tree of 32 need the rest)"),
        (["--port", "70000"], "--port: expected 1..65535"),
        (["--target", "/nowhere"], "--draft: expected a folder or hub id"),
        (["--out", "/no/such/folder/c.json"], "expected a folder /no/such/folder"),
        (["--engine", "local", "--target", "quick", "--draft", str(models.path("deep-thin", "dspark"))],
         "was not made for this target"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(arguments, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("profile", *arguments) == 2
    assert complaint in capsys.readouterr().err


def test_nothing_is_written_over(tmp_path, capsys):
    (tmp_path / "cost.json").write_text("mine")
    assert run(*LOCAL, "--out", tmp_path / "cost.json") == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "cost.json").read_text() == "mine"


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name, *rest)
    )
    assert run(*LOCAL, "--plot", "--out", tmp_path / "cost.json") == 2
    assert "matplotlib is not installed; pip install 'specplug[plot]'" in capsys.readouterr().err


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    from specplug.cost_plot import plot

    plot(table_for("vllm"), tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


def table_for(engine: str, *, rows=(2, 9), **facts):
    known = {
        "engine_version": "9.9",
        "draft_hash": config_hash(models.path("quick", "dspark")),
        "target_hash": config_hash(models.path("quick", "target")),
    }
    return from_probes(
        [
            Probe(
                shape="tree", requests=1, tokens=t, context=64.0, median_seconds=0.01 * t, spread_seconds=1e-4
            )
            for t in rows
        ],
        provenance=Provenance(engine=engine, **(known | facts)),
    )


@pytest.mark.parametrize(
    ("table", "target", "more", "state", "said"),
    [
        (table_for("vllm"), "quick", {}, "ok", "measured for vllm 9.9; 2 probes up to 9 rows; fits"),
        (table_for("vllm"), None, {}, "ok", "fits, target not compared (give --model)"),
        (table_for("vllm"), "deep-thin", {}, "failed", "target: measured for"),
        (table_for("vllm", engine_version="8"), None, {}, "failed", "engine version: measured for 8"),
        (table_for("local"), None, {}, "failed", "engine: measured for local, here it is vllm"),
        (table_for("local"), None, {"cost_table_mismatch": "warn"}, "warning", "engine: measured for local"),
        (table_for("local", rows=(9,)), None, {"cost_table_mismatch": "warn"}, "off", "trimming off"),
        (table_for("vllm", draft_hash="00"), None, {}, "failed", "draft: measured for"),
        (table_for("vllm", rows=(9,)), None, {}, "off", "trimming off"),
    ],
)
def test_the_verdict_on_a_table(tmp_path, table, target, more, state, said):
    file = tmp_path / "cost.json"
    write_cost_table(file, table)
    options = TreeOptions(model=str(models.path("quick", "dspark")), cost_table=str(file), **more)
    folder = None if target is None else str(models.path(target, "target"))
    verdict = judge(options, target=folder, draft=options.model, engine="vllm", engine_version="9.9")
    assert (verdict.state, said in verdict.detail) == (state, True), verdict.detail


def test_doctor_has_a_line_about_the_table(tmp_path, monkeypatch):
    write_cost_table(tmp_path / "cost.json", table_for("vllm"))
    monkeypatch.setattr(doctor, "engine_version", lambda engine: "9.9")
    config = {"method": "ddtree", "model": str(models.path("quick", "dspark"))}

    def lines(config: object) -> list[tuple[str, str]]:
        return [(c.name, c.state) for c in doctor.file_checks(json.dumps(config), target=None)]

    assert lines(config) == lines({"method": "dspark", "model": "x"}) == lines([]) == []
    assert lines(config | {"cost_table": str(tmp_path / "cost.json")}) == [("cost table", "ok")]
    assert lines(config | {"cost_table": str(tmp_path / "none.json")}) == [("cost table", "failed")]
    unread = [str(tmp_path), str(tmp_path / "none.json")]
    for file in unread:
        assert lines(config | {"calibration": file}) == [("calibration", "failed")]
    Calibration().save(tmp_path / "fit.json")
    assert lines(config | {"calibration": str(tmp_path / "fit.json")}) == [("calibration", "ok")]
    # A host's key does not keep the table from being looked at, our own wrong key does: its line has failed.
    assert len(lines(config | {"cost_table": str(tmp_path / "cost.json"), "revision": "main"})) == 1
    assert lines(config | {"cost_table": str(tmp_path / "cost.json"), "tree_budget": 0}) == []


@pytest.mark.parametrize("file", ["", "none.json"])
def test_an_unread_table_is_a_sentence(tmp_path, file):
    options = TreeOptions(model="d", cost_table=str(tmp_path / file))
    verdict = judge(options, target=None, draft=None, engine="vllm", engine_version="")
    assert verdict.state == "failed"
    assert verdict.detail.startswith("cost_table: ")
    assert "expected a file" in verdict.detail
    assert "Errno" not in verdict.detail


def test_a_config_file_of_an_adapter_is_checked(tmp_path):
    table = tmp_path / "cost.json"
    write_cost_table(table, table_for("sglang"))

    def lines(config: object) -> list[tuple[str, str]]:
        return [(c.name, c.state) for c in doctor.config_file_checks(config, engine="sglang")]

    assert lines({}) == []
    assert lines("SPECPLUG_CONFIG: cannot read x") == [("config file", "failed")]
    assert lines({"tree_budgett": 4}) == [("config file", "failed")]
    assert lines({"dspark": False, "tree_budget": 4}) == [("config file", "ok")]
    assert lines({"cost_table": str(tmp_path)}) == [("config file", "ok"), ("cost table", "failed")]


def test_how_a_table_is_used():
    assert '"cost_table": "my cost.json"' in use("vllm", "my cost.json")
    assert "--speculative-dspark-sps-table-path 'my cost.json'" in use("sglang", "my cost.json")
    local = use("local", "my cost.json")
    assert "--cost 'my cost.json'" in local
    assert "specplug profile --engine vllm" in local
    assert "speculative-config" not in local


@pytest.mark.parametrize("command", ["profile", "record"])
def test_an_out_that_cannot_be_written_is_refused(command, capsys):
    assert run(command, "--out", "/proc/c.json") == 2
    assert "--out /proc/c.json: expected a folder that can be written" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["profile", "record", "evaluate"])
def test_a_device_that_is_not_there_is_refused(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert run(command, "--out", tmp_path / "x", "--device", "cuda") == 2
    assert "--device: expected cpu, got cuda: this torch has no CUDA" in capsys.readouterr().err
