"""`specplug bench` with a fake engine and a fake load generator: what is run, written, resumed and refused.

The generator's output and the counters are those that the real ones gave here (tests/core/bench_samples, the
shipped quick models); tests/vllm/test_bench.py and tests/sglang/test_bench.py run the real ones.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest
from commands import run

from specplug import bench_arms, bench_load, bench_report, cli, server
from specplug.bench_result import Load, read_result, write_result

SAMPLES = Path(__file__).with_name("bench_samples")
# Answers as vLLM does: token i of any greedy answer is i, but for the arm "wrong", whose third token is 9.
SERVER = """
import http.server, json, sys
port, arm, asked_for_metrics = int(sys.argv[1]), sys.argv[2], 0
def metrics():  # every look finds as much again
    global asked_for_metrics
    asked_for_metrics += 1
    lines = (line.rpartition(" ") for line in METRICS.splitlines())
    return "".join(f"{name} {asked_for_metrics * float(value)}\\n" for name, _, value in lines)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        models = json.dumps({"data": [{"id": "fake"}]})
        self.reply(metrics() if self.path == "/metrics" else models if self.path == "/v1/models" else "")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = list(range(asked["max_tokens"]))
        if arm == "wrong" and len(ids) > 2:
            ids[2] = 9
        top = [{f"token_id:{i}": -0.1, "token_id:9": -2.1} for i in ids]
        one = {"token_ids": ids, "logprobs": {"top_logprobs": top}}
        self.reply(json.dumps({"choices": [one] * asked["n"]}))
    def reply(self, body):
        self.send_response(200); self.end_headers(); self.wfile.write(body.encode())
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
ARGUMENTS = (
    *("bench", "--target", "quick", "--concurrency", "2"),
    *("--arm", 'tree=--speculative-config {"method": "ddtree", "model": "{draft}"}'),
    *("--requests", "6", "--repeats", "2", "--max-tokens", "8", "--samples", "20", "--quality-prompts", "3"),
)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """The engine and the generator; the list of arms whose server was started, and of generator runs."""
    started, generated = [], []

    def command(arm, port):
        started.append(arm.name)
        if "broken" in arm.name:
            return [sys.executable, "-c", "raise RuntimeError('no weights')"]
        text = (SAMPLES / "vllm.metrics").read_text()
        return [sys.executable, "-c", SERVER.replace("METRICS", repr(text)), str(port), arm.name]

    def generate(engine, load, data, *, output, requests, **_):
        generated.append((str(load), requests))
        if Path("hang").is_file() and Path("hang").read_text() in output.name:
            return [sys.executable, "-c", "import time; time.sleep(600)"]
        return [
            sys.executable,
            "-c",
            f"import shutil; shutil.copy({str(SAMPLES / 'vllm.json')!r}, {str(output)!r})",
        ]

    monkeypatch.setattr(bench_arms, "started", command)
    monkeypatch.setattr(bench_load, "command", generate)
    monkeypatch.setattr(server, "missing_engine", lambda **_: None)
    monkeypatch.chdir(tmp_path)
    return started, generated


def test_a_run_writes_every_cell_with_its_settings_and_judges_the_text(fake, capsys):
    started, generated = fake
    Path("bench.run").mkdir()  # an earlier run of this name answered otherwise
    for kind in ("greedy", "sampled"):
        Path(f"bench.run/baseline-{kind}.json").write_text("[]")
    assert run(*ARGUMENTS, "--rate", "3", "--plot") == 0
    assert started == ["plain", "tree"]
    assert generated == [("2 in flight", 6)] * 2 + [("3 requests/s", 6)] * 2 + generated[:4]
    result = read_result("bench.json")
    assert [(cell.arm, str(cell.load), len(cell.repeats)) for cell in result.cells] == [
        *[("plain", load, 2) for load in ("2 in flight", "3 requests/s")],
        *[("tree", load, 2) for load in ("2 in flight", "3 requests/s")],
    ]
    cell = result.cell("tree", Load(concurrency=2))
    sample = json.loads((SAMPLES / "vllm.json").read_text())
    assert cell.median("output_tokens_per_second") == sample["output_throughput"]
    assert cell.median("ttft", "p99_ms") == sample["p99_ttft_ms"]
    assert cell.peak_host_bytes > 1 << 20
    assert [repeat.rounds.drafts for repeat in cell.repeats] == [63, 63]
    assert cell.median("rounds", "accepted_length") == 1 + 80 / 63
    assert cell.median("rounds", "nodes_per_draft") == 16
    assert all(repeat.rounds is None for repeat in result.cell("plain", Load(rate=3.0)).repeats)
    assert result.gain("tree", Load(rate=3.0)) == 1.0
    assert result.settings.dtype == "float32"
    assert not result.settings.prefix_cache
    (judged,) = result.quality
    assert (judged.agreement.identical, judged.agreement.answers) == (3, 3)
    assert judged.distribution.same
    assert [(one.data_set, one.answers, one.accepted_length) for one in judged.lengths] == [
        (name, 1, 1 + 80 / 63) for name in ("chat", "code", "maths")
    ]
    text = Path("bench.md").read_text()
    assert "CPU RIG" in text
    assert "EAGER MODE" in text
    assert "12.9 (12.9 to 12.9)" in text
    said = capsys.readouterr()
    assert "EAGER MODE" in said.out
    drawn = Path("bench.png").is_file()
    assert drawn == (importlib.util.find_spec("matplotlib") is not None)
    assert drawn or "--plot needs matplotlib" in said.err


def test_a_wrong_arm_ends_with_an_error_and_its_divergence(fake, capsys):
    arguments = [word.replace("tree=", "wrong=") for word in ARGUMENTS]
    assert run(*arguments) == 1
    (judged,) = read_result("bench.json").quality
    assert judged.agreement.faults == 3
    assert {(one.position, one.arm_token, one.baseline_token) for one in judged.agreement.divergences} == {
        (2, 9, 2)
    }
    assert judged.agreement.divergences[0].gap_nats == pytest.approx(2.0)
    assert not judged.distribution.same
    out = capsys.readouterr().out
    assert "FAULT: wrong, prompt 0, position 2: token 9 for 2, gap 2.0000 nats" in out
    assert "ANOTHER LAW" in out


def test_resume_measures_what_is_missing_and_nothing_else(fake, capsys):
    started, generated = fake
    assert run(*ARGUMENTS, "--arm", "broken=--speculative-config {}") == 1
    assert "arm broken: " in (err := capsys.readouterr().err)
    assert "no weights" in err
    assert "--resume goes on" in err
    before = read_result("bench.json")
    assert [cell.arm for cell in before.cells] == ["plain", "tree"]
    assert run(*ARGUMENTS) == 2
    assert "--out bench.json: exists already" in capsys.readouterr().err

    started.clear(), generated.clear()
    more = (*ARGUMENTS, "--resume", "--concurrency", "1", "2")
    assert run(*more, "--arm", "broken=--speculative-config {}") == 1
    after = read_result("bench.json")
    assert started == ["plain", "tree", "broken"]  # one load more for all; the broken arm is still asked for
    assert generated == [("1 in flight", 6)] * 4
    assert after.cells[:2] == before.cells

    # An arm of which nothing is measured keeps nothing from being finished, and may be mended.
    started.clear()
    assert run(*more, "--arm", "other=--speculative-config {}") == 0
    assert started == ["other"]
    assert [arm.name for arm in read_result("bench.json").arms] == ["plain", "tree", "other"]
    assert run(*more, "--arm", 'other=--speculative-config {"method": "dspark"}') == 2
    assert "arm other, command: " in capsys.readouterr().err


CHANGED = {
    "max_tokens: 8 and 9": ["--max-tokens", "9"],
    "temperature: 0.0 and 0.7": ["--temperature", "0.7"],
    "prompt_count: ": ["--count", "2"],
    "prefix_cache: False and True": ["--prefix-cache"],
    "repeats: 2 and 3": ["--repeats", "3"],
}


def test_another_setting_is_neither_resumed_nor_compared(fake, capsys):
    started, _ = fake
    assert run(*ARGUMENTS) == 0
    started.clear()
    for said, arguments in CHANGED.items():
        assert run(*ARGUMENTS, "--resume", *arguments) == 2
        err = capsys.readouterr().err
        assert "--resume: the runs differ in more than the arms: " in err
        assert said in err
    other = [word.replace("ddtree", "dspark") for word in ARGUMENTS]
    assert run(*other, "--resume") == 2
    assert "arm tree, command: " in capsys.readouterr().err
    assert not started
    result = read_result("bench.json")
    settings = msgspec.structs.replace(result.settings, temperature=0.7, device="another")
    write_result(msgspec.structs.replace(result, settings=settings), Path("other.json"))
    assert run("bench", "--compare", "bench.json", "other.json") == 2
    err = capsys.readouterr().err
    assert "temperature: 0.0 and 0.7" in err
    assert "and 'another'" in err


def test_runs_that_differ_in_the_arm_alone_stand_side_by_side_and_losses_are_marked(fake, capsys):
    assert run(*ARGUMENTS) == 0
    other = [word.replace("tree=", "chain=") for word in ARGUMENTS]
    assert run(*other, "--repeats", "1", "--out", "other.json") == 0
    capsys.readouterr()
    assert run("bench", "--compare", "bench.json", "other.json") == 0
    out = capsys.readouterr().out
    assert "| 2 in flight | tree | 12.9 (1.00) | - |" in out
    assert "| 2 in flight | chain | - | 12.9 (1.00) |" in out

    result = read_result("bench.json")
    plain, tree = result.cells
    slow = [msgspec.structs.replace(one, output_tokens_per_second=9.0) for one in tree.repeats]
    slower = msgspec.structs.replace(result, cells=[plain, msgspec.structs.replace(tree, repeats=slow)])
    text = bench_report.markdown(slower)
    assert "**0.70 SLOWER**" in text
    assert "tree is slower than plain in 1 of 1 cells: 2 in flight." in text


def test_failed_requests_are_no_measurement(fake, capsys):
    assert run(*ARGUMENTS, "--requests", "7") == 1  # the sample has six
    assert "1 of 7 requests failed" in capsys.readouterr().err


def test_an_interrupted_run_leaves_no_process_and_goes_on(fake, tmp_path):
    """Ctrl-C while a load runs: the server and the generator end, the cells before stay."""
    (tmp_path / "hang").write_text("tree-2-in-flight-1")
    child = os.fork()  # a new process would import everything anew
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            cli.main(list(ARGUMENTS))
        except SystemExit as end:
            os._exit(int(end.code))
        finally:
            os._exit(99)
    log, users = tmp_path / "bench.run" / "tree-2-in-flight-1.log", []
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (log.exists() and len(users) == 2):
        time.sleep(0.05)
        # A copy of the run that has yet to become the generator does not count: Ctrl-C is for later.
        users = [pid for pid in _users(tmp_path / "bench.run") if _command(pid) != _command(child)]
    assert len(users) == 2  # the server and the generator
    os.kill(child, signal.SIGINT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert not _users(tmp_path / "bench.run")
    assert [cell.arm for cell in read_result(tmp_path / "bench.json").cells] == ["plain"]
    (tmp_path / "hang").unlink()
    started, _ = fake
    assert run(*ARGUMENTS, "--resume") == 0
    assert started == ["tree"]


def _command(pid: int) -> bytes:
    """Command line of a process; of none that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _users(folder: Path) -> list[int]:
    """Processes with an open file below the folder."""
    found = []
    for handles in Path("/proc").glob("[0-9]*/fd"):
        try:
            names = [os.readlink(handle) for handle in handles.iterdir()]
        except OSError:
            continue
        if any(name.startswith(f"{folder}/") for name in names):
            found.append(int(handles.parent.name))
    return found
