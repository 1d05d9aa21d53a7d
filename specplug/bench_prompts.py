"""What `specplug bench` sends: prompts as text, and as the file that an engine's load generator reads.

The chat template is applied here, once, so every arm of every engine gets the same text. The data sets are
taken in turn, so a load of any length has all of them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specplug.local.prompts import Line, encode, templated

SHAREGPT_PROMPT = 1024  # tokens; vLLM's sharegpt reader drops longer prompts, and longer sums than twice this
SHAREGPT_LEAST = 4  # and shorter prompts


class Prompt(NamedTuple):
    """One request."""

    text: str
    tokens: int  # as the server will count them
    data_set: str


class DataFile(NamedTuple):
    """The generator's data set."""

    name: str  # in the words of its --dataset-name
    path: Path


def rendered(
    sets: Mapping[str, Sequence[Line]], tokenizer: Any, *, thinking: bool | None = None
) -> list[Prompt]:
    """Prompts of all data sets, one of each in turn. ``thinking``: the chat template's switch.

    Raises ValueError for one that text cannot stand for.
    """
    rows = [[_render(line, name, tokenizer, thinking) for line in lines] for name, lines in sets.items()]
    return [prompt for group in itertools.zip_longest(*rows) for prompt in group if prompt is not None]


def _render(line: Line, name: str, tokenizer: Any, thinking: bool | None) -> Prompt:
    wanted = list(encode(line, tokenizer, thinking=thinking))
    if line.prompt is not None or not tokenizer.chat_template:
        text = line.prompt or line.question or ""
    else:
        text = templated(line, tokenizer, thinking=thinking)
    # A server puts the tokenizer's own begin-of-text before a text; a template may have done so already.
    begin = getattr(tokenizer, "bos_token", None) or ""
    for candidate in (text, text.removeprefix(begin)):
        if list(tokenizer(candidate)["input_ids"]) == wanted:
            return Prompt(candidate, len(wanted), name)
    raise ValueError(
        f"data set {name}: expected a prompt whose text gives the tokens of its chat template, got "
        f"{text[:60]!r}; leave it out, or give it as a prompt"
    )


def digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the texts in order, hex."""
    return hashlib.sha256(json.dumps([prompt.text for prompt in prompts]).encode()).hexdigest()


def cycled(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """``count`` prompts, from the first on, and again."""
    return list(itertools.islice(itertools.cycle(prompts), count))


def reader(engine: str, prompts: Sequence[Prompt], max_tokens: int, *, pandas: bool | None = None) -> str:
    """The generator's reader for these prompts.

    vLLM's ``custom`` needs pandas, which vLLM itself does not bring; its ``sharegpt`` does not, but leaves
    out long prompts without a word. Raises ValueError where neither will do.
    """
    if engine == "sglang":
        return "custom"
    if importlib.util.find_spec("pandas") is not None if pandas is None else pandas:
        return "custom"
    for prompt in prompts:
        fits = SHAREGPT_LEAST <= prompt.tokens <= SHAREGPT_PROMPT
        if not fits or prompt.tokens + max_tokens > 2 * SHAREGPT_PROMPT:
            raise ValueError(
                f"data set {prompt.data_set}: a prompt of {prompt.tokens} tokens, --max-tokens {max_tokens}: "
                f"vllm bench serve takes {SHAREGPT_LEAST} to {SHAREGPT_PROMPT} tokens, {2 * SHAREGPT_PROMPT} "
                "with the answer, unless pandas is there; pip install pandas"
            )
    return "sharegpt"


def write(name: str, engine: str, prompts: Sequence[Prompt], file: Path) -> DataFile:
    """Write the data set in the form of a reader; ``file`` without its ending."""
    if engine == "vllm" and name == "custom":
        path = file.with_suffix(".jsonl")
        path.write_text("".join(json.dumps({"prompt": one.text}) + "\n" for one in prompts))
        return DataFile(name, path)
    # Two turns: the second stands for an answer, whose length the generator is told instead.
    turns = [{"conversations": [{"value": one.text}, {"value": ""}]} for one in prompts]
    path = file.with_suffix(".json" if engine == "vllm" else ".jsonl")
    if engine == "vllm":
        path.write_text(json.dumps(turns))
    else:
        path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return DataFile(name, path)
