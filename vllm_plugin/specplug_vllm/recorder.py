"""What a running engine writes down: what its steps cost, and how its drafts fared.

``engine.json`` says what runs, ``steps.jsonl`` holds a line a step for `specplug profile`, ``rounds.jsonl`` a
line a request and round, as `specplug evaluate --record` writes them. Rounds are written where every node is
verified (no cost table): of a trimmed tree nobody knows how the rest would have fared. They are copied to the
host every step, and the engine waits for the device: for measuring, not for service.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specplug import step_log
from specplug.local.records import RoundRecord, append
from specplug.order import sibling_ranks
from specplug.step_log import EngineFacts, append_steps, write_engine
from specplug.tree import DraftTree

if TYPE_CHECKING:
    from specplug.verify import Walk
    from specplug_vllm.manager import Step
    from specplug_vllm.store import TreeStore

DATASET = "engine"


class Recorder:
    """Appends to the files of one folder, which belongs to one engine at a time."""

    def __init__(
        self, folder: Path, engine: EngineFacts, store: TreeStore, *, forced: bool, rounds: bool
    ) -> None:
        """Raises OSError where the folder cannot be made or written."""
        write_engine(folder, engine)
        self._folder, self._rounds = folder, folder / "rounds.jsonl"
        self._store, self._forced, self._wants_rounds = store, forced, rounds
        self._requests: dict[str, list[int]] = {}  # request id -> [number, rounds so far]

    def step(self, step: Step, verify_seconds: float, draft_seconds: float) -> None:
        """Write one step, and its rounds if it had any."""
        record = step_log.Step(
            requests=len(step.requests),
            rows=step.rows,
            prefill_rows=step.prefill_rows,
            nodes=step.nodes,
            context=round(step.context, 1),
            verify_seconds=verify_seconds,
            draft_seconds=draft_seconds,
            verified=step.verified,
            drafted=step.drafted,
            forced=self._forced,
        )
        append_steps(self._folder, [record])
        if step.rounds:
            append(self._rounds, step.rounds)

    def rounds(
        self,
        requests: list[str],
        slots: torch.Tensor,  # [R] int64
        tokens: torch.Tensor,  # [R, B] int64, the drafts that were verified
        walk: Walk,
        live: torch.Tensor,  # [R] int, nodes that were verified
    ) -> list[RoundRecord]:
        """The rounds of a step whose trees are still in the store, with the nodes that were verified; empty
        where rounds are not wanted."""
        if not self._wants_rounds:
            return []
        store = self._store
        tree = DraftTree(
            tokens=tokens,
            parents=store.parents[slots],
            depths=store.depths[slots],
            scores=store.log_probs[slots],
            counts=store.counts[slots],
        )
        rows: dict[str, Any] = {
            "tokens": tree.tokens,
            "parents": tree.parents,
            "depths": tree.depths,
            "ranks": sibling_ranks(tree),
            "log_probs": tree.scores,
        }
        rows = {name: values.tolist() for name, values in rows.items()}
        counts = torch.minimum(tree.counts, live).tolist()
        temperatures = store.temperatures[slots].tolist()
        paths, emitted = walk.path.tolist(), walk.num_emitted.tolist()
        records = []
        for r, request in enumerate(requests):
            if not counts[r]:
                continue
            number, done = self._requests.setdefault(request, [len(self._requests), 0])
            self._requests[request][1] += 1
            taken = {column - 1 for column in paths[r][1 : emitted[r]]}
            records.append(
                RoundRecord(
                    dataset=DATASET,
                    temperature=round(temperatures[r], 6),
                    method=f"tree {store.budget}",
                    prompt=number,
                    round=done,
                    survivals=None,
                    accepted=[node in taken for node in range(counts[r])],
                    **{name: values[r][: counts[r]] for name, values in rows.items()},
                )
            )
        return records
