"""The OpenAI server with draft trees, seen from outside: what a client gets is what a plain server gives.

Two real servers, as `vllm serve` starts them (API server, engine core and worker in processes of their own):
one with `ddtree`, one stock with specplug switched off. Both decode in fp32, so texts and token ids compare
exactly.
"""

import contextlib
import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specplug import models, server
from specplug.comparison import counters

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

PROMPTS = [
    [17, 230, 44, 511, 90],
    "def add(a, b):",
    "import os\nimport sys\n\n\ndef main():\n",
    "class Node:\n    def __init__(self, value):",
    "for index in range(10):\n    print(",
    "Return the number of",
    "hello",
    "    try:\n        result = ",
]
LONG = 36  # tokens of a compared answer
SHORT = 12  # where tokens are drawn: the interpreter takes a tenth of a second for each row


class Servers(NamedTuple):
    tree: server.Server
    plain: server.Server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Both servers, started side by side; their process groups are gone when the module is done."""
    folder = tmp_path_factory.mktemp("servers")
    speculative = {"method": "ddtree", "model": str(models.path("quick", "dspark")), "tree_budget": 16}
    with contextlib.ExitStack() as stack:
        tree = start(stack, folder / "tree.log", speculative, {})
        plain = start(stack, folder / "plain.log", None, {"SPECPLUG_DISABLE": "1"})
        tree.wait_ready("tree")
        plain.wait_ready("plain")
        yield Servers(tree, plain)


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


def test_greedy_equals_plain_and_drafts_are_accepted(servers: Servers) -> None:
    before = counters(servers.tree.get("/metrics"))
    found = [answers(servers.tree, prompt) for prompt in PROMPTS[:4]]
    spent = counters(servers.tree.get("/metrics"))
    assert found == [answers(servers.plain, prompt) for prompt in PROMPTS[:4]]
    drafts, accepted = spent.drafts - before.drafts, spent.accepted - before.accepted
    assert accepted > 0
    # An answer: one token from the prompt's pass, then 1 + accepted a draft; its end may cut one.
    emitted = len(found) * (LONG - 1)
    assert emitted <= drafts + accepted <= emitted + 8 * len(found)
    assert drafts < emitted
    assert counters(servers.plain.get("/metrics")) == (0, 0)  # the reference does not speculate


@pytest.mark.parametrize(("temperature", "count"), [(0, LONG), (0.8, SHORT)])
def test_streamed_equals_whole(servers: Servers, temperature: float, count: int) -> None:
    parameters = {"temperature": temperature, "seed": 11, "max_tokens": count}
    for prompt in PROMPTS[:2]:
        usage = {"stream_options": {"include_usage": True}}
        with streaming(servers.tree, prompt, **parameters, **usage) as events:
            received = list(events)
        pieces = [event["choices"][0] for event in received if event["choices"]]
        whole = complete(servers.tree, prompt, **parameters)
        choice = whole["choices"][0]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [token for piece in pieces for token in piece["token_ids"] or []] == choice["token_ids"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "length"
        assert received[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == count
        assert len(pieces) < count  # several tokens an event: trees were at work
        assert (choice["text"], choice["token_ids"], "length") in answers(servers.plain, prompt, **parameters)


@pytest.mark.parametrize("included", [False, True])
def test_stop_strings(servers: Servers, included: bool) -> None:
    """Cut out of plain decoding's answer at every fourth character: inside tokens and accepted runs."""
    prompt = PROMPTS[0]
    text = answers(servers.plain, prompt)[0][0]
    stops = [text[at : at + 3] for at in range(0, 36, 4)]
    assert len(set(stops)) > 5
    lengths = set()
    for stop in dict.fromkeys(stops):
        parameters = {"stop": [stop], "include_stop_str_in_output": included}
        found = complete(servers.tree, prompt, **parameters)["choices"][0]
        assert found["text"] == text[: text.index(stop) + (len(stop) if included else 0)]
        assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
        assert found["text"] == answers(servers.plain, prompt, **parameters)[0][0]
        lengths.add(len(found["text"]))
    assert len(lengths) > 5


def test_stop_strings_streamed(servers: Servers) -> None:
    """No character of or after the stop string is ever sent."""
    text = answers(servers.plain, PROMPTS[0])[0][0]
    for at in (5, 14, 23):
        stop = text[at : at + 3]
        with streaming(servers.tree, PROMPTS[0], stop=[stop]) as events:
            pieces = [event["choices"][0]["text"] for event in events if event["choices"]]
        assert "".join(pieces) == text[: text.index(stop)]


@pytest.mark.parametrize("prompt", PROMPTS[:2], ids=["ids", "text"])
def test_stop_token_and_max_tokens_at_every_index(servers: Servers, prompt: str | list[int]) -> None:
    text, token_ids, _ = answers(servers.plain, prompt, max_tokens=16)[0]
    for count in range(1, 11):
        whole = complete(servers.tree, prompt, max_tokens=count)
        choice, usage = whole["choices"][0], whole["usage"]
        assert (choice["token_ids"], choice["finish_reason"]) == (token_ids[:count], "length")
        assert text.startswith(choice["text"])
        assert usage["completion_tokens"] == count
        assert usage["total_tokens"] == usage["prompt_tokens"] + count
    for token in dict.fromkeys(token_ids[:10]):
        cut = token_ids.index(token) + 1
        whole = complete(servers.tree, prompt, stop_token_ids=[token])
        assert whole["choices"][0]["token_ids"] == token_ids[:cut]
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == cut


def test_client_that_goes_away(servers: Servers) -> None:
    """The request is aborted, its cache is given back, and the next request is unharmed."""
    expected = answers(servers.plain, PROMPTS[0])
    for wanted_events in (1, 3):
        generated = metric(servers.tree, "generation_tokens_total")
        with streaming(servers.tree, PROMPTS[1], max_tokens=1000) as events:
            for _ in range(wanted_events):
                next(events)
            assert metric(servers.tree, "num_requests_running") == 1
        wait_idle(servers.tree)
        assert metric(servers.tree, "generation_tokens_total") - generated < 900
        assert metric(servers.tree, "kv_cache_usage_perc") == 0
        assert answers(servers.tree, PROMPTS[0]) == expected


def wait_idle(one: server.Server) -> None:
    for _ in range(2000):  # each look is an HTTP request and takes milliseconds
        if metric(one, "num_requests_running") == metric(one, "num_requests_waiting") == 0:
            return
    pytest.fail("the request of a client that went away is still running")


def test_eight_at_once(servers: Servers) -> None:
    """Different lengths and temperatures in one batch, and a client that leaves it: each as if alone."""
    parameters = [
        {"max_tokens": SHORT + index, "temperature": 0.7 if index in (1, 4) else 0, "seed": index}
        for index in range(len(PROMPTS))
    ]

    def one_of(index: int) -> list[tuple[str, list[int], str]]:
        return answers(servers.tree, PROMPTS[index], **parameters[index])

    with (
        ThreadPoolExecutor(len(PROMPTS)) as pool,
        streaming(servers.tree, PROMPTS[2], max_tokens=900) as events,
    ):
        next(events)
        pending = [pool.submit(one_of, index) for index in range(len(PROMPTS))]
        next(events)
        found = [future.result() for future in pending]
    assert found == [
        answers(servers.plain, prompt, **one) for prompt, one in zip(PROMPTS, parameters, strict=True)
    ]
    wait_idle(servers.tree)


def test_parallel_sampling(servers: Servers) -> None:
    parameters = {"n": 2, "seed": 5, "temperature": 0.9, "top_p": 0.95, "max_tokens": SHORT}
    found = answers(servers.tree, PROMPTS[1], **parameters)
    assert found == answers(servers.plain, PROMPTS[1], **parameters)
    assert len({tuple(token_ids) for _, token_ids, _ in found}) == 2
    other = answers(servers.tree, PROMPTS[1], **{**parameters, "seed": 6})
    assert other != found  # the negative control: the seed decides


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"frequency_penalty": 5}, "frequency_penalty must be in [-2, 2]"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"logprobs": -7}, "logprobs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_request(servers: Servers, parameters: dict[str, Any], named: str) -> None:
    refused = r"answered 400: .*" + re.escape(named)
    with pytest.raises(RuntimeError, match=refused):
        complete(servers.tree, PROMPTS[1], **parameters)
    assert answers(servers.tree, PROMPTS[6], max_tokens=4) == answers(servers.plain, PROMPTS[6], max_tokens=4)


@pytest.mark.parametrize(
    "parameters",
    [{"min_p": 0.1, "temperature": 0.8, "seed": 3}, {"logit_bias": {"5": 3}}],
    ids=["min_p", "logit_bias"],
)
def test_parameters_vllm_refuses_with_other_speculation(servers: Servers, parameters: dict[str, Any]) -> None:
    expected = answers(servers.plain, PROMPTS[1], max_tokens=12, **parameters)
    assert answers(servers.tree, PROMPTS[1], max_tokens=12, **parameters) == expected


def test_reference_is_stock(servers: Servers) -> None:
    """The off switch reaches the server's processes, and the plain server does not need the plugin."""
    text = servers.plain.log.read_text(errors="replace")
    assert "switched off by SPECPLUG_DISABLE=1" in text
    assert "loaded in EngineCore" not in text
    assert "loaded in EngineCore" in servers.tree.log.read_text(errors="replace")


def test_nothing_is_left_running(servers: Servers) -> None:
    wait_idle(servers.tree)
    assert metric(servers.tree, "kv_cache_usage_perc") == 0
    assert servers.tree.process.poll() is None
    assert metric(servers.tree, "request_success_total", finished_reason="error") == 0
