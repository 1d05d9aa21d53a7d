"""Resident memory of a vLLM server with draft trees against vLLM's own dflash chain, in one run.

    python benchmarks/memory.py [--budget 16] [--requests 16] [--rounds 2]

Both servers get the same target, draft, settings and requests; they run one after the other and take turns.
Per process, after the requests, from /proc/PID/smaps_rollup: PSS (a page shared by n processes counts 1/n in
each) and RSS (it counts in full), and the peak of RSS from /proc/PID/status. PSS falls when anything else on
the machine maps the same libraries: run this where no other vLLM runs, or read the RSS ratio.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from specplug import models, server
from specplug.config import parse_options
from specplug.processes import members

MIB = 1024  # KiB in a MiB; /proc counts in KiB
DEPTH = 7  # the shipped drafts predict seven tokens; a chain has to say so
METHODS = ("dflash", "ddtree")
CONCURRENCY = 4


class Resident(NamedTuple):
    """Memory of one process, in MiB."""

    pss_mib: float
    rss_mib: float
    peak_rss_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", choices=models.sets(), default="deep-thin", help="default deep-thin")
    parser.add_argument("--budget", type=int, default=16, help="nodes of a tree; default 16")
    parser.add_argument("--requests", type=int, default=16, help="before measuring; default 16")
    parser.add_argument("--max-tokens", type=int, default=48, help="of a request; default 48")
    parser.add_argument("--rounds", type=int, default=2, help="servers of each method; default 2")
    arguments = parser.parse_args()
    if min(arguments.requests, arguments.max_tokens, arguments.rounds) < 1:
        parser.error("--requests, --max-tokens and --rounds: expected at least 1")
    on_gpu = server.gpu_available()
    missing = server.missing_engine(on_gpu=on_gpu)
    if missing:
        sys.exit(f"memory: {missing}")
    draft = str(models.path(arguments.models, "dflash"))
    configs = {
        "dflash": {"method": "dflash", "model": draft, "num_speculative_tokens": DEPTH},
        "ddtree": {"method": "ddtree", "model": draft, "tree_budget": arguments.budget},
    }
    try:
        parse_options(configs["ddtree"])
    except ValueError as error:
        parser.error(str(error))

    print(f"{datetime.date.today()}  {shlex.join(['python', *sys.argv])}")
    print(f"hardware: {hardware(on_gpu=on_gpu)}")
    print(
        "versions: "
        + ", ".join(f"{name} {version(name)}" for name in ("specplug", "vllm", "torch", "triton"))
    )
    print(f"models: {arguments.models}; {arguments.requests} requests of {arguments.max_tokens} tokens, "
          f"{CONCURRENCY} at a time; depth {DEPTH}, budget {arguments.budget}\n")  # fmt: skip

    folder = Path(tempfile.mkdtemp(prefix="specplug-memory-"))
    measured: dict[str, list[dict[str, Resident]]] = {method: [] for method in METHODS}
    for turn in range(arguments.rounds):
        for method in METHODS:
            log = folder / f"{method}-{turn}.log"
            measured[method].append(measure(configs[method], arguments, log=log, on_gpu=on_gpu))
    print_table(measured)


def measure(
    speculative: dict[str, Any], arguments: argparse.Namespace, *, log: Path, on_gpu: bool
) -> dict[str, Resident]:
    """Memory of a fresh server's processes, by role, after it has answered."""
    port = server.free_port()
    target = models.path(arguments.models, "target")
    command = server.vllm_command(target, port=port, speculative=speculative, on_gpu=on_gpu)
    environment = server.engine_environment(on_gpu=on_gpu)
    with server.running(command, port=port, log=log, environment=environment) as started:
        started.wait_ready(log.stem)
        texts = [one.prompt for one in models.prompts()]
        prompts = [texts[index % len(texts)] for index in range(arguments.requests)]

        def ask(prompt: str) -> None:
            body = {
                "prompt": prompt,
                "max_tokens": arguments.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            started.post("/v1/completions", body)

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(ask, prompts))
        return resident(started.process.pid)


def resident(group: int) -> dict[str, Resident]:
    """Memory of every process of a process group, by role; several of one role are added up."""
    found: dict[str, Resident] = {}
    for pid in members(group):
        folder = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # a process may end while it is looked at
            rollup, status = (folder / "smaps_rollup").read_text(), (folder / "status").read_text()
            one = Resident(kib(rollup, "Pss") / MIB, kib(rollup, "Rss") / MIB, kib(status, "VmHWM") / MIB)
            role = role_of((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            before = found.get(role, Resident(0, 0, 0))
            found[role] = Resident(*(a + b for a, b in zip(before, one, strict=True)))
    return found


def kib(text: str, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def role_of(command: str) -> str:
    if command.startswith("VLLM::"):
        return command.split()[0].removeprefix("VLLM::")
    return "resource tracker" if "resource_tracker" in command else "API server"


def print_table(measured: dict[str, list[dict[str, Resident]]]) -> None:
    """Medians over the rounds, a row a process and the sum."""
    row = "{:20}" + "{:>12}" * 2 + "{:>8}" + "{:>12}" * 2 + "{:>8}" + "{:>12}" * 2 + "{:>8}"
    head = [f"{method} {kind}" for kind in ("PSS", "RSS", "peak") for method in METHODS]
    print(row.format("MiB", *head[0:2], "ratio", *head[2:4], "ratio", *head[4:6], "ratio"))
    roles = list(dict.fromkeys(role for runs in measured.values() for run in runs for role in run))
    for role in [*roles, "all processes"]:
        cells: list[str] = []
        for kind in Resident._fields:
            chain, tree = (
                statistics.median(value(run, role, kind) for run in measured[method]) for method in METHODS
            )
            cells += [f"{chain:.0f}", f"{tree:.0f}", f"{tree / chain:.3f}" if chain else "-"]
        print(row.format(role, *cells))
    print()
    for kind in ("pss_mib", "rss_mib"):
        for method in METHODS:
            sums = ", ".join(f"{value(run, 'all processes', kind):.0f}" for run in measured[method])
            print(f"{method} {kind} of all processes, every round: {sums}")


def value(run: dict[str, Resident], role: str, kind: str) -> float:
    if role == "all processes":
        return sum(getattr(one, kind) for one in run.values())
    return getattr(run[role], kind) if role in run else 0.0


def hardware(*, on_gpu: bool) -> str:
    if on_gpu:
        import torch

        return f"{torch.cuda.get_device_name(0)}; the figures are host memory"
    model = "unknown CPU"
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        model = found[1] if found else model
    gib = kib(Path("/proc/meminfo").read_text(), "MemTotal") / MIB / 1024
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {gib:.0f} GiB, {platform.system()} {platform.release()}"


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    main()
