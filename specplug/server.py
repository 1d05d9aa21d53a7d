"""A real OpenAI server of an engine as a child process: started, waited for, asked, and always ended.

The server gets its own session, so its process group is exactly the server and everything it spawned
(engine core, workers). Ending it means ending that group: first politely, then by SIGKILL, in every case in
which `running` is left. Plain urllib, never through a proxy: the server listens on 127.0.0.1 only.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplug.processes import members

HOST = "127.0.0.1"
POLL_SECONDS = 0.25
ERASE = "\r\033[K"  # back to the start of a terminal's line, and erase it
START_SECONDS = 600.0  # a start takes 25 to 40 s on two cores; ten minutes is a hang, not a slow machine
STOP_SECONDS = 10.0  # vLLM's own shutdown takes less than one second
KILL_SECONDS = 10.0  # a killed process is gone within one second, on a busy machine in a few
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# How vLLM runs on a CPU. OMP_NUM_THREADS=1 is several times faster than 2 on a small shared machine.
CPU_SETTINGS = {
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
}
OFFLINE_SETTINGS = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

MAX_MODEL_LEN = 1024  # tokens of prompt and answer; the shipped questions have under 100


@dataclass(frozen=True)
class Server:
    """A started server. `process` leads its own process group; `log` holds everything the group printed."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def get(self, path: str, *, timeout_seconds: float = 30.0) -> str:
        """Body of a GET. Raises OSError when there is no answer, urllib.error.HTTPError for an error
        status.
        """
        with _OPENER.open(self.url + path, timeout=timeout_seconds) as reply:
            text: str = reply.read().decode()
            return text

    def post(self, path: str, body: Mapping[str, Any], *, timeout_seconds: float = 300.0) -> dict[str, Any]:
        """JSON answer of a POST with a JSON body. Raises RuntimeError, with the server's own words,
        otherwise.
        """
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with _OPENER.open(request, timeout=timeout_seconds) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")
            raise RuntimeError(f"{path}: the server answered {error.code}: {detail}") from None
        except OSError as error:
            raise RuntimeError(
                f"{path}: no answer from the server ({error}): {failure_cause(self.log)}\nIts whole log: "
                f"{self.log}"
            ) from None

    def wait_ready(self, what: str) -> None:
        """Wait until /health answers, saying on stderr what is being waited for.

        Raises RuntimeError, with the cause found in the log, when the server ends or does not answer in ten
        minutes.
        """
        began = time.monotonic()
        live = sys.stderr.isatty()
        while (seconds := time.monotonic() - began) < START_SECONDS:
            code = self.process.poll()
            if code is not None:
                raise RuntimeError(
                    f"{what}: the server ended with exit code {code} while starting: "
                    f"{failure_cause(self.log)}\nIts whole log: {self.log}"
                )
            with contextlib.suppress(OSError):
                self.get("/health", timeout_seconds=5)
                print(f"{ERASE if live else ''}  {what}: ready after {seconds:.0f} s", file=sys.stderr)
                return
            if live:
                line = f"  {what}: starting vLLM, {seconds:.0f} s  {last_line(self.log)}"
                columns = shutil.get_terminal_size().columns
                print(f"{ERASE}{line[: columns - 1]}", end="", file=sys.stderr, flush=True)
            time.sleep(POLL_SECONDS)
        raise RuntimeError(
            f"{what}: the server did not answer within {START_SECONDS:.0f} s; its last line: "
            f"{last_line(self.log)}\nIts whole log: {self.log}"
        )

    def stop(self) -> None:
        """End the server and everything it spawned. Idempotent; a second Ctrl-C only makes it quicker."""
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        finally:
            self._signal(signal.SIGKILL)  # whatever of the group is left, the leader gone or not
            self.process.wait()
            deadline = time.monotonic() + KILL_SECONDS
            # Zombies do not count: where nobody reaps orphans they stay.
            while members(self.process.pid) and time.monotonic() < deadline:
                time.sleep(0.01)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the group, if it still has a member."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@contextlib.contextmanager
def running(
    command: Sequence[str], *, port: int, log: Path, environment: Mapping[str, str], keep: bool = False
) -> Iterator[Server]:
    """Start `command` and end its whole process group on the way out, also on Ctrl-C, SystemExit or failure.

    `keep=True` leaves it running, but only where the block ends without an exception.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            # Not even kill -9 of this process leaves a server behind; one that is to be kept outlives it.
            preexec_fn=None if keep else _end_with_parent,
        )
    server = Server(process, port, log)
    finished = False
    try:
        yield server
        finished = True
    finally:
        if not (keep and finished):
            server.stop()


def vllm_command(
    model: Path | str, *, port: int, speculative: Mapping[str, Any] | None, on_gpu: bool
) -> list[str]:
    """Command line of `vllm serve`, by this Python. On a CPU in fp32, which is what its exactness is stated
    for.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += [
        "--host",
        HOST,
        "--port",
        str(port),
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--max-num-seqs",
        "4",
    ]
    if not on_gpu:
        command += ["--dtype", "float32", "--enforce-eager"]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    return command


def engine_environment(*, on_gpu: bool) -> dict[str, str]:
    """This process's environment plus what the engine needs; a variable the user has set stays as it is."""
    return {**OFFLINE_SETTINGS, **({} if on_gpu else CPU_SETTINGS), **os.environ}


def gpu_available() -> bool:
    import torch  # here, so that `specplug --help` does not pay for it

    return torch.cuda.is_available()


def missing_engine(*, on_gpu: bool) -> str | None:
    """One sentence saying why vLLM cannot be started here and what to do, or None."""
    if importlib.util.find_spec("vllm") is None:
        return (
            "vLLM is not installed for this Python; run ci/demo from a clone of specplug, or "
            "pip install 'specplug[vllm]'"
        )
    if on_gpu:
        return None
    # Asked in a child: what is visible may depend on TRITON_INTERPRET, which is read when Python starts.
    probe = "from importlib.metadata import entry_points as e; print(*e(group='triton.backends').names)"
    environment = engine_environment(on_gpu=False)
    found = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True)
    if "cpu" in found.stdout.split():
        return None
    return (
        "there is no GPU, and vLLM's model runner V2 needs a Triton backend to run without one; run "
        "ci/demo from a clone of "
        "specplug, whose test environment has Triton's interpreter set up"
    )


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody holds at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_parent() -> None:
    """In the child: get SIGTERM when the parent dies, on which vLLM ends its own processes. Linux only."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def check_port(port: int) -> None:
    """Raises ValueError when something already listens on the port, or the port is none of ours to use."""
    if not 1 <= port <= 65535:
        raise ValueError(f"--port: expected 1..65535, got {port}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        reason = None
        try:
            probe.bind((HOST, port))
        except OSError as error:
            reason = error.strerror
    if reason is None and _answers(port):  # a listener on all addresses lets a bind to this one pass
        reason = "something answers there"
    if reason is not None:
        raise ValueError(
            f"--port: {HOST}:{port} cannot be used ({reason}); choose another port or leave --port out"
        )


def _answers(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex((HOST, port)) == 0


def last_line(log: Path, *, tail_bytes: int = 4096) -> str:
    """Last line of a growing log that is not blank, without vLLM's progress bars."""
    with log.open("rb") as lines:
        lines.seek(max(0, log.stat().st_size - tail_bytes))
        text = lines.read().decode(errors="replace").replace("\r", "\n")
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "(nothing yet)")


# The first error counts: vLLM wraps it in later ones ("Engine core initialization failed. See root cause
# above"). Warnings may quote error names, so lines of a lower level are skipped.
_CAUSE = re.compile(r"(?:\b\w*(?:Error|Exception)|Value error|: error)[:,] +(?P<text>\S.*)")
_BELOW_ERROR = re.compile(r"(?:^|\) )(?:DEBUG|INFO|WARNING) ")


def failure_cause(log: Path) -> str:
    """The first error named in a log, else its last line."""
    for line in log.read_text(errors="replace").splitlines():
        found = _CAUSE.search(line)
        if found and not _BELOW_ERROR.search(line):
            return found["text"].strip()
    return last_line(log)
