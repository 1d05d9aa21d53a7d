"""The client's side of one request: read whole, streamed, left in the middle, or refused.

Plain HTTP of the standard library. A connection that is closed is how a client leaves: the server finds out.
"""

import contextlib
import http.client
import json
import socket
from typing import Any, NamedTuple

from load_requests import Ask

from specplug import server

PATH = "/v1/completions"
TIMEOUT_SECONDS = 900.0  # a slow machine; a request that gets no answer at all is an error


class Part(NamedTuple):
    """One of the n answers of a request."""

    token_ids: tuple[int, ...]
    text: str
    finish: str | None
    stop: int | str | None
    logprobs: tuple[float, ...]  # of the tokens, where asked for


class Reply(NamedTuple):
    """What came back. Without a status the connection broke, which `error` describes."""

    status: int | None
    parts: tuple[Part, ...]
    left: bool  # the client went away
    error: str


def send(port: int, ask: Ask) -> Reply:
    """Send a request and behave as its client does."""
    connection = http.client.HTTPConnection(server.HOST, port, timeout=TIMEOUT_SECONDS)
    status = None
    try:
        connection.request("POST", PATH, json.dumps(ask.body), {"Content-Type": "application/json"})
        if ask.manner == "leave" and not ask.leave_events:
            return _wait_and_leave(connection, ask.leave_after)
        reply = connection.getresponse()
        status = reply.status
        if status != 200:
            return Reply(status, (), left=False, error=reply.read().decode(errors="replace"))
        if not ask.body.get("stream"):
            return Reply(status, _whole(json.load(reply)), left=False, error="")
        return _streamed(reply, ask)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Reply(status, (), left=False, error=f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def _wait_and_leave(connection: http.client.HTTPConnection, seconds: float) -> Reply:
    """Wait without reading, then go away; the answer may have come already and is not looked at."""
    assert connection.sock is not None
    connection.sock.settimeout(max(seconds, 0.001))
    with contextlib.suppress(TimeoutError):
        connection.sock.recv(1, socket.MSG_PEEK)
    return Reply(None, (), left=True, error="")


def _whole(answer: dict[str, Any]) -> tuple[Part, ...]:
    parts = []
    for choice in sorted(answer["choices"], key=lambda one: one["index"]):
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        ids, ends = tuple(choice["token_ids"]), (choice["finish_reason"], choice["stop_reason"])
        parts.append(Part(ids, choice["text"], *ends, tuple(logprobs)))
    return tuple(parts)


def _streamed(reply: http.client.HTTPResponse, ask: Ask) -> Reply:
    """Put the events of a stream together; `left` where the client had read all it wanted."""
    found: dict[int, Part] = {}
    events, done, error = 0, False, ""
    for line in reply:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            done = True
            break
        if not data:
            continue
        event = json.loads(data)
        if "error" in event:
            error = data
            break
        for choice in event["choices"]:
            have = found.get(choice["index"], Part((), "", None, None, ()))
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
            found[choice["index"]] = Part(
                have.token_ids + tuple(choice.get("token_ids") or ()),
                have.text + choice["text"],
                choice["finish_reason"] or have.finish,
                choice.get("stop_reason") if choice.get("stop_reason") is not None else have.stop,
                have.logprobs + tuple(logprobs),
            )
        events += 1
        if ask.manner == "leave" and events >= ask.leave_events:
            break
    left = ask.manner == "leave" and not error and not done
    if not (done or left or error):
        error = "the stream ended without [DONE]"
    return Reply(reply.status, tuple(found[index] for index in sorted(found)), left=left, error=error)
