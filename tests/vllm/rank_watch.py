"""What each tensor-parallel rank drafts, seen from inside its worker process: vLLM's `worker_extension_cls`.

A worker imports this before it has a device, so what must differ from the start is planted on import.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch

from specplug import ranks

if os.environ.get("SPECPLUG_TEST_RANKS_DIFFER"):
    _agree = ranks.agree

    def _differing(facts: dict[str, Any], group: Any) -> list[dict[str, Any]]:
        budget = facts["budget"] + torch.distributed.get_rank(group)
        return _agree({**facts, "budget": budget}, group)

    ranks.agree = _differing


class RankWatch:
    """Methods that vLLM adds to its worker; ``collective_rpc`` calls them on every rank."""

    model_runner: Any
    rank: int

    def watch_rounds(self) -> None:
        """From now on, hash what every round drafts: slots, trees and their scores to the last bit."""
        speculator, self.rounds = self.model_runner.speculator, []
        propose = speculator.propose

        def watched(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            tokens = propose(input_batch, *args, **kwargs)
            if not kwargs.get("dummy_run"):
                store, slots = speculator.store, input_batch.idx_mapping
                counts = store.counts[slots]
                exists = torch.arange(store.budget) < counts[:, None]
                columns = (tokens, store.parents[slots], store.depths[slots], store.log_probs[slots])
                digest = hashlib.sha256(slots.numpy().tobytes() + counts.numpy().tobytes())
                for column in columns:
                    digest.update(torch.where(exists, column, 0).numpy().tobytes())
                self.rounds.append((int(counts.sum()), digest.hexdigest()))
            return tokens

        speculator.propose = watched

    def watched_rounds(self) -> list[tuple[int, str]]:
        """Drafted nodes and hash of every round since the last call."""
        rounds, self.rounds = self.rounds, []
        return rounds

    def duties(self) -> tuple[bool, bool, bool]:
        """Whether this rank decides, counts and records."""
        manager = self.model_runner.adaptive_verification
        return tuple(part is not None for part in (manager.policy, manager.counters, manager.recorder))

    def plant(self, rank: int) -> None:
        """From now on this rank scores its draft with an error of one part in a thousand, after the ranks
        have gathered the logits: before, all would have it."""
        speculator = self.model_runner.speculator
        if self.rank == rank:
            sound = speculator.table

            def wrong(*args: Any) -> Any:
                table = sound(*args)
                return table._replace(log_probs=table.log_probs * 1.001)

            speculator.table = wrong
