"""An evaluation: every method on every batch of every data set, in turns, recorded as it goes.

One unit of work is a batch of prompts at one temperature. All methods answer it one after the other, in an
order that turns with the unit, so a busy spell of the machine hits them alike and a wall-clock ratio compares
neighbours in time. A unit is written when it is complete; a resumed run starts with the first that is not.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from tqdm import tqdm

from specplug.local.draft import Draft
from specplug.local.loop import Batch, Round, generate, next_scores
from specplug.local.method import Method
from specplug.local.pair import Pair
from specplug.local.records import (
    Record,
    RoundRecord,
    Settings,
    append,
    open_folder,
)
from specplug.order import sibling_ranks

WARM_TOKENS = 8  # of the untimed answer that each method gives first


class Unit(NamedTuple):
    """One batch of prompts at one temperature."""

    dataset: str
    temperature: float
    prompts: range  # numbers inside the data set


def evaluate(
    pair: Pair,
    prompts: dict[str, list[list[int]]],  # token ids by data set
    methods: Sequence[Method],
    settings: Settings,
    *,
    folder: Path | None = None,
    resume: bool = False,
    show_progress: bool = True,
) -> list[Record]:
    """Run what ``folder`` does not have yet; every record, in order of the units.

    Without a folder nothing is written. Raises ValueError where the folder is of another setting.
    """
    if settings.record and folder is None:
        raise ValueError("--record: expected a folder to record rounds in; name one with --out")
    done = open_folder(folder, settings, resume=resume) if folder is not None else {}
    work = list(units(prompts, settings))
    records: list[Record] = []
    warm = False
    with tqdm(total=len(work) * len(methods), disable=not show_progress, unit="run") as progress:
        for number, unit in enumerate(work):
            keys = [(unit.dataset, unit.temperature, m.label, unit.prompts[0]) for m in methods]
            if all(key in done for key in keys):
                records += [done[key] for key in keys]
                progress.update(len(methods))
                continue
            batch = [prompts[unit.dataset][i] for i in unit.prompts]
            if not warm:
                for method in methods:
                    _answer(pair, batch, method, unit, settings, limit=WARM_TOKENS)
                warm = True
            turn = number % len(methods)
            answers: dict[str, Record] = {}
            rounds: list[RoundRecord] = []
            for method in (*methods[turn:], *methods[:turn]):
                progress.set_description(f"{unit.dataset} T {unit.temperature:g} {method.label}")
                answers[method.label] = _measure(pair, batch, method, unit, settings, rounds)
                progress.update()
            unit_records = [_with_gaps(pair, batch, answers, m.label, settings) for m in methods]
            if folder is not None:
                if settings.record:
                    append(folder / "rounds.jsonl", rounds)
                append(folder / "records.jsonl", unit_records)
            records += unit_records
    return records


def units(prompts: dict[str, list[list[int]]], settings: Settings) -> Iterator[Unit]:
    """Every batch at every temperature."""
    for temperature in settings.temperatures:
        for dataset, tokens in prompts.items():
            for first in range(0, len(tokens), settings.batch):
                yield Unit(dataset, temperature, range(first, min(first + settings.batch, len(tokens))))


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the token ids of a data set."""
    return hashlib.sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()


def _measure(
    pair: Pair,
    batch: list[list[int]],
    method: Method,
    unit: Unit,
    settings: Settings,
    rounds: list[RoundRecord],
) -> Record:
    """Answer a batch ``settings.repeats`` times; the median run's times, and its rounds if wanted."""
    runs = [_answer(pair, batch, method, unit, settings) for _ in range(settings.repeats)]
    runs.sort(key=lambda run: sum(run.seconds.values()))
    median = statistics.median_low(range(len(runs)))
    if settings.record and method.name != "plain":
        recorder = Recorder(pair.draft, method, unit)  # a run of its own: recording costs time
        _answer(pair, batch, method, unit, settings, recorder=recorder)
        rounds += recorder.rounds
    run = runs[median]
    return Record(
        dataset=unit.dataset,
        temperature=unit.temperature,
        method=method.label,
        prompts=list(unit.prompts),
        tokens=run.tokens,
        emitted=run.emitted,
        seconds=run.seconds,
    )


def _with_gaps(
    pair: Pair, batch: list[list[int]], answers: dict[str, Record], label: str, settings: Settings
) -> Record:
    """The record of one method with its distance from plain decoding, where that was run."""
    record, plain = answers[label], answers.get("plain")
    if plain is None:
        return record
    gaps = []
    for i, (mine, theirs) in enumerate(zip(record.tokens, plain.tokens, strict=True)):
        at = next((k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if at is None:
            gaps.append(0.0)
            continue
        row = next_scores(
            pair.target,
            [*batch[i], *mine[:at]],
            temperature=record.temperature,
            seed=settings.seed + record.prompts[i],
        )
        gaps.append(float(row[theirs[at]] - row[mine[at]]))
    return msgspec.structs.replace(record, gaps=gaps)


def _answer(
    pair: Pair,
    batch: list[list[int]],
    method: Method,
    unit: Unit,
    settings: Settings,
    *,
    limit: int | None = None,
    recorder: Recorder | None = None,
) -> Batch:
    return generate(
        pair.target,
        batch,
        method=method,
        draft=pair.draft,
        limit=limit or settings.max_tokens,
        stop=pair.stop,
        temperature=unit.temperature,
        seeds=[settings.seed + number for number in unit.prompts],
        on_round=recorder,
    )


class Recorder:
    """Turns the rounds of a batch into records."""

    def __init__(self, draft: Draft, method: Method, unit: Unit) -> None:
        self.draft, self.method, self.unit = draft, method, unit
        self.rounds: list[RoundRecord] = []
        self.numbers = [0] * len(unit.prompts)

    def __call__(self, one: Round) -> None:
        tree, survivals = one.tree, self.draft.survivals(one.proposal, one.tree)
        ranks = sibling_ranks(tree)
        for r, running in enumerate(one.running):
            if not running:
                continue
            count = int(tree.counts[r])
            path = one.walk.path[r, 1 : int(one.walk.num_emitted[r])].tolist()
            self.rounds.append(
                RoundRecord(
                    dataset=self.unit.dataset,
                    temperature=self.unit.temperature,
                    method=self.method.label,
                    prompt=self.unit.prompts[r],
                    round=self.numbers[r],
                    tokens=tree.tokens[r, :count].tolist(),
                    parents=tree.parents[r, :count].tolist(),
                    depths=tree.depths[r, :count].tolist(),
                    ranks=ranks[r, :count].tolist(),
                    log_probs=tree.scores[r, :count].tolist(),
                    survivals=None if survivals is None else survivals[r, :count].tolist(),
                    accepted=[node + 1 in path for node in range(count)],
                )
            )
            self.numbers[r] += 1
