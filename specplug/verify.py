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
from torch.nn.functional import pad


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

    No two children of a node may hold the same token (``DraftTree.validate``).
    Raises ValueError where ``sampled`` does not have one column for the root and one a node.
    """
    requests, budget = tokens.shape
    if tuple(sampled.shape) != (requests, budget + 1):
        raise ValueError(
            f"sampled: expected [R, B + 1] = {(requests, budget + 1)}, got {tuple(sampled.shape)}"
        )
    row = torch.arange(budget + 1, device=tokens.device)
    exists = row[:-1] < counts[:, None]
    sampled, above = sampled.long(), torch.where(exists, parents.long() + 1, 0)
    entered = exists & (tokens == sampled.gather(1, above))
    if blocked is not None:
        entered = entered & ~blocked
    # A node is on the path if it and all above it are entered. Pointer doubling: after k steps ``entered``
    # speaks for a row and its 2^k - 1 nearest ancestors, and ``above`` is the next one.
    entered, above = pad(entered, (1, 0), value=True), pad(above, (1, 0))
    for _ in range(max_depth.bit_length()):
        entered = entered & entered.gather(1, above)
        above = above.gather(1, above)
    on_path = entered & (above == 0)
    # One row a depth, parents first. Rows off the path and below max_depth go to a column that is cut off.
    depth = torch.where(on_path, on_path.cumsum(1) - 1, max_depth + 1).clamp_max(max_depth + 1)
    path = row.new_zeros(requests, max_depth + 2).scatter(1, depth, row.expand_as(depth))[:, :-1]
    num_emitted = on_path.sum(1, dtype=torch.int32).clamp_max(max_depth + 1)
    live = torch.arange(max_depth + 1, device=tokens.device) < num_emitted[:, None]
    return Walk(torch.where(live, sampled.gather(1, path), -1), num_emitted, path)


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
