"""Measure serving: speculation against plain decoding under load, in one run with everything else equal.

Starts a server an arm, one after the other, and drives it with the engine's own load generator (vllm bench
serve, sglang.benchmark.serving) at every load. Text is judged apart from speed: greedy answers token by
token, sampled ones by their law. Every finished cell is written at once; --resume goes on. docs/bench.md has
the protocol and says what each figure is.
"""

import argparse
import sys
from pathlib import Path

from specplug import bench_compare, bench_report, models
from specplug.arguments import check_new_file, check_sampling
from specplug.bench_plan import (
    BUDGET,
    CONCURRENCY,
    CPU_CONCURRENCY,
    CPU_MAX_TOKENS,
    LEAST_MAX_TOKENS,
    MAX_TOKENS,
    REPEATS,
    TARGET,
    planned,
)
from specplug.bench_result import BenchResult, read_result
from specplug.config import MAX_TREE_BUDGET


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shipped = ", ".join(models.sets())
    what = parser.add_argument_group("what is served")
    what.add_argument("--engine", choices=["vllm", "sglang"], help="default vllm; a recipe has its own")
    what.add_argument("--recipe", help="name or path of a recipe: its target, its arms")
    what.add_argument(
        "--target",
        help=f"folder, hub id, or a shipped set ({shipped}); default {TARGET}; a recipe has its own",
    )
    what.add_argument("--draft", help="folder or hub id; default: the shipped set's dspark draft")
    what.add_argument(
        "--arm", action="append", default=[], metavar="NAME[='FLAGS']",
        help="an arm beside plain decoding: NAME='[VARIABLE=VALUE ..] FLAGS' of the server, where {draft} "
        "and {target} stand for the models; with --recipe the name of one of its arms. Repeatable; default: "
        "a tree",
    )  # fmt: skip
    what.add_argument("--budget", type=int, help=f"nodes of the default arm's tree; default {BUDGET}")
    what.add_argument(
        "--server-args", default="", metavar="ARGS", help="more flags of every arm's server, as one string"
    )
    what.add_argument("--prefix-cache", action="store_true", help="leave the engines' prefix caches on")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency", type=int, nargs="*", metavar="N",
        help=f"requests in flight, one load each; default {_words(CONCURRENCY)}, on a CPU "
        f"{_words(CPU_CONCURRENCY)}; none with --rate",
    )  # fmt: skip
    load.add_argument(
        "--rate", type=float, nargs="+", default=[], metavar="R",
        help="arrivals a second (Poisson, nobody waits), one load each",
    )  # fmt: skip
    load.add_argument(
        "--requests",
        type=int,
        help="of a load; default every prompt, 4 waves, 30 s of arrivals, the most of them",
    )
    load.add_argument("--repeats", type=int, default=REPEATS, help=f"of a load; default {REPEATS}")
    load.add_argument(
        "--dataset", nargs="+", metavar="NAME[=FILE]",
        help="chat, code, maths (reasoning), library, or NAME=FILE.jsonl; default chat code maths",
    )  # fmt: skip
    load.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE",
        help='JSONL, a line {"prompt": ...}, {"question": ...} or {"messages": ...}; "kind" is its set',
    )  # fmt: skip
    load.add_argument(
        "--thinking",
        choices=["on", "off"],
        help="switch of the chat template; default: as the template has it",
    )
    load.add_argument("--count", type=int, help="prompts a data set, the first ones; default all")
    load.add_argument(
        "--max-tokens", type=int, help=f"longest answer; default {MAX_TOKENS}, on a CPU {CPU_MAX_TOKENS}"
    )
    load.add_argument("--ignore-eos", action="store_true", help="answers go on to --max-tokens")
    load.add_argument("--temperature", type=float, default=0.0, help="of the load; default 0")
    load.add_argument("--top-p", type=float, default=1.0, help="of the load; default 1")
    load.add_argument("--seed", type=int, default=0, help="of arrivals and the generator's order; default 0")
    load.add_argument(
        "--generator-args", default="", metavar="ARGS", help="more flags of the load generator, as one string"
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--quality-prompts", type=int, default=24, metavar="N",
        help="greedy answers to compare an arm by; default 24, 0: none",
    )  # fmt: skip
    text.add_argument(
        "--samples", type=int, default=200, metavar="N",
        help="sampled answers a prompt and arm whose law is compared, at --temperature or 1; default 200, 0: "
        "none",
    )  # fmt: skip
    text.add_argument(
        "--near-tie", type=float, metavar="NATS",
        help="gap of log-probabilities up to which a difference is a near tie; default: by precision",
    )  # fmt: skip
    result = parser.add_argument_group("result")
    result.add_argument(
        "--out", type=Path, default=Path("bench.json"), help="default bench.json; .md beside it"
    )
    result.add_argument(
        "--resume", action="store_true", help="go on with the run of --out; arms may be added"
    )
    result.add_argument(
        "--plot", action="store_true", help="also OUT with the ending .png (needs matplotlib)"
    )
    result.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar="FILE",
        help="hold two results side by side; measures nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 0, or 1 where an arm's text is not the baseline's, or a server or a load failed.

    Raises ValueError for arguments that cannot work, before anything is started.
    """
    a = arguments
    if a.compare:
        print(bench_compare.side_by_side(*map(read_result, a.compare)))
        return 0
    _check(a)
    bench = planned(a)
    try:
        bench.run()
    finally:
        if bench.result.cells:
            file = a.out.with_suffix(".md")
            file.write_text(bench_report.markdown(bench.result))
            print(f"{a.out} and {file}: {len(bench.result.cells)} cells", file=sys.stderr)
    print(_printed(bench.result))
    if a.plot:
        _plot(bench.result, a.out.with_suffix(".png"))
    return 1 if bench_report.faulty(bench.result.quality) else 0


def _words(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def _printed(result: BenchResult) -> str:
    labels = [*result.labels, *(f"{arm.name}: {label}" for arm in result.arms for label in arm.labels)]
    parts = [bench_report.speed(result), bench_report.losses(result), bench_report.latency(result)]
    parts += [bench_report.rounds(result), bench_report.quality(result) if result.quality else "", *labels]
    return "\n\n".join(part for part in parts if part)


def _plot(result: BenchResult, file: Path) -> None:
    from specplug.bench_plot import plot

    try:
        plot(result, file)
    except ImportError:
        print("specplug bench: --plot needs matplotlib; pip install 'specplug[plot]'", file=sys.stderr)


def _check(a: argparse.Namespace) -> None:
    for flag, value, least in (
        ("--repeats", a.repeats, 1),
        ("--requests", a.requests, 1),
        ("--count", a.count, 1),
        ("--max-tokens", a.max_tokens, LEAST_MAX_TOKENS),
        ("--quality-prompts", a.quality_prompts, 0),
        ("--samples", a.samples, 0),
        ("--seed", a.seed, 0),
        ("--budget", a.budget, 1),
        *(("--concurrency", value, 1) for value in a.concurrency or []),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag}: expected at least {least}, got {value}")
    for rate in a.rate:
        if not 0 < rate < float("inf"):
            raise ValueError(f"--rate: expected a number above 0, got {rate}")
    check_sampling(a.temperature, a.top_p)
    for flag, value, most in (
        ("--budget", a.budget, MAX_TREE_BUDGET),
        ("--seed", a.seed, (1 << 32) - a.repeats),  # numpy's limit; a repeat adds its number
    ):
        if value is not None and value > most:
            raise ValueError(f"{flag}: expected at most {most}, got {value}")
    if a.near_tie is not None and not 0 <= a.near_tie < float("inf"):
        raise ValueError(f"--near-tie: expected 0 or more, got {a.near_tie}")
    if a.recipe is not None:
        own = {"--engine": a.engine, "--target": a.target, "--draft": a.draft, "--budget": a.budget}
        own |= {f"--arm {arm}": arm for arm in a.arm if "=" in arm}
        for flag, value in own.items():
            if value is not None:
                raise ValueError(
                    f"--recipe and {flag}: expected one of them, as a recipe says engine, models and arms, "
                    "got both; leave one out, and name a recipe's arms by --arm NAME"
                )
    beside = [a.out.with_suffix(ending) for ending in (".md", ".png", ".run")]
    if a.out in beside or beside[0].is_dir() or beside[2].is_file():
        raise ValueError(
            f"--out {a.out}: expected a name beside which the report {beside[0].name} and the folder "
            f"{beside[2].name} can stand, got one where they cannot; take another, such as bench.json"
        )
    if a.resume:
        if not a.out.is_file():
            raise ValueError(f"--resume: {a.out}: expected the file of an interrupted run, found none")
    else:
        check_new_file("--out", a.out)
