"""Two real OpenAI servers beside each other, and a client: one with `ddtree`, one stock with specplug off.

As `vllm serve` starts them (API server, engine core and worker in processes of their own), in fp32.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specplug import models, server
from specplug.processes import members

LONG = 36  # tokens of a compared answer
SHORT = 12  # where tokens are drawn: the interpreter takes a tenth of a second for each row


class Servers(NamedTuple):
    tree: server.Server
    plain: server.Server


def start(
    stack: contextlib.ExitStack, log: Path, speculative: dict[str, Any] | None, extra: dict[str, str]
) -> server.Server:
    port = server.free_port()
    target = models.path("quick", "target")
    command = server.vllm_command(target, port=port, speculative=speculative, on_gpu=False)
    command += ["--served-model-name", "tiny", "--max-num-seqs", "8"]
    environment = server.engine_environment(on_gpu=False) | extra
    return stack.enter_context(server.running(command, port=port, log=log, environment=environment))


def body(prompt: str | list[int], **parameters: Any) -> dict[str, Any]:
    defaults = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "tiny", "prompt": prompt, **defaults, **parameters}


def complete(one: server.Server, prompt: str | list[int], **parameters: Any) -> dict[str, Any]:
    return one.post("/v1/completions", body(prompt, **parameters))


def answers(
    one: server.Server, prompt: str | list[int], **parameters: Any
) -> list[tuple[str, list[int], str]]:
    choices = complete(one, prompt, **parameters)["choices"]
    return [(choice["text"], choice["token_ids"], choice["finish_reason"]) for choice in choices]


@contextlib.contextmanager
def streaming(
    one: server.Server, prompt: str | list[int], **parameters: Any
) -> Iterator[Iterator[dict[str, Any]]]:
    """Events of a streamed completion; leaving the block closes the connection, read to the end or not."""
    connection = http.client.HTTPConnection(server.HOST, one.port, timeout=120)
    try:
        request = json.dumps(body(prompt, stream=True, **parameters))
        connection.request("POST", "/v1/completions", request, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200

        def events() -> Iterator[dict[str, Any]]:
            for line in reply:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    return
                if data:
                    yield json.loads(data)

        yield events()
    finally:
        connection.close()


def metric(one: server.Server, name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = re.findall(rf"^vllm:{name}(?:{{(.*)}})? (\S+)$", one.get("/metrics"), re.MULTILINE)
    assert found, name
    return sum(float(value) for given, value in found if all(label in given for label in wanted))


def wait_idle(one: server.Server) -> None:
    for _ in range(2000):  # each look is an HTTP request and takes milliseconds
        if metric(one, "num_requests_running") == metric(one, "num_requests_waiting") == 0:
            return
    pytest.fail("the request of a client that went away is still running")


def spoken(one: server.Server) -> list[float]:
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return [metric(one, f"spec_decode_num_{name}_total") for name in names]


def status(one: server.Server, asked: dict[str, Any], headers: dict[str, str]) -> int | None:
    """Status of a completion; None where the server closes the connection instead."""
    connection = http.client.HTTPConnection(server.HOST, one.port, timeout=120)
    try:
        headers = {"Content-Type": "application/json", **headers}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        return connection.getresponse().status
    except (ConnectionError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def processes(group: int) -> dict[int, str]:
    """Live processes of a process group: id -> command line."""
    found = {}
    for pid in members(group):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found[pid] = command.strip()
    return found


def ends_within(group: int, *, seconds: float) -> bool:
    """Whether every process of the group is gone by then; killed ones take a moment, others end with
    their parent's pipe."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not processes(group):
            return True
        time.sleep(0.05)
    return False


def listening(group: int) -> set[tuple[str, int]]:
    """Addresses and TCP ports that the processes of a group listen on; IPv4, and IPv6 as its hexadecimals."""
    inodes = set()
    for pid in members(group):
        with contextlib.suppress(OSError):
            for link in list(Path(f"/proc/{pid}/fd").iterdir()):
                with contextlib.suppress(FileNotFoundError):  # closed in between, as the listing's own
                    inodes.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                host, _, port = local.partition(":")
                if table == "tcp":
                    host = socket.inet_ntoa(bytes.fromhex(host)[::-1])
                found.add((host, int(port, 16)))
    return found
