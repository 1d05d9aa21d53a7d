"""The servers that `specplug bench` compares: from a recipe or the command line, the plain one first.

Arms may differ in how they draft, and in settings of the engine that leave the text's law alone; those are
said beside the numbers. Weights, precision, lengths and parallelism must be equal, or the arms are refused.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

import msgspec

from specplug import recipe, recipe_arms, server, sglang_server
from specplug.bench_result import BASELINE, Arm
from specplug.recipe_rules import ARM_NAME
from specplug.recipe_shelf import Shelved

# Flags that must be equal, as `specplug.recipe_arms` names them: another value is another model, precision,
# length or machine.
SAME = {
    *("program", "model", "model-path", "revision", "code-revision", "tokenizer", "chat-template"),
    *("dtype", "quantization", "kv-cache-dtype", "load-format", "hf-overrides", "json-model-override-args"),
    *("max-model-len", "context-length", "device"),
    *("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "expert-parallel-size"),
    *("enable-expert-parallel",),
}
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_OBJECT = re.compile(r"""(?<![^\s=])\{(?=\s*["}])""")  # where a JSON object begins that no quote protects
_PROGRAMS = {"vllm": [sys.executable, "-m", "vllm.entrypoints.cli.main"], "python": [sys.executable]}
_EAGER = "EAGER MODE: no CUDA graphs, every step pays for launching its kernels"
_SYNTHETIC = (
    "SYNTHETIC ACCEPTANCE: tokens are accepted at a set rate; texts and accepted lengths mean nothing"
)


def from_recipe(shelved: Shelved, names: Sequence[str]) -> list[Arm]:
    """Arms of a recipe, all without ``names``; its plain arm is always among them, and first.

    Raises ValueError for a name it has not, and for a recipe without a plain arm.
    """
    every = [_of_recipe(shelved, arm) for arm in shelved.recipe.arms]
    known = [arm.name for arm in every]
    for name in names:
        if name not in known:
            raise ValueError(f"--arm: expected one of {', '.join(known)}, got {name!r}")
    chosen = [arm for arm in every if not names or arm.name in names]
    if all(arm.speculative for arm in chosen):
        chosen += [arm for arm in every if not arm.speculative][:1]
    if all(arm.speculative for arm in chosen):
        raise ValueError(
            f"recipe {shelved.recipe.name}: expected an arm without speculation to compare with, found none; "
            "add one"
        )
    return sorted(chosen, key=lambda arm: arm.speculative)


def _of_recipe(shelved: Shelved, arm: recipe.Arm) -> Arm:
    command, environment = recipe.resolve(shelved.recipe, arm, folder=shelved.folder, port=0)
    # The port is chosen when the server starts.
    command = [raw if "{port}" in raw else word for word, raw in zip(command, arm.command, strict=True)]
    return _arm(arm.name, command, environment)


def from_flags(
    engine: str,
    asked: Sequence[str],  # NAME=FLAGS
    *,
    target: str,
    draft: str | None,
    budget: int,
    common: Sequence[str],  # flags of every arm
    on_gpu: bool,
) -> list[Arm]:
    """Plain decoding, and the arms asked for; a tree of ``budget`` nodes where none is.

    Raises ValueError for an arm without a name, a name used twice, or flags that cannot be read.
    """
    if engine == "vllm":
        start = server.vllm_command(target, port=0, speculative=None, on_gpu=on_gpu)
        start = ["vllm", *start[start.index("serve") :]]
    else:
        start = ["python", *sglang_server.command(target, port=0, flags={}, on_gpu=on_gpu)[1:]]
    start[start.index("--port") + 1] = "{port}"
    arms = {BASELINE: _arm(BASELINE, [*start, *common], {})}
    for one in asked or [_tree(engine, budget)]:
        name, equals, text = one.partition("=")
        if not equals or not ARM_NAME.fullmatch(name):
            raise ValueError(f"--arm: expected NAME='FLAGS', got {one!r}")
        if name in arms:
            raise ValueError(f"--arm: expected names, each once and none of them {BASELINE!r}, got {name!r}")
        if "{draft}" in text and draft is None:
            raise ValueError(f"--arm {name}: it names {{draft}}, and there is none; give --draft")
        flags = [
            word.replace("{draft}", draft or "").replace("{target}", target)
            for word in words(text, f"--arm {name}")
        ]
        environment = {}
        while flags and _VARIABLE.match(flags[0]):
            variable, _, value = flags.pop(0).partition("=")
            environment[variable] = value
        arms[name] = _arm(name, [*start, *common, *flags], environment)
    return list(arms.values())


def _tree(engine: str, budget: int) -> str:
    if engine == "vllm":
        options = {"method": "ddtree", "model": "{draft}", "tree_budget": budget}
        return f"ddtree=--speculative-config {json.dumps(options)}"
    flags = sglang_server.tree_flags("{draft}", budget=budget)
    return "ddtree=" + " ".join(f"--{flag} {value}" for flag, value in flags.items())


def words(text: str, flag: str) -> list[str]:
    """A command line's words, as a shell reads them; a JSON object is one word, quoted or not.

    Raises ValueError, naming ``flag``, for a quote or a brace that is not closed.
    """
    objects: list[str] = []
    while found := _OBJECT.search(text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, found.start())
        except ValueError as error:
            raise ValueError(f"{flag}: expected JSON, got {text[found.start() :]!r}: {error}") from None
        objects.append(text[found.start() : end])
        text = f"{text[: found.start()]}\0{len(objects) - 1}\0{text[end:]}"
    try:
        split = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error} in {text!r}; close it") from None
    return [re.sub("\0(\\d+)\0", lambda number: objects[int(number[1])], word) for word in split]


def started(arm: Arm, port: int) -> list[str]:
    """The arm's command line with the engine of this Python, on a port."""
    command = [word.replace("{port}", str(port)) for word in arm.command]
    return [*_PROGRAMS.get(command[0].removesuffix("3"), command[:1]), *command[1:]]


def with_flags(arm: Arm, flags: Sequence[str]) -> Arm:
    """The arm with more flags at the end, where an engine takes them before others of the same name."""
    return _arm(arm.name, [*arm.command, *flags], arm.environment)


def flag(command: Sequence[str], name: str) -> str | None:
    """The last value of a flag, None where it is not given."""
    return _settings(BASELINE, command, {}).get(name)


def compared(arms: Sequence[Arm], baseline: Arm) -> list[Arm]:
    """The arms, each labelled with what else it differs in from the baseline.

    Raises ValueError where that is the model, its precision, a length or the machine, for a baseline that
    speculates, and for a port.
    """
    base = _settings(baseline.name, baseline.command, baseline.environment)
    if baseline.speculative:
        raise ValueError(
            f"arm {baseline.name}: expected plain decoding, got the method {base[recipe_arms.METHOD]}; give "
            "flags of speculation to another arm"
        )
    done = []
    for arm in arms:
        mine, labels = _settings(arm.name, arm.command, arm.environment), list(arm.labels)
        if (port := mine.get("--port", "{port}")) != "{port}":
            raise ValueError(f"arm {arm.name}: --port: expected none, as a free one is taken, got {port}")
        for name in sorted(base.keys() | mine.keys()):
            if mine.get(name) == base.get(name) or name.startswith(recipe_arms.SPECULATION):
                continue
            ours, theirs = (_said(some.get(name)) for some in (mine, base))
            if name.removeprefix("--") in SAME:
                raise ValueError(
                    f"arm {arm.name}: {name}: {ours}, and {baseline.name} has {theirs}; arms of one run have "
                    "the same weights, precision, lengths and machine: make them equal"
                )
            labels.append(f"differs from {baseline.name} in {name}: {ours} against {theirs}")
        done.append(msgspec.structs.replace(arm, labels=labels))
    return done


def _said(value: str | None) -> str:
    return "not given" if value is None else value or "given"


def _arm(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Arm:
    settings = _settings(name, command, environment)
    speculative = settings[recipe_arms.METHOD] != "none"
    labels = []
    uncaptured = '"NONE"' in settings.get("--compilation-config", "").upper()
    uncaptured = uncaptured or settings.get("--optimization-level") == "0"
    if uncaptured or "--enforce-eager" in settings or "--disable-cuda-graph" in settings:
        labels.append(_EAGER)
    simulated = {**os.environ, **environment}.get("SGLANG_SIMULATE_ACC_LEN", "")
    set_rate = any("synthetic" in f"{key} {settings[key]}" for key in settings if "speculation." in key)
    if speculative and (set_rate or simulated not in ("", "-1")):
        labels.append(_SYNTHETIC)
    return Arm(
        name=name,
        command=list(command),
        environment=dict(environment),
        speculative=speculative,
        labels=labels,
    )


def _settings(name: str, command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    return recipe_arms.settings(recipe.Arm(name=name, command=list(command), environment=dict(environment)))
