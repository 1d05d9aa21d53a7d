"""Reduced draft vocabularies: a draft that scores V_draft of the target's V tokens.

The checkpoint's ``d2t`` [V_draft] holds offsets, target id = draft id + d2t[draft id], and ``t2d`` [V] says
which target tokens the draft can propose (convention of EAGLE-3, kept by speculators; vLLM 0.32,
models/qwen3_dspark.py map_draft_to_target). Logits, W2 and lm_head count draft ids; W1, the embedding,
anchors and trees count target ids. Two draft ids with one target id would make siblings that are the same
token, so a table must be one to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specplug.candidates import TransitionTable


@dataclass(frozen=True)
class DraftVocabulary:
    """The target token of every draft id; make it with ``from_offsets``, which checks it."""

    targets: torch.Tensor  # [V_draft] int64, distinct ids of the target vocabulary

    @classmethod
    def from_offsets(
        cls,
        d2t: torch.Tensor,  # [V_draft] integers
        vocab_size: int,  # V
        *,
        t2d: torch.Tensor | None = None,  # [V] bool or 0/1
    ) -> DraftVocabulary:
        """Read a checkpoint's table, on the host, once.

        Raises ValueError for floats, an id outside the target's vocabulary, two draft ids for one target
        token, or a ``t2d`` that names other tokens.
        """
        if d2t.dim() != 1 or d2t.dtype.is_floating_point or d2t.dtype == torch.bool:
            raise ValueError(f"d2t: expected [V_draft] integers, got {d2t.dtype} {list(d2t.shape)}")
        targets = d2t.long() + torch.arange(d2t.shape[0], device=d2t.device)
        outside = (targets < 0) | (targets >= vocab_size)
        if outside.any():
            draft = int(outside.nonzero()[0, 0])
            raise ValueError(
                f"d2t: draft id {draft} maps to {int(targets[draft])}, expected 0..{vocab_size - 1}; the "
                "table holds offsets, target id = draft id + d2t[draft id]"
            )
        order = targets.sort().values
        same = order[1:] == order[:-1]
        if same.any():
            raise ValueError(
                f"d2t: target token {int(order[1:][same][0])} has two draft ids; siblings of a tree would be "
                "the same token"
            )
        if t2d is not None:
            known = torch.zeros(vocab_size, dtype=torch.bool, device=targets.device)
            known[targets] = True
            if tuple(t2d.shape) != (vocab_size,) or not torch.equal(t2d != 0, known):
                raise ValueError(
                    f"t2d: expected a mask [{vocab_size}] of the {targets.shape[0]} tokens that d2t names, "
                    f"got {list(t2d.shape)} with {int((t2d != 0).sum())} set"
                )
        return cls(targets)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids, any shape, int64."""
        return self.targets[draft_ids]

    def map_table(self, table: TransitionTable) -> TransitionTable:
        """A table over draft ids (``factorised``) as one over target ids; scores and order stay."""
        return table._replace(tokens=self.to_target(table.tokens))
