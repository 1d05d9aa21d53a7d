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
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        odd = [name for name in first | theirs if first.get(name) != theirs.get(name)]
        if odd:
            differences = "; ".join(f"{name}: {theirs.get(name)!r}, not {first.get(name)!r}" for name in odd)
            raise RuntimeError(
                f"specplug: rank {rank} differs from rank 0 in {differences}. Give every rank the same "
                "versions, files and settings."
            )
    return everyone
