"""`specplug demo` with the real vLLM server: the table holds, and nothing is left running."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specplug import models, server

# A start takes 30 s on a quiet machine; the limit leaves room for a loaded one.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
SPECPLUG = Path(sys.executable).with_name("specplug")
WAIT_SECONDS = 250


def demo(*arguments: str) -> subprocess.Popen[str]:
    """Started as from a terminal: Ctrl-C reaches it even if this test run is a background job."""

    def as_from_a_terminal():
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        [SPECPLUG, "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_from_a_terminal,
    )


def users_of(folder: Path) -> list[int]:
    """Living processes that have a file below `folder` open: every process of a server writes to its log
    there.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            targets = [os.readlink(handle) for handle in (process / "fd").iterdir()]
        except OSError:  # ended meanwhile
            continue
        if any(target.startswith(f"{folder}/") for target in targets):
            found.append(int(process.name))
    return found


def until(condition, what: str):
    """Poll until `condition()` is true and return it; fails naming what was waited for."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {WAIT_SECONDS} s for {what}")


def log_folder(running: subprocess.Popen[str]) -> Path:
    return Path(running.stderr.readline().split()[-1])


def test_plain_and_tree_give_the_same_output_in_fewer_forwards():
    running = demo("--method", "ddtree", "--prompts", "3", "--max-tokens", "24", "--json")
    out, err = running.communicate(timeout=WAIT_SECONDS)
    assert running.returncode == 0, err
    plain, tree = json.loads(out)["runs"]
    assert (plain["method"], tree["method"]) == ("none", "ddtree")
    assert plain["tokens"] == plain["target_forwards"] == tree["tokens"]
    assert tree["same_output"]
    assert tree["target_forwards"] < plain["target_forwards"]
    assert tree["accepted_length"] > 1.5
    folder = Path(re.search(r"logs are in (\S+)", err)[1])
    until(lambda: not users_of(folder), "the end of every process of the servers")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_server_starts_ends_all_its_processes(number):
    running = demo("--method", "none")
    folder = log_folder(running)
    # The engine core, vLLM's second process, exists from its first log line on.
    until(
        lambda: (folder / "none.log").exists() and "(EngineCore pid=" in (folder / "none.log").read_text(),
        "the core",
    )
    assert len(users_of(folder)) >= 2
    running.send_signal(number)
    running.communicate(timeout=30)
    assert running.returncode == 128 + number
    until(lambda: not users_of(folder), "the end of every process of the server")


def test_a_server_that_cannot_start_is_explained_and_ended(tmp_path):
    port, log = server.free_port(), tmp_path / "log"
    speculative = {"method": "ddtree", "model": str(models.path("quick", "dflash")), "tree_budgett": 8}
    command = server.vllm_command(
        models.path("quick", "target"), port=port, speculative=speculative, on_gpu=False
    )
    environment = server.engine_environment(on_gpu=False)
    with (
        server.running(command, port=port, log=log, environment=environment) as started,
        pytest.raises(RuntimeError, match="did you mean 'tree_budget'"),
    ):
        started.wait_ready("a server with an unknown key")
    until(lambda: not users_of(tmp_path), "the end of every process of the server")


def test_keep_leaves_a_server_that_answers_and_stops_as_it_says():
    running = demo("--method", "none", "--prompts", "1", "--max-tokens", "4", "--keep")
    # Its pipes stay open for as long as nothing closes them, so read lines rather than to the end.
    folder = log_folder(running)
    kept = None
    try:
        text = ""
        while "stop it: kill" not in text:
            line = running.stderr.readline()
            assert line, text
            text += line
        assert running.wait(WAIT_SECONDS) == 0
        kept = int(re.search(r"stop it: kill (\d+)", text)[1])
        body = re.search(r"-d '(.*)'", text)[1]
        url = re.search(r"curl (\S+)", text)[1]
        request = server.urllib.request.Request(
            url, data=body.encode(), headers={"Content-Type": "application/json"}
        )
        with server._OPENER.open(request, timeout=WAIT_SECONDS) as reply:
            assert json.load(reply)["choices"][0]["message"]["content"]
        os.kill(kept, signal.SIGTERM)
        until(lambda: not users_of(folder), "the end of the kept server")
    finally:
        if kept is not None and users_of(folder):
            os.killpg(kept, signal.SIGKILL)
