"""Ranks of a group compare what they run, and every one of them notices a difference."""

import multiprocessing
from pathlib import Path
from typing import Any

from specplug.ranks import agree

FACTS = {"draft": "a" * 8, "budget": 16, "threads": 4}
SECOND = [FACTS, {**FACTS, "threads": 3}, {**FACTS, "later": 1}]  # what rank 1 says, group after group


def compare(rank: int, store: str, answers: Any) -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    said = []
    for second in SECOND:
        try:
            said.append(agree(second if rank else FACTS, torch.distributed.group.WORLD))
        except RuntimeError as error:
            said.append(str(error))
    answers.put(said)
    torch.distributed.destroy_process_group()


def test_every_rank_notices(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=compare, args=(rank, str(tmp_path / "store"), answers)) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    said = [answers.get(timeout=100) for _ in ranks]
    for rank in ranks:
        rank.join(60)
    for same, threads, later in said:
        assert same == [FACTS, FACTS]
        assert threads.startswith("specplug: rank 1 differs from rank 0 in threads: 3, not 4.")
        assert later.startswith("specplug: rank 1 differs from rank 0 in later: 1, not None.")
