"""Measure what a step costs on this machine: the cost table that tells the engine how much to verify.

--engine local times the Transformers loop of specplug evaluate; --engine vllm starts vllm serve in profiling
mode and puts load on it; --url with --record uses an engine that already runs in that mode. Every sample is
logged beside OUT as it is taken, so an interrupted run goes on with --resume. Give the file to the engine as
the key cost_table of --speculative-config.
"""

import argparse
import datetime
import importlib.util
import json
import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from specplug import models, server
from specplug.arguments import check_device, check_new_file
from specplug.config import MAX_CANDIDATES, MAX_TREE_BUDGET, parse_options
from specplug.cost import CostTable, write_cost_table
from specplug.cost_fit import fit
from specplug.evaluate import DTYPES, pair_names
from specplug.profiling import Limits
from specplug.profiling_run import (
    Settings,
    doublings,
    measure_local,
    measure_running,
    measure_started,
    open_run,
)
from specplug.step_log import read_steps

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "local": "the local loop"}
CPU_REQUESTS, GPU_REQUESTS = 8, 128  # largest of the default; a CPU is bound by arithmetic long before
MAX_REQUESTS = 4096  # as of specplug simulate
CPU_CONTEXTS, GPU_CONTEXTS = (64, 512), (256, 2048, 8192)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shipped = ", ".join(models.sets())
    parser.add_argument(
        "--engine",
        choices=["vllm", "sglang", "local"],
        default="vllm",
        help="engine to measure; default vllm",
    )
    parser.add_argument(
        "--target",
        default="deep-thin",
        help=f"folder, hub id, or a shipped set ({shipped}); default deep-thin",
    )
    parser.add_argument("--draft", help="folder or hub id; default: the shipped set's dspark draft")
    parser.add_argument(
        "--url", help="measure this running engine, started with explore and record, instead of a new one"
    )
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="folder that the engine at --url records its steps in"
    )
    parser.add_argument(
        "--budget", type=int, default=32, help="largest tree to measure, nodes a request; default 32"
    )
    parser.add_argument(
        "--nodes", type=int, nargs="+",
        help="nodes of the trees of --engine local; default 1 2 4 .. BUDGET. A server draws its own",
    )  # fmt: skip
    parser.add_argument("--candidates", type=int, default=32, help="tokens kept a depth; default 32")
    parser.add_argument(
        "--requests", type=int, nargs="+",
        help=f"batch sizes; default 1 2 4 .. {GPU_REQUESTS}, on a CPU .. {CPU_REQUESTS}",
    )  # fmt: skip
    parser.add_argument(
        "--contexts", type=int, nargs="+",
        help=f"committed tokens of a request; default {_words(GPU_CONTEXTS)}, on a CPU "
        f"{_words(CPU_CONTEXTS)}, of which those that the target has positions for",
    )  # fmt: skip
    parser.add_argument(
        "--spread", type=float, default=0.02,
        help="repeat until a median's standard error is below this share of it; default 0.02",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=int, nargs=2, default=[5, 40], metavar=("LEAST", "MOST"),
        help="fewest and most samples of a probe; default 5 40",
    )  # fmt: skip
    parser.add_argument(
        "--max-minutes", type=float, default=15.0,
        help="time for all samples; what it does not reach is said; default 15",
    )  # fmt: skip
    parser.add_argument(
        "--graph-sizes", type=int, nargs="+", metavar="ROWS",
        help="rows of the engine's captured graphs; default: what the engine says",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default float32 on a CPU; on a GPU bfloat16, or the engine's choice"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--engine-args", default="", metavar="ARGS",
        help="more arguments of the server, as one string: --engine-args='--max-num-seqs 64'. Captured "
        "graphs follow from them, so give what you serve with",
    )  # fmt: skip
    parser.add_argument("--port", type=int, help="port of the started server; default: a free one")
    parser.add_argument("--out", type=Path, default=Path("cost.json"), help="default cost.json")
    parser.add_argument("--resume", action="store_true", help="go on with the interrupted run of --out")
    parser.add_argument(
        "--plot", action="store_true", help="also write OUT with the ending .png (needs matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 0 when the table says what a row costs, 1 when it is written and does not.

    Raises ValueError for arguments that cannot work, before anything is measured or started, and RuntimeError
    where the engine does not execute what it is told.
    """
    _check(arguments)
    least, most = arguments.repeats
    limits = Limits(arguments.spread, least, most, seconds=60 * arguments.max_minutes)
    folder = arguments.record or arguments.out.with_suffix(".steps")
    settings = _settings(arguments)
    if arguments.url is not None:
        measured = measure_running(arguments.url, settings, folder, limits)
    else:
        open_run(folder, settings, resume=arguments.resume)
        if arguments.engine == "local":
            measured = measure_local(settings, folder, limits)
        else:
            measured = measure_started(settings, folder, limits, port=arguments.port)
    steps = read_steps(folder)
    table = fit(
        steps,
        contexts=measured.contexts,
        requests=settings.requests,
        provenance=measured.facts.provenance(
            **_as_named(arguments),
            context=max(measured.contexts),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            command=shlex.join(["specplug", *sys.argv[1:]]),
        ),
        graph_sizes=arguments.graph_sizes or measured.facts.graph_sizes,
    )
    write_cost_table(arguments.out, table)
    if arguments.url is None:
        shutil.rmtree(folder)
    if arguments.plot:
        from specplug.cost_plot import plot

        plot(table, arguments.out.with_suffix(".png"))
    summary = _summary(table, arguments, steps=len(steps), unsettled=measured.unsettled)
    print(json.dumps(summary, indent=2) if arguments.json else _text(summary))
    return 0 if table.informative else 1


def _settings(a: argparse.Namespace) -> Settings:
    """What is to be measured, every default filled in."""
    on_gpu = a.device == "cuda" or (a.device is None and server.gpu_available())
    target, draft = ("", "") if a.url is not None else pair_names(a.target, a.draft)
    requests = a.requests or doublings(GPU_REQUESTS if on_gpu else CPU_REQUESTS)
    local_dtype = ("bfloat16" if on_gpu else "float32") if a.engine == "local" else ""
    if a.engine != "local" and a.url is None:
        parse_options({"model": draft, "tree_budget": a.budget, "candidates": a.candidates})
    return Settings(
        engine=a.engine,
        target=target,
        draft=draft,
        budget=a.budget,
        candidates=a.candidates,
        nodes=sorted(set(a.nodes)) if a.nodes else doublings(a.budget),
        requests=sorted(set(requests)),
        contexts=sorted(set(a.contexts or (GPU_CONTEXTS if on_gpu else CPU_CONTEXTS))),
        all_contexts=a.contexts is not None,
        dtype=a.dtype or local_dtype,
        on_gpu=on_gpu,
        engine_args=shlex.split(a.engine_args),
    )


def _as_named(a: argparse.Namespace) -> dict[str, str]:
    """The models as the user wrote them, not where they lie here; of a running engine only it knows."""
    if a.url is not None:
        return {}
    return {"target": a.target, "draft": a.draft or f"{a.target} dspark"}


def _check(a: argparse.Namespace) -> None:
    """Refuse what cannot work, before anything is read."""
    check_new_file("--out", a.out)
    if (a.url is None) != (a.record is None):
        raise ValueError("--url and --record: expected both, of one engine, or none; give the other as well")
    if a.url is not None and (a.engine == "local" or a.resume or a.engine_args):
        raise ValueError(
            "--url: measures a running engine, whose log is its own; leave --engine local, --resume and "
            "--engine-args out"
        )
    if a.engine == "local" and (a.engine_args or a.port is not None):
        raise ValueError("--engine-args and --port: belong to --engine vllm or sglang; leave them out")
    if a.engine != "local" and a.nodes:
        raise ValueError(f"--nodes: {NAMES[a.engine]} draws its own; leave it out, or use --engine local")
    if not 1 <= a.budget <= MAX_TREE_BUDGET:
        raise ValueError(f"--budget: expected 1..{MAX_TREE_BUDGET} nodes, got {a.budget}")
    if not 1 <= a.candidates <= MAX_CANDIDATES:
        raise ValueError(f"--candidates: expected 1..{MAX_CANDIDATES}, got {a.candidates}")
    for flag, values, most in (
        ("--nodes", a.nodes, a.budget),
        ("--requests", a.requests, MAX_REQUESTS),
        ("--contexts", a.contexts, math.inf),
        ("--graph-sizes", a.graph_sizes, math.inf),
    ):
        bad = [value for value in values or [] if not 1 <= value <= most]
        if bad:
            raise ValueError(f"{flag}: expected numbers of 1..{most}, got {bad[0]}")
    least, most = a.repeats
    if not 3 <= least <= most:
        raise ValueError(
            f"--repeats: expected LEAST of 3 or more and MOST of LEAST or more, got {least} {most}"
        )
    for flag, value in (("--spread", a.spread), ("--max-minutes", a.max_minutes)):
        if not 0 < value < math.inf:
            raise ValueError(f"{flag}: expected a number above 0, got {value}")
    if a.url is None:  # the device of a running engine is its own
        check_device(a.device)
    if a.port is not None:
        server.check_port(a.port)
    needed = {"matplotlib": "plot"} if a.plot else {}
    needed |= {"transformers": "local"} if a.engine == "local" else {}
    for module, extra in needed.items():
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"{module} is not installed; pip install 'specplug[{extra}]'")


def _summary(table: CostTable, a: argparse.Namespace, *, steps: int, unsettled: int) -> dict[str, Any]:
    """What was measured, as plain data."""
    spreads = [probe.spread_seconds / probe.median_seconds for probe in table.verify]
    return {
        "table": str(a.out),
        "engine": table.provenance.engine if table.provenance else a.engine,
        "measured_for": str(table.provenance),
        "steps": steps,
        "verify_probes": len(table.verify),
        "draft_probes": len(table.draft),
        "unsettled": unsettled,
        "worst_spread": max(spreads),
        "max_tokens": table.max_tokens,
        "informative": table.informative,
        "reason": table.reason,
        "probes": [
            {
                "shape": probe.shape,
                "requests": probe.requests,
                "tokens": probe.tokens,
                "context": round(probe.context),
                "milliseconds": 1000 * probe.median_seconds,
            }
            for probe in (*table.verify, *table.draft)
        ],
    }


def _text(summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['table']}: {summary['verify_probes']} verify and {summary['draft_probes']} draft "
        f"probes from {summary['steps']} steps, up to {summary['max_tokens']} rows",
        f"the least certain median is known to {summary['worst_spread']:.1%} (standard error)",
        f"measured for: {summary['measured_for']}",
    ]
    if summary["unsettled"]:
        lines.append(f"{summary['unsettled']} not settled in the time there was; raise --max-minutes")
    return "\n".join([*lines, summary["reason"] or use(summary["engine"], summary["table"])])


def use(engine: str, file: str) -> str:
    """How a table measured on an engine is used."""
    if engine == "local":
        return (
            f"use it: specplug simulate --cost {shlex.quote(file)}, or advise; it is not for serving: "
            "specplug profile --engine vllm makes the table to serve with"
        )
    if engine == "sglang":
        flag = f"--speculative-dspark-sps-table-path {shlex.quote(file)}"
        return f"use it: {flag} and SGLANG_RAGGED_VERIFY_MODE=compact"
    return f"use it: --speculative-config '{{..., \"cost_table\": {json.dumps(file)}}}'"


def _words(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))
