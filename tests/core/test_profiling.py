"""The plan of a profile, the loop that works it off, and the load on an engine."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import pytest
from msgspec.structs import replace

from specplug import profiling_run, server
from specplug.cost_fit import fit
from specplug.engine_load import Endpoint, Load, drive
from specplug.profiling import Limits, Point, measure, plan, step_point
from specplug.profiling_run import Settings, doublings, measure_running, measure_started, open_run
from specplug.step_log import EngineFacts, Step, append_steps, read_steps, write_engine

QUICKLY = Limits(spread=0.02, least=3, most=5, seconds=60)


class FakeBench:
    """A machine of known costs; ``noise`` by shape; interrupted after ``stop`` samples."""

    def __init__(self, *, noise=lambda point: 0.0, stop=None):
        self.noise, self.stop, self.random, self.asked = noise, stop, Random(0), []

    def sample(self, point: Point) -> Step:
        if len(self.asked) == self.stop:
            raise KeyboardInterrupt
        self.asked.append(point)
        rows = point.requests * (1 + point.nodes)
        return Step(
            requests=point.requests,
            rows=rows,
            nodes=point.requests * point.nodes,
            context=point.context,
            verify_seconds=0.01 + 0.001 * rows * (1 + self.noise(point) * self.random.random()),
            verified=point.shape,
            forced=True,
        )


POINTS = plan(requests=[2, 1], nodes=[4, 1], contexts=[64], depth=3)


def test_the_plan():
    kinds = (("plain", 0), ("chain", 1), ("chain", 2), ("chain", 3), ("tree", 1), ("tree", 4))
    assert [Point(64, requests, *kind) for requests in (1, 2) for kind in kinds] == POINTS


@pytest.mark.parametrize(
    ("last", "numbers"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_doublings(last, numbers):
    assert doublings(last) == numbers


def test_every_point_is_measured_until_its_median_is_known(tmp_path):
    """Quiet points stop at the least repeats, the noisy one goes on to the most; one more each warms up."""
    write_engine(tmp_path, EngineFacts())
    bench = FakeBench(noise=lambda point: 5.0 if point.nodes == 4 else 0.0)
    assert measure(POINTS, bench, tmp_path, QUICKLY, progress=False) == 0
    logged = Counter(map(step_point, read_steps(tmp_path)))
    assert logged == {point: 5 if point.nodes == 4 else 3 for point in POINTS}
    assert Counter(bench.asked) == {point: count + 1 for point, count in logged.items()}


def test_points_of_one_batch_take_turns(tmp_path):
    write_engine(tmp_path, EngineFacts())
    measure(POINTS, FakeBench(), tmp_path, QUICKLY, progress=False)
    logged = [step_point(step) for step in read_steps(tmp_path)]
    each = len(POINTS) // 2  # of each batch size
    assert logged[: 2 * each] == POINTS[:each] * 2


@pytest.mark.parametrize("stop", [0, 5, 17, 30])
def test_an_interrupted_run_goes_on(tmp_path, stop):
    write_engine(tmp_path, EngineFacts())
    with pytest.raises(KeyboardInterrupt):
        measure(POINTS, FakeBench(stop=stop), tmp_path, QUICKLY, progress=False)
    kept = Counter(map(step_point, read_steps(tmp_path)))
    bench = FakeBench()
    assert measure(POINTS, bench, tmp_path, QUICKLY, progress=False) == 0
    assert Counter(map(step_point, read_steps(tmp_path))) == dict.fromkeys(POINTS, 3)
    assert all(point not in bench.asked for point, count in kept.items() if count == 3)
    bench.asked.clear()
    measure(POINTS, bench, tmp_path, QUICKLY, progress=False)
    assert bench.asked == []


def test_what_the_time_does_not_reach_is_counted(tmp_path):
    write_engine(tmp_path, EngineFacts())
    bench = FakeBench()
    assert measure(POINTS, bench, tmp_path, QUICKLY._replace(seconds=0), progress=False) == len(POINTS)
    assert bench.asked == []


SETTINGS = Settings(
    engine="vllm", target="T", draft="D", budget=8, candidates=32, nodes=[1, 8], requests=[1, 2],
    contexts=[8, 64], all_contexts=True, dtype="", on_gpu=False, engine_args=[],
)  # fmt: skip


def test_a_folder_belongs_to_one_setting(tmp_path):
    folder = tmp_path / "run"
    open_run(folder, SETTINGS, resume=False)
    (folder / "steps.jsonl").write_bytes(b'{"whole": 1}\n{"torn')
    with pytest.raises(ValueError, match="has an interrupted run; add --resume"):
        open_run(folder, SETTINGS, resume=False)
    open_run(folder, SETTINGS, resume=True)
    assert (folder / "steps.jsonl").read_bytes() == b'{"whole": 1}\n'
    with pytest.raises(ValueError, match=r"--resume: budget: the run in .* has 8, now 16"):
        open_run(folder, replace(SETTINGS, budget=16), resume=True)


def test_contexts_have_to_fit_the_model():
    assert SETTINGS.fitting(None) == SETTINGS.fitting(152) == [8, 64]
    with pytest.raises(ValueError, match="expected at most 63 of 151 positions"):
        SETTINGS.fitting(151)
    default = replace(SETTINGS, all_contexts=False)
    assert default.fitting(151) == [8]
    with pytest.raises(ValueError, match="--contexts"):
        default.fitting(60)


class FakeEngine:
    """An OpenAI server that logs the steps an exploring engine would: two for every request it answers."""

    def __init__(self, folder, *, executed=lambda nodes: nodes, records=True, refuses=False):
        self.folder, self.executed, self.records, self.refuses = folder, executed, records, refuses
        self.bodies, self.lock, self.random, self.inside = [], threading.Lock(), Random(0), 0

    def answer(self, body: dict) -> None:
        with self.lock:
            self.bodies.append(body)
            self.inside += 1
            if self.records:
                for requests in (1, 2):
                    nodes = self.executed(self.random.choice([0, 1, 8]) * requests)
                    shape = "tree" if nodes else "plain"
                    append_steps(
                        self.folder,
                        [
                            Step(
                                requests=requests,
                                rows=requests + nodes,
                                nodes=nodes,
                                context=len(body["prompt"]) + 3.5,
                                verify_seconds=0.01 + 0.001 * (requests + nodes),
                                draft_seconds=0.002,
                                verified=shape,
                                drafted="tree",
                                forced=True,
                            )
                        ],
                    )


@contextmanager
def serving(engine: FakeEngine):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": "the-model", "max_model_len": 200}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if engine.refuses:
                self.reply({"error": "prompt too long for me"}, 400)
                return
            engine.answer(body)
            self.reply({"choices": [{}]})

        def reply(self, body, status=200):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as host:
        thread = threading.Thread(target=host.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{host.server_port}"
        finally:
            host.shutdown()
            thread.join()


LOADS = [Load(context, requests) for context in (8, 64) for requests in (1, 2)]


def test_a_running_engine_is_measured(tmp_path):
    write_engine(tmp_path, EngineFacts(engine="vllm", graph_sizes=(1, 2, 4)))
    engine = FakeEngine(tmp_path)
    with serving(engine) as url:
        measured = measure_running(url, SETTINGS, tmp_path, QUICKLY)
    assert (measured.facts.graph_sizes, measured.contexts, measured.unsettled) == ((1, 2, 4), [8, 64], 0)
    assert {len(body["prompt"]) for body in engine.bodies} == {8, 64}
    assert {body["model"] for body in engine.bodies} == {"the-model"}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in engine.bodies)
    table = fit(read_steps(tmp_path), contexts=measured.contexts, requests=SETTINGS.requests)
    assert {(p.requests, p.tokens) for p in table.verify if p.shape == "tree"} == {
        (1, 2), (1, 9), (2, 4), (2, 18),
    }  # fmt: skip
    assert table.informative


def test_a_load_has_its_own_prompts_in_every_wave(tmp_path):
    engine = FakeEngine(tmp_path)
    with serving(engine) as url:
        drive(Endpoint(url), [Load(8, 2)], tmp_path, QUICKLY, progress=False)
    prompts = Counter(tuple(body["prompt"]) for body in engine.bodies)
    assert len(prompts) == 2
    assert len(set(prompts.values())) == 1  # as often one as the other
    assert sum(prompts.values()) > 2


def test_a_load_that_the_log_has_settled_is_not_put_on_again(tmp_path):
    engine = FakeEngine(tmp_path)
    with serving(engine) as url:
        assert drive(Endpoint(url), LOADS, tmp_path, QUICKLY, progress=False) == 0
        engine.bodies.clear()
        assert drive(Endpoint(url), LOADS, tmp_path, QUICKLY, progress=False) == 0
    assert engine.bodies == []


def test_the_load_has_as_many_requests_in_flight(tmp_path):
    """Three workers: the server lets none go before three are inside."""
    engine = FakeEngine(tmp_path)
    together = threading.Barrier(3, timeout=30)
    answer = engine.answer

    def wait_for_all(body):
        together.wait()
        answer(body)

    engine.answer = wait_for_all
    with serving(engine) as url:
        load, limits = Load(8, 3), QUICKLY._replace(seconds=0.2)  # the fake never logs 3 requests: unsettled
        assert drive(Endpoint(url), [load], tmp_path, limits, progress=False) == 1
    assert len(engine.bodies) % 3 == 0


def test_an_engine_that_ignores_its_budgets_is_refused(tmp_path):
    engine = FakeEngine(tmp_path, executed=lambda nodes: 16)
    with serving(engine) as url:
        drive(Endpoint(url), LOADS[:1], tmp_path, QUICKLY._replace(seconds=0.5), progress=False)
    with pytest.raises(RuntimeError, match="cannot be told apart"):
        fit(read_steps(tmp_path), contexts=[8])


def test_an_engine_that_does_not_record_is_named(tmp_path):
    with (
        serving(FakeEngine(tmp_path, records=False)) as url,
        pytest.raises(RuntimeError, match="logged no step there; start it with explore and record"),
    ):
        drive(Endpoint(url), LOADS[:1], tmp_path, QUICKLY._replace(seconds=0.1), progress=False)


def test_a_refused_request_ends_the_run_in_the_engines_words(tmp_path):
    with (
        serving(FakeEngine(tmp_path, refuses=True)) as url,
        pytest.raises(RuntimeError, match=r"answered 400.*prompt too long for me"),
    ):
        drive(Endpoint(url), LOADS, tmp_path, QUICKLY, progress=False)


def test_nothing_listening(tmp_path):
    with pytest.raises(RuntimeError, match="no answer"):
        drive(Endpoint(f"http://127.0.0.1:{server.free_port()}"), LOADS, tmp_path, QUICKLY, progress=False)


class Started:
    """Stands for a server that was started."""

    def __init__(self, url):
        self.url = url

    def wait_ready(self, what):
        pass


ON_A_CPU = EngineFacts(engine="vllm", device="CPU")


def start(tmp_path, monkeypatch, *, facts=ON_A_CPU, settings=SETTINGS):
    """`measure_started` against the fake engine; what it found, and the command line."""
    commands = []
    (tmp_path / "target").mkdir(exist_ok=True)
    (tmp_path / "target" / "config.json").write_text('{"max_position_embeddings": 200}')
    settings = replace(settings, target=str(tmp_path / "target"))
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    with serving(FakeEngine(folder)) as url:

        @contextmanager
        def running(command, *, port, log, environment):
            commands.append(command)
            write_engine(folder, facts)
            yield Started(url)

        monkeypatch.setattr(server, "running", running)
        monkeypatch.setattr(server, "missing_engine", lambda *, on_gpu: None)
        return measure_started(settings, folder, QUICKLY, port=None), commands[0], folder


def last(command: list[str], flag: str) -> str:
    """Value that argparse would take."""
    return command[len(command) - command[::-1].index(flag)]


def test_vllm_is_started_in_profiling_mode(tmp_path, monkeypatch):
    settings = replace(SETTINGS, engine_args=["--max-num-seqs", "64"], dtype="bfloat16")
    measured, command, folder = start(tmp_path, monkeypatch, settings=settings)
    assert measured.unsettled == 0
    assert json.loads(last(command, "--speculative-config")) == {
        "method": "ddtree", "model": "D", "tree_budget": 8, "candidates": 32, "explore": True,
        "record": str(folder),
    }  # fmt: skip
    assert last(command, "--max-num-seqs") == "64"
    assert last(command, "--dtype") == "bfloat16"
    assert int(last(command, "--max-model-len")) >= 64 + 32 + 8


def test_a_resumed_run_with_another_engine_is_refused(tmp_path, monkeypatch):
    start(tmp_path, monkeypatch)
    start(tmp_path, monkeypatch, facts=EngineFacts(engine="vllm", device="CPU", date="later"))
    with pytest.raises(ValueError, match=r"--resume: device: the steps in .* are of 'CPU', now it is 'GPU'"):
        start(tmp_path, monkeypatch, facts=EngineFacts(engine="vllm", device="GPU"))


def test_without_an_engine_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "missing_engine", lambda *, on_gpu: "no engine here; install one")
    with pytest.raises(RuntimeError, match="no engine here"):
        profiling_run.measure_started(SETTINGS, tmp_path, QUICKLY, port=None)
