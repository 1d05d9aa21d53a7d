"""The greedy chain inside a tree: the best child of the best child, and so on.

Nodes stand in score order, so a node's best child is its first. A tree with fewer nodes than the chain
needs holds only the chain's upper part.
"""

from __future__ import annotations

import torch


def greedy_survival(
    survival: torch.Tensor,  # [R, B] fp32, a(v) in node order, 0 past the last node
    parents: torch.Tensor,  # [R, B] int32, -1 = root
    *,
    max_depth: int,
) -> torch.Tensor:
    """a(v) of the greedy chain, [R, max_depth] fp32, 0 past its end. A loop over depth, no host read."""
    live = survival > 0
    above = torch.full_like(parents[:, :1], -1)
    chain = []
    for _ in range(max_depth):
        children = live & (parents == above)
        any_ = children.any(1, keepdim=True)
        first = children.int().argmax(1, keepdim=True)
        chain.append(torch.where(any_, survival.gather(1, first), 0.0))
        above = torch.where(any_, first.to(parents.dtype), -2)
    return torch.cat(chain, 1)
