"""Requests over every pair of values of any two parameters: what may be asked for, in few combinations.

A combination is a row, parameter -> label. Rows are chosen greedily by the pairs that few rows have yet, so a
larger count covers every pair several times. Engine-level parameters make the engines, and the engine is one
more parameter of a request: each of a request's values meets each of an engine's.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from comparing import differences
from engine_rig import Output, _output
from prompts import cut

Cell = tuple[str, str]  # a parameter and the label of one of its values
Row = dict[str, str]

JSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
# Tokens of several characters: a grammar takes a stop token for its end, and must have others to go on with.
STOP_IDS = list(range(260, 600, 4))
# parameter -> label of a value -> arguments of SamplingParams
REQUESTS: dict[str, dict[str, dict[str, Any]]] = {
    "temperature": {t: {"temperature": float(t)} for t in ("0", "0.7", "1.2")},
    "top_k": {"off": {}, "5": {"top_k": 5}, "40": {"top_k": 40}},
    "top_p": {"off": {}, "0.9": {"top_p": 0.9}},
    "min_p": {"off": {}, "0.1": {"min_p": 0.1}},
    "repetition_penalty": {"off": {}, "1.3": {"repetition_penalty": 1.3}},
    "presence_penalty": {"off": {}, "0.8": {"presence_penalty": 0.8}},
    "frequency_penalty": {"off": {}, "0.9": {"frequency_penalty": 0.9}},
    "logit_bias": {"none": {}, "three": {"logit_bias": {11: 4.0, 202: -100.0, 300: 2.5}}},
    "bad_words": {"none": {}, "four": {"bad_words": ["self", "return", " the", " in"]}},
    "allowed_token_ids": {"all": {}, "600": {"allowed_token_ids": list(range(100, 700))}},
    "stop_token_ids": {
        "none": {},
        "85": {"stop_token_ids": STOP_IDS},
        "85, min_tokens": {"stop_token_ids": STOP_IDS, "min_tokens": 4},
    },
    "stop": {
        "none": {},
        "two": {"stop": ["e", ", "]},
        "kept": {"stop": ["\n"], "include_stop_str_in_output": True},
    },
    "logprobs": {"none": {}, "0": {"logprobs": 0}, "3": {"logprobs": 3}},
    "prompt_logprobs": {"none": {}, "2": {"prompt_logprobs": 2}},
    "structured_outputs": {
        "none": {},
        "regex": {"structured_outputs": {"regex": r"[a-z_]{4} [0-9]{6}\n"}},
        "json": {"structured_outputs": {"json": JSON}},
        "choice": {"structured_outputs": {"choice": ["True", "False", "None or less"]}},
    },
    "n": {"1": {}, "2": {"n": 2}},
    "max_tokens": {m: {"max_tokens": int(m)} for m in ("1", "5", "12")},
    "prompt": {"20 tokens": {}, "70 tokens": {}},
}  # fmt: skip
# parameter -> label of a value -> arguments of engine_rig.engine, but for those of its tree
ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "draft": {"dflash": {}, "dspark": {}},
    "budget": {"1": {}, "7": {}, "16": {}},
    "async_scheduling": {"off": {"async_scheduling": False}, "on": {"async_scheduling": True}},
    "prefix_caching": {"off": {"enable_prefix_caching": False}, "on": {"enable_prefix_caching": True}},
    "chunk": {"64": {"max_num_batched_tokens": 64}, "1024": {"max_num_batched_tokens": 1024}},
}
SAMPLING = ({"top_k": {"5", "40"}}, {"top_p": {"0.9"}}, {"min_p": {"0.1"}}, {"n": {"2"}})
# Values that do not stand together, with the reason.
CONFLICTS: list[tuple[Mapping[str, set[str]], Mapping[str, set[str]], str]] = [
    *(({"temperature": {"0"}}, other, "vLLM refuses it or takes no notice") for other in SAMPLING),
    (
        {"stop_token_ids": {"85, min_tokens"}},
        {"max_tokens": {"1"}},
        "vLLM refuses more min_tokens than max_tokens",
    ),
    (
        {"structured_outputs": {"regex", "json", "choice"}},
        {"allowed_token_ids": {"600"}},
        "no token may be left",
    ),
    (
        {"structured_outputs": {"regex", "json", "choice"}},
        {"stop_token_ids": {"85, min_tokens"}},
        "an ended grammar allows the end alone",
    ),
]


def may_stand_together(one: Cell, other: Cell) -> bool:
    for left, right, _ in CONFLICTS:
        for (a, label_a), (b, label_b) in ((one, other), (other, one)):
            if label_a in left.get(a, ()) and label_b in right.get(b, ()):
                return False
    return True


def fits(row: Row, name: str, label: str) -> bool:
    """Whether a value may stand with the values of all other parameters of the row."""
    return all(may_stand_together((name, label), cell) for cell in row.items() if cell[0] != name)


def pairs(parameters: Mapping[str, Sequence[str]]) -> Iterator[frozenset[Cell]]:
    """Every two values of two parameters that may stand together."""
    for a, b in itertools.combinations(parameters, 2):
        for one in itertools.product((a,), parameters[a]):
            for other in itertools.product((b,), parameters[b]):
                if may_stand_together(one, other):
                    yield frozenset((one, other))


def covering(parameters: Mapping[str, Sequence[str]], *, count: int = 0, seed: int = 0) -> list[Row]:
    """At least ``count`` rows in which every pair occurs; the same for the same arguments."""
    draw, rows = random.Random(seed), []
    seen = Counter(dict.fromkeys(pairs(parameters), 0))
    while len(rows) < count or min(seen.values()) == 0:
        fewest = min(seen.values())
        row = dict(draw.choice([pair for pair in seen if seen[pair] == fewest]))
        for name in draw.sample(list(parameters), len(parameters)):
            if name not in row:
                row[name] = _best(name, parameters[name], row, seen, draw)
        seen.update(frozenset(two) for two in itertools.combinations(row.items(), 2))
        rows.append({name: row[name] for name in parameters})
    return rows


def _best(
    name: str, labels: Sequence[str], row: Row, seen: Counter[frozenset[Cell]], draw: random.Random
) -> str:
    """The value that brings most new pairs, half as much for each time a pair has been there before."""

    def gain(label: str) -> tuple[float, float]:
        return sum(0.5 ** seen[frozenset(((name, label), cell))] for cell in row.items()), draw.random()

    fits = [label for label in labels if all(may_stand_together((name, label), cell) for cell in row.items())]
    return max(fits, key=gain)


def engines() -> list[Row]:
    """The fewest of twenty tries."""
    parameters = {name: list(values) for name, values in ENGINES.items()}
    return min((covering(parameters, seed=seed) for seed in range(20)), key=len)


def requests(count: int) -> list[Row]:
    """Rows of all parameters of a request; ``engine`` is an index into :func:`engines`."""
    parameters = {name: list(values) for name, values in REQUESTS.items()}
    return covering({"engine": [str(i) for i in range(len(engines()))], **parameters}, count=count)


def prompt_of(row: Row, index: int) -> tuple[int, ...]:
    """Few different ones, so that prefixes come again."""
    return cut(40 + index % 6, int(row["prompt"].split()[0]))


def params_of(row: Row, index: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings: dict[str, Any] = {"seed": 1000 + 10 * index}
    for name, values in REQUESTS.items():
        settings |= values[row[name]]
    if "structured_outputs" in settings:
        settings["structured_outputs"] = StructuredOutputsParams(**settings["structured_outputs"])
    return SamplingParams(**settings)


def one_by_one(params: Any) -> list[Any]:
    """What plain decoding is asked. Of a request for n answers vLLM makes n requests, whose seeds count on;
    and where nothing is drawn no seed may matter.
    """
    alone = [copy.copy(params) for _ in range(params.n)]
    for i, one in enumerate(alone):
        one.n, one.seed = 1, params.seed + i if params.temperature else None
    return alone


def outputs_of(result: Any) -> list[Output]:
    """Each of the n answers of a vLLM result."""
    found = []
    for answer in result.outputs:
        single = copy.copy(result)
        single.outputs = [answer]
        found.append(_output(single))
    return found


def unlike(want: Output, have: Output, *, tolerance: float = 1e-4) -> list[str]:
    """How two answers differ in tokens, in their end, or in a log-probability by more than ``tolerance``."""
    found = differences([want], [have])
    for field in ("logprobs", "prompt_logprobs"):
        positions, others = getattr(want, field), getattr(have, field)
        if (positions is None) != (others is None) or len(positions or ()) != len(others or ()):
            found.append(f"{field}: other positions")
            continue
        for at, (position, other) in enumerate(zip(positions or (), others or (), strict=True)):
            if (position or {}).keys() != (other or {}).keys():
                found.append(f"{field}: position {at}: expected {position}, got {other}")
                continue
            for token, (value, rank) in (position or {}).items():
                near = math.isclose(value, other[token][0], rel_tol=0, abs_tol=tolerance)
                if not near or other[token][1] != rank:
                    found.append(f"{field}: position {at}, token {token}: {value, rank} is {other[token]}")
    return found
