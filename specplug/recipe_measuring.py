"""What a recipe's measurement must hold beyond types: prompts, sampling, arguments of the bench, and the
numbers that are expected of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

from specplug.arguments import check_sampling

if TYPE_CHECKING:
    from specplug.recipe import Expectation, Recipe

_SAID_ELSEWHERE = (  # arguments of the bench that other keys of a recipe say
    *("engine", "recipe", "target", "draft", "arm", "budget", "dataset", "prompts", "thinking", "count"),
    *("max_tokens", "temperature", "top_p", "out", "resume", "compare"),
)


def check_measuring(recipe: Recipe) -> None:
    """Raises ValueError, "key: expected ..., got ...; the fix", for the first rule that does not hold."""
    _check_load(recipe)
    benched = _concurrency(recipe)
    if recipe.status == "unverified" and recipe.expectations:
        raise ValueError(
            "expectations: expected none at status unverified, got some; "
            "a published number belongs in sources, a measured one makes the recipe verified"
        )
    seen = set()
    for one in recipe.expectations:
        recipe.arm(one.arm)
        _check_expectation(one)
        if one.concurrency not in benched:
            raise ValueError(
                f"expectations: {one.arm}: concurrency: expected one that is benched "
                f"({', '.join(map(str, benched)) or 'none'}), got {one.concurrency}; add it to bench"
            )
        if (one.arm, one.concurrency) in seen:
            raise ValueError(
                f"expectations: {one.arm}: expected one at concurrency {one.concurrency}, got another; "
                "leave one out"
            )
        seen.add((one.arm, one.concurrency))
    first = recipe.arms[0].name
    if recipe.status == "verified" and not any(
        one.arm == first and one.accepted_length_bonus_counted is not None for one in recipe.expectations
    ):
        raise ValueError(
            f"expectations: expected a measured accepted length of arm {first} at status verified, got none"
        )


def _check_load(recipe: Recipe) -> None:
    from specplug.bench_plan import LEAST_MAX_TOKENS  # it reads recipes
    from specplug.recipe import PROMPTS, SHIPPED

    sampling, data = recipe.sampling, recipe.dataset
    if sampling.max_tokens < LEAST_MAX_TOKENS:
        raise ValueError(
            f"sampling.max_tokens: expected {LEAST_MAX_TOKENS} or more, got {sampling.max_tokens}"
        )
    check_sampling(sampling.temperature, sampling.top_p, names=("sampling.temperature", "sampling.top_p"))
    if data.count < 1:
        raise ValueError(f"dataset.count: expected 1 or more prompts, got {data.count}")
    if not all(data.kinds) or not 0 < len(set(data.kinds)) == len(data.kinds):
        raise ValueError(f"dataset.kinds: expected at least one, each once, got {data.kinds}")
    if data.name.startswith(SHIPPED) and data.name != PROMPTS:
        raise ValueError(f"dataset.name: expected {PROMPTS} or a file beside the recipe, got {data.name!r}")


def _concurrency(recipe: Recipe) -> list[int]:
    """Requests in flight of the recipe's loads. Raises ValueError for arguments that the bench refuses."""
    from specplug import bench  # it reads recipes
    from specplug.bench_plan import CONCURRENCY, CPU_CONCURRENCY

    parser = _Parser(prog="specplug bench", add_help=False)
    bench.add_arguments(parser)
    parser.set_defaults(**dict.fromkeys(_SAID_ELSEWHERE))
    a = parser.parse_args(recipe.bench)
    for name in _SAID_ELSEWHERE:
        if getattr(a, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"bench: expected what no other key of the recipe says, got {flag}; leave it out"
            )
    if a.concurrency is None:
        return [] if a.rate else list(CONCURRENCY if recipe.device.kind == "gpu" else CPU_CONCURRENCY)
    if any(value < 1 for value in a.concurrency):
        raise ValueError(f"bench: --concurrency: expected 1 or more, got {min(a.concurrency)}")
    return list(a.concurrency)


def _check_expectation(one: Expectation) -> None:
    from specplug.recipe_rules import check_date

    length, tolerance = one.accepted_length_bonus_counted, one.accepted_length_tolerance
    if (length is None) != (tolerance is None) or (tolerance is not None and tolerance < 0):
        raise ValueError(
            f"expectations: {one.arm}: expected accepted_length_bonus_counted with a tolerance of 0 or "
            f"more, got {length} and {tolerance}"
        )
    if length is not None and length < 1:
        raise ValueError(
            f"expectations: {one.arm}: expected an accepted length of 1 or more, got {length}: "
            "the bonus token counts"
        )
    if length is not None and tolerance is not None and tolerance >= length:
        raise ValueError(
            f"expectations: {one.arm}: accepted_length_tolerance: expected less than the length {length}, "
            f"got {tolerance}; every run would be within it"
        )
    speed = one.output_tokens_per_second
    if speed is not None and (len(speed) != 2 or not 0 < speed[0] <= speed[1]):
        raise ValueError(
            f"expectations: {one.arm}: output_tokens_per_second: expected [lowest, highest], got {speed}"
        )
    if one.concurrency < 1 or one.measured_by.runs < 1:
        raise ValueError(f"expectations: {one.arm}: concurrency and runs: expected 1 or more")
    check_date(f"expectations: {one.arm}: measured_by.date", one.measured_by.date)


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"bench: expected arguments of specplug bench, got {message}; see docs/bench.md")
