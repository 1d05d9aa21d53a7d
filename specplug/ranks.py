"""All ranks of a tensor-parallel group must run the same thing: compared once, at start."""

from __future__ import annotations

from typing import Any

import torch.distributed


def agree(facts: dict[str, Any], group: torch.distributed.ProcessGroup) -> list[dict[str, Any]]:
    """The facts of every rank of a CPU group, in rank order.

    Raises RuntimeError, on every rank, where they differ: such a group would emit different tokens.
    """
    everyone: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, facts, group=group)
    odd = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if odd:
        raise RuntimeError(f"specplug: rank {odd[0]} differs from rank 0: {everyone[odd[0]]}, {everyone[0]}")
    return everyone
