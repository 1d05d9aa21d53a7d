"""Serve a shipped tiny model with stock vLLM or SGLang and compare plain decoding, a chain and a draft tree.

One server after the other, so that no start slows another. The prompts go through the engine's HTTP API,
greedily.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from specplug import models, server, sglang_server
from specplug.comparison import KIND, Counters, Run, counters, label, print_table, print_texts, report
from specplug.config import parse_options

LONGEST_ANSWER = server.MAX_MODEL_LEN - 128  # tokens; the rest is for the question
CONCURRENCY = 4  # requests in flight; the servers are started with --max-num-seqs 4
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
METHODS = ("none", "dflash", "dspark", "ddtree")
QUESTIONS = tuple(
    one.prompt.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    for one in models.prompts()
)  # none of them occurred in the training of the shipped models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm", help="default vllm")
    parser.add_argument(
        "--method",
        nargs="+",
        choices=METHODS,
        help="what to compare with plain decoding (none), which always runs first: a chain of the engine's "
        "own (dflash, dspark) or a tree (ddtree); default: the draft's chain, then ddtree",
    )
    parser.add_argument(
        "--draft", choices=["dflash", "dspark"], help="draft model of the tree; default dspark"
    )
    parser.add_argument(
        "--budget", type=int, default=16, help="nodes of a tree, its root not counted; default 16"
    )
    parser.add_argument(
        "--prompts", type=int, default=8, help=f"how many questions, 1..{len(QUESTIONS)}; default 8"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer in tokens; default 64")
    parser.add_argument("--port", type=int, help="port on 127.0.0.1; default: a free one")
    parser.add_argument(
        "--keep", action="store_true", help="leave the last server running and say how to call and stop it"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON instead of texts and a table"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 0 when every method gave plain decoding's tokens, 1 when one did not or a server failed.

    Raises ValueError for arguments that cannot work, before anything is started.
    """
    methods, draft = chosen(arguments)
    if arguments.port is not None:
        server.check_port(arguments.port)
    on_gpu = server.gpu_available()
    on_sglang = arguments.engine == "sglang"
    missing = (sglang_server.missing if on_sglang else server.missing_engine)(on_gpu=on_gpu)
    if missing:
        print(f"specplug demo: {missing}", file=sys.stderr)
        return 1
    questions = QUESTIONS[: arguments.prompts]
    logs = Path(tempfile.mkdtemp(prefix="specplug-demo-"))
    print(
        f"specplug demo: {len(methods)} {ENGINES[arguments.engine]} server(s), one after the other; "
        f"their logs are in {logs}",
        file=sys.stderr,
    )
    runs = []
    for method in methods:
        port = arguments.port or server.free_port()
        keep = arguments.keep and method is methods[-1]
        target, budget = models.path("deep-thin", "target"), arguments.budget
        if on_sglang:
            flags = sglang_flags(method, draft=draft, budget=budget)
            command = sglang_server.command(target, port=port, flags=flags, on_gpu=on_gpu)
            environment = sglang_server.environment(on_gpu=on_gpu)
        else:
            speculative = speculative_config(method, draft=draft, budget=budget)
            command = server.vllm_command(target, port=port, speculative=speculative, on_gpu=on_gpu)
            environment = server.engine_environment(on_gpu=on_gpu)
        log = logs / f"{method}.log"
        with server.running(command, port=port, log=log, environment=environment, keep=keep) as started:
            started.wait_ready(label(method, draft))
            measured = measure_sglang if on_sglang else measure
            runs.append(measured(started, method, questions=questions, max_tokens=arguments.max_tokens))
    same = all(one.token_ids == runs[0].token_ids for one in runs)
    if arguments.json:
        print(json.dumps(report(runs, questions, draft=draft, on_gpu=on_gpu), indent=2))
    else:
        print_texts(runs, questions)
        print_table(runs, draft=draft, on_gpu=on_gpu)
    if arguments.keep:
        print_kept(started)
    return 0 if same else 1


def chosen(arguments: argparse.Namespace) -> tuple[list[str], str]:
    """Methods to run, plain first, and the tree's draft. Raises ValueError for values out of range."""
    if not 1 <= arguments.prompts <= len(QUESTIONS):
        raise ValueError(f"--prompts: expected 1..{len(QUESTIONS)}, got {arguments.prompts}")
    if arguments.max_tokens < 1:
        raise ValueError(f"--max-tokens: expected at least 1, got {arguments.max_tokens}")
    if arguments.max_tokens > LONGEST_ANSWER:
        raise ValueError(f"--max-tokens: expected at most {LONGEST_ANSWER}, got {arguments.max_tokens}")
    asked = arguments.method or []
    chains = [method for method in asked if KIND[method] == "chain"]
    draft = arguments.draft or (chains[0] if chains else "dspark")
    chain = [] if arguments.engine == "sglang" and draft == "dflash" else [draft]
    methods = asked or [*chain, "ddtree"]
    if arguments.engine == "sglang" and "dflash" in methods:
        raise ValueError(
            "--method dflash: SGLang's own DFLASH runs in bfloat16 only, where no two methods give the same "
            "tokens; leave it out, or draft trees with --draft dflash"
        )
    if "ddtree" in methods:
        parse_options(speculative_config("ddtree", draft=draft, budget=arguments.budget) or {})
    return ["none", *dict.fromkeys(method for method in methods if method != "none")], draft


def speculative_config(method: str, *, draft: str, budget: int) -> dict[str, Any] | None:
    if method == "none":
        return None
    if method == "ddtree":
        return {"method": "ddtree", "model": str(models.path("deep-thin", draft)), "tree_budget": budget}
    # The shipped drafts predict seven tokens. A chain has to say so; a tree reads it from the draft.
    return {"method": method, "model": str(models.path("deep-thin", method)), "num_speculative_tokens": 7}


def sglang_flags(method: str, *, draft: str, budget: int) -> dict[str, str | int | bool]:
    """SGLang's own flags. It reads a chain's length from the draft."""
    limit = {"max-running-requests": CONCURRENCY}
    if method == "none":
        return {**limit}
    if method == "ddtree":
        return sglang_server.tree_flags(models.path("deep-thin", draft), budget=budget) | limit
    path = str(models.path("deep-thin", method))
    return {"speculative-algorithm": method.upper(), "speculative-draft-model-path": path, **limit}


def measure_sglang(started: server.Server, method: str, *, questions: Sequence[str], max_tokens: int) -> Run:
    """As `measure`, from what SGLang says of every request."""

    def one(question: str) -> dict[str, Any]:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        params = {"temperature": 0, "max_new_tokens": max_tokens}
        return started.post("/generate", {"text": prompt, "sampling_params": params})

    one("Hello")  # a server's first request allocates: not ours to measure
    began = time.monotonic()
    pool = ThreadPoolExecutor(CONCURRENCY)
    try:
        answers = list(pool.map(one, questions))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, ending the server ends the requests
    wall_seconds = time.monotonic() - began
    meta = [answer["meta_info"] for answer in answers]
    spent = Counters(
        sum(one.get("spec_verify_ct", 0) for one in meta),
        sum(one.get("spec_num_correct_drafts", 0) for one in meta),
    )
    ids = [answer["output_ids"] for answer in answers]
    return Run(method, [answer["text"] for answer in answers], ids, spent, wall_seconds)


def measure(started: server.Server, method: str, *, questions: Sequence[str], max_tokens: int) -> Run:
    """Send all questions, a few at a time, and read vLLM's counters around them."""
    ask(started, "Hello", max_tokens=2)  # a server's first request allocates: not ours to measure
    before = counters(started.get("/metrics"))
    began = time.monotonic()
    pool = ThreadPoolExecutor(CONCURRENCY)
    try:
        answers = list(pool.map(lambda question: ask(started, question, max_tokens=max_tokens), questions))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, ending the server ends the requests
    wall_seconds = time.monotonic() - began
    after = counters(started.get("/metrics"))
    spent = Counters(after.drafts - before.drafts, after.accepted - before.accepted)
    return Run(method, [text for text, _ in answers], [ids for _, ids in answers], spent, wall_seconds)


def ask(started: server.Server, question: str, *, max_tokens: int) -> tuple[str, list[int]]:
    """Text and token ids of one greedy chat answer."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    choice = started.post("/v1/chat/completions", body)["choices"][0]
    return choice["message"]["content"], choice["token_ids"]


def print_kept(kept: server.Server) -> None:
    body = '{"temperature": 0, "messages": [{"role": "user", "content": "Count down from 43 to 37."}]}'
    print(
        f"\nThe last server is still running; its log: {kept.log}\n"
        f"  call it: curl {kept.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  stop it: kill {kept.process.pid}",
        file=sys.stderr,
    )
