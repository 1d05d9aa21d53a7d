"""The OpenAI server with draft trees, seen from outside: what a client gets is what a plain server gives.

Two real servers, as `vllm serve` starts them (API server, engine core and worker in processes of their own):
one with `ddtree`, one stock with specplug switched off. Both decode in fp32, so texts and token ids compare
exactly.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_rig import (
    LONG,
    SHORT,
    Servers,
    answers,
    body,
    complete,
    listening,
    metric,
    spoken,
    start,
    status,
    streaming,
    wait_idle,
)

from specplug import models, server
from specplug.comparison import counters

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import load_judge
from load_chaos import kill_engine
from load_client import send
from load_requests import Requests
from random_load import as_whole, serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

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


def test_limits_of_a_request_are_vllms_own(servers: Servers) -> None:
    """More than each limit allows is refused by both servers alike."""
    for beyond in (
        {"logprobs": 21},
        {"prompt": [5] * (server.MAX_MODEL_LEN + 1)},
        {"n": 100_000},
        {"logit_bias": {str(token): 1 for token in range(2000)}},
    ):
        tree, plain = (status(one, {**body(PROMPTS[1]), **beyond}, {}) for one in servers)
        assert tree == plain
        assert tree in range(400, 500)
    # Where headers are too long a client finds an error, or the connection closed.
    for headers in ({"X-Long": "x" * (5 << 20)}, {f"X-{i}": "x" for i in range(300)}):
        tree, plain = (status(one, body(PROMPTS[1], max_tokens=2), headers) == 200 for one in servers)
        assert tree == plain


def test_no_path_of_a_request_is_touched(servers: Servers, tmp_path: Path) -> None:
    """Our own options name files; in a request they name nothing."""
    named = {key: str(tmp_path / key) for key in ("record", "cost_table", "calibration")}
    asked = {**named, "speculative_config": named, "vllm_xargs": named, "max_tokens": SHORT}
    assert answers(servers.tree, PROMPTS[1], **asked) == answers(servers.plain, PROMPTS[1], **asked)
    assert list(tmp_path.iterdir()) == []


def test_no_port_beside_vllms_own(servers: Servers) -> None:
    tree, plain = (listening(one.process.pid) for one in servers)
    assert sorted(host for host, _ in tree) == sorted(host for host, _ in plain)
    assert (server.HOST, servers.tree.port) in tree
    with socket.socket() as more:  # the control
        more.bind((server.HOST, 0))
        more.listen()
        assert more.getsockname() in listening(os.getpgid(0))


def test_vllm_bench_serve(servers: Servers, tmp_path: Path) -> None:
    """What vLLM's own load generator prints of speculation is what the server counted."""
    tokenizer = str(models.path("quick", "target"))
    command = f"bench serve --backend openai --base-url {servers.tree.url} --endpoint /v1/completions"
    command += f" --model tiny --tokenizer {tokenizer} --dataset-name random --random-input-len 24"
    command += " --random-output-len 20 --num-prompts 3 --ignore-eos --temperature 0 --disable-tqdm"
    environment = server.engine_environment(on_gpu=False)
    before = spoken(servers.tree)
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", *command.split()],
        env=environment, capture_output=True, text=True, timeout=150, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = dict(re.findall(r"^ *(.+?):\s+([\d.]+)\s*$", done.stdout, re.MULTILINE))
    drafts, nodes, accepted = (now - then for now, then in zip(spoken(servers.tree), before, strict=True))
    # It probes the server with a request of its own before it begins to count.
    assert 0 < int(told["Drafts"]) <= drafts
    assert 0 < int(told["Accepted tokens"]) <= accepted
    assert int(told["Draft tokens"]) <= nodes
    assert int(told["Failed requests"]) == 0
    length = 1 + int(told["Accepted tokens"]) / int(told["Drafts"])
    assert float(told["Acceptance length"]) == pytest.approx(length, abs=0.01)
    # Of a tree's nodes, most of which lie off the accepted branch.
    rate = 100 * int(told["Accepted tokens"]) / int(told["Draft tokens"])
    assert float(told["Acceptance rate (%)"]) == pytest.approx(rate, abs=0.01)
    places = [float(told[f"Position {i}"]) for i in range(16)]
    assert places == sorted(places, reverse=True)
    assert sum(places) / 100 == pytest.approx(length - 1, abs=0.02)  # a place is a depth, not a node
    assert places[7:] == [0] * 9  # the drafter looks seven tokens ahead


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


def test_mixed_random_load(servers: Servers) -> None:
    """A little of what benchmarks/random_load.py does for half an hour."""
    tokenizer = models.path("quick", "target") / "tokenizer.json"
    source = Requests(3, model="tiny", tokenizer=tokenizer, max_model_len=server.MAX_MODEL_LEN)
    asks = [source.draw() for _ in range(20)]
    answered = list(zip(asks, serve(servers.tree, asks, 6), strict=True))
    wait_idle(servers.tree)
    assert metric(servers.tree, "kv_cache_usage_perc") == 0
    assert [said for ask, reply in answered if (said := load_judge.wrong_reply(ask, reply))] == []
    assert {ask.manner for ask in asks} == {"whole", "stream", "leave", "refused"}
    chosen = [(ask, reply) for ask, reply in answered if ask.seeded and reply.parts]
    assert len(chosen) > 10
    plain = serve(servers.plain, [as_whole(ask, reply) for ask, reply in chosen], 6)
    pairs = zip(chosen, plain, strict=True)
    assert [found for (ask, reply), want in pairs for found in load_judge.compare(ask, want, reply)] == []
    assert load_judge.log_errors(servers.tree.log) == []


def test_a_killed_engine_is_told_and_ends_the_server(servers: Servers) -> None:
    """Last: it ends the server. Stock vLLM ends with exit code 0 then."""
    source = Requests(
        4, model="tiny", tokenizer=models.path("quick", "target") / "tokenizer.json", max_model_len=512
    )
    death = kill_engine(servers.tree, [source.draw() for _ in range(8)], send, clients=4)
    assert death.wrong == []
    assert death.told == death.asked
    assert servers.tree.process.poll() == 1
    with pytest.raises(RuntimeError, match="no answer from the server"):
        complete(servers.tree, PROMPTS[1], max_tokens=4)
    assert "EngineDeadError" in servers.tree.log.read_text(errors="replace")
