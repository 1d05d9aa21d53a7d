"""What an evaluation leaves on disk: settings, one record a batch and method, and, if asked, every round.

Files are append-only JSON lines, so an interrupted run loses the batch in work and nothing else: a torn last
line is dropped on reading, and of two records of one key the later counts. A folder belongs to one setting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that decides the figures of a run."""

    target: str
    draft: str
    methods: list[str]  # labels
    temperatures: list[float]
    datasets: dict[str, str]  # name -> SHA-256 of its prompts' token ids
    max_tokens: int
    batch: int
    candidates: int
    depth: int
    seed: int
    repeats: int
    dtype: str
    device: str
    record: bool


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One batch of prompts, answered by one method."""

    dataset: str
    temperature: float
    method: str  # label
    prompts: list[int]  # numbers inside the data set
    tokens: list[list[int]]  # answers
    emitted: list[list[int]]  # tokens of each round
    gaps: list[float] = []  # at an answer's first token that is not plain decoding's, by how much the target
    # preferred plain's (scores: logits / T + noise); 0 for the same answer; empty where plain was not run
    seconds: dict[str, float]  # by step, of the whole batch; the median run where it was repeated

    @property
    def key(self) -> tuple[str, float, str, int]:
        return self.dataset, self.temperature, self.method, self.prompts[0]

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())


class RoundRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One round of one request: its tree, node by node, and how far the target followed it."""

    dataset: str
    temperature: float
    method: str
    prompt: int
    round: int
    tokens: list[int]
    parents: list[int]  # -1 = root
    depths: list[int]  # from 1
    ranks: list[int]  # among the siblings, from 0
    log_probs: list[float]  # of the path, draft's, at temperature 1
    survivals: list[float] | None  # of the path by the confidence head; None = the draft has none
    accepted: list[bool]


def append(file: Path, records: list[S]) -> None:
    """Add records in one write."""
    with file.open("ab") as out:
        out.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def read(file: Path, kind: type[S]) -> list[S]:
    """Every whole line. Raises ValueError for a damaged one that is not the last."""
    lines = file.read_bytes().split(b"\n") if file.is_file() else []
    records = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is empty or torn
        try:
            records.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}:{number}: {error}; start again with another --out") from None
    return records


def drop_torn_line(file: Path) -> None:
    """Cut what an interrupted write left after the last newline."""
    if file.is_file():
        whole = file.read_bytes()
        file.write_bytes(whole[: whole.rfind(b"\n") + 1])


def open_folder(folder: Path, settings: Settings, *, resume: bool) -> dict[Any, Record]:
    """Make or reopen a run's folder; the records it already has, by key.

    Raises ValueError where the folder has records and ``resume`` is false, or is of another setting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts, file = folder / "settings.json", folder / "records.jsonl"
    if facts.is_file():
        if not resume:
            raise ValueError(f"--out {folder}: has a run already; add --resume, or name another folder")
        before = msgspec.json.decode(facts.read_bytes(), type=Settings)
        for name in settings.__struct_fields__:
            old, new = getattr(before, name), getattr(settings, name)
            if old != new:
                raise ValueError(
                    f"--resume {folder}: {name}: the run has {old!r}, now {new!r}; use the same settings"
                )
    facts.write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=1) + b"\n")
    for name in ("records.jsonl", "rounds.jsonl"):
        drop_torn_line(folder / name)
    return {record.key: record for record in read(file, Record)}


def read_rounds(folder: Path) -> list[RoundRecord]:
    """The recorded rounds of a run; of a batch that was interrupted and repeated, the last repetition."""
    runs: dict[tuple[str, float, str, int], list[RoundRecord]] = {}
    for record in read(folder / "rounds.jsonl", RoundRecord):
        key = record.dataset, record.temperature, record.method, record.prompt
        if record.round == 0:
            runs[key] = []
        runs[key].append(record)
    return [record for rounds in runs.values() for record in rounds]
