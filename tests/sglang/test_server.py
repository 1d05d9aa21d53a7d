"""DDTREE behind SGLang's HTTP server: chat, streams, clients that leave, metrics and the state.

The server runs as a user starts it: overlap, ragged windows, budgets drawn at random.
"""

import contextlib
import json
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
from prompts import tokenizer, varied
from sglang_rig import serve, tree
from transformers import AutoTokenizer

from specplug import models

pytestmark = pytest.mark.sglang

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 160, "ignore_eos": True}
CHAT = [{"role": "user", "content": "def total(values):\n    count = 0\n    for value in values:\n"}]
BUDGET = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "specplug.json").write_text(json.dumps({"explore": True, "record": str(folder / "record")}))
    env = {"SPECPLUG_CONFIG": str(folder / "specplug.json"), "SGLANG_RAGGED_VERIFY_MODE": "compact"}
    flags = tree("dspark", BUDGET, enable_metrics=True, log_level="info")
    with serve(flags, log=folder / "log", env=env) as running:
        yield running


def events(response):
    """The JSON events of a stream."""
    for line in response:
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            yield json.loads(line[len(b"data: ") :])


def metric(server, name):
    """The sum over a metric's labels."""
    lines = [
        line for line in server.get("/metrics").splitlines() if line.startswith((f"{name} ", name + "{"))
    ]
    assert lines, f"no metric {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_generate_is_plain_decoding(plain, server):
    body = {"input_ids": [list(prompt) for prompt in varied()], "sampling_params": GREEDY}
    answers = json.load(server.post("/generate", body))
    expected = plain.generate(varied(), GREEDY)
    assert [answer["output_ids"] for answer in answers] == [output.ids for output in expected]
    for answer in answers:
        meta = answer["meta_info"]
        assert 1 <= meta["spec_accept_length"] <= 8
        assert 1 <= meta["spec_cap_length"] <= BUDGET + 1
        # Every step emits its accepted nodes and one token; the first token comes from the prompt.
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(histogram) == meta["spec_verify_ct"]
        counts = meta["specplug"]
        rounds = [counts[f"rounds_{shape}"] for shape in ("plain", "chain", "tree")]
        assert sum(rounds) == meta["spec_verify_ct"]
        assert counts["nodes_verified"] + sum(rounds) == round(meta["spec_cap_length"] * sum(rounds))
    assert len({answer["meta_info"]["spec_cap_length"] for answer in answers}) > 10


def test_chat_whole_and_streamed_is_plain_decoding(plain, server):
    template = AutoTokenizer.from_pretrained(models.path("quick", "target"))
    ids = template.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    (expected,) = plain.generate([ids], GREEDY)
    text = tokenizer().decode(expected.ids)
    body = {"model": "default", "messages": CHAT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    whole = json.load(server.post("/v1/chat/completions", body))
    assert whole["usage"]["prompt_tokens"] == len(ids)
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["choices"][0]["message"]["content"] == text

    chunks = list(events(server.post("/v1/chat/completions", body | {"stream": True})))
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
    assert "".join(pieces) == text
    assert sum(map(bool, pieces)) > 1


def test_clients_that_leave_disturb_nobody(plain, server):
    """Sixteen streams, every second one closed after a few events."""
    prompts = varied()[:16]
    expected = plain.generate(prompts, LONG)

    last = {}

    def follow(i):
        got = []
        with server.post(
            "/generate", {"input_ids": list(prompts[i]), "sampling_params": LONG, "stream": True}
        ) as response:
            for count, event in enumerate(events(response), 1):
                got, last[i] = event["output_ids"], event["meta_info"]
                if i % 2 and count > i % 5:
                    break
        return got

    with ThreadPoolExecutor(len(prompts)) as clients:
        outputs = list(clients.map(follow, range(len(prompts))))
    assert outputs[::2] == [output.ids for output in expected[::2]]
    for meta in last.values():  # our counts are in every event, SGLang's own in a request's last
        rounds = sum(meta["specplug"][f"rounds_{shape}"] for shape in ("plain", "chain", "tree"))
        assert rounds == meta.get("spec_verify_ct", rounds)
    assert all(last[i]["spec_verify_ct"] > 20 for i in range(0, len(prompts), 2))
    assert all(left == whole.ids[: len(left)] for left, whole in zip(outputs, expected, strict=True))
    assert sum(len(left) < 160 for left in outputs[1::2]) > 4

    deadline = time.monotonic() + 30
    while metric(server, "sglang:num_running_reqs") and time.monotonic() < deadline:
        json.load(server.post("/generate", {"input_ids": [5], "sampling_params": GREEDY}))
    assert metric(server, "sglang:num_running_reqs") == 0
    server.post("/flush_cache?timeout=30", {}).close()  # refused unless every request ends by then
    state = json.loads(server.get("/server_info"))["internal_states"][0]
    assert state["specplug"]["active"]


def test_state_and_metrics_say_what_runs(server):
    steps = metric(server, "specplug:steps_total")
    json.load(server.post("/generate", {"input_ids": [[5, 6, 7]], "sampling_params": GREEDY}))
    assert 24 / 8 <= metric(server, "specplug:steps_total") - steps <= 24
    assert metric(server, "sglang:spec_accept_length") >= 0
    (state,) = json.loads(server.get("/server_info"))["internal_states"]
    block = state["specplug"]
    assert (block["algorithm"], block["nodes"], block["depth"]) == ("DDTREE", BUDGET, 7)
    assert [rank["mode"] for rank in block["ranks"]] == ["compact"]
    log = server.log.read_text()
    assert log.count("specplug: DDTREE, pid") == 1
    assert "rank 0 of 1: TreeWorker over Qwen3DSparkModel, 16 nodes, depth 7, verification compact" in log


def test_a_request_that_cannot_be_served_is_refused_with_a_reason(server):
    body = {"input_ids": [1, 2], "sampling_params": GREEDY, "return_hidden_states": True}
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post("/generate", body)
    assert error.value.code == 400
    with contextlib.closing(error.value) as answer:
        assert "hidden states" in answer.read().decode()
