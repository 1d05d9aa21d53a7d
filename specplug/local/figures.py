"""The figures of an evaluation, from its records.

Accepted length is tokens a round, the bonus token counted: the ratio of sums over prompts, so that a long
answer weighs more. Rounds of one answer resemble each other, so standard errors treat the *prompt* as the
unit (linearised ratio estimator, Cochran, Sampling Techniques, section 6): with residuals d_i = t_i - m r_i,

    m = sum t / sum r,    se(m)^2 = n / (n - 1) * sum d_i^2 / (sum r)^2

A ratio of two methods' accepted lengths pairs them prompt by prompt: its residuals are e_i = d_i / sum t of
one minus that of the other, se = ratio * sqrt(n / (n - 1) * sum e_i^2). A round that a stop token cuts counts
what it emitted up to there; one that the token limit cuts counts in full.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from specplug.local.records import Record

NGRAM = 4  # of the distinct n-gram ratio, as in the literature on degenerate text


class Estimate(NamedTuple):
    """A figure and its standard error; None from fewer than two prompts."""

    value: float
    standard_error: float | None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one data set at one temperature."""

    dataset: str
    temperature: float
    method: str
    prompts: int
    tokens: int  # of the answers
    rounds: int
    accepted_length: Estimate
    over_chain: Estimate | None  # ratio of accepted lengths; None where no chain was run
    accepted_by_position: list[Estimate]  # share of rounds that accepted at least 1, 2, ... drafted tokens
    tokens_per_forward: float  # the prompt's own forward counted
    wall_ratio: float | None  # median over batches of plain's seconds by this method's, prompt included
    wall_ratio_quartiles: tuple[float, float] | None
    wall_over_chain: float | None
    step_milliseconds: dict[str, float]  # a round, mean; "prefill" a batch
    tokens_per_second: float  # median over batches
    distinct_ngrams: float | None  # distinct 4-grams by all, mean over answers that have one
    identical: int | None  # answers equal to plain decoding's
    largest_gap: float | None  # of all answers, see Record.gaps


def rows(records: Sequence[Record]) -> list[Row]:
    """Every method's figures, by data set and over all data sets ("all", where there are several)."""
    groups: dict[tuple[str, float], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    several = len({record.dataset for record in records}) > 1
    for record in records:
        for dataset in (record.dataset, "all") if several else (record.dataset,):
            groups[dataset, record.temperature][record.method].append(record)
    return [
        _row(dataset, temperature, method, by_method)
        for (dataset, temperature), by_method in groups.items()
        for method in by_method
    ]


def accepted_length(records: Sequence[Record]) -> Estimate:
    """Tokens a round, over prompts."""
    sums = [(sum(one), len(one)) for record in records for one in record.emitted]
    return ratio([t for t, _ in sums], [r for _, r in sums])


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Ratio of sums with the standard error of the module's docstring; one pair a prompt."""
    total = sum(denominators)
    value = sum(numerators) / total
    residuals = [t - value * r for t, r in zip(numerators, denominators, strict=True)]
    return Estimate(value, _error(residuals, scale=1 / total))


def ratio_of_ratios(mine: Sequence[Record], theirs: Sequence[Record]) -> Estimate:
    """My accepted length by theirs, paired by prompt. Raises ValueError where the prompts differ."""
    pairs = [_by_prompt(mine), _by_prompt(theirs)]
    if pairs[0].keys() != pairs[1].keys():
        raise ValueError("records: expected the same prompts on both sides of a ratio")
    lengths, residuals = [], []
    for side in pairs:
        tokens = sum(t for t, _ in side.values())
        m = tokens / sum(r for _, r in side.values())
        lengths.append(m)
        residuals.append([(t - m * r) / tokens for t, r in (side[key] for key in pairs[0])])
    value = lengths[0] / lengths[1]
    return Estimate(value, _error([a - b for a, b in zip(*residuals, strict=True)], scale=value))


def distinct_ngrams(tokens: Sequence[int]) -> float | None:
    """Distinct n-grams by all of one answer; None where it is too short for one."""
    grams = list(zip(*(tokens[i:] for i in range(NGRAM)), strict=False))
    return len(set(grams)) / len(grams) if grams else None


def _row(dataset: str, temperature: float, method: str, by_method: dict[str, list[Record]]) -> Row:
    mine, plain, chain = by_method[method], by_method.get("plain"), by_method.get("chain")
    emitted = [count for record in mine for one in record.emitted for count in one]
    answers = [answer for record in mine for answer in record.tokens]
    batches_rounds = sum(max(map(len, record.emitted)) for record in mine)
    walls = _walls(plain, mine) if plain else None
    distinct = [d for answer in answers if (d := distinct_ngrams(answer)) is not None]
    steps = {
        step: 1e3
        * sum(record.seconds[step] for record in mine)
        / (len(mine) if step == "prefill" else batches_rounds)
        for step in mine[0].seconds
    }
    return Row(
        dataset=dataset,
        temperature=temperature,
        method=method,
        prompts=len(answers),
        tokens=sum(map(len, answers)),
        rounds=len(emitted),
        accepted_length=accepted_length(mine),
        over_chain=ratio_of_ratios(mine, chain) if chain else None,
        accepted_by_position=[
            ratio(*_survivors(mine, position)) for position in range(1, max(emitted, default=1))
        ],
        tokens_per_forward=sum(map(len, answers)) / (len(emitted) + len(answers)),
        wall_ratio=statistics.median(walls) if walls else None,
        wall_ratio_quartiles=_quartiles(walls) if walls else None,
        wall_over_chain=statistics.median(_walls(chain, mine)) if chain else None,
        step_milliseconds=steps,
        tokens_per_second=statistics.median(
            sum(map(len, record.tokens)) / record.wall_seconds for record in mine
        ),
        distinct_ngrams=statistics.fmean(distinct) if distinct else None,
        identical=_identical(plain, mine) if plain else None,
        largest_gap=max((gap for record in mine for gap in record.gaps), default=None),
    )


def _survivors(records: Sequence[Record], position: int) -> tuple[list[int], list[int]]:
    """Rounds of each prompt that accepted at least ``position`` tokens, and all its rounds."""
    rounds = [one for record in records for one in record.emitted]
    return [sum(count > position for count in one) for one in rounds], [len(one) for one in rounds]


def _walls(base: Sequence[Record], mine: Sequence[Record]) -> list[float]:
    """Seconds a token of ``base`` by mine, batch by batch (answers can differ below fp32)."""
    slow = {(record.dataset, record.prompts[0]): record for record in base}
    return [
        _seconds_per_token(slow[record.dataset, record.prompts[0]]) / _seconds_per_token(record)
        for record in mine
        if (record.dataset, record.prompts[0]) in slow
    ]


def _seconds_per_token(record: Record) -> float:
    return record.wall_seconds / sum(map(len, record.tokens))


def _identical(plain: Sequence[Record], mine: Sequence[Record]) -> int:
    expected = {
        (record.dataset, number): answer
        for record in plain
        for number, answer in zip(record.prompts, record.tokens, strict=True)
    }
    return sum(
        answer == expected.get((record.dataset, number))
        for record in mine
        for number, answer in zip(record.prompts, record.tokens, strict=True)
    )


def _by_prompt(records: Sequence[Record]) -> dict[tuple[str, int], tuple[int, int]]:
    return {
        (record.dataset, number): (sum(one), len(one))
        for record in records
        for number, one in zip(record.prompts, record.emitted, strict=True)
    }


def _error(residuals: Sequence[float], *, scale: float) -> float | None:
    n = len(residuals)
    return scale * math.sqrt(n / (n - 1) * sum(d * d for d in residuals)) if n > 1 else None


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high
