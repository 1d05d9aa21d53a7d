"""The log of an engine's steps: a folder with steps.jsonl, a line a step, and engine.json, who wrote it.

Written by an engine that runs with recording on and by `specplug profile --engine local`; read by the fit of
a cost table (`specplug.cost_fit`). Append only: an interrupted run loses its last line at most.
"""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from specplug.cost_curves import Shape
from specplug.local.records import append, read
from specplug.provenance import Provenance, config_hash

STEPS = "steps.jsonl"
ENGINE = "engine.json"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One target step. Other keys of a line are read over."""

    requests: int
    rows: int  # that the target computed: roots, nodes and prefill
    prefill_rows: int = 0
    nodes: int = 0
    context: float  # mean committed tokens of a request
    verify_seconds: float
    draft_seconds: float = 0.0  # 0 = nothing was drafted, or not what the table is to hold
    verified: Shape
    drafted: Shape = "plain"
    forced: bool = False  # the nodes were drawn to be measured, not chosen


class EngineFacts(Provenance, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """Content of engine.json: the provenance, and what else the fit needs of the engine."""

    graph_sizes: tuple[int, ...] = ()  # rows of the captured graphs; empty = none

    def provenance(self, **known: object) -> Provenance:
        """The provenance alone, with ``known`` facts put in."""
        facts = {name: getattr(self, name) for name in Provenance.__struct_fields__}
        return Provenance(**(facts | known))


def facts_here(*, target: str, draft: str, **known: Any) -> EngineFacts:
    """Facts of the engine in this process, now; ``target`` and ``draft`` as the user named them."""
    return EngineFacts(
        target=target,
        draft=draft,
        target_hash=_hash(target),
        draft_hash=_hash(draft),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=shlex.join(sys.argv),
        **known,
    )


def _hash(model: str) -> str:
    """ "" for a hub id: nothing is fetched here."""
    folder = Path(model)
    return config_hash(folder) if folder.is_dir() else ""


def write_engine(folder: Path, facts: EngineFacts) -> None:
    """Make the folder and say in it who writes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENGINE).write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")


def read_engine(folder: Path) -> EngineFacts:
    """Raises ValueError where the folder has no engine.json or a damaged one."""
    file = folder / ENGINE
    if not file.is_file():
        raise ValueError(f"{folder}: expected {ENGINE} of an engine that records there, found none")
    try:
        return msgspec.json.decode(file.read_bytes(), type=EngineFacts)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: {error}") from None


def append_steps(folder: Path, steps: list[Step]) -> None:
    """Add steps in one write."""
    append(folder / STEPS, steps)


def read_steps(folder: Path) -> list[Step]:
    """Every whole line. Raises ValueError for a damaged one that is not the last."""
    return read(folder / STEPS, Step)
