"""Which shape a round drafts: the guard, its hysteresis, and probes of what is not in use.

**Guard.** Shapes in order of what they cost: plain, chain, tree. A chain or tree is entered when its
predicted rate beats plain decoding by ``min_gain``, and a tree instead of a chain when it is predicted no
slower: the two are compared on the same drafts, and where chains are in use those are the drafts that chains
come by, at which a tree gains less than at its own (1 % less on the shipped recordings). What is in use is
kept while it is less than half of ``min_gain`` below what it needed, so smaller noise does not make shapes
flap.

**Probes.** A shape not in use is not observed, so now and then one round drafts it. The price of a probe
is the seconds it takes beyond what its tokens are worth at the present rate. Every round saves
`PROBE_SHARE` of its seconds and a probe is paid from the savings: over any stretch of service probes cost
at most that share (of predicted time). Within that, a shape's probes double their interval up to
`LONGEST`, start again from the shortest when one of them pays.

A change of load needs no probe: `specplug.outlook` predicts every batch size from the rows it has.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from specplug.correction import SHAPES
from specplug.cost_curves import Shape
from specplug.outlook import Outlook

PROBE_SHARE = 0.004  # of the seconds; leaves room for prediction errors below 1 %
SHORTEST, LONGEST = 4, 512  # rounds between two probes of one shape
SAVED_PROBES = 8  # the savings are worth at most so many probes, to answer a surprise at once


class ShapeChoice:
    """The state of the choice: the shape in use, the savings, and each shape's probing interval."""

    def __init__(self, *, min_gain: float, first: Shape = "tree") -> None:
        """``first``: in use until a choice is made. Raises ValueError for a negative gain."""
        if not 0 <= min_gain < 1:
            raise ValueError(f"min_gain: expected a share in [0, 1), got {min_gain}; 0.02 is 2 %")
        self.min_gain = min_gain
        self.current = first
        self._savings = 0.0  # seconds
        self._waited = dict.fromkeys(SHAPES, 0)  # rounds since the shape was last drafted
        self._interval = dict.fromkeys(SHAPES, SHORTEST)

    def choose(self, outlooks: Mapping[Shape, Outlook], *, probes: Container[Shape]) -> Shape:
        """The shape of the coming round, in use or probed.

        ``outlooks`` holds the shapes allowed, plain among them; ``probes`` those worth a probe.
        """
        before, self.current = self.current, self._guarded(outlooks)
        if before != self.current:
            self._interval[before] = SHORTEST
        inuse = outlooks[self.current]
        self._savings += PROBE_SHARE * inuse.seconds
        choice, dearest = self.current, 0.0
        for shape, one in outlooks.items():
            self._waited[shape] += 1
            if shape == self.current or shape not in probes:
                continue
            price = max(0.0, one.seconds - one.tokens / inuse.rate)
            dearest = max(dearest, price)
            due = self._waited[shape] >= self._interval[shape] and price <= self._savings
            if due and choice == self.current:
                choice = shape
                self._savings -= price
        self._savings = min(self._savings, SAVED_PROBES * dearest)
        self._waited[choice] = 0
        return choice

    def probed(self, shape: Shape, *, paid: bool) -> None:
        """What a probe of ``shape`` came to: whether its round beat the shape in use."""
        self._interval[shape] = SHORTEST if paid else min(2 * self._interval[shape], LONGEST)

    def _guarded(self, outlooks: Mapping[Shape, Outlook]) -> Shape:
        best: Shape = "plain"
        for shape in SHAPES[1:]:
            if shape in outlooks:
                needed = self.min_gain if best == "plain" else 0.0
                needed -= self.min_gain / 2 if shape == self.current else 0.0
                if outlooks[shape].rate >= outlooks[best].rate * (1 + needed):
                    best = shape
        return best
