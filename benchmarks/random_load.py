"""Mixed random load on a vLLM server with draft trees; then every answer is compared with plain decoding.

    python benchmarks/random_load.py --minutes 30 --seed 0 --out DIR [--chaos]

The server runs a shipped model with few cache blocks, so that requests are preempted. It gets requests of all
lengths and parameters, whole and streamed, from clients of which some leave, and invalid ones; bursts of 1 to
16 clients, and idle times in which every cache block must be free. Then a server without speculation answers
the same requests: tokens, texts, ends and log-probabilities must be the same, also what a client had read
before it left. Requests that are drawn without a seed are counted and not compared.

`--chaos` kills the engine's process at the end, with requests in flight: clients must be told, /health must
fail, and the server must end. DIR gets result.json, table.md and the logs. Exit code 1 when anything is
wrong.
"""

import argparse
import datetime
import json
import math
import random
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import load_judge as judge
from load_chaos import kill_engine
from load_client import Part, Reply, send
from load_report import Outcome, table, write
from load_requests import Ask, Requests
from load_watch import Watch, metrics
from memory import hardware, version
from tqdm import tqdm

from specplug import models, server
from specplug.config import parse_options

MODEL = "tiny"  # the name clients ask for
MAX_MODEL_LEN = 512
CLIENTS = (1, 2, 4, 8, 16)
BLOCK = 32  # tokens of a cache block: the fewest the CPU backend takes
IDLE_LIMIT_SECONDS = (
    300.0  # to run dry after the last client; a request of a client that left is not computed
)
REPLAYS = 24  # requests that plain decoding answers at a time
LOOKS = 16  # at the plain server's memory, while it answers them all


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of load; default 30")
    parser.add_argument("--requests", type=int, help="end after as many instead")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and bursts; default 0")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result; must be empty or new")
    parser.add_argument("--models", choices=models.sets(), default="quick", help="default quick")
    parser.add_argument("--draft", choices=("dflash", "dspark"), default="dspark", help="default dspark")
    parser.add_argument("--budget", type=int, default=8, help="nodes of a tree; default 8")
    parser.add_argument("--options", default="{}", help="more keys of ddtree, as JSON, such as a cost_table")
    parser.add_argument(
        "--blocks", type=int, default=24, help="blocks of the cache, 32 tokens each; default 24"
    )
    parser.add_argument("--chaos", action="store_true", help="kill the engine at the end")
    arguments = parser.parse_args()
    speculative = {
        "method": "ddtree",
        "model": str(models.path(arguments.models, arguments.draft)),
        "tree_budget": arguments.budget,
        **json.loads(arguments.options),
    }
    try:
        parse_options(speculative)
    except ValueError as error:
        parser.error(str(error))
    if arguments.minutes <= 0 or (arguments.requests is not None and arguments.requests < 1):
        parser.error("--minutes and --requests: expected more than 0")
    if arguments.blocks < (least := MAX_MODEL_LEN // BLOCK + 2):
        parser.error(
            f"--blocks: expected {least} or more, room for one longest request, got {arguments.blocks}"
        )
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        parser.error(f"--out: {out} is not empty; name a new folder")
    missing = server.missing_engine(on_gpu=False)
    if missing:
        sys.exit(f"random_load: {missing}")

    outcome = run(arguments, speculative)
    facts = {
        "command": shlex.join(["python", *sys.argv]),
        "date": str(datetime.date.today()),
        "hardware": hardware(on_gpu=False),
        "versions": {name: version(name) for name in ("specplug", "vllm", "torch", "triton")},
        "speculative_config": {**speculative, "model": f"{arguments.models}/{arguments.draft}"},
    }
    write(out, facts, outcome)
    print(table(outcome))
    for line in outcome.wrong[:20]:
        print(f"WRONG: {line}", file=sys.stderr)
    sys.exit(1 if outcome.wrong else 0)


def run(arguments: argparse.Namespace, speculative: dict[str, Any]) -> Outcome:
    outcome = Outcome()
    requests = Requests(
        arguments.seed,
        model=MODEL,
        tokenizer=models.path(arguments.models, "target") / "tokenizer.json",
        max_model_len=MAX_MODEL_LEN,
    )
    log = arguments.out / "tree.log"
    with started(arguments, log, speculative) as one:
        one.wait_ready("ddtree")
        watch = Watch(one, every_seconds=5.0)
        answered = load(one, requests, watch, arguments)
        outcome.note_load(answered, watch, metrics(one), judge.log_errors(log))
        if arguments.chaos:
            outcome.note_chaos(kill_engine(one, [requests.draw() for _ in range(40)], send))
    with started(arguments, arguments.out / "plain.log", None) as one:
        one.wait_ready("plain")
        watch = Watch(one, every_seconds=5.0)
        outcome.note_comparison(*compare_all(one, answered, watch))
        outcome.note_plain_memory(watch)
    return outcome


def started(arguments: argparse.Namespace, log: Path, speculative: dict[str, Any] | None) -> Any:
    port = server.free_port()
    target = models.path(arguments.models, "target")
    command = server.vllm_command(target, port=port, speculative=speculative, on_gpu=False)
    command += ["--served-model-name", MODEL, "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--block-size", str(BLOCK), "--max-num-seqs", str(max(CLIENTS) if speculative else REPLAYS)]
    command += ["--max-num-batched-tokens", "256" if speculative else "1024"]
    blocks = arguments.blocks if speculative else MAX_MODEL_LEN // BLOCK * REPLAYS
    command += ["--num-gpu-blocks-override", str(blocks)]
    environment = server.engine_environment(on_gpu=False)
    # oneDNN keeps the compiled products of the last 1,024 shapes: a curve that ends after hours.
    environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"
    if speculative is None:
        # The values that judge a near tie are those that the noise is added to.
        command += ["--logprobs-mode", "raw_logprobs"]
        environment["SPECPLUG_DISABLE"] = "1"
    return server.running(command, port=port, log=log, environment=environment)


def load(
    one: server.Server, requests: Requests, watch: Watch, arguments: argparse.Namespace
) -> list[tuple[Ask, Reply]]:
    """Bursts until the time or the requests are over; after each the server runs dry and is looked at."""
    draw, answered = random.Random(arguments.seed + 1), list[tuple[Ask, Reply]]()
    began = time.monotonic()
    total = arguments.requests or round(60 * arguments.minutes)
    with tqdm(total=total, unit="" if arguments.requests else "s", disable=not sys.stderr.isatty()) as bar:
        while (
            done := len(answered) if arguments.requests else min(total, round(time.monotonic() - began))
        ) < total:
            clients = draw.choice(CLIENTS)
            count = clients * draw.randint(1, 4)
            if arguments.requests:
                count = min(count, total - done)
            burst = [requests.draw() for _ in range(count)]
            answered += list(zip(burst, serve(one, burst, clients), strict=True))
            last = watch.wait_idle(limit_seconds=IDLE_LIMIT_SECONDS)
            bar.n = len(answered) if arguments.requests else min(total, round(time.monotonic() - began))
            bar.set_postfix_str(f"{len(answered)} requests, {last.own_mib:.0f} MiB")
            bar.refresh()
            if draw.random() < 0.3:
                time.sleep(draw.random() * 2)
    watch.stop()
    return answered


def serve(one: server.Server, asks: Sequence[Ask], clients: int) -> list[Reply]:
    with ThreadPoolExecutor(clients) as pool:
        pending: list[Future[Reply]] = [pool.submit(send, one.port, ask) for ask in asks]
        return [future.result() for future in pending]


def compare_all(
    one: server.Server, answered: Sequence[tuple[Ask, Reply]], watch: Watch
) -> tuple[int, list[judge.Divergence], list[judge.Divergence]]:
    """Number of compared answers, mismatches, and near ties."""
    chosen = [(ask, reply) for ask, reply in answered if ask.seeded and reply.status == 200 and reply.parts]
    asked = [as_whole(ask, reply) for ask, reply in chosen]
    print(f"  plain decoding answers {len(asked)} requests", file=sys.stderr)
    plain: list[Reply] = []
    step = math.ceil(len(asked) / LOOKS)
    while len(plain) < len(asked):
        plain += serve(one, asked[len(plain) : len(plain) + step], REPLAYS)
        watch.wait_idle(limit_seconds=IDLE_LIMIT_SECONDS)
    watch.stop()
    mismatches, ties = [], []
    for (ask, reply), want, again in zip(chosen, plain, asked, strict=True):
        for found in judge.compare(ask, want, reply):
            near = judge.is_near_tie(found, logprobs_at(one, again, want, found))
            (ties if near else mismatches).append(found)
    return sum(len(reply.parts) for _, reply in chosen), mismatches, ties


def as_whole(ask: Ask, reply: Reply) -> Ask:
    """The same request read to its end; of one whose client left no more than it had read."""
    body = {name: value for name, value in ask.body.items() if name not in ("stream", "stream_options")}
    if reply.left:
        body["max_tokens"] = max(1, *(len(part.token_ids) for part in reply.parts))
        body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    return ask._replace(manner="whole", body=body)


def logprobs_at(one: server.Server, ask: Ask, want: Reply, found: judge.Divergence) -> dict[int, float]:
    """Plain decoding's log-probabilities where an answer parts from it: of greedy requests without penalties,
    where they alone decide.
    """
    if ask.body["temperature"] or any(name.endswith("_penalty") for name in ask.body):
        return {}
    part: Part = want.parts[found.part]
    prompt = ask.body["prompt"]
    if isinstance(prompt, str):
        prompt = one.post("/tokenize", {"model": MODEL, "prompt": prompt})["tokens"]
    body = {"prompt": [*prompt, *part.token_ids[: found.at]], "max_tokens": 1, "temperature": 0}
    answer = one.post(
        "/v1/completions", {"model": MODEL, "logprobs": 5, "return_tokens_as_token_ids": True, **body}
    )
    (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    return {int(name.removeprefix("token_id:")): value for name, value in top.items()}


if __name__ == "__main__":
    main()
