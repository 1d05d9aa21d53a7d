"""Plans from survivals that reach the host some steps after their drafts, as under an overlapped schedule.

The device publishes what each request's draft looked like; when the host plans a step, the numbers of an
earlier one have landed. They may be of another request (its slot has a new owner), of another shape, or of a
step that drafted nothing. What is known is learned from as the shape it was; who is not known counts as the
usual request of the shape that is planned. The total may therefore be off, which costs speed alone: the
device admits by the live survivals (`specplug.ragged.admit`).

Notation: R requests, B nodes, gamma depth.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.budget import Plan
from specplug.cost_curves import Shape
from specplug.greedy import greedy_survival
from specplug.policies import Policy
from specplug.tree import DraftTree

SHAPES: tuple[Shape, ...] = get_args(Shape)  # the code of a shape is its place
FADE = 0.9  # of the usual request's survivals, a step: follows a change within some ten steps


class SurvivalRelay:
    """One engine's. What travels is [R, B + gamma + 1] fp32: a(v) of the nodes, then of the tree's greedy
    chain, then the code of the shape."""

    def __init__(self, *, budget: int, depth: int) -> None:
        self.budget, self.depth = budget, depth
        hope = (np.arange(budget) < depth).astype(np.float32)  # until a draft was seen: one path of it pays
        self._usual: dict[Shape, NDArray[np.float32]] = {
            shape: np.concatenate([hope, np.ones(depth, np.float32)]) for shape in SHAPES
        }

    def pack(self, tree: DraftTree, shape: Shape) -> torch.Tensor:
        """What the device sends of a step's drafts."""
        survival = tree.scores.exp()
        chain = greedy_survival(survival, tree.parents, max_depth=self.depth)
        return torch.cat((survival, chain, torch.full_like(chain[:, :1], SHAPES.index(shape))), 1)

    def plan(
        self,
        policy: Policy,
        rows: NDArray[np.float32],  # [R, B + gamma + 1], whatever has landed
        owned: NDArray[np.bool_],  # [R] rows that are of the request itself
        *,
        shape: Shape,  # of the step to plan
        context: float,  # mean committed tokens
    ) -> Plan:
        """The plan of a step in which everybody decodes.

        A row that nothing has written yet may hold anything: it misleads the total of one step at most.
        """
        landed = np.where(owned, np.nan_to_num(rows[:, -1]), 0).clip(0, 2).astype(np.int64)
        values = np.nan_to_num(rows[:, :-1]).clip(0, 1).astype(np.float32)
        for code, was in enumerate(SHAPES):
            mine = landed == code
            if was == "plain" or not mine.any():
                continue
            self._usual[was] = FADE * self._usual[was] + (1 - FADE) * values[mine].mean(0)
            if was != shape:
                self._ask(policy, values, mine, was, context)  # learned from; the step is of another shape
        known = landed == SHAPES.index(shape)
        values[~known] = self._usual[shape]
        return self._ask(policy, values, known, shape, context)

    def _ask(
        self,
        policy: Policy,
        values: NDArray[np.float32],  # [R, B + gamma]
        known: NDArray[np.bool_],
        shape: Shape,
        context: float,
    ) -> Plan:
        nodes, chain = np.split(values, [self.budget], axis=1)
        return policy.verify(
            np.minimum.accumulate(nodes, axis=1),
            (nodes > 0).sum(1).astype(np.int32),
            base_tokens=len(values),
            emitting=len(values),
            context=context,
            shape=shape,
            chain=chain,
            known=known,
        )
