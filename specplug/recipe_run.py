"""Run a recipe: make or take its environment, run `specplug bench` inside it, and read what it measured."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from specplug import bench_report
from specplug.bench_result import BenchResult, read_result
from specplug.recipe import FILE, PROMPTS, Recipe
from specplug.recipe_engine import default_folder, environment, here
from specplug.recipe_facts import Finding, facts
from specplug.recipe_shelf import Shelved, clone

RESULT = "bench.json"  # in the folder of --out


@contextlib.contextmanager
def environment_folder(recipe: Recipe, given: Path | None, *, fresh: bool) -> Iterator[Path]:
    """The folder of the environment to run in; a fresh one without a folder given is deleted again.

    Raises ValueError for a fresh one that cannot be made here, RuntimeError when making it failed.
    """
    if not fresh:
        yield given or default_folder(recipe.engine.name)
        return
    if given is not None:
        _make(recipe, given)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix=f"specplug-{recipe.name}-") as made:
        folder = Path(made) / "env"
        _make(recipe, folder)
        yield folder


def obstacles(shelved: Shelved, folder: Path) -> list[Finding]:
    """What keeps the recipe from running in this environment, here; empty: it can run."""
    recipe = shelved.recipe
    wrong = [one for one in facts(recipe, shelved.folder) if one.state == "failed"]
    return wrong + [one for one in here(recipe, environment(recipe, folder)) if one.state != "ok"]


def bench_command(shelved: Shelved, env: Path, arms: Sequence[str], out: Path) -> list[str]:
    """The command line of `specplug bench` in that environment, writing into the folder ``out``."""
    recipe = shelved.recipe
    command = [str(env / "bin" / "specplug"), "bench", "--recipe", str(shelved.folder / FILE)]
    for arm in arms or [arm.name for arm in recipe.arms]:
        command += ["--arm", arm]
    data, sampling = recipe.dataset, recipe.sampling
    if data.name == PROMPTS:
        command += ["--dataset", *data.kinds]
    else:
        command += ["--prompts", str(shelved.folder / data.name)]
    command += ["--count", str(data.count), "--max-tokens", str(sampling.max_tokens)]
    command += ["--temperature", str(sampling.temperature), "--top-p", str(sampling.top_p)]
    if recipe.chat.thinking is not None:
        command += ["--thinking", "on" if recipe.chat.thinking else "off"]
    return [*command, *recipe.bench, "--out", str(out / RESULT)]


def measure(shelved: Shelved, env: Path, arms: Sequence[str], out: Path) -> BenchResult:
    """Run the bench and read what it wrote. Raises RuntimeError where it failed.

    A bench that measured everything and found another text than plain decoding's is a result too.
    """
    out.mkdir(parents=True)
    command = bench_command(shelved, env, arms, out)
    path = f"{env / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(command, env={**os.environ, "PATH": path})
    result = read_result(out / RESULT) if (out / RESULT).is_file() else None
    if result is None or (done.returncode and not bench_report.faulty(result.quality)):
        raise RuntimeError(
            f"recipe {shelved.recipe.name}: specplug bench ended with exit code {done.returncode}; "
            f"what it had measured is in {out}"
        )
    return result


def _make(recipe: Recipe, folder: Path) -> None:
    root = clone()
    if recipe.software.requirements is None:
        raise ValueError(
            f"--fresh: recipe {recipe.name} has no list of pins; make an environment with "
            f"{recipe.engine.distribution} and give it with --env"
        )
    if root is None:
        raise ValueError(
            "--fresh: a recipe for a CPU needs the rig and the pins of a clone of specplug, and this is an "
            "installed wheel; run it from a clone"
        )
    if folder.exists():
        raise ValueError(f"--fresh: expected a folder {folder} that does not exist yet; name another one")
    done = subprocess.run(
        [sys.executable, root / "ci" / "env", recipe.engine.name, "--into", folder], stdout=sys.stderr
    )
    if done.returncode:
        raise RuntimeError(
            f"--fresh: ci/env {recipe.engine.name} failed, see above; {folder} is not to be used"
        )
