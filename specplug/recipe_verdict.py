"""Whether a measured run is what its recipe promises."""

from __future__ import annotations

from typing import NamedTuple

from specplug.bench_result import BenchResult, Load, Quality
from specplug.recipe import Expectation, Recipe


class Verdict(NamedTuple):
    """One number against its expectation; measured None: the run has no such number."""

    arm: str
    concurrency: int | None  # None: of no load
    quantity: str
    expected: str
    measured: float | None
    held: bool

    def __str__(self) -> str:
        counted = isinstance(self.measured, int)
        got = "nothing" if self.measured is None else f"{self.measured:{'' if counted else '.3f'}}"
        word = "as expected" if self.held else "NOT as expected"
        at = self.arm if self.concurrency is None else f"{self.arm}, {self.concurrency} in flight"
        return f"{at}: {self.quantity} {got}, expected {self.expected}: {word}"


def judge(recipe: Recipe, result: BenchResult, arms: list[str] | None = None) -> list[Verdict]:
    """Every number that the recipe expects of these arms (None: of all), medians of the run's repeats.

    And where the run compared text: greedy answers are plain decoding's, near ties aside.
    """
    verdicts: list[Verdict] = []
    for one in recipe.expectations:
        if arms is None or one.arm in arms:
            verdicts += _judge(one, result)
    if verdicts:  # text counts only beside a number that was expected
        verdicts += [_judge_text(one) for one in result.quality if one.agreement is not None]
    return verdicts


def reproduced(verdicts: list[Verdict]) -> bool:
    """All numbers hold, and there is one."""
    return bool(verdicts) and all(one.held for one in verdicts)


def _judge_text(quality: Quality) -> Verdict:
    assert quality.agreement is not None
    faults = quality.agreement.faults
    return Verdict(quality.arm, None, "greedy answers unlike plain decoding's", "0", faults, faults == 0)


def _judge(one: Expectation, result: BenchResult) -> list[Verdict]:
    cell = result.cell(one.arm, Load(concurrency=one.concurrency))
    found = []
    if one.accepted_length_bonus_counted is not None and one.accepted_length_tolerance is not None:
        wanted, tolerance = one.accepted_length_bonus_counted, one.accepted_length_tolerance
        got = None if cell is None else cell.median("rounds", "accepted_length")
        held = got is not None and abs(got - wanted) <= tolerance
        text = f"{wanted:g} +- {tolerance:g}"
        found.append(Verdict(one.arm, one.concurrency, "accepted length (bonus counted)", text, got, held))
    if one.output_tokens_per_second is not None:
        low, high = one.output_tokens_per_second
        got = None if cell is None else cell.median("output_tokens_per_second")
        held = got is not None and low <= got <= high
        found.append(Verdict(one.arm, one.concurrency, "output tokens/s", f"{low:g} to {high:g}", got, held))
    return found
