"""Where a recording comes from: our own file, a shipped one, or what an evaluation or an engine wrote."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from specplug.jsonfile import read_struct
from specplug.local.records import Record, RoundRecord, Settings, read, read_rounds
from specplug.recording import DATA, About, Recording, request_arrays
from specplug.recording_file import read_file


def shipped(name: str = "deep-thin") -> Path:
    """File of a shipped recording. Raises ValueError for a name that is not shipped."""
    names = sorted(file.stem for file in DATA.glob("*.npz"))
    if name not in names:
        raise ValueError(f"recording: expected one of {', '.join(names)}, or a file, got {name!r}")
    return DATA / f"{name}.npz"


def read_recording(source: Path | str, *, method: str | None = None) -> Recording:
    """A recording from our file, a folder of `specplug evaluate --record`, or a shipped one by name.

    ``method``: whose rounds of a folder to take, as "tree 64"; None = the widest tree. Raises ValueError for
    what is none of these, damaged, or too large.
    """
    path = Path(source)
    if path.is_dir():
        return read_run(path, method=method)
    if not path.exists() and path.suffix == "" and len(path.parts) == 1:
        path = shipped(path.name)
    if method is not None:
        raise ValueError(
            f"{path}: method {method!r}: one recording holds trees of every budget; leave it out"
        )
    return read_file(path)


def read_run(folder: Path, *, method: str | None = None) -> Recording:
    """The rounds that `specplug evaluate --record` or a recording engine left in a folder.

    An incomplete recording: it has the positions that its policy came to. The greedy chain is taken from the
    tree, as deep as the tree has it. An engine does not write answers; theirs end with their last round.
    """
    rounds = read_rounds(folder)
    if not rounds:
        raise ValueError(f"{folder}: expected rounds.jsonl with rounds; record some")
    widest: dict[str, int] = {}
    for one in rounds:
        widest[one.method] = max(widest.get(one.method, 0), len(one.parents))
    label = method or max(widest, key=lambda name: (name.startswith("tree"), widest[name]))
    if label not in widest:
        raise ValueError(f"{folder}: method: expected one of {', '.join(widest)}, got {label!r}")
    evaluated = (folder / "settings.json").exists()
    settings = read_struct(folder / "settings.json", Settings) if evaluated else None
    answers = {
        (one.dataset, one.temperature, number): len(tokens)
        for one in read(folder / "records.jsonl", Record)
        if one.method == label
        for number, tokens in zip(one.prompts, one.tokens, strict=True)
    }
    mine = [r for r in rounds if r.method == label and r.parents]
    if settings is not None:  # an interrupted run's last rounds may have no answer yet
        mine = [r for r in mine if (r.dataset, r.temperature, r.prompt) in answers]
    if not mine:
        raise ValueError(f"{folder}: expected rounds of {label} with nodes, and their answers, found none")
    datasets = list(settings.datasets) if settings else sorted({r.dataset for r in mine})
    mine.sort(key=lambda r: (datasets.index(r.dataset), r.temperature, r.prompt, r.round))
    requests: list[tuple[int, float, int, int, int]] = []
    request, position = [], []
    for key, group in groupby(mine, key=lambda r: (r.dataset, r.temperature, r.prompt)):
        at = 0
        for one in group:
            request.append(len(requests))
            position.append(at)
            at += 1 + sum(one.accepted)
        requests.append((datasets.index(key[0]), key[1], key[2], 0, answers.get(key, at)))
    tree = _ragged(mine, widest[label])
    about = About(
        target=settings.target if settings else "",
        draft=settings.draft if settings else "",
        datasets=datasets,
        max_tokens=settings.max_tokens if settings else max(one[4] for one in requests),
        candidates=settings.candidates if settings else 0,
        seed=settings.seed if settings else 0,
        complete=False,
        source=f"{'specplug evaluate' if settings else 'engine'}, {label}",
    )
    return Recording(
        about=about,
        requests=request_arrays(requests),
        request=np.array(request, np.int32),
        position=np.array(position, np.int32),
        **tree,
        **_chains(tree, settings.depth if settings else max(max(r.depths) for r in mine)),
    )


def _ragged(rounds: list[RoundRecord], budget: int) -> dict[str, Any]:
    """Node lists as padded arrays."""
    shape = len(rounds), budget
    counts = np.array([len(r.parents) for r in rounds], np.int32)
    live = np.arange(budget) < counts[:, None]
    arrays: dict[str, Any] = {
        "counts": counts,
        "parents": np.full(shape, -1, np.int16),
        "log_probs": np.full(shape, -np.inf, np.float32),
        "accepted": np.zeros(shape, bool),
    }
    for name, array in arrays.items():
        if name != "counts":
            array[live] = [value for r in rounds for value in getattr(r, name)]
    arrays["log_probs"] = np.minimum.accumulate(np.minimum(arrays["log_probs"], 0.0), axis=1)
    if all(r.survivals is not None for r in rounds):
        arrays["survivals"] = np.zeros(shape, np.float32)
        arrays["survivals"][live] = [value for r in rounds for value in r.survivals or ()]
    return arrays


def _chains(tree: dict[str, Any], depth: int) -> dict[str, Any]:
    """The path of best children of every tree, [N, depth]: node order is best first."""
    parents, counts = tree["parents"], tree["counts"]
    rounds, row = len(parents), np.arange(len(parents))
    node = np.arange(parents.shape[1])
    now = np.full(rounds, -1)
    chain: dict[str, Any] = {
        "chain_log_probs": np.full((rounds, depth), -np.inf, np.float32),
        "chain_accepted": np.zeros(rounds, np.int32),
    }
    if "survivals" in tree:
        chain["chain_survivals"] = np.zeros((rounds, depth), np.float32)
    going = np.ones(rounds, bool)
    for d in range(depth):
        children = (parents == now[:, None]) & (node > now[:, None]) & (node < counts[:, None])
        going = going & children.any(1)
        now = children.argmax(1)
        chain["chain_log_probs"][:, d] = np.where(going, tree["log_probs"][row, now], -np.inf)
        chain["chain_accepted"] += going & tree["accepted"][row, now]
        if "survivals" in tree:
            chain["chain_survivals"][:, d] = np.where(going, tree["survivals"][row, now], 0.0)
    return chain
