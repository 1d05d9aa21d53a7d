"""What to measure and how often: the plan of a profile, and the loop that works it off.

A point is one shape at some requests, nodes and context. Points of the same requests and context are measured
in turns, so that a busy spell of the machine hits them alike. Every sample is logged when it is taken
(`specplug.step_log`); a resumed run counts what the log has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

from tqdm import tqdm

from specplug.cost_curves import Shape
from specplug.cost_fit import median
from specplug.step_log import Step, append_steps, read_steps


class Point(NamedTuple):
    """One thing to measure."""

    context: int  # committed tokens of every request
    requests: int
    shape: Shape
    nodes: int  # of each request; 0 for plain


class Limits(NamedTuple):
    """When to stop repeating."""

    spread: float  # standard error of the median over the median
    least: int  # repeats of a point
    most: int
    seconds: float  # of the whole run


class Bench(Protocol):
    """Something that runs steps."""

    def sample(self, point: Point) -> Step:
        """Run one step and say what it took. The first one of a point is thrown away."""


def plan(
    *, requests: Sequence[int], nodes: Sequence[int], contexts: Sequence[int], depth: int
) -> list[Point]:
    """Plain decoding, the chain of ``depth`` nodes, half as many and one, and trees of each of ``nodes``,
    everywhere.
    """
    kinds: list[tuple[Shape, int]] = [
        ("plain", 0),
        *(("chain", n) for n in sorted({1, (depth + 1) // 2, depth})),
        *(("tree", n) for n in sorted(set(nodes))),
    ]
    return [
        Point(context, count, shape, each)
        for context in sorted(set(contexts))
        for count in sorted(set(requests))
        for shape, each in kinds
    ]


def measure(points: Sequence[Point], bench: Bench, folder: Path, limits: Limits, *, progress: bool) -> int:
    """Sample every point until its median is known to ``limits``; the number of points left unmeasured.

    Time is shared out evenly over the points that are left; each gets its least repeats as long as there is
    any time at all.
    """
    taken: dict[Point, list[float]] = {point: [] for point in points}
    for step in read_steps(folder):
        if step_point(step) in taken:
            taken[step_point(step)].append(step.verify_seconds)
    began, left = time.monotonic(), len(points)
    with tqdm(total=len(points), disable=not progress, unit="point") as bar:
        for (context, requests), members in groupby(points, key=lambda point: point[:2]):
            group = [point for point in members if not _settled(taken[point], limits)]
            done = sum(1 for point in points if point[:2] == (context, requests)) - len(group)
            left -= done
            bar.update(done)
            bar.set_description(f"{requests} requests, context {context}")
            share = (limits.seconds - (time.monotonic() - began)) / max(left, 1)
            ends = time.monotonic() + share * len(group)
            for point in group:
                if time.monotonic() < began + limits.seconds:
                    bench.sample(point)
            while group and time.monotonic() < began + limits.seconds:
                for point in group:
                    step = bench.sample(point)
                    append_steps(folder, [step])
                    taken[point].append(step.verify_seconds)
                late = time.monotonic() > ends
                open_points = [
                    point
                    for point in group
                    if not (_settled(taken[point], limits) or (late and len(taken[point]) >= limits.least))
                ]
                bar.update(len(group) - len(open_points))
                left -= len(group) - len(open_points)
                group = open_points
    return sum(1 for samples in taken.values() if len(samples) < limits.least)


def step_point(step: Step) -> Point:
    """The point that a logged step of ``measure`` is a sample of."""
    return Point(round(step.context), step.requests, step.verified, step.nodes // step.requests)


def _settled(seconds: Sequence[float], limits: Limits) -> bool:
    return bool(seconds) and median(seconds).settled(
        spread=limits.spread, least=limits.least, most=limits.most
    )
