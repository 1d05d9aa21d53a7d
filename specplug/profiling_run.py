"""A profile against an engine: the local loop, a vLLM or SGLang that is started for it, or one that runs
already.

All three leave the same log of steps (`specplug.step_log`), from which `specplug.cost_fit` makes the table. A
folder belongs to one setting; it is checked when a run is resumed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

import specplug
from specplug import server, sglang_server
from specplug.checkpoint import check_pair, read_draft
from specplug.draft_config import read_config
from specplug.engine_load import ANSWER_TOKENS, Endpoint, Load, drive
from specplug.hub import checkpoint_folder
from specplug.local.records import drop_torn_line
from specplug.profiling import Limits, measure, plan
from specplug.provenance import config_hash, device_name
from specplug.step_log import ENGINE, STEPS, EngineFacts, read_engine, read_steps, write_engine

SETTINGS = "profile.json"
SPARE_TOKENS = 16  # of a started server's model length, beyond prompt, answer and tree


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that decides what is measured; a resumed run must have the same."""

    engine: str
    target: str
    draft: str
    budget: int
    candidates: int
    nodes: list[int]
    requests: list[int]
    contexts: list[int]
    all_contexts: bool  # the user named them: one that does not fit is an error
    dtype: str  # "" = the engine's choice
    on_gpu: bool
    engine_args: list[str]

    def fitting(self, positions: int | None) -> list[int]:
        """The contexts for which a model of ``positions`` tokens has room. Raises ValueError for a named one
        that has none, and where none is left.
        """
        room = (positions or sys.maxsize) - ANSWER_TOKENS - self.budget - SPARE_TOKENS
        kept = [context for context in self.contexts if context <= room]
        if not kept or (self.all_contexts and len(kept) < len(self.contexts)):
            raise ValueError(
                f"--contexts: expected at most {room} of {positions} positions (an answer of {ANSWER_TOKENS} "
                f"and a tree of {self.budget} need the rest), got {self.contexts[-1]}"
            )
        return kept


class Measured(NamedTuple):
    """What a run found, beside its log."""

    facts: EngineFacts
    contexts: list[int]
    unsettled: int  # points or loads whose medians are not known to the limits


def doublings(last: int) -> list[int]:
    """1, 2, 4, ... and ``last`` itself."""
    return sorted({1 << i for i in range(last.bit_length())} | {last})


def open_run(folder: Path, settings: Settings, *, resume: bool) -> None:
    """Make or reopen the folder of a run. Raises ValueError where it has one of another setting, or has
    one and ``resume`` is false. A step that was being written when it was interrupted is cut.
    """
    file = folder / SETTINGS
    if file.is_file():
        if not resume:
            raise ValueError(f"{folder}: has an interrupted run; add --resume, or delete the folder")
        before = msgspec.json.decode(file.read_bytes(), type=Settings)
        for name in settings.__struct_fields__:
            old, new = getattr(before, name), getattr(settings, name)
            if old != new:
                raise ValueError(f"--resume: {name}: the run in {folder} has {old!r}, now {new!r}")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(settings))
    drop_torn_line(folder / STEPS)


def measure_local(settings: Settings, folder: Path, limits: Limits) -> Measured:
    """Time single rounds of the Transformers loop."""
    draft_files = read_draft(settings.draft)
    target_folder = checkpoint_folder(settings.target, files=["config.json"])
    config = read_config(target_folder)
    check_pair(draft_files, config)
    contexts = settings.fitting((config.get("text_config") or config).get("max_position_embeddings"))

    import torch

    from specplug.local.bench import LocalBench
    from specplug.local.pair import load_pair

    device, dtype = torch.device("cuda" if settings.on_gpu else "cpu"), getattr(torch, settings.dtype)
    facts = EngineFacts(
        engine="local",
        engine_version=f"{specplug.__version__} (transformers {importlib.metadata.version('transformers')})",
        target=settings.target,
        draft=settings.draft,
        target_hash=config_hash(target_folder),
        draft_hash=config_hash(draft_files.path),
        device=device_name(device),
        dtype=settings.dtype,
        tensor_parallel=1,
    )
    _check_same(folder, _recorded(folder), facts)
    write_engine(folder, facts)
    target, draft, _ = load_pair(settings.target, draft_files, dtype=dtype, device=device)
    bench = LocalBench(target, draft, budget=settings.budget, candidates=settings.candidates)
    points = plan(requests=settings.requests, nodes=settings.nodes, contexts=contexts, depth=draft.depth)
    return Measured(facts, contexts, measure(points, bench, folder, limits, progress=True))


def measure_started(settings: Settings, folder: Path, limits: Limits, *, port: int | None) -> Measured:
    """Start the engine in profiling mode, measure, end it. Raises RuntimeError where it does not start."""
    on_gpu = settings.on_gpu
    missing = (
        sglang_server.missing(on_gpu=on_gpu)
        if settings.engine == "sglang"
        else server.missing_engine(on_gpu=on_gpu)
    )
    if missing:
        raise RuntimeError(missing)
    config = read_config(checkpoint_folder(settings.target, files=["config.json"]))
    contexts = settings.fitting((config.get("text_config") or config).get("max_position_embeddings"))
    at = port or server.free_port()
    longest = max(contexts) + ANSWER_TOKENS + settings.budget + SPARE_TOKENS
    start = _sglang_start if settings.engine == "sglang" else _vllm_start
    before = _recorded(folder)
    command, environment = start(settings, folder, port=at, longest=longest)
    # An engine takes the last of an argument that is given twice; the user's come last.
    command += ["--dtype", settings.dtype] if settings.dtype else []
    command += settings.engine_args
    with server.running(command, port=at, log=folder / "server.log", environment=environment) as started:
        started.wait_ready(f"{settings.engine} in profiling mode")
        facts = read_engine(folder)
        _check_same(folder, before, facts)
        loads = [Load(context, requests) for context in contexts for requests in settings.requests]
        return Measured(facts, contexts, drive(Endpoint(started.url), loads, folder, limits, progress=True))


def _vllm_start(
    settings: Settings, folder: Path, *, port: int, longest: int
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a vLLM that draws its nodes at random and records in ``folder``."""
    speculative = {
        "method": "ddtree",
        "model": settings.draft,
        "tree_budget": settings.budget,
        **_profiling_options(settings, folder),
    }
    command = server.vllm_command(settings.target, port=port, speculative=speculative, on_gpu=settings.on_gpu)
    command += ["--max-num-seqs", str(max(settings.requests)), "--max-model-len", str(longest)]
    return command, server.engine_environment(on_gpu=settings.on_gpu)


def _sglang_start(
    settings: Settings, folder: Path, *, port: int, longest: int
) -> tuple[list[str], dict[str, str]]:
    """The same of an SGLang."""
    flags = sglang_server.tree_flags(settings.draft, budget=settings.budget)
    flags |= {"max-running-requests": max(settings.requests), "context-length": longest}
    if settings.on_gpu:  # the backend that follows ragged trees, which are not captured in graphs
        flags |= {"attention-backend": "flashinfer", "disable-cuda-graph": True}
    else:
        flags["max-total-tokens"] = 2 * longest * max(settings.requests)
    command = sglang_server.command(settings.target, port=port, flags=flags, on_gpu=settings.on_gpu)
    config = sglang_server.write_config(folder / "specplug.json", _profiling_options(settings, folder))
    return command, sglang_server.environment(on_gpu=settings.on_gpu, config=config, ragged=True)


def _profiling_options(settings: Settings, folder: Path) -> dict[str, object]:
    return {"candidates": settings.candidates, "explore": True, "record": str(folder.resolve())}


def measure_running(url: str, settings: Settings, folder: Path, limits: Limits) -> Measured:
    """Put load on an engine that runs in profiling mode and records in ``folder``."""
    facts, endpoint = read_engine(folder), Endpoint(url)
    contexts = settings.fitting(endpoint.model().max_model_len)
    loads = [Load(context, requests) for context in contexts for requests in settings.requests]
    return Measured(facts, contexts, drive(endpoint, loads, folder, limits, progress=True))


def _recorded(folder: Path) -> EngineFacts | None:
    """The engine of the steps that an interrupted run left in the folder."""
    return read_engine(folder) if (folder / ENGINE).is_file() and read_steps(folder) else None


def _check_same(folder: Path, before: EngineFacts | None, now: EngineFacts) -> None:
    """Raise ValueError where the folder's steps are another engine's."""
    for name in EngineFacts.__struct_fields__:
        old, new = getattr(before or now, name), getattr(now, name)
        if old != new and name not in ("date", "command", "context"):
            raise ValueError(f"--resume: {name}: the steps in {folder} are of {old!r}, now it is {new!r}")
