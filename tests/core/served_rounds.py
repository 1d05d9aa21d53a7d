"""A made-up engine: rounds of drafts whose survivals are true, on a machine with its own seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from cost_tables import MadeUp

from specplug.budget import Planner


@dataclass
class Served:
    """What came out."""

    tokens: list[int] = field(default_factory=list)  # by round
    seconds: list[float] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    def rate(self, start: int = 0) -> float:
        return sum(self.tokens[start:]) / sum(self.seconds[start:])

    @property
    def switches(self) -> int:
        """Times the shape of most rounds changed: single rounds of another shape are probes."""
        kept = [
            shape
            for before, shape, after in zip(self.shapes, self.shapes[1:], self.shapes[2:], strict=False)
            if shape in (before, after)
        ]
        return sum(a != b for a, b in pairwise(kept))


def falling(first: float, ratio: float, width: int) -> np.ndarray:
    return (first * ratio ** np.arange(width)).astype(np.float32)


def serve(
    planner: Planner,
    machine: MadeUp,
    drafts: Callable[[int, np.random.Generator], tuple[np.ndarray, np.ndarray]],  # R -> trees, their chains
    *,
    rounds: int,
    requests: int | Callable[[int], int] = 1,
    accept: float = 1.0,  # accepted over predicted
    outliers: float = 0.0,  # share of steps that take 100 times as long to the clock that `observe` reads
    seed: int = 0,
) -> Served:
    noise = np.random.default_rng(seed)
    served = Served()
    for number in range(rounds):
        count = requests(number) if callable(requests) else requests
        shape = planner.draft(count, context=100.0)
        plan, nodes, accepted, drafting = None, 0, 0, 0.0
        if shape != "plain":
            trees, chains = drafts(count, noise)
            survival = trees if shape == "tree" else chains
            caps = np.full(count, survival.shape[1], np.int32)
            plan = planner.verify(
                survival, caps, base_tokens=count, emitting=count, context=100.0, shape=shape, chain=chains
            )
            nodes = plan.nodes
            taken = survival[np.arange(survival.shape[1]) < plan.counts[:, None]]
            accepted = int((noise.random(nodes) < accept * taken).sum())
            drafting = machine.draft_seconds(count, shape=shape)
        verified = shape if nodes else "plain"
        rows = count + nodes
        seconds = float(machine.verify_seconds(count, np.array([rows]), shape=verified)[0])
        slow = 100.0 if noise.random() < outliers else 1.0
        planner.observe(
            requests=count,
            tokens=rows,
            context=100.0,
            verified=verified,
            verify_seconds=seconds * slow * float(noise.lognormal(0, 0.02)),
            drafted=shape,
            draft_seconds=drafting * slow if drafting else None,
            emitting=count,
            emitted=count + accepted,
            plan=plan,
        )
        served.tokens.append(count + accepted)
        served.seconds.append(seconds + drafting)
        served.shapes.append(shape)
        served.nodes.append(nodes)
    return served
