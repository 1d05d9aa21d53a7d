"""Lossless acceptance on a tree whose shape never looked at the target's noise.

Every verify row holds the target's own draw at that row. Starting from the root, descend while the drawn
token is a child of the current row; the first draw that is no child is the next root. Each emitted token is
the target's draw given exactly the tokens before it, so the emitted law is the target's at any temperature,
and no lossless rule accepts more in expectation: E[accepted] = sum of p(v) over the tree. No ratio of p and q
appears: on children chosen deterministically min(1, p/q) is biased. Seeds are the host's: rows of one depth
draw with that position's noise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Walk(NamedTuple):
    """What a round emits. D = max_depth."""

    tokens: torch.Tensor  # [R, D + 1] int64, accepted tokens, then the first draw that is no child; -1 after
    num_emitted: torch.Tensor  # [R] int32, accepted + 1
    path: (
        torch.Tensor
    )  # [R, D + 1] int64, window row that drew token k (0 root, j + 1 node j); 0 past the end


def walk(
    parents: torch.Tensor,  # [R, B] int32, -1 = root
    tokens: torch.Tensor,  # [R, B] int64
    counts: torch.Tensor,  # [R] int32, nodes past it do not exist
    sampled: torch.Tensor,  # [R, B + 1] int64, the target's draw at every window row
    *,
    max_depth: int,
    blocked: torch.Tensor | None = None,  # [R, B] bool, nodes that must not be entered
) -> Walk:
    """Walk every request's tree down the target's draws, at most ``max_depth`` nodes deep.

    Raises ValueError where ``sampled`` does not have one column for the root and one a node.
    """
    requests, budget = tokens.shape
    if tuple(sampled.shape) != (requests, budget + 1):
        raise ValueError(
            f"sampled: expected [R, B + 1] = {(requests, budget + 1)}, got {tuple(sampled.shape)}"
        )
    node = torch.arange(budget, device=tokens.device)
    open_nodes = node < counts[:, None]
    if blocked is not None:
        open_nodes = open_nodes & ~blocked
    row = torch.zeros(requests, 1, dtype=torch.int64, device=tokens.device)
    alive = torch.ones(requests, 1, dtype=torch.bool, device=tokens.device)
    drawn = sampled.long().gather(1, row)
    emitted, rows, lives = [drawn], [row], [alive]
    for _ in range(max_depth if budget else 0):
        child = open_nodes & (parents == row - 1) & (tokens == drawn)
        first = torch.where(child, node, budget).amin(1, keepdim=True)
        alive = alive & (first < budget)
        row = torch.where(alive, first + 1, 0)
        drawn = sampled.long().gather(1, row)
        emitted.append(drawn)
        rows.append(row)
        lives.append(alive)
    live = torch.cat(lives, 1)
    missing = max_depth + 1 - live.shape[1]  # an empty tree stops at the root
    return Walk(
        tokens=torch.nn.functional.pad(torch.where(live, torch.cat(emitted, 1), -1), (0, missing), value=-1),
        num_emitted=live.sum(1, dtype=torch.int32),
        path=torch.nn.functional.pad(torch.cat(rows, 1), (0, missing)),
    )


def path_permutation(
    path: torch.Tensor,  # [R, D + 1] int64 window rows, as in Walk
    num_emitted: torch.Tensor,  # [R] int32
    width: int,
) -> torch.Tensor:
    """Row order after acceptance: [R, width] int64, a true permutation of the ``width`` = B + 1 window rows.

    The rows of the path come first, in order, then all others in their old order. Gathering keys, values and
    features by it makes the window look like a verified chain.
    """
    requests, steps = path.shape
    step = torch.arange(steps, device=path.device).expand(requests, -1)
    on_path = torch.where(step < num_emitted[:, None], path, width)  # column `width` is discarded
    place = torch.arange(steps, steps + width + 1, device=path.device).repeat(requests, 1)
    return place.scatter(1, on_path, step)[:, :width].argsort(1)
