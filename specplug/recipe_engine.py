"""A recipe's engine on this machine: its environment, its version, its devices, and what it says to the
recipe's commands. Asked in child processes of that environment, nothing is started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from specplug import server, sglang_server
from specplug.recipe import Arm, Model, Recipe, model_name, resolve
from specplug.recipe_facts import Finding
from specplug.recipe_shelf import clone
from specplug.recipe_stand_in import write_stand_in

PROBE_SECONDS = 600.0  # importing an engine takes 10 s, minutes on a machine with other work
_ASK = """
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
try: import torch; gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
except ImportError: gpus = []
versions = {name: version(name) for name in sys.argv[1:]} | {"python": "%d.%d" % sys.version_info[:2]}
print(json.dumps({"versions": versions, "gpus": gpus}))
"""


class Environment(NamedTuple):
    """A Python environment and what is in it."""

    folder: Path
    versions: dict[str, str | None]  # of distributions, None: not installed; and of "python", two numbers
    gpus: list[str]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def default_folder(engine: str) -> Path:
    """The clone's environment of an engine where there is one, else this Python's own."""
    root = clone()
    made = root / ".venvs" / engine if root is not None else None
    return made if made is not None and (made / "bin" / "python").is_file() else Path(sys.prefix)


def environment(recipe: Recipe, folder: Path) -> Environment:
    """Ask an environment for the recipe's packages. Raises ValueError where no Python answers."""
    python = folder / "bin" / "python"
    if not python.is_file():
        raise ValueError(f"--env {folder}: expected an environment with bin/python, found none")
    names = [recipe.engine.name, "torch", "triton", "specplug"]
    if recipe.engine.distribution:
        names.append(recipe.engine.distribution.partition("==")[0])
    try:
        code, out, err = _run([str(python), "-c", _ASK, *names], "", dict(os.environ))
        if code:
            raise ValueError(f"exit code {code}: {(err.strip().splitlines() or ['nothing said'])[-1]}")
        return Environment(folder, **json.loads((out.strip().splitlines() or [""])[-1]))
    except subprocess.TimeoutExpired:
        fault = f"no answer within {PROBE_SECONDS:.0f} s"
    except (OSError, ValueError, TypeError) as error:
        fault = str(error)
    raise ValueError(
        f"--env {folder}: expected a Python that says what is installed, got {fault}; give another folder"
    )


def here(recipe: Recipe, found: Environment) -> Iterator[Finding]:
    """Whether this environment and machine are the recipe's: "absent" for each that is not."""
    engine, version = recipe.engine, found.versions[recipe.engine.name]
    wanted = f"{engine.name} {engine.version}"
    if version is None:
        yield Finding("engine", "absent", f"expected {wanted}, {found.folder} has none; {_install(recipe)}")
    elif version.partition("+")[0] != engine.version:
        yield Finding(
            "engine", "absent", f"expected {wanted}, {found.folder} has {version}; {_install(recipe)}"
        )
    else:
        other = _other_build(recipe, found)
        yield Finding("engine", "absent" if other else "ok", f"{engine.name} {version}{other}")
    for name in ("python", "torch", "triton", "specplug"):
        pinned, version = getattr(recipe.software, name), found.versions[name]
        if pinned is not None and pinned not in (version, (version or "").partition("+")[0]):
            yield Finding(name, "absent", f"expected {pinned}, {found.folder} has {version or 'none'}")
    yield _device(recipe, found)


def asked_arms(recipe: Recipe, folder: Path, found: Environment) -> Iterator[Finding]:
    """What the engine says to each arm's command: how far it got, and why not further."""
    version = found.versions[recipe.engine.name]
    if version is None:
        yield Finding("commands", "absent", "not checked: engine absent")
        return
    if version.partition("+")[0] != recipe.engine.version:
        yield Finding("commands", "absent", f"not checked: {recipe.engine.name} {version} is another engine")
        return
    with _with_stand_ins(recipe) as stood_in:
        port = server.free_port()
        resolved = [resolve(stood_in, arm, folder=folder, port=port) for arm in recipe.arms]
        arms = [{"command": command, "environment": added} for command, added in resolved]
        command = [str(found.python), "-m", "specplug.recipe_probe", recipe.engine.name]
        try:
            code, out, err = _run(
                command, json.dumps(arms), probe_environment(recipe, on_gpu=bool(found.gpus))
            )
        except subprocess.TimeoutExpired:
            yield Finding("commands", "absent", f"not checked: no answer within {PROBE_SECONDS:.0f} s")
            return
    if code:
        last = (err.strip().splitlines() or ["nothing"])[-1]
        yield Finding("commands", "absent", f"not checked: {recipe.engine.name} could not be asked: {last}")
        return
    answers = json.loads(out.strip().splitlines()[-1])
    for arm, answer in zip(recipe.arms, answers, strict=True):
        yield _verdict(recipe, arm, found, **answer)


def probe_environment(recipe: Recipe, *, on_gpu: bool) -> dict[str, str]:
    """What the engine is asked with: offline, and where there is no GPU as the rig needs it."""
    settings = {**server.OFFLINE_SETTINGS, "OMP_NUM_THREADS": "1"}
    if not on_gpu:
        settings |= server.CPU_SETTINGS if recipe.engine.name == "vllm" else sglang_server.CPU_SETTINGS
    return {**os.environ, **settings}


def _run(command: list[str], words: str, environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; nothing that the command started is left. Raises TimeoutExpired."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(words, timeout=PROBE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def _verdict(
    recipe: Recipe, arm: Arm, found: Environment, *, reached: str | None, error: str | None
) -> Finding:
    what, reason = f"arm {arm.name}", " ".join((error or "").split())
    if error is None and reached is not None:
        return Finding(what, "ok", reached)
    if reached is None:
        return Finding(what, "failed", f"not parsed: {reason}")
    elsewhere = recipe.device.kind == "gpu" and not found.gpus
    return Finding(what, "absent" if elsewhere else "failed", f"{reached}; config refused here: {reason}")


@contextlib.contextmanager
def _with_stand_ins(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with folders made from its own facts for models that are not here."""
    import msgspec

    with tempfile.TemporaryDirectory(prefix="specplug-recipe-") as made:
        changed: dict[str, Model] = {}
        for key, model in (("target", recipe.target), ("draft", recipe.draft)):
            if model is not None and model.config is not None and not Path(model_name(model)).is_dir():
                folder = write_stand_in(Path(made) / key / Path(model.model).name[:64], model)
                changed[key] = msgspec.structs.replace(model, model=str(folder))
        yield msgspec.structs.replace(recipe, **changed) if changed else recipe


def _device(recipe: Recipe, found: Environment) -> Finding:
    wanted = recipe.device
    if wanted.kind == "cpu":
        return Finding("device", "ok", f"CPU, made for {wanted.name}")
    if len(found.gpus) < wanted.count:
        got = f"{len(found.gpus)} GPU(s)" if found.gpus else "no GPU"
        return Finding("device", "absent", f"expected {wanted.count} GPU(s) ({wanted.name}), found {got}")
    return Finding("device", "ok", f"{', '.join(found.gpus)}, made for {wanted.name}")


def _other_build(recipe: Recipe, found: Environment) -> str:
    """A clause where the version is right and the distribution another, such as the CPU's."""
    name, _, version = (recipe.engine.distribution or "").partition("==")
    if not name or found.versions.get(name) == version:
        return ""
    return f", another build than {recipe.engine.distribution}"


def _install(recipe: Recipe) -> str:
    if recipe.software.requirements is not None:
        return f"run ci/env {recipe.engine.name} in a clone of specplug"
    return f"pip install {recipe.engine.distribution} specplug=={recipe.software.specplug}"
