"""What a policy sees of recorded rounds, and what it gets for any number of nodes.

Sees: survivals a(v) in node order. Gets: how many tokens the target accepts among the first n nodes, for
every n at once. Survivals are the draft's path probabilities, or calibrated ones; those may put the nodes
into another order, as a served tree is re-ordered.

No request is judged by a calibration that has seen it: `cross_fitted` deals the prompts into halves and
predicts each half by a fit on the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.calibration import Calibration, Coefficients, log_acceptance
from specplug.calibration_fit import Records, fit
from specplug.cost import Shape
from specplug.greedy import greedy_survival
from specplug.recording import Recording, join

FIT_NODES = (
    100_000  # a regime; 7 depths with 5 coefficients each need no more, and the fit stays below a second
)


@dataclass(frozen=True)
class Drafts:
    """One shape's drafts of all N rounds, W nodes wide."""

    survival: NDArray[np.float32]  # [N, W] a(v) in node order, non-increasing, 0 past the last node
    counts: NDArray[np.int32]  # [N] nodes
    accepted: NDArray[np.uint8]  # [N, W + 1] tokens accepted of the first n nodes
    chain: NDArray[np.float32] | None = (
        None  # [N, gamma] a(v) of a tree's greedy chain, as far as it holds it
    )

    def take(
        self,
        rounds: NDArray[np.bool_],  # [N]
    ) -> Drafts:
        """Those of some rounds."""
        chain = None if self.chain is None else self.chain[rounds]
        return Drafts(self.survival[rounds], self.counts[rounds], self.accepted[rounds], chain)


@dataclass(frozen=True)
class Outcomes:
    """A recording, ready to be replayed."""

    recording: Recording
    drafts: dict[Shape, Drafts]

    def take(
        self,
        keep: NDArray[np.bool_],  # [Q]
    ) -> Outcomes:
        """Those of some requests, survivals as they are."""
        rounds = keep[self.recording.request]
        drafts = {shape: drafts.take(rounds) for shape, drafts in self.drafts.items()}
        return Outcomes(self.recording.take(keep), drafts)


def outcomes(recording: Recording, calibration: Calibration | None = None) -> Outcomes:
    """Outcomes under a calibration; None: the draft's own probabilities, in the draft's own order."""
    r = recording
    rounds = len(r.request)
    chain_counts = (r.chain_log_probs > -np.inf).sum(1, dtype=np.int32)
    followed = np.minimum(np.arange(r.depth + 1), r.chain_accepted[:, None])
    node = np.arange(r.depth)
    tree, tree_accepted, parents = r.log_probs, r.accepted, r.parents.astype(np.int64)
    chain = r.chain_log_probs
    if calibration is not None:
        tree = _calibrated(r, calibration, r.log_probs, r.parents, r.depths, r.ranks, r.survivals)
        order = np.argsort(-tree, axis=1, kind="stable")
        tree = np.take_along_axis(tree, order, 1)
        tree_accepted = np.take_along_axis(tree_accepted, order, 1)
        parents = _moved(parents, order)
        above = np.broadcast_to(node - 1, chain.shape)
        deep = np.where(node < chain_counts[:, None], node + 1, 0)
        flat = np.zeros(chain.shape, np.int32)
        chain = _calibrated(r, calibration, chain, above, deep, flat, r.chain_survivals)
    nothing = Drafts(
        np.zeros((rounds, 1), np.float32), np.zeros(rounds, np.int32), np.zeros((rounds, 2), np.uint8)
    )
    drafts: dict[Shape, Drafts] = {
        "plain": nothing,
        "chain": Drafts(np.exp(chain), chain_counts, followed.astype(np.uint8)),
        "tree": Drafts(
            np.exp(tree),
            r.counts,
            _accepted_of_first(tree_accepted),
            greedy_survival(
                torch.from_numpy(np.exp(tree)), torch.from_numpy(parents.astype(np.int32)), max_depth=r.depth
            ).numpy(),
        ),
    }
    return Outcomes(recording, drafts)


def fitted(recording: Recording) -> Calibration:
    """A calibration of the trees' path probabilities, one regime a recorded temperature; the hottest also
    serves what is hotter, unless that is greedy.

    The confidence head is not used: on the shipped recordings it moves the log-loss of held-out nodes by less
    than half a per cent.
    """
    temperatures = np.unique(recording.requests.temperature)
    regimes: dict[float | None, Records] = {}
    for temperature in temperatures:
        hottest = temperature == temperatures[-1] and temperature > 0
        mine = recording.requests.temperature[recording.request] == temperature
        regimes[None if hottest else float(temperature)] = _records(recording, mine)
    return fit(regimes, target=recording.about.target, draft=recording.about.draft)


def cross_fitted(recording: Recording) -> Outcomes:
    """Calibrated outcomes of all requests, each half by the fit on the other half.

    The requests stand in another order than in ``recording``: those of the first half first. Raises
    ValueError for a recording of one prompt.
    """
    first = recording.halves()
    if first.all():
        raise ValueError("recording: expected prompts for two halves, got one prompt a data set; record more")
    halves = [recording.take(first), recording.take(~first)]
    parts = [outcomes(mine, fitted(other)) for mine, other in zip(halves, reversed(halves), strict=True)]
    drafts = {shape: _after(*(part.drafts[shape] for part in parts)) for shape in parts[0].drafts}
    return Outcomes(join(halves), drafts)


def _after(first: Drafts, then: Drafts) -> Drafts:
    """The drafts of one set of rounds after those of another."""
    joined = {
        name: np.concatenate((getattr(first, name), getattr(then, name)))
        for name in ("survival", "counts", "accepted", "chain")
        if getattr(first, name) is not None
    }
    return Drafts(**joined)


def _moved(
    parents: NDArray[np.int64],  # [N, B] -1 = root
    order: NDArray[np.int64],  # [N, B] old node at each new place
) -> NDArray[np.int64]:
    """Parents of nodes in a new order."""
    place = np.argsort(order, axis=1)
    above = np.take_along_axis(parents, order, 1)
    return np.where(above < 0, -1, np.take_along_axis(place, np.maximum(above, 0), 1))


def _accepted_of_first(
    accepted: NDArray[np.bool_],  # [N, B]
) -> NDArray[np.uint8]:
    """[N, B + 1]: accepted nodes among the first 0..B."""
    return np.pad(np.cumsum(accepted, axis=1, dtype=np.uint8), ((0, 0), (1, 0)))


def _calibrated(
    recording: Recording,
    calibration: Calibration,
    log_probs: NDArray[np.float32],  # [N, W]
    parents: NDArray[np.integer],  # [N, W]
    depths: NDArray[np.integer],  # [N, W]
    ranks: NDArray[np.integer],  # [N, W]
    survivals: NDArray[np.float32] | None,  # [N, W]
) -> NDArray[np.float32]:
    """log a(v), [N, W], no child above its parent, -inf where there is no node."""
    temperatures = recording.requests.temperature[recording.request]
    log_a = log_acceptance(
        Coefficients.of(calibration),
        torch.from_numpy(log_probs),
        parents=torch.from_numpy(parents.astype(np.int32)),
        depths=torch.from_numpy(depths.astype(np.int32)),
        ranks=torch.from_numpy(ranks.astype(np.int32)),
        temperatures=torch.from_numpy(temperatures),
        max_depth=max(int(depths.max()), 1),
        confidence=None if survivals is None else torch.from_numpy(survivals),
    )
    return log_a.numpy()


def _records(
    recording: Recording,
    rounds: NDArray[np.bool_],  # [N] to take nodes from
) -> Records:
    """Nodes of evenly spaced rounds, about `FIT_NODES` of them."""
    r = recording
    which = np.flatnonzero(rounds)
    which = which[:: max(1, int(r.counts[which].sum()) // FIT_NODES)]
    live = np.arange(r.budget) < r.counts[which][:, None]
    return Records(
        log_probs=r.log_probs[which][live].astype(np.float64),
        depths=r.depths[which][live].astype(np.int64),
        ranks=r.ranks[which][live].astype(np.int64),
        accepted=r.accepted[which][live],
    )
