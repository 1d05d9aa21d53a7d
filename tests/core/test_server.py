"""A started server is waited for, asked, and ended with everything it spawned, whatever happens."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specplug import server

# A server with a child, as vLLM has: it answers /health, echoes POSTs, and ignores SIGTERM where told to.
FAKE = """
import http.server, json, signal, subprocess, sys
port, stubborn = int(sys.argv[1]), sys.argv[2] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.reply(200, b"fine")
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(400 if b"bad" in body else 200, body)
    def reply(self, status, body):
        self.send_response(status); self.end_headers(); self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def members(group: int) -> list[int]:
    """Living processes of a process group, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # ended meanwhile
            continue
        if int(process_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def start(tmp_path: Path, *, mode: str = "polite", keep: bool = False):
    port = server.free_port()
    command = [sys.executable, "-c", FAKE, str(port), mode]
    return server.running(command, port=port, log=tmp_path / "log", environment=os.environ, keep=keep)


def test_a_ready_server_answers_and_is_gone_afterwards_with_its_children(tmp_path, capsys):
    with start(tmp_path) as started:
        started.wait_ready("a fake")
        assert started.get("/anything") == "fine"
        assert started.post("/echo", {"a": [1, "ü"]}) == {"a": [1, "ü"]}
        assert len(members(started.process.pid)) == 2
    assert members(started.process.pid) == []
    assert "a fake: ready after" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("keep", [False, True])
def test_any_exception_ends_the_whole_group_also_where_it_was_to_be_kept(tmp_path, error, keep):
    with pytest.raises(error), start(tmp_path, keep=keep) as started:  # noqa: PT012
        started.wait_ready("a fake")
        raise error
    assert members(started.process.pid) == []


def test_a_server_that_ignores_the_polite_signal_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "STOP_SECONDS", 0.2)
    with start(tmp_path, mode="stubborn") as started:
        started.wait_ready("a fake")
    assert members(started.process.pid) == []


def test_keep_leaves_it_running_and_stop_may_be_called_twice(tmp_path):
    with start(tmp_path, keep=True) as started:
        started.wait_ready("a fake")
    assert started.get("/health") == "fine"
    started.stop()
    started.stop()
    assert members(started.process.pid) == []


def test_an_error_status_is_reported_in_the_servers_words(tmp_path):
    with start(tmp_path) as started:
        started.wait_ready("a fake")
        with pytest.raises(RuntimeError, match=r'/echo: the server answered 400: {"prompt": "bad"}'):
            started.post("/echo", {"prompt": "bad"})


def test_a_proxy_of_the_environment_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with start(tmp_path) as started:
        started.wait_ready("a fake")
        assert started.get("/") == "fine"


def test_a_server_that_ends_while_starting_is_explained_by_its_log(tmp_path):
    code = "raise ValueError('the draft has another vocabulary')"
    log = tmp_path / "log"
    with (
        server.running([sys.executable, "-c", code], port=1, log=log, environment=os.environ) as started,
        pytest.raises(
            RuntimeError, match="exit code 1 while starting: the draft has another vocabulary"
        ) as caught,
    ):
        started.wait_ready("a fake")
    assert str(log) in str(caught.value)


def test_a_server_that_dies_between_requests_is_explained_by_its_log(tmp_path):
    with start(tmp_path) as started:
        started.wait_ready("a fake")
        with (tmp_path / "log").open("a") as log:
            log.write("MemoryError: no more\n")
        os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()
        with pytest.raises(RuntimeError, match=r"no answer from the server .*: no more"):
            started.post("/echo", {})


def test_an_occupied_port_is_refused_and_a_free_one_is_not():
    with socket.socket() as holder:
        holder.bind((server.HOST, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port: 127.0.0.1:{port} cannot be used"):
            server.check_port(port)
    server.check_port(port)


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_a_number_that_is_no_port_is_refused(port):
    with pytest.raises(ValueError, match=f"expected 1..65535, got {port}"):
        server.check_port(port)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("", "(nothing yet)"),
        ("loading\nloaded\n\n", "loaded"),
        ("a\rb 50%\rb 100%", "b 100%"),
        ("RuntimeError: first\nRuntimeError: Engine core initialization failed.\n", "first"),
        ("(APIServer pid=1) WARNING 11-29 can cause `OSError: [Errno 24]`\nKeyError: 'x'\n", "'x'"),
        ("(Core pid=2) ERROR 11-29 12:00:00 [core.py:1] ValueError: depth 9\n", "depth 9"),
        (
            "1 validation error for Config\n  Value error, unknown key 'a' [type=v]\n",
            "unknown key 'a' [type=v]",
        ),
        ("vllm: error: argument --port: invalid int value\n", "argument --port: invalid int value"),
    ],
)
def test_the_cause_of_a_failure_is_the_first_error_in_the_log(tmp_path, log, cause):
    (tmp_path / "log").write_text(log)
    assert server.failure_cause(tmp_path / "log") == cause


def test_settings_of_the_user_win_over_ours(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    on_cpu, on_gpu = server.engine_environment(on_gpu=False), server.engine_environment(on_gpu=True)
    assert on_cpu["OMP_NUM_THREADS"] == "7"
    assert on_cpu["TRITON_INTERPRET"] == "1"
    assert on_gpu["HF_HUB_OFFLINE"] == "1"


def test_the_command_line_is_a_local_server_in_fp32_on_a_cpu():
    spec = {"method": "ddtree", "model": "D"}
    command = server.vllm_command("T", port=5, speculative=spec, on_gpu=False)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--dtype") + 1] == "float32"
    assert json.loads(command[command.index("--speculative-config") + 1]) == spec
    assert "--speculative-config" not in server.vllm_command("T", port=5, speculative=None, on_gpu=False)
    assert "--dtype" not in server.vllm_command("T", port=5, speculative=spec, on_gpu=True)


def test_without_vllm_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'specplug[vllm]'" in (server.missing_engine(on_gpu=True) or "")


@pytest.mark.parametrize(("backends", "missing"), [("amd nvidia", True), ("amd cpu nvidia", False)])
def test_without_a_gpu_and_without_a_backend_one_sentence_says_what_to_do(monkeypatch, backends, missing):
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: object())
    answer = subprocess.CompletedProcess([], 0, stdout=backends + "\n")
    monkeypatch.setattr(server.subprocess, "run", lambda *arguments, **options: answer)
    assert ("run ci/demo" in (server.missing_engine(on_gpu=False) or "")) is missing
    assert server.missing_engine(on_gpu=True) is None


def test_a_listener_on_all_addresses_occupies_the_port():
    with (
        socket.create_server(("", 0)) as holder,
        pytest.raises(ValueError, match="cannot be used"),
    ):
        server.check_port(holder.getsockname()[1])


def test_a_server_does_not_outlive_a_killed_parent(tmp_path):
    """kill -9 leaves no time to clean up: the kernel ends the server."""
    parent = (
        "import sys, time; from pathlib import Path; from specplug import server\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "log = Path(sys.argv[1])\n"
        "keep = sys.argv[2] == 'keep'\n"
        "with server.running(sleeper, port=1, log=log, environment={}, keep=keep) as started:\n"
        "    print(started.process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    for mode in ("end", "keep"):
        command = [sys.executable, "-c", parent, str(tmp_path / "log"), mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
            child = int(killed.stdout.readline())
            killed.kill()
        try:
            assert gone(child, seconds=10 if mode == "end" else 0.5) is (mode == "end")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def gone(pid: int, *, seconds: float) -> bool:
    """Whether the process has ended, or is a zombie nobody collects, by then."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):  # the latter: ended since the file was opened
            return True
        time.sleep(0.05)
    return False
