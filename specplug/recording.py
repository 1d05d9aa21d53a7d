"""Recorded rounds: what a draft proposed at a position of an answer, and how far the target followed it.

A round stands at a *position* p of a request's answer: p tokens are out, the last of them (or of the prompt)
is the root. It holds the tree in node order, the greedy chain, and which nodes the target accepted. Trees are
nested, so the first n nodes are the tree a budget of n would have drawn, and a policy that verifies n nodes
accepts the accepted ones among them and goes on at p + 1 + accepted.

A *complete* recording has a round at every position of every answer (`specplug.local.anchors` makes one).
Whatever policy is replayed over it, its next round is there: the replay is exact. An incomplete one has the
positions that one policy visited; a replay then takes the nearest round at or before its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_NODES = 1024  # widest tree, as MAX_TREE_BUDGET of specplug.config
DATA = Path(__file__).resolve().parent / "recordings"  # shipped ones, see its README.md


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was recorded."""

    target: str
    draft: str
    datasets: list[str]  # names; a request says which one by its number
    max_tokens: int  # longest answer that was asked for
    candidates: int  # C a depth under a Markov head
    seed: int
    complete: bool  # a round at every position
    source: str = ""  # what recorded it

    def __post_init__(self) -> None:
        if not self.datasets or len(set(self.datasets)) != len(self.datasets):
            raise ValueError(f"datasets: expected different names, at least one, got {self.datasets}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1, got {self.max_tokens}")


@dataclass(frozen=True)
class Requests:
    """Q requests."""

    dataset: NDArray[np.int32]  # [Q] number in About.datasets
    temperature: NDArray[np.float32]  # [Q]
    prompt: NDArray[np.int32]  # [Q] number inside the data set
    prompt_tokens: NDArray[np.int32]  # [Q] 0 = unknown
    answer_tokens: NDArray[np.int32]  # [Q] >= 1, the stop token included


REQUEST_TYPES: dict[str, type[np.number]] = {
    "dataset": np.int32, "temperature": np.float32, "prompt": np.int32, "prompt_tokens": np.int32,
    "answer_tokens": np.int32,
}  # fmt: skip


def request_arrays(rows: Sequence[tuple[int, float, int, int, int]]) -> Requests:
    """Requests from one tuple each, in the order of the fields."""
    columns = zip(REQUEST_TYPES.items(), zip(*rows, strict=True), strict=True)
    arrays: dict[str, Any] = {name: np.array(column, kind) for (name, kind), column in columns}
    return Requests(**arrays)


@dataclass(frozen=True)
class Recording:
    """N rounds of Q requests, ordered by (request, position). Raises ValueError where arrays disagree."""

    about: About
    requests: Requests
    request: NDArray[np.int32]  # [N]
    position: NDArray[np.int32]  # [N] answer tokens before the round
    counts: NDArray[np.int32]  # [N] nodes
    parents: NDArray[np.int16]  # [N, B] -1 = root; -1 past the count
    log_probs: NDArray[np.float32]  # [N, B] of the path, the draft's, non-increasing; -inf past the count
    accepted: NDArray[np.bool_]  # [N, B]
    chain_log_probs: NDArray[np.float32]  # [N, G] of the greedy chain; -inf past its end
    chain_accepted: NDArray[np.int32]  # [N] tokens of the chain that the target followed
    survivals: NDArray[np.float32] | None = None  # [N, B] by the confidence head; None = the draft has none
    chain_survivals: NDArray[np.float32] | None = None  # [N, G]

    def __post_init__(self) -> None:
        _check(self)

    @property
    def budget(self) -> int:
        """B, nodes of the widest tree."""
        return self.parents.shape[1]

    @property
    def depth(self) -> int:
        """G, tokens of the longest chain."""
        return self.chain_log_probs.shape[1]

    @cached_property
    def depths(self) -> NDArray[np.int32]:
        """[N, B], 1..gamma; 0 past the count."""
        depths = np.zeros(self.parents.shape, np.int32)
        row = np.arange(len(depths))
        for node in range(self.budget):
            parent = self.parents[:, node]
            depths[:, node] = np.where(parent < 0, 0, depths[row, parent]) + 1
        return np.where(self._live, depths, 0)

    @cached_property
    def ranks(self) -> NDArray[np.int32]:
        """[N, B], siblings before a node; 0 past the count."""
        ranks = np.zeros(self.parents.shape, np.int32)
        for node in range(1, self.budget):
            ranks[:, node] = (self.parents[:, :node] == self.parents[:, node, None]).sum(1)
        return np.where(self._live, ranks, 0)

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """[Q] place of each request's position 0 in `rows`."""
        return np.concatenate(([0], np.cumsum(self.requests.answer_tokens[:-1], dtype=np.int64)))

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Round of every position of every answer, [sum of answer_tokens]; see `first`.

        The nearest recorded one at or before it, the request's first where there is none before.
        """
        place = self.first[self.request] + self.position
        nearest = np.searchsorted(place, np.arange(int(self.requests.answer_tokens.sum())), side="right") - 1
        owner = np.repeat(np.arange(len(self.first)), self.requests.answer_tokens)
        return np.maximum(nearest, np.searchsorted(self.request, owner))

    def take(self, keep: NDArray[np.bool_]) -> Recording:
        """The rounds of the requests [Q] to keep. Raises ValueError if none is."""
        if not keep.any():
            raise ValueError("recording: expected at least one request to keep, got none")
        numbers = np.cumsum(keep, dtype=np.int32) - 1
        rounds = keep[self.request]
        arrays = {name: getattr(self, name) for name in ROUND_ARRAYS if getattr(self, name) is not None}
        taken = {name: array[rounds] for name, array in arrays.items()}
        taken["request"] = numbers[taken["request"]]
        requests = Requests(*(getattr(self.requests, name)[keep] for name in REQUEST_ARRAYS))
        return replace(self, requests=requests, **taken)

    def matching(self, *, dataset: str | None = None, temperature: float | None = None) -> NDArray[np.bool_]:
        """[Q] requests of one data set, of one temperature, or both. Raises ValueError if there is none."""
        keep = np.ones(len(self.requests.dataset), bool)
        if dataset is not None:
            if dataset not in self.about.datasets:
                raise ValueError(
                    f"data set: expected one of {', '.join(self.about.datasets)}, got {dataset!r}"
                )
            keep &= self.requests.dataset == self.about.datasets.index(dataset)
        if temperature is not None:
            have = ", ".join(f"{t:g}" for t in np.unique(self.requests.temperature[keep]))
            keep &= self.requests.temperature == np.float32(temperature)
            if not keep.any():
                raise ValueError(
                    f"recording: no request of {dataset or 'any data set'} at temperature {temperature:g}; "
                    f"the temperatures are {have or 'none'}"
                )
        if not keep.any():
            raise ValueError(f"recording: no request of data set {dataset}")
        return keep

    def halves(self, seed: int = 0) -> NDArray[np.bool_]:
        """[Q] whether a request is in the first half; prompts are dealt, data set by data set.

        All temperatures of a prompt fall into the same half.
        """
        first = np.zeros(len(self.requests.dataset), bool)
        for number in range(len(self.about.datasets)):
            mine = self.requests.dataset == number
            prompts = np.random.default_rng(seed).permutation(np.unique(self.requests.prompt[mine]))
            first |= mine & np.isin(self.requests.prompt, prompts[: (len(prompts) + 1) // 2])
        return first

    @cached_property
    def _live(self) -> NDArray[np.bool_]:
        return np.arange(self.budget) < self.counts[:, None]


REQUEST_ARRAYS = tuple(REQUEST_TYPES)
ROUND_ARRAYS = (
    "request", "position", "counts", "parents", "log_probs", "accepted", "chain_log_probs", "chain_accepted",
    "survivals", "chain_survivals",
)  # fmt: skip


def join(parts: list[Recording]) -> Recording:
    """Recordings of the same widths and settings as one. Raises ValueError where they have not."""
    if not parts:
        raise ValueError("join: expected at least one recording, got none")
    first = parts[0]
    for part in parts[1:]:
        if part.about != first.about or (part.budget, part.depth) != (first.budget, first.depth):
            raise ValueError("join: expected recordings of one setting and one width, got different ones")
    offsets = np.cumsum([0] + [len(part.requests.dataset) for part in parts[:-1]])
    requests = Requests(
        *(np.concatenate([getattr(part.requests, name) for part in parts]) for name in REQUEST_ARRAYS)
    )
    arrays = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ROUND_ARRAYS
        if all(getattr(part, name) is not None for part in parts)
    }
    arrays["request"] = np.concatenate(
        [part.request + offset for part, offset in zip(parts, offsets, strict=True)]
    ).astype(np.int32)
    return replace(first, requests=requests, **{"survivals": None, "chain_survivals": None} | arrays)


def _check(r: Recording) -> None:
    """Raise ValueError naming the array that breaks the contract, and the round where one does."""
    rounds, requests = len(r.request), len(r.requests.dataset)
    if not rounds or not requests:
        raise ValueError(f"recording: expected rounds and requests, got {rounds} and {requests}")
    for name in REQUEST_ARRAYS:
        _expect_shape(f"requests.{name}", getattr(r.requests, name), (requests,))
    if r.parents.ndim != 2 or r.chain_log_probs.ndim != 2 or not 1 <= r.parents.shape[1] <= MAX_NODES:
        raise ValueError(
            f"recording: expected parents [N, B] with B in 1..{MAX_NODES} and chain_log_probs [N, G], got "
            f"{r.parents.shape} and {r.chain_log_probs.shape}"
        )
    tree, chain = (rounds, r.parents.shape[1]), (rounds, r.chain_log_probs.shape[1])
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((*ROUND_ARRAYS[:3], "chain_accepted"), (rounds,))
    shapes |= dict.fromkeys(("parents", "log_probs", "accepted", "survivals"), tree)
    shapes |= {"chain_log_probs": chain, "chain_survivals": chain}
    for name, shape in shapes.items():
        if getattr(r, name) is not None:
            _expect_shape(name, getattr(r, name), shape)
    q = r.requests
    _expect("requests.dataset", (q.dataset >= 0) & (q.dataset < len(r.about.datasets)), q.dataset)
    _expect("requests.temperature", (q.temperature >= 0) & (q.temperature < np.inf), q.temperature)
    _expect("requests.prompt_tokens", q.prompt_tokens >= 0, q.prompt_tokens)
    _expect(
        "requests.answer_tokens",
        (q.answer_tokens >= 1) & (q.answer_tokens <= r.about.max_tokens),
        q.answer_tokens,
    )
    _expect("request", (r.request >= 0) & (r.request < requests), r.request)
    _expect("position", (r.position >= 0) & (r.position < q.answer_tokens[r.request]), r.position)
    order = np.diff(r.request.astype(np.int64) * (1 << 32) + r.position)
    _expect("position", np.concatenate(([True], order > 0)), r.position)
    missing = np.setdiff1d(np.arange(requests), r.request)
    if len(missing):
        raise ValueError(f"request: expected a round of every request, got none of request {missing[0]}")
    if r.about.complete and rounds != q.answer_tokens.sum():
        raise ValueError(
            f"recording: expected a round at each of {q.answer_tokens.sum()} positions, got {rounds}"
        )
    node, row = np.arange(r.parents.shape[1]), np.arange(rounds)[:, None]
    live, parents = node < r.counts[:, None], r.parents
    _expect("counts", (r.counts >= 0) & (r.counts <= parents.shape[1]), r.counts)
    _expect("parents", np.where(live, (parents >= -1) & (parents < node), parents == -1).all(1), parents)
    _expect("log_probs", (live == (r.log_probs > -np.inf)).all(1) & _falls(r.log_probs), r.log_probs)
    orphan = r.accepted & (parents >= 0) & ~r.accepted[row, np.maximum(parents, 0)]
    children = np.zeros((rounds, parents.shape[1] + 1), np.int32)  # accepted ones of each row, root first
    np.add.at(children, (np.broadcast_to(row, parents.shape), parents + 1), r.accepted)
    path = ~(orphan | (r.accepted & ~live)).any(1) & (children <= 1).all(1)
    _expect("accepted", path, r.accepted)
    _expect("chain_log_probs", _falls(r.chain_log_probs), r.chain_log_probs)
    length = (r.chain_log_probs > -np.inf).sum(1)
    _expect("chain_accepted", (r.chain_accepted >= 0) & (r.chain_accepted <= length), r.chain_accepted)
    for name in ("survivals", "chain_survivals"):
        values = getattr(r, name)
        if values is not None:
            _expect(name, ((values >= 0) & (values <= 1)).all(1), values)


def _falls(scores: NDArray[np.float32]) -> Any:
    """Whether each row [N, B] is at most 0, not NaN and non-increasing."""
    above = np.concatenate((np.zeros((len(scores), 1), np.float32), scores[:, :-1]), 1)
    return (scores <= above).all(1)


def _expect_shape(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")


def _expect(name: str, fine: Any, values: NDArray[Any]) -> None:
    if not fine.all():
        at = int((~fine).argmax())
        raise ValueError(f"{name}[{at}]: out of range or out of order: {values[at].tolist()}")
