"""What each shape would bring now: the outlooks of plain, chain and tree at one load, kept for some rounds.

Requests differ more than shapes do, so chains and trees are compared on the same drafts: a tree holds its
greedy chain, and every tree round gives a row of both. The level is that of the latest rounds, chain rows
of either shape; a tree that is not in use is that level times what the trees of its last rounds gained
over their own chains.

Under speculation requests that draft poorly stay longer, so the batch fills with them. Plain decoding would
serve the same work with every request in the batch as long as it has tokens: it is priced at the context of a
mean *token* of the latest rounds, not of a mean request, where the host tells it.

A tree that was never drafted gets the benefit of the doubt for `OPTIMISTIC` drafts: one whole path of it
is accepted; so does a chain where a host drafts chains alone. A host that does not tell the chain of its
trees has no chain outlook.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specplug.correction import AcceptanceCorrection
from specplug.cost_curves import Shape
from specplug.outlook import Outlook, RecentRows, outlook
from specplug.prices import Prices, rounded_context, rounded_requests

OPTIMISTIC = 8  # drafts
GAP = 2  # rounds without a draft of a shape after which its next one renews the outlooks
STALE, STALE_ROWS = 64, 32  # after so many rounds without any draft, so many of the rows still count
REFRESH_ROUNDS, OF_LARGE = 32, 128  # outlooks are kept so long; early on, a quarter of the rounds so far
KEPT = 64  # loads
LARGE, SKIPPED = 128, 3  # batches that large are sampled every 4th round: 512 rows are 64 rounds then


SKEW_ROUNDS = 16  # over which the context of a token is averaged, about the rounds that a request stays


class Seen(NamedTuple):
    """Outlooks at one load."""

    outlooks: dict[Shape, Outlook]
    round: int  # when this was computed


class Prospects:
    """The samples of chains and trees, and the outlooks made of them. Bounded memory."""

    def __init__(
        self,
        prices: Prices,
        acceptance: AcceptanceCorrection,
        *,
        budget: int,
        depth: int,
        trees: bool = True,  # False: chains alone are drafted
    ) -> None:
        self._prices, self._acceptance, self._depth = prices, acceptance, depth
        self._drafts_trees = trees
        self._trees, self._of_trees = RecentRows(max(budget, depth)), RecentRows(depth)  # of the same rounds
        self._chains = RecentRows(depth)  # of all rounds that drafted
        self._hope = np.ones((1, min(budget, depth)), np.float32)
        self._last: dict[Shape, int] = {"chain": 0, "tree": 0}
        self._round, self._skipped = 0, SKIPPED
        self._seen: dict[tuple[int, float], Seen] = {}
        self._skew = 0.0  # log of a mean token's context over a mean request's

    def remember(
        self,
        shape: Shape,
        survival: NDArray[np.float32],  # [R, B] not capped
        drafted: NDArray[np.bool_],  # [R]
        chain: NDArray[np.float32] | None,  # [R, gamma] of these trees, where known
    ) -> None:
        """Add the drafts of one round."""
        if self._round - max(self._last.values()) > STALE:
            for sample in (self._trees, self._of_trees, self._chains):
                sample.keep(STALE_ROWS)
        if self._round - self._last[shape] > GAP:
            self._seen.clear()
            self._skipped = SKIPPED
        self._last[shape] = self._round
        self._skipped += 1
        if len(survival) >= LARGE and self._skipped <= SKIPPED:
            return
        self._skipped = 0
        every = bool(drafted.all())
        rows = survival if every else survival[drafted]
        if shape == "chain":
            self._chains.add(rows[:, : self._depth])
            return
        self._trees.add(rows)
        if chain is None:
            self._of_trees.keep(0)
            self._chains.keep(0)
        else:
            rows = chain if every else chain[drafted]
            self._of_trees.add(rows[:, : self._depth])
            self._chains.add(rows[:, : self._depth])

    def skewed(self, *, context: float, emitted_context: float) -> None:
        """Learn from one round: mean committed tokens of a request and of an emitted token's request."""
        if context > 0 and emitted_context > 0:
            self._skew += (math.log(emitted_context / context) - self._skew) / SKEW_ROUNDS

    def of(self, requests: int, context: float) -> Seen:
        """The outlooks of a coming round."""
        self._round += 1
        key = (rounded_requests(requests), rounded_context(context))
        seen = self._seen.get(key)
        longest = OF_LARGE if requests >= LARGE else REFRESH_ROUNDS
        if seen is None or self._round - seen.round >= min(longest, 1 + self._round // 4):
            self._seen.pop(key, None)
            if len(self._seen) >= KEPT:
                del self._seen[next(iter(self._seen))]
            seen = self._seen[key] = self._compute(*key)
        return seen

    def rate(self, shape: Shape, requests: int, context: float) -> float | None:
        """Tokens a second of a shape in use; None while its outlook is a hope."""
        drafts = self._trees if self._drafts_trees else self._chains
        if shape != "plain" and len(drafts) < OPTIMISTIC:
            return None
        seen = self._seen.get((rounded_requests(requests), rounded_context(context)))
        found = (seen or self.of(requests, context)).outlooks.get(shape)
        return found.rate if found else None

    def _compute(self, requests: int, context: float) -> Seen:
        plain = self._plain(requests, context)

        def look(shape: Shape, rows: NDArray[np.float32]) -> Outlook:
            return self._outlook(shape, rows, requests, context, plain)

        served = plain if not self._skew else self._plain(requests, context * math.exp(self._skew))
        outlooks: dict[Shape, Outlook] = {"plain": Outlook(float(requests), served)}
        if not self._drafts_trees:
            rows = self._chains.newest(at_least=OPTIMISTIC, otherwise=self._hope)
            return Seen(outlooks | {"chain": look("chain", rows)}, self._round)
        tree = look("tree", self._trees.newest(at_least=OPTIMISTIC, otherwise=self._hope))
        if len(self._of_trees):
            chain = look("chain", self._chains.newest())
            level = chain.rate / look("chain", self._of_trees.newest()).rate
            tree = Outlook(tree.tokens * level, tree.seconds)
            outlooks["chain"] = chain
        outlooks["tree"] = tree
        return Seen(outlooks, self._round)

    def _plain(self, requests: int, context: float) -> float:
        return float(self._prices.step("plain", requests, requests, 0, context).seconds[0])

    def _outlook(
        self, shape: Shape, rows: NDArray[np.float32], requests: int, context: float, plain: float
    ) -> Outlook:
        def step_seconds(nodes: NDArray[np.int64]) -> NDArray[np.float64]:
            seconds = self._prices.step(shape, requests, requests, int(nodes[-1]), context).seconds[nodes]
            seconds[0] = plain
            return seconds

        return outlook(
            rows,
            requests=requests,
            scale=self._acceptance.factor(shape),
            step_seconds=step_seconds,
            draft_seconds=self._prices.draft(shape, requests, context),
        )
