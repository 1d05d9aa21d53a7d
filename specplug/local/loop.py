"""Plain and speculative decoding of a batch of prompts, one loop for both.

The prompt's forward computes all but its last token, which is the first root. So every emitted token comes
from a round: one target forward over each request's window (its root, and the nodes of its tree), the
target's own draw at every row, the walk, and the commit that moves the accepted rows to the front. Plain
decoding is the loop without a tree: windows of one row, no draft, no walk, no commit.

A request ends at a stop token or at ``limit`` tokens. It then stays in the batch, idle, until the last one
ends: its rows are computed and thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specplug.local.draft import Draft, Proposal
from specplug.local.method import Method
from specplug.local.noise import draw, scores
from specplug.local.target import Rows, Target
from specplug.tree import DraftTree
from specplug.verify import Walk, walk
from specplug.window import commit, lay_out_windows

STEPS = ("prefill", "draft", "build", "verify", "commit")


class Round(NamedTuple):
    """What a speculative round did, for a recorder."""

    proposal: Proposal
    tree: DraftTree
    walk: Walk
    running: list[bool]  # requests that were not done before it


class Batch(NamedTuple):
    """What a batch of prompts gave."""

    tokens: list[list[int]]  # a prompt: its answer, the stop token included
    emitted: list[list[int]]  # a prompt: tokens of each round; cut at a stop token, not at the limit
    seconds: dict[str, float]  # of the whole batch, by STEPS


@dataclass
class Clock:
    """Seconds by step; on an accelerator each step waits for the device."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    last: float = field(default_factory=time.perf_counter)

    def charge(self, step: str) -> None:
        """Count the time since the last call to ``step``."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[step] += now - self.last
        self.last = now


class Requests:
    """The batch on the host: answers, and where each request's root stands."""

    def __init__(self, prompts: Sequence[Sequence[int]], *, limit: int, stop: frozenset[int]) -> None:
        self.limit, self.stop = limit, stop
        self.roots = [len(prompt) - 1 for prompt in prompts]
        self.running = [True] * len(prompts)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.emitted: list[list[int]] = [[] for _ in prompts]

    def take(self, drawn: list[list[int]], counts: list[int]) -> None:
        """Append a round's tokens; ``drawn[r][:counts[r]]`` are the emitted ones."""
        for r, (row, count) in enumerate(zip(drawn, counts, strict=True)):
            if not self.running[r]:
                continue
            end = next((i + 1 for i, token in enumerate(row[:count]) if token in self.stop), None)
            self.emitted[r].append(end or count)
            self.tokens[r] = (self.tokens[r] + row[: end or count])[: self.limit]
            self.running[r] = end is None and len(self.tokens[r]) < self.limit
            if self.running[r]:
                self.roots[r] += count


class Session:
    """Device state of a batch: both caches, roots and anchors."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        method: Method,
        requests: Requests,
        *,
        temperature: float,
        seeds: Sequence[int],
    ) -> None:
        self.target, self.draft, self.method, self.temperature = target, draft, method, temperature
        self.device = target.device
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=self.device)
        self.roots = torch.tensor(requests.roots, dtype=torch.int64, device=self.device)
        self.depth = draft.depth if draft else 0
        self.width = 1 if draft is None else 1 + (method.budget or self.depth)
        slots = max(requests.roots) + requests.limit + self.width + self.depth + 1
        self.cache = target.cache(len(seeds), slots)
        self.context = draft.cache(len(seeds), slots) if draft else None
        self.clock = Clock(self.device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compute every prompt but its last token, which becomes the anchor."""
        width = max(len(prompt) for prompt in prompts) - 1
        self.anchors = torch.tensor([prompt[-1] for prompt in prompts], device=self.device)
        if width:
            rows = [[*prompt[:-1], *[0] * (width + 1 - len(prompt))] for prompt in prompts]
            column = torch.arange(width, device=self.device).expand(len(prompts), -1)
            starts = torch.zeros_like(self.roots)
            computed = self.target.forward(
                torch.tensor(rows, device=self.device),
                starts=starts,
                depths=column,
                mask=(column[:, :, None] >= column[:, None]),
                cache=self.cache,
                live=width,
                last_only=True,
            )
            self._extend(computed, starts)
        self.clock.charge("prefill")

    def plain(self, live: int) -> torch.Tensor:
        """One token a request: [R, 1] int64."""
        depths = torch.zeros_like(self.roots)[:, None]
        rows = self.target.forward(
            self.anchors[:, None],
            starts=self.roots,
            depths=depths,
            mask=torch.ones(len(self.roots), 1, 1, dtype=torch.bool, device=self.device),
            cache=self.cache,
            live=live,
        )
        drawn = self._draw(rows, depths)
        self.anchors = drawn[:, 0]
        self.clock.charge("verify")
        return drawn

    def speculate(self, live: int) -> tuple[Proposal, DraftTree, Walk]:
        """Draft, verify and commit one tree a request."""
        draft, context = self.draft, self.context
        assert draft is not None
        assert context is not None
        proposal = draft.propose(context, self.anchors, self.roots, live)
        self.clock.charge("draft")
        tree = self.method.build(draft, proposal)
        self.clock.charge("build")
        requests, width = len(self.roots), self.width
        windows = lay_out_windows(
            ends=torch.arange(1, requests + 1, device=self.device) * width,
            drafted=torch.full_like(self.roots, width - 1),
            parents=tree.parents,
            depths=tree.depths,
            live=tree.counts,
            width=width,
            num_rows=requests * width,
            max_depth=self.depth,
        )
        rows = self.target.forward(
            torch.cat((self.anchors[:, None], tree.tokens), 1),
            starts=self.roots,
            depths=windows.depths,
            mask=windows.mask,
            cache=self.cache,
            live=live,
        )
        drawn = self._draw(rows, windows.depths)
        self.clock.charge("verify")
        step = walk(tree.parents, tree.tokens, tree.counts, drawn, max_depth=self.depth)
        moves = commit(windows, step.path, step.num_emitted)
        if self.method.name != "chain":  # a chain's rows are in place
            self.cache.commit(moves)
            if rows.features is not None:
                moves.move(rows.features.flatten(0, 1))
        if rows.features is not None:
            kept = rows._replace(features=rows.features[:, : self.depth + 1])
            self._extend(kept, self.roots)
        self.anchors = step.tokens.gather(1, step.num_emitted.long()[:, None] - 1)[:, 0]
        return proposal, tree, step

    def _draw(self, rows: Rows, depths: torch.Tensor) -> torch.Tensor:
        return draw(
            rows.logits,
            temperature=self.temperature,
            seeds=self.seeds,
            first=self.roots + 1,
            depths=depths,
            max_depth=self.depth,
        )

    def _extend(self, rows: Rows, starts: torch.Tensor) -> None:
        if self.draft is not None and self.context is not None and rows.features is not None:
            self.draft.extend(self.context, rows.features, starts)


@torch.inference_mode()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    method: Method,
    draft: Draft | None = None,
    limit: int,
    stop: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Batch:
    """Answer every prompt with up to ``limit`` tokens.

    ``seeds`` gives each prompt its noise; None is 0, 1, 2, ... Raises ValueError for an empty prompt, a limit
    below 1, a negative temperature, a wrong number of seeds, and a drafting method without a draft.
    """
    method.check()
    seeds = range(len(prompts)) if seeds is None else seeds
    if not prompts or not all(prompts):
        raise ValueError("prompts: expected one token or more in each of one prompt or more")
    if limit < 1:
        raise ValueError(f"limit: expected 1 token or more, got {limit}")
    if not temperature >= 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    if len(seeds) != len(prompts):
        raise ValueError(f"seeds: expected one for each of {len(prompts)} prompts, got {len(seeds)}")
    plain = method.name == "plain"
    if draft is None and not plain:
        raise ValueError(f"method {method.name}: expected a draft, got none")
    requests = Requests(prompts, limit=limit, stop=stop)
    session = Session(
        target, None if plain else draft, method, requests, temperature=temperature, seeds=seeds
    )
    session.prefill(prompts)
    margin = max(session.width, session.draft.block if session.draft else 0)
    while any(requests.running):
        live, before = max(requests.roots) + margin, list(requests.running)
        if plain:
            requests.take(session.plain(live).tolist(), [1] * len(prompts))
        else:
            proposal, tree, step = session.speculate(live)
            requests.take(step.tokens.tolist(), step.num_emitted.tolist())
            if on_round is not None:
                on_round(Round(proposal, tree, step, before))
        session.roots = torch.tensor(requests.roots, dtype=torch.int64, device=session.device)
        session.clock.charge("verify" if plain else "commit")
    return Batch(requests.tokens, requests.emitted, session.clock.seconds)


@torch.inference_mode()
def next_scores(target: Target, tokens: Sequence[int], *, temperature: float, seed: int) -> torch.Tensor:
    """What decides the token after ``tokens``, [V] fp32: logits / T + noise; at temperature 0 the logits."""
    ids = torch.tensor([tokens], device=target.device)
    column = torch.arange(ids.shape[1], device=target.device)[None]
    start = torch.zeros(1, dtype=torch.int64, device=target.device)
    rows = target.forward(
        ids,
        starts=start,
        depths=column,
        mask=column[:, :, None] >= column[:, None],
        cache=target.cache(1, ids.shape[1]),
        live=ids.shape[1],
        last_only=True,
    )
    return scores(
        rows.logits[:, -1:],
        temperature=temperature,
        seeds=start + seed,
        first=start + ids.shape[1],
        depths=start[:, None],
        max_depth=0,
    )[0, 0]
