"""An engine's own load generator as a child process: `vllm bench serve`, `sglang.benchmark.serving`.

Both send the requests of a file at an arrival rate or with so many in flight, read the answers as streams,
and write one JSON object, which is read here. They agree on TTFT, TPOT and whole answers. Of ITL they do not:
vLLM's is the gap between two chunks of a stream, SGLang's the gap shared out over the tokens of the chunk.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specplug import server
from specplug.bench_prompts import DataFile
from specplug.bench_result import Load, Quantiles, Repeat, Rounds

POLL_SECONDS = 0.2
_LATENCIES = {"ttft": "ttft", "itl": "itl", "tpot": "tpot", "answer": "e2el"}


def command(
    engine: str,
    load: Load,
    data: DataFile,
    *,
    url: str,
    model: str,  # as the server names it
    tokenizer: str,
    requests: int,
    max_tokens: int,
    ignore_eos: bool,
    temperature: float,
    top_p: float,
    seed: int,
    output: Path,
    extra: Sequence[str] = (),
) -> list[str]:
    """Command line of the generator; every request of the file once."""
    common = {
        "--base-url": url,
        "--model": tokenizer,
        "--served-model-name": model,
        "--tokenizer": tokenizer,
        "--dataset-name": data.name,
        "--dataset-path": str(data.path),
        "--num-prompts": str(requests),
        "--temperature": str(temperature),
        "--seed": str(seed),
        "--request-rate": "inf" if load.rate is None else str(load.rate),
    }
    if load.concurrency is not None:
        common["--max-concurrency"] = str(load.concurrency)
    if top_p < 1:
        common["--top-p"] = str(top_p)
    if engine == "vllm":
        line = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
        common |= {
            "--output-len": str(max_tokens),
            "--percentile-metrics": ",".join(_LATENCIES.values()),
            "--metric-percentiles": "50,95,99",
            "--result-dir": str(output.parent),
            "--result-filename": output.name,
        }
        flags = ["--save-result", "--save-detailed", "--disable-shuffle", "--skip-chat-template"]
        flags += ["--ignore-eos"] if ignore_eos else []
    else:
        line = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
        common |= {
            "--sharegpt-output-len": str(max_tokens),
            "--output-file": str(output),
            "--warmup-requests": "0",
        }
        flags = ["--output-details"] + ([] if ignore_eos else ["--disable-ignore-eos"])
    return [*line, *(word for pair in common.items() for word in pair), *flags, "--disable-tqdm", *extra]


def run(
    generator: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    serving: server.Server,
) -> None:
    """Run the generator to its end. Raises RuntimeError where it or the server fails, with the reason."""
    with server.running(generator, port=serving.port, log=log, environment=environment) as started:
        while (code := started.process.poll()) is None:
            if serving.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended under load: {server.failure_cause(serving.log)}\n"
                    f"Its log: {serving.log}"
                )
            time.sleep(POLL_SECONDS)
    if code:
        raise RuntimeError(
            f"the load generator ended with exit code {code}: {server.failure_cause(log)}\nIts log: {log}"
        )


def read(file: Path, *, requests: int) -> Repeat:
    """The generator's figures. Raises RuntimeError for failed requests, and for a file that is none of its.

    The rounds are not its to know.
    """
    lines = file.read_text().splitlines() if file.is_file() else []
    if not lines:
        raise RuntimeError(f"{file}: the load generator wrote no result")
    found: dict[str, Any] = json.loads(lines[-1])
    completed = int(found["completed"])
    if completed != requests:
        reasons = [reason for reason in found.get("errors", []) if reason]
        why = reasons[0].strip().splitlines()[-1] if reasons else "the generator gives no reason"
        raise RuntimeError(f"{requests - completed} of {requests} requests failed, the first: {why}")
    return Repeat(
        seconds=found["duration"],
        completed=completed,
        failed=0,
        input_tokens=found["total_input_tokens"],
        output_tokens=found["total_output_tokens"],
        output_tokens_per_second=found["output_throughput"],
        requests_per_second=found["request_throughput"],
        **{name: _quantiles(found, theirs) for name, theirs in _LATENCIES.items()},
        rounds=None,
    )


def _quantiles(found: Mapping[str, Any], name: str) -> Quantiles:
    if f"mean_{name}_ms" not in found and name == "e2el":
        name = "e2e_latency"  # SGLang's name
    return Quantiles(
        mean_ms=found[f"mean_{name}_ms"],
        p50_ms=found[f"median_{name}_ms"],
        p95_ms=found[f"p95_{name}_ms"],
        p99_ms=found[f"p99_{name}_ms"],
    )


class Counted:
    """The engine's counters of speculation on its /metrics page, summed over engines and labels."""

    def __init__(self, page: str) -> None:
        self.totals: dict[str, float] = {}
        for line in page.splitlines():
            if line.startswith(("vllm:spec_decode_num_", "sglang:spec_verify_calls", "specplug:")):
                name, _, value = line.rpartition(" ")
                name, _, labels = name.partition("{")
                if name.startswith("specplug:") and 'shape="' in labels:
                    name += ":" + labels.partition('shape="')[2].partition('"')[0]
                self.totals[name] = self.totals.get(name, 0.0) + float(value)

    def since(self, before: Counted, name: str) -> int | None:
        """What a counter gained; None where the engine has none of the name."""
        if name not in self.totals:
            return None
        return round(self.totals[name] - before.totals.get(name, 0.0))


def rounds(engine: str, before: Counted, after: Counted, *, answers: int, output_tokens: int) -> Rounds:
    """What the engine did between two readings, in which it gave these answers and nothing else.

    docs/bench.md says who counts what.
    """
    nodes = after.since(before, "specplug:nodes_verified_total")
    if engine == "vllm":
        drafts = after.since(before, "vllm:spec_decode_num_drafts_total")
        accepted = after.since(before, "vllm:spec_decode_num_accepted_tokens_total")
        if nodes is None:  # nothing is trimmed: what was drafted was verified
            nodes = after.since(before, "vllm:spec_decode_num_draft_tokens_total")
    else:
        drafts = after.since(before, "sglang:spec_verify_calls_total")
        kept = output_tokens - answers  # a request's first token comes from its prompt
        accepted = None if drafts is None else max(kept - drafts, 0)
    steps = {
        shape: after.since(before, f"specplug:steps_total:{shape}") for shape in ("plain", "chain", "tree")
    }
    return Rounds(
        drafts=drafts,
        accepted=accepted,
        accepted_length=1 + accepted / drafts if drafts and accepted is not None else None,
        nodes_verified=nodes,
        **steps,
    )
