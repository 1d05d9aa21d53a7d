"""What one step's draft must remember until the next step verifies it, per request slot, on the device."""

from __future__ import annotations

import torch

from specplug.tree import DraftTree


class TreeStore:
    """Trees by request slot. One slot past the last takes the writes of padding rows."""

    def __init__(self, max_requests: int, budget: int, device: torch.device) -> None:
        slots = max_requests + 1
        self.budget = budget
        self._spare_slot = max_requests
        self.parents = torch.full((slots, budget), -1, dtype=torch.int32, device=device)
        self.depths = torch.zeros((slots, budget), dtype=torch.int32, device=device)
        self.counts = torch.zeros(slots, dtype=torch.int32, device=device)  # live nodes; 0: nothing drafted
        self.chain_only = torch.zeros(slots, dtype=torch.bool, device=device)
        self.chain_slots: set[int] = set()  # where chain_only is set, for the host: mostly empty

    def forget(self, slot: int, *, chain_only: bool) -> None:
        """A new request took the slot: it has no tree yet. ``chain_only``: its trees must be chains."""
        self.counts[slot] = 0
        self.chain_only[slot] = chain_only
        (self.chain_slots.add if chain_only else self.chain_slots.discard)(slot)

    def slots(self, slots: torch.Tensor) -> torch.Tensor:
        """[R] int64 slots with negative entries (padding rows) sent to the spare slot."""
        return torch.where(slots < 0, self._spare_slot, slots)

    def write(self, slots: torch.Tensor, tree: DraftTree) -> None:
        """Remember ``tree`` (R requests, the store's budget) at ``slots`` [R] int64."""
        self.parents[slots] = tree.parents
        self.depths[slots] = tree.depths
        self.counts[slots] = tree.counts
