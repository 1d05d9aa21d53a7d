"""What one step's draft must remember until the next step verifies it, per request slot, on the device."""

from __future__ import annotations

import numpy as np
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
        self.log_probs = torch.zeros((slots, budget), dtype=torch.float32, device=device)  # draft's, of paths
        self.chain_only = torch.zeros(slots, dtype=torch.bool, device=device)
        self.temperatures = torch.zeros(slots, dtype=torch.float32, device=device)
        # For the host: where chain_only is set (mostly nowhere), and where no tree branches.
        self.chain_slots: set[int] = set()
        self._linear = np.ones(slots, dtype=bool)

    def forget(self, slot: int, *, chain_only: bool, temperature: float = 0.0) -> None:
        """A new request took the slot: it has no tree yet. ``chain_only``: its trees must be chains."""
        self.counts[slot] = 0
        self.chain_only[slot] = chain_only
        self.temperatures[slot] = temperature
        self._linear[slot] = True
        (self.chain_slots.add if chain_only else self.chain_slots.discard)(slot)

    def branch(self, slots: np.ndarray, *, chains: bool) -> None:
        """Note on the host what these slots hold now: chains, or trees but where chain_only is set."""
        self._linear[slots] = chains or [int(slot) in self.chain_slots for slot in slots]

    def linear(self, slots: np.ndarray) -> bool:
        """Whether no tree in these slots branches, as far as the host knows."""
        return bool(self._linear[slots].all())

    def slots(self, slots: torch.Tensor) -> torch.Tensor:
        """[R] int64 slots with negative entries (padding rows) sent to the spare slot."""
        return torch.where(slots < 0, self._spare_slot, slots)

    def write(self, slots: torch.Tensor, tree: DraftTree) -> None:
        """Remember ``tree`` (R requests, the store's budget) at ``slots`` [R] int64."""
        self.parents[slots] = tree.parents
        self.depths[slots] = tree.depths
        self.counts[slots] = tree.counts
