"""How far an engine goes with command lines before anything is started.

``python -m specplug.recipe_probe ENGINE < ARMS``, ARMS a JSON list of ``{"command", "environment"}``, is run
by `specplug recipe check` with the engine's own Python. The core must not import an adapter, so the plugin is
found through its entry point, and the module ``argument_check`` beside it asks the engine. Importing an
engine takes ten seconds and asking it one, so it is imported once and a fork asks for each arm.

The last line of stdout is a JSON list, an object an arm: ``reached``, the last stage that was reached
("parsed", "config accepted", null), and ``error``, the engine's reason where it refused.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specplug.plugin_probe import entry_point

ARM_SECONDS = 300  # an answer takes seconds, on a machine with much other work a minute or two
Accept = Callable[[Sequence[str], Callable[[str], None]], None]


def ask(engine: str, arms: Sequence[Mapping[str, Any]]) -> list[dict[str, str | None]]:
    """What the engine says to each arm. Raises RuntimeError where specplug's plugin is not installed."""
    found = entry_point(engine)
    if found is None:
        raise RuntimeError(f"specplug's plugin for {engine} is not installed here")
    check = importlib.import_module(f"{found.module.rpartition('.')[0]}.argument_check")
    check.load()
    return [_forked(check.accept, arm["command"], arm["environment"]) for arm in arms]


def _forked(accept: Accept, command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str | None]:
    # Files, not pipes: what an engine starts on the way would hold a pipe open after its end.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as answered:
        child = os.fork()
        if child == 0:
            signal.alarm(ARM_SECONDS)
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            os.environ.update(environment)
            os.write(answered.fileno(), json.dumps(_ask(accept, command)).encode())
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        answered.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
        answer = answered.read()
    if code == -signal.SIGALRM:
        return {"reached": None, "error": f"no answer within {ARM_SECONDS} s"}
    if not answer:
        return {"reached": None, "error": f"it died with exit code {code}: {(lines or ['nothing said'])[-1]}"}
    got: dict[str, str | None] = json.loads(answer)
    if got["error"] == "":  # an argparse parser says it on stderr
        got["error"] = next((line for line in reversed(lines) if "error:" in line), "no reason given")
    return got


def _ask(accept: Accept, command: Sequence[str]) -> dict[str, str | None]:
    answer: dict[str, str | None] = {"reached": None, "error": None}

    def reached(stage: str) -> None:
        answer["reached"] = stage

    try:
        accept(command, reached)
    except SystemExit as end:
        answer["error"] = end.code if isinstance(end.code, str) else ""
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


if __name__ == "__main__":
    print("\n" + json.dumps(ask(sys.argv[1], json.load(sys.stdin))), flush=True)
