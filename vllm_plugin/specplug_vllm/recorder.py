"""What a running engine writes down: its steps, and how the stored drafts fared (`specplug.round_log`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specplug import step_log
from specplug.drafting import Drafted
from specplug.round_log import RoundLog, Rounds
from specplug.step_log import EngineFacts
from specplug.tree import DraftTree

if TYPE_CHECKING:
    from specplug.verify import Walk
    from specplug_vllm.manager import Step
    from specplug_vllm.store import TreeStore


class Recorder:
    """Appends to the files of one folder, which belongs to one engine at a time."""

    def __init__(
        self, folder: Path, engine: EngineFacts, store: TreeStore, *, forced: bool, rounds: bool
    ) -> None:
        """Raises OSError where the folder cannot be made or written."""
        self._log = RoundLog(folder, engine)
        self._store, self._forced, self._wants_rounds = store, forced, rounds

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
        self._log.step(record)
        if step.rounds is not None:
            self._log.rounds(step.requests, step.rounds)

    def rounds(
        self,
        slots: torch.Tensor,  # [R] int64
        tokens: torch.Tensor,  # [R, B] int64, the drafts that were verified
        walk: Walk,
        live: torch.Tensor,  # [R] int, nodes that were verified
    ) -> Rounds | None:
        """The rounds of a step whose trees are still in the store; None where they are not wanted."""
        if not self._wants_rounds:
            return None
        store = self._store
        log_probs = store.log_probs[slots]
        tree = DraftTree(tokens, store.parents[slots], store.depths[slots], log_probs, store.counts[slots])
        return Rounds.of(Drafted(tree, log_probs), live, store.temperatures[slots], walk)
