"""Judges a run under load: answers against plain decoding, memory, cache blocks, refusals, errors.

Nothing here talks to a server. Every function returns what is wrong in words, or a number to be shown.
"""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from load_client import Part, Reply
from load_requests import Ask
from load_watch import Sample

LOGPROB_TOLERANCE = 1e-3  # fp32; seen: below 1e-4
NEAR_TIE = 1e-3  # gap of two log-probabilities that a batch's shape may swap in fp32
FLAT_SHARE = 0.02  # of the memory: growth over the second half that a flat curve may show
SETTLED_SAMPLES = 8  # fewer samples in the second half say nothing about a slope
SLOPE_SECONDS = 300.0  # a second half shorter than this is the caches of a start filling

# The levels of vLLM's log lines, and what only a fault writes.
_ERROR_LINE = re.compile(r"(?:^|\) )(?:ERROR|CRITICAL) |Traceback \(most recent call last\)|\bFATAL\b")


class Divergence(NamedTuple):
    """Two answers to one request that differ: the first place, and what stood there."""

    number: int  # of the request
    part: int  # of its n answers
    what: str
    at: int  # token
    plain: int | None
    ours: int | None


def compare(ask: Ask, plain: Reply, ours: Reply) -> list[Divergence]:
    """Where an answer is not plain decoding's; what a client that left had read must be its beginning."""
    found = []
    if plain.status != 200 or (len(plain.parts) != len(ours.parts) and not ours.left):
        what = f"plain decoding answered {plain.status} with {len(plain.parts)} parts {plain.error[:200]}"
        return [Divergence(ask.number, 0, what, 0, None, None)]
    for index, (want, have) in enumerate(zip(plain.parts, ours.parts, strict=False)):
        ids = want.token_ids[: len(have.token_ids)] if ours.left else want.token_ids
        if ids != have.token_ids:
            pairs = enumerate(zip(ids, have.token_ids, strict=False))
            at = next((k for k, (a, b) in pairs if a != b), min(len(ids), len(have.token_ids)))
            one = _token(want, at), _token(have, at)
            found.append(Divergence(ask.number, index, f"token {at}: {one[0]} became {one[1]}", at, *one))
            continue
        for what in _unlike(want, have, left=ours.left):
            found.append(Divergence(ask.number, index, what, len(ids), None, None))
    return found


def _token(part: Part, at: int) -> int | None:
    return part.token_ids[at] if at < len(part.token_ids) else None


def _unlike(want: Part, have: Part, *, left: bool) -> list[str]:
    """Differences beside the tokens."""
    found = []
    near = zip(want.logprobs, have.logprobs, strict=False)
    worst = max((abs(a - b) for a, b in near), default=0.0)
    if worst > LOGPROB_TOLERANCE:
        found.append(f"log-probabilities differ by {worst:.2g}")
    if left:
        return found
    if len(want.logprobs) != len(have.logprobs):
        found.append(f"{len(want.logprobs)} log-probabilities became {len(have.logprobs)}")
    if want.text != have.text:
        found.append(f"text {want.text[-30:]!r} became {have.text[-30:]!r}")
    if (want.finish, want.stop) != (have.finish, have.stop):
        found.append(f"end {want.finish, want.stop} became {have.finish, have.stop}")
    return found


def is_near_tie(one: Divergence, logprobs: dict[int, float]) -> bool:
    """Whether plain decoding holds both tokens for as good as equally likely. Only a token may be excused.

    `logprobs`: token -> log-probability where the answers part, after all that was asked for but noise.
    """
    if one.plain is None or one.ours is None:
        return False
    if one.plain not in logprobs or one.ours not in logprobs:
        return False
    return abs(logprobs[one.plain] - logprobs[one.ours]) <= NEAR_TIE


def wrong_reply(ask: Ask, reply: Reply) -> str:
    """What is wrong with a reply by itself; empty when nothing is."""
    if ask.manner == "refused":
        fine = reply.status is not None and 400 <= reply.status < 500
        return "" if fine else f"request {ask.number}: expected a 4xx, got {reply.status} {reply.error[:200]}"
    if reply.left:
        return ""
    if reply.status != 200 or reply.error:
        return f"request {ask.number}: {reply.status} {reply.error[:300]} for {str(ask.body)[-300:]}"
    wanted, limit = ask.body.get("n", 1), ask.body["max_tokens"]
    if len(reply.parts) != wanted:
        return f"request {ask.number}: expected {wanted} answers, got {len(reply.parts)}"
    if any(len(part.token_ids) > limit or part.finish not in ("stop", "length") for part in reply.parts):
        ends = [(len(part.token_ids), part.finish) for part in reply.parts]
        return f"request {ask.number}: expected at most {limit} tokens and an end, got {ends}"
    return ""


def second_half(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of the second half of the time; none where they say nothing."""
    if not samples:
        return []
    first, last = samples[0].seconds, samples[-1].seconds
    half = [one for one in samples if one.seconds >= (first + last) / 2]
    long_enough = (last - first) / 2 >= SLOPE_SECONDS and len(half) >= SETTLED_SAMPLES
    return half if long_enough else []


def slope(samples: Sequence[Sample]) -> float | None:
    """MiB a second over the second half, least squares; None where the run was too short to tell."""
    half = second_half(samples)
    if not half:
        return None
    return statistics.linear_regression([one.seconds for one in half], [one.own_mib for one in half]).slope


def leaks(samples: Sequence[Sample]) -> list[str]:
    """Memory that grows, cache blocks or requests that stay when nobody asks."""
    found = []
    growth, half = slope(samples), second_half(samples)
    if growth is not None:
        mib, typical = growth * (half[-1].seconds - half[0].seconds), half[0].own_mib
        if mib > FLAT_SHARE * typical:
            found.append(f"memory grew by {mib:.0f} MiB over the second half, from {typical:.0f}")
    for one in samples:
        if one.idle and (one.cache_used or one.running or one.waiting):
            found.append(
                f"after {one.seconds:.0f} s, idle: {one.running} running, {one.waiting} waiting, "
                f"{one.cache_used:.2%} of the cache in use"
            )
    return found


def log_errors(log: Path) -> list[str]:
    """Lines of a server's log that only a fault writes."""
    return [line for line in log.read_text(errors="replace").splitlines() if _ERROR_LINE.search(line)]
