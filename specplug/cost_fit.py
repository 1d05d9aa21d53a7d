"""A cost table from logged steps: medians by shape, requests, rows and context.

The median shrugs off the first step of a shape (compilation, graph capture) and the machine's hiccups. Its
standard error is estimated from the median absolute deviation, as for normal noise; it says how well the
median is known, not how much steps vary.

Steps with prefill rows are left out: their time is the prefill's. A table whose steps did not execute what
was asked, or always executed the same, is refused: a profiler whose forced budgets are ignored yields a table
that looks right and says nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specplug.cost import CostTable, from_probes
from specplug.cost_curves import Probe, Shape
from specplug.provenance import Provenance
from specplug.step_log import Step

LEAST_REPEATS = 3  # of a median
NORMAL_DEVIATION = 1.4826  # standard deviation over median absolute deviation, of a normal law
MEDIAN_ERROR = 1.2533  # standard error of the median over that of the mean, of a normal law: sqrt(pi / 2)


class Group(NamedTuple):
    """What shares a median."""

    shape: Shape
    requests: int
    rows: int
    context: int  # number of the context


class Median(NamedTuple):
    """A median and how well it is known."""

    seconds: float
    error_seconds: float  # standard error
    repeats: int

    def settled(self, *, spread: float, least: int, most: int) -> bool:
        """Whether it needs no further repeat: enough of them, and known to ``spread`` of itself."""
        known = self.error_seconds <= spread * self.seconds
        return self.repeats >= most or (self.repeats >= least and known)


def median(seconds: Sequence[float]) -> Median:
    """Median of one sample or more, in seconds."""
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(one - middle) for one in seconds)
    error = MEDIAN_ERROR * NORMAL_DEVIATION * deviation / math.sqrt(len(seconds))
    return Median(middle, error, len(seconds))


def verify_groups(
    steps: Iterable[Step], *, contexts: Sequence[int], requests: Iterable[int] | None = None
) -> dict[Group, list[Step]]:
    """The steps without prefill, by what the target did; of these request counts, None = of all.

    A step belongs to the nearest of ``contexts``. Raises RuntimeError for a step that did not compute its
    roots and nodes and nothing else.
    """
    wanted = None if requests is None else set(requests)
    groups: dict[Group, list[Step]] = {}
    for step in steps:
        if step.prefill_rows or step.verify_seconds <= 0 or step.requests < 1:
            continue
        if step.rows != step.requests + step.nodes:
            raise RuntimeError(
                f"a step of {step.requests} requests and {step.nodes} nodes: expected "
                f"{step.requests + step.nodes} executed rows, got {step.rows}; the engine does not execute "
                "the budgets that it is given, so no table can be measured"
            )
        if wanted is None or step.requests in wanted:
            key = Group(step.verified, step.requests, step.rows, _nearest(contexts, step.context))
            groups.setdefault(key, []).append(step)
    return groups


def fit(
    steps: Sequence[Step],
    *,
    contexts: Sequence[int],
    requests: Sequence[int] | None = None,
    provenance: Provenance | None = None,
    graph_sizes: Sequence[int] = (),
) -> CostTable:
    """The table of these steps; medians of fewer than three are left out.

    The context of a probe is the mean over all steps that belong to it. Raises RuntimeError where the steps
    did not execute their budgets, where no median has three steps, and where rows never differ.
    """
    groups = verify_groups(steps, contexts=contexts, requests=requests)
    verify = {key: members for key, members in groups.items() if len(members) >= LEAST_REPEATS}
    if not verify:
        raise RuntimeError(
            f"{len(steps)} logged steps, and no {LEAST_REPEATS} of them with the same requests, rows and "
            "context; measure longer (--max-minutes)"
        )
    _check_distinct(verify)
    context = {
        number: float(
            np.mean([s.context for key, members in verify.items() if key.context == number for s in members])
        )
        for number in {key.context for key in verify}
    }
    draft: dict[Group, list[float]] = {}
    measured = {(key.requests, key.context) for key in verify}
    for step in steps:
        key = Group(step.drafted, step.requests, 0, _nearest(contexts, step.context))
        if step.drafted != "plain" and step.draft_seconds > 0 and (key.requests, key.context) in measured:
            draft.setdefault(key, []).append(step.draft_seconds)
    return from_probes(
        _probes({key: [s.verify_seconds for s in members] for key, members in verify.items()}, context),
        _probes({key: times for key, times in draft.items() if len(times) >= LEAST_REPEATS}, context),
        provenance=provenance,
        graph_sizes=graph_sizes,
    )


def _probes(groups: dict[Group, list[float]], context: dict[int, float]) -> list[Probe]:
    probes = []
    for key, seconds in groups.items():
        middle = median(seconds)
        probes.append(
            Probe(
                shape=key.shape,
                requests=key.requests,
                tokens=key.rows,
                context=context[key.context],
                median_seconds=middle.seconds,
                spread_seconds=middle.error_seconds,
                repeats=middle.repeats,
            )
        )
    return probes


def _check_distinct(groups: Iterable[Group]) -> None:
    """Raise RuntimeError unless some request count was run with different rows."""
    rows: dict[int, set[int]] = {}
    for key in groups:
        rows.setdefault(key.requests, set()).add(key.rows)
    if all(len(seen) == 1 for seen in rows.values()):
        found = ", ".join(f"{requests} request(s): {seen} rows" for requests, seen in sorted(rows.items()))
        raise RuntimeError(
            f"the steps cannot be told apart: every request count always ran the same rows ({found}); is the "
            "engine in profiling mode (explore)?"
        )


def _nearest(contexts: Sequence[int], context: float) -> int:
    return min(range(len(contexts)), key=lambda number: abs(contexts[number] - context))
