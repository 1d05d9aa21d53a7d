"""What an adapter or a replay asks each step, and the answers that need no cost table.

A policy says what to draft and how many nodes to verify. `specplug.budget.Planner` decides from measured
costs; here are every node (as without a table), always the same shape and budget, and the one that measures.
"""

from __future__ import annotations

import math
import random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specplug.budget import Plan, allocate
from specplug.cost import Shape

PLAIN_SHARE, CHAIN_SHARE = 0.15, 0.3  # of an explorer's rounds; the rest draft trees


class Policy(Protocol):
    """Shapes: R requests in the batch, B nodes of a tree."""

    reason: str  # "" or why nothing is decided, for the log

    def draft(self, requests: int, *, context: float) -> Shape:
        """What the coming round should draft; "plain": nothing."""

    def verify(
        self,
        survival: NDArray[np.float32],  # [R, B] a(v) in node order, 0 past the last node
        caps: NDArray[np.int32],  # [R] nodes that may be verified
        *,
        base_tokens: int,  # rows that run anyway: roots and prefill
        emitting: int,  # requests that will emit a token
        context: float,  # mean committed tokens
        shape: Shape,  # of what was drafted
        chain: NDArray[np.float32] | None = None,  # [R, gamma] a(v) of the greedy chains
        known: NDArray[np.bool_] | None = None,  # [R] whose survivals are a draft's; None: everybody's
    ) -> Plan:
        """How many nodes of each request to verify."""

    def observe(self, *args: Any, **facts: Any) -> None:
        """What the step really took and gave; see `Planner.observe`."""


class FullTrees:
    """Drafts a tree for everybody and verifies every node; the base of policies that price nothing."""

    reason = "every drafted node is verified: no cost table"

    def draft(self, requests: int, *, context: float) -> Shape:
        return "tree"

    def counts(
        self,
        survival: NDArray[np.float32],  # [R, B]
        caps: NDArray[np.int32],  # [R]
    ) -> NDArray[np.int32]:
        """Nodes of each request to verify, [R]."""
        return allocate(survival, caps, int(caps.sum()))

    def verify(
        self,
        survival: NDArray[np.float32],
        caps: NDArray[np.int32],
        *,
        base_tokens: int,
        emitting: int,
        context: float,
        shape: Shape,
        chain: NDArray[np.float32] | None = None,
        known: NDArray[np.bool_] | None = None,
    ) -> Plan:
        counts = self.counts(survival, caps)
        taken = np.arange(survival.shape[1]) < counts[:, None]
        return Plan(counts, int(counts.sum()), emitting + float(survival[taken].sum()), math.nan, math.nan)

    def observe(self, **facts: Any) -> None:
        pass


class Fixed(FullTrees):
    """Always the same shape, and of a tree always the same budget."""

    reason = "fixed"

    def __init__(self, shape: Shape, nodes: int = 0) -> None:
        """``nodes``: budget of a tree; a chain verifies all it has. Raises ValueError for an empty tree."""
        if shape == "tree" and nodes < 1:
            raise ValueError(f"nodes: expected at least 1 for a tree, got {nodes}")
        self.shape, self.nodes = shape, nodes

    def draft(self, requests: int, *, context: float) -> Shape:
        return self.shape

    def counts(self, survival: NDArray[np.float32], caps: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.minimum(caps, self.nodes) if self.shape == "tree" else caps


class Explorer(FullTrees):
    """Draws shapes and node totals at random, so that one run of an engine covers a cost table.

    The totals are 0 and powers of two a request, up to everything that was drafted.
    """

    reason = "profiling: shapes and node totals are drawn at random"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def draft(self, requests: int, *, context: float) -> Shape:
        drawn = self._random.random()
        return "plain" if drawn < PLAIN_SHARE else "chain" if drawn < PLAIN_SHARE + CHAIN_SHARE else "tree"

    def counts(self, survival: NDArray[np.float32], caps: NDArray[np.int32]) -> NDArray[np.int32]:
        most = int(caps.max(initial=0))
        each = self._random.choice([0, *(1 << i for i in range(most.bit_length())), most])
        return allocate(survival, caps, min(each * len(caps), int(caps.sum())))
