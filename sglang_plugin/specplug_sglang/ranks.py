"""All ranks of a tensor-parallel group must run the same algorithm: compared once, at start."""

from __future__ import annotations

from typing import Any


def agree(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of every rank, in rank order.

    Raises RuntimeError, on every rank, where they differ: such a group would emit different tokens.
    """
    import torch.distributed
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group.cpu_group
    everyone: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, facts, group=group)
    odd = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if odd:
        raise RuntimeError(f"specplug: rank {odd[0]} differs from rank 0: {everyone[odd[0]]}, {everyone[0]}")
    return everyone
