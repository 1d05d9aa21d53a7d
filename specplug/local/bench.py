"""Single rounds of the local loop, timed: what `specplug profile --engine local` measures.

A round's cost does not depend on what is in the caches, so a context is slots that count as committed, not
tokens that were computed. Verification includes the walk and the commit, the draft includes building. Time
in which other processes kept this one off the processor is not counted.
"""

from __future__ import annotations

import time

import torch

from specplug.local.draft import Draft, Proposal
from specplug.local.loop import Clock, Requests, Session
from specplug.local.method import Method
from specplug.local.target import Target
from specplug.profiling import Point
from specplug.run_delay import waited_seconds
from specplug.step_log import Step
from specplug.tree import DraftTree


class OwnClock(Clock):
    """A clock that stands still while this thread waits for a core."""

    waited = 0.0

    def charge(self, step: str) -> None:
        """Count the time since the last call to ``step``, without the waiting in it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before, now, waited = waited_seconds(), time.perf_counter(), waited_seconds()
        while waited != before:  # a wait between the readings belongs to both of them or to none
            before, now, waited = waited, time.perf_counter(), waited_seconds()
        self.seconds[step] += now - self.last - (waited - self.waited)
        self.last, self.waited = now, waited


class ShortChain(Method):
    """The first ``budget`` nodes of the chain."""

    __slots__ = ()

    def build(self, draft: Draft, proposal: Proposal) -> DraftTree:
        whole, nodes = super().build(draft, proposal), self.budget
        return DraftTree(
            tokens=whole.tokens[:, :nodes],
            parents=whole.parents[:, :nodes],
            depths=whole.depths[:, :nodes],
            scores=whole.scores[:, :nodes],
            counts=whole.counts.clamp(max=nodes),
        )


class LocalBench:
    """Rounds of one pair of models; keeps the caches of the last requests and context."""

    def __init__(self, target: Target, draft: Draft, *, budget: int, candidates: int) -> None:
        """``budget``: nodes of the tree whose drafting is measured, at least those of every point."""
        self.target, self.draft, self.budget, self.candidates = target, draft, budget, candidates
        self._held: tuple[int, int] | None = None
        self._session: Session | None = None

    @torch.inference_mode()
    def sample(self, point: Point) -> Step:
        """One round of every request at this point."""
        session = self._at(point.requests, point.context)
        live = point.context + max(1 + self.budget, 1 + self.draft.depth, self.draft.block)
        before = dict(session.clock.seconds)
        session.clock.charge("prefill")
        if point.shape == "plain":
            session.plain(live).tolist()
            session.clock.charge("verify")
        else:
            session.method = self._method(point)
            session.width = 1 + point.nodes
            _, _, walked = session.speculate(live)
            walked.tokens.tolist()
            session.clock.charge("commit")
        spent = {name: seconds - before[name] for name, seconds in session.clock.seconds.items()}
        whole = point.nodes == (self.draft.depth if point.shape == "chain" else self.budget)
        return Step(
            requests=point.requests,
            rows=point.requests * (1 + point.nodes),
            nodes=point.requests * point.nodes,
            context=point.context,
            verify_seconds=spent["verify"] + spent["commit"],
            # What a round drafts is always the whole budget, of which a smaller tree is a prefix, and the
            # whole chain.
            draft_seconds=spent["draft"] + spent["build"] if point.shape != "plain" and whole else 0.0,
            verified=point.shape,
            drafted=point.shape,
            forced=True,
        )

    def _method(self, point: Point) -> Method:
        if point.shape == "chain":
            return ShortChain("chain", point.nodes)
        return Method("tree", point.nodes, self.candidates)

    def _at(self, requests: int, context: int) -> Session:
        if self._session is None or self._held != (requests, context):
            self._session = None  # its caches go before the next ones are made
            batch = Requests([[0] * (context + 1)] * requests, limit=self.budget, stop=frozenset())
            tree = Method("tree", self.budget, self.candidates)
            self._session = Session(
                self.target, self.draft, tree, batch, temperature=0.0, seeds=range(requests)
            )
            self._session.clock = OwnClock(self._session.device)
            self._session.anchors = torch.zeros_like(self._session.roots)
            self._held = requests, context
        return self._session
