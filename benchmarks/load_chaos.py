"""Kills the engine's process under a server with requests in flight, and sees what the server does."""

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from load_client import Reply
from load_requests import Ask
from load_watch import ENGINE, metrics, processes

from specplug import server

END_SECONDS = 60.0  # vLLM looks every five seconds whether its engine is alive
TOLD = "EngineCore encountered an issue"  # vLLM's EngineDeadError


class Death(NamedTuple):
    """What followed the kill."""

    asked: int  # requests in flight
    told: int  # of them, those whose clients got vLLM's own error
    dropped: int  # those whose connection was refused or closed
    finished: int  # those that were answered just before
    health_fails: bool
    exit_code: int | None  # None: it did not end
    seconds: float  # until it ended
    left_over: tuple[str, ...]  # processes of the server that still live

    @property
    def wrong(self) -> list[str]:
        found = []
        if not self.told:
            found.append(f"chaos: none of {self.asked} clients was told that the engine is dead")
        if self.told + self.dropped + self.finished != self.asked:
            found.append(f"chaos: not every one of {self.asked} requests came to an end")
        if not self.health_fails:
            found.append("chaos: /health does not fail")
        if self.exit_code is None:
            found.append(f"chaos: the server did not end within {END_SECONDS:.0f} s")
        elif not self.exit_code:
            found.append("chaos: the server ended with exit code 0, as if nothing had happened")
        found += [f"chaos: still alive: {command}" for command in self.left_over]
        return found


def kill_engine(
    one: server.Server, asks: Sequence[Ask], send: Callable[[int, Ask], Reply], *, clients: int = 8
) -> Death:
    """Kill -9 while requests run; returns when the server has ended, or a minute later."""
    asked = [long(ask) for ask in asks if ask.manner in ("whole", "stream")][:clients]
    with ThreadPoolExecutor(len(asked)) as pool:
        pending = [pool.submit(send, one.port, ask) for ask in asked]
        while metrics(one)["vllm:num_requests_running"] < len(asked) and not any(f.done() for f in pending):
            time.sleep(0.05)
        (engine,) = (each.pid for each in processes(one.process.pid) if each.command.startswith(ENGINE))
        os.kill(engine, signal.SIGKILL)
        began, health_fails = time.monotonic(), False
        while one.process.poll() is None and time.monotonic() - began < END_SECONDS:
            health_fails = health_fails or not healthy(one)
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(0.1)
        seconds = time.monotonic() - began
        health_fails = health_fails or not healthy(one)
        ends = Counter(end(future.result()) for future in pending)
    while time.monotonic() - began < END_SECONDS and (left := processes(one.process.pid)):
        time.sleep(0.1)
    return Death(
        len(asked),
        ends["told"],
        ends["dropped"],
        ends["finished"],
        health_fails,
        one.process.poll(),
        seconds,
        tuple(each.command[:60] for each in left),
    )


def long(ask: Ask) -> Ask:
    """The request without an end of its own, so that it runs when the engine is killed."""
    body = {"model": ask.body["model"], "prompt": "def", "max_tokens": 400, "ignore_eos": True}
    return ask._replace(
        body={**body, "temperature": 0, "stream": ask.manner == "stream", "return_token_ids": True}
    )


def end(reply: Reply) -> str:
    if TOLD in reply.error:
        return "told"
    if reply.status == 200 and not reply.error:
        return "finished"
    return "dropped" if reply.status in (None, 200) else "answered"


def healthy(one: server.Server) -> bool:
    try:
        one.get("/health", timeout_seconds=10)
    except (urllib.error.HTTPError, OSError):
        return False
    return True
