"""What a running engine writes down in one folder, which belongs to one engine at a time.

``engine.json`` says what runs, ``steps.jsonl`` holds a line a step for `specplug profile`, ``rounds.jsonl`` a
line a request and round, as `specplug evaluate --record` writes them, for `specplug simulate` and `advise`.
Rounds are for engines that verify every node: of a trimmed tree nobody knows how the rest would have fared.
They are copied to the host every step, and the engine waits for the device: for measuring, not for service.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from specplug.drafting import Drafted
from specplug.local.records import RoundRecord, append
from specplug.order import sibling_ranks
from specplug.step_log import EngineFacts, Step, append_steps, write_engine
from specplug.tree import DraftTree
from specplug.verify import Walk

DATASET = "engine"


class Rounds(NamedTuple):
    """One step's drafts and outcomes, on the host. R requests, B nodes."""

    tree: DraftTree
    log_probs: torch.Tensor  # [R, B] fp32
    counts: torch.Tensor  # [R] int32, nodes that were verified
    temperatures: torch.Tensor  # [R] fp32, 0 = greedy
    path: torch.Tensor  # [R, D + 1] int64, as `specplug.verify.Walk`
    emitted: torch.Tensor  # [R] int32

    @classmethod
    def of(cls, drafted: Drafted, live: torch.Tensor, temperatures: torch.Tensor, walk: Walk) -> Rounds:
        """Copied now, before anything is written over. ``live``: [R] int, nodes that could be taken."""
        tree = drafted.tree
        counts = torch.minimum(tree.counts, live.to(tree.counts.dtype))
        moved = (drafted.log_probs, counts, temperatures, walk.path, walk.num_emitted)
        return cls(tree.to("cpu"), *(tensor.to("cpu") for tensor in moved))


class RoundLog:
    """Appends to the files of a folder."""

    def __init__(self, folder: Path, engine: EngineFacts) -> None:
        """Raises OSError where the folder cannot be made or written."""
        write_engine(folder, engine)
        self._folder = folder
        self._requests: dict[str, list[int]] = {}  # request id -> [number, rounds so far]

    def step(self, step: Step) -> None:
        """Write one step."""
        append_steps(self._folder, [step])

    def rounds(self, requests: Sequence[str | None], rounds: Rounds) -> None:
        """Write the rounds of a step; ``requests``: an id each, None = not to be written."""
        append(self._folder / "rounds.jsonl", self.records(requests, rounds))

    def records(self, requests: Sequence[str | None], rounds: Rounds) -> list[RoundRecord]:
        """The lines of a step; none for a request without a node."""
        tree = rounds.tree
        columns = {
            "tokens": tree.tokens,
            "parents": tree.parents,
            "depths": tree.depths,
            "ranks": sibling_ranks(tree),
            "log_probs": rounds.log_probs,
        }
        values = {name: column.tolist() for name, column in columns.items()}
        counts, temperatures = rounds.counts.tolist(), rounds.temperatures.tolist()
        paths, emitted = rounds.path.tolist(), rounds.emitted.tolist()
        records = []
        for r, request in enumerate(requests):
            if request is None or not counts[r]:
                continue
            number, done = self._requests.setdefault(request, [len(self._requests), 0])
            self._requests[request][1] += 1
            taken = {column - 1 for column in paths[r][1 : emitted[r]]}
            records.append(
                RoundRecord(
                    dataset=DATASET,
                    temperature=round(temperatures[r], 6),
                    method=f"tree {tree.budget}",
                    prompt=number,
                    round=done,
                    survivals=None,
                    accepted=[node in taken for node in range(counts[r])],
                    **{name: rows[r][: counts[r]] for name, rows in values.items()},
                )
            )
        return records
