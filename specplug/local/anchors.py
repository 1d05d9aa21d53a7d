"""A round at every position of the target's own answers: a complete recording.

The answer is decoded first, plainly. Noise is keyed by position, so what the target says at a root is the
answer itself, whatever was drafted: a tree's accepted path at a root is read off the tokens that follow. One
forward over the whole text gives the features that the draft reads; the draft then runs at every root, over
the features below it, many roots at a time.

The features come from one long forward, in a round from many short ones: the same up to floating-point
differences, so a near tie of the draft may be ordered otherwise than in a served round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from specplug.local.draft import ContextCache, Draft
from specplug.local.loop import generate
from specplug.local.method import Method
from specplug.local.pair import Pair
from specplug.local.target import Target
from specplug.recording import About, Recording, request_arrays
from specplug.tree import DraftTree
from specplug.verify import walk

ROOTS = 32  # roots the draft runs at together; each needs a copy of the request's context cache


class Unit(NamedTuple):
    """Some prompts of one data set at one temperature."""

    dataset: int  # number in About.datasets
    temperature: float
    first: int  # number of the first prompt
    prompts: list[list[int]]


@torch.inference_mode()
def record(
    pair: Pair,
    prompts: dict[str, list[list[int]]],  # token ids by data set
    *,
    temperatures: Sequence[float],
    method: Method,  # of name "tree": the widest tree to record
    max_tokens: int,
    batch: int = 16,
    seed: int = 0,
    target: str = "",
    draft: str = "",
    show_progress: bool = True,
) -> Recording:
    """Answer every prompt at every temperature and record each position's round.

    Prompt n of a data set samples with the noise of seed + n, as in an evaluation. Raises ValueError for a
    method that draws no tree and for prompts that `generate` refuses.
    """
    method.check()
    if method.name != "tree":
        raise ValueError(f"method: expected tree, got {method.name}")
    about = About(
        target=target,
        draft=draft,
        datasets=list(prompts),
        max_tokens=max_tokens,
        candidates=method.candidates,
        seed=seed,
        complete=True,
        source="specplug record",
    )
    requests: list[tuple[int, float, int, int, int]] = []
    rounds: list[dict[str, NDArray[Any]]] = []
    total = sum(map(len, prompts.values())) * len(temperatures)
    with tqdm(total=total, disable=not show_progress, unit="answer") as progress:
        for unit in _units(prompts, temperatures, batch):
            numbers = range(unit.first, unit.first + len(unit.prompts))
            answers = generate(
                pair.target,
                unit.prompts,
                method=Method("plain"),
                limit=max_tokens + pair.draft.depth,  # what follows the last root decides its round
                temperature=unit.temperature,
                seeds=[seed + number for number in numbers],
            ).tokens
            for number, prompt, answer in zip(numbers, unit.prompts, answers, strict=True):
                end = next((i + 1 for i, t in enumerate(answer[:max_tokens]) if t in pair.stop), max_tokens)
                kept = answer[: end + pair.draft.depth]
                one = request_rounds(pair.target, pair.draft, prompt, kept, method=method)
                one["request"] = np.full(end, len(requests), np.int32)
                rounds.append(one)
                requests.append((unit.dataset, unit.temperature, number, len(prompt), end))
                progress.update()
    arrays: dict[str, Any] = {name: np.concatenate([one[name] for one in rounds]) for name in rounds[0]}
    return Recording(about=about, requests=request_arrays(requests), **arrays)


@torch.inference_mode()
def request_rounds(
    target: Target,
    draft: Draft,
    prompt: Sequence[int],
    answer: Sequence[int],  # the answer's L tokens and the ``draft.depth`` that the target would say next
    *,
    method: Method,
) -> dict[str, NDArray[Any]]:
    """The L rounds of one answer: the arrays of a `Recording` but ``request``."""
    length = len(answer) - draft.depth
    text = torch.tensor([*prompt, *answer], device=target.device)
    roots = torch.arange(len(prompt) - 1, len(prompt) - 1 + length, device=target.device)
    context = _context(target, draft, text[: len(prompt) + length - 2])
    parts = []
    for some in roots.split(ROOTS):
        cache = ContextCache(
            *(
                [t.expand(len(some), -1, -1, -1).clone() for t in side]
                for side in (context.keys, context.values)
            )
        )
        proposal = draft.propose(cache, text[some], some, int(some[-1]) + draft.block)
        trees = method.build(draft, proposal), Method("chain").build(draft, proposal)
        parts.append(
            [
                {
                    "parents": tree.parents,
                    "scores": tree.scores,
                    "counts": tree.counts,
                    "accepted": _accepted(tree, text, some, draft.depth),
                    "survivals": draft.survivals(proposal, tree),
                }
                for tree in trees
            ]
        )
    tree, chain = (_joined([part[which] for part in parts]) for which in (0, 1))
    arrays = {
        "position": np.arange(length, dtype=np.int32),
        "counts": tree["counts"],
        "parents": tree["parents"].astype(np.int16),
        "log_probs": np.minimum(tree["scores"], 0.0),
        "accepted": tree["accepted"],
        "chain_log_probs": np.minimum.accumulate(np.minimum(chain["scores"], 0.0), 1),
        "chain_accepted": chain["accepted"].sum(1, dtype=np.int32),
    }
    if "survivals" in tree:
        arrays |= {"survivals": tree["survivals"], "chain_survivals": chain["survivals"]}
    return arrays


def _joined(parts: list[dict[str, torch.Tensor | None]]) -> dict[str, NDArray[Any]]:
    """Rounds of some roots after the other, on the host; without what the draft does not have."""
    columns = {name: [part[name] for part in parts] for name in parts[0]}
    return {
        name: torch.cat([values for values in column if values is not None]).cpu().numpy()
        for name, column in columns.items()
        if column[0] is not None
    }


def _context(
    target: Target,
    draft: Draft,
    text: torch.Tensor,  # [n] int64, all before the last root
) -> ContextCache:
    """The draft's context of one request, with room for a block after it."""
    width = len(text)
    cache = draft.cache(1, width + draft.block + 1)
    if width:
        column = torch.arange(width, device=text.device)[None]
        start = torch.zeros(1, dtype=torch.int64, device=text.device)
        rows = target.forward(
            text[None],
            starts=start,
            depths=column,
            mask=column[:, :, None] >= column[:, None],
            cache=target.cache(1, width),
            live=width,
            last_only=True,
        )
        assert rows.features is not None
        draft.extend(cache, rows.features, start)
    return cache


def _accepted(
    tree: DraftTree,
    text: torch.Tensor,  # [n] int64, prompt and answer
    roots: torch.Tensor,  # [A] int64, positions in the text
    max_depth: int,
) -> torch.Tensor:
    """Nodes on the text's path, [A, B] bool: the walk, every row having drawn what the text says next.

    A row off the path would draw something else, but the walk does not come there.
    """
    depths = torch.nn.functional.pad(tree.depths.long(), (1, 0))
    drawn = text[roots[:, None] + 1 + depths]
    path = walk(tree.parents, tree.tokens, tree.counts, drawn, max_depth=max_depth).path
    return torch.zeros_like(depths, dtype=torch.bool).scatter_(1, path, True)[:, 1:]


def _units(prompts: dict[str, list[list[int]]], temperatures: Sequence[float], batch: int) -> Iterator[Unit]:
    for dataset, rows in enumerate(prompts.values()):
        for temperature in temperatures:
            for first in range(0, len(rows), batch):
                yield Unit(dataset, temperature, first, rows[first : first + batch])
