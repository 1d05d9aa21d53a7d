"""The prompts of an evaluation, as token ids by data set: built in, or read from JSONL files.

A line of a file has one of ``prompt`` (text, taken as it is), ``question`` (one user turn) or ``messages``
(chat turns), and may have a ``kind``. Turns go through the target's chat template; a target without one gets
a question as plain text. Other keys are the data set's own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from specplug import models
from specplug.local import library

CHAT_SETS = ("chat", "maths", "code")
BUILT_IN = (*CHAT_SETS, "library")
LIBRARY_WINDOWS = 64
THINKING = "enable_thinking"  # name of the switch in the templates of Qwen3 and its like
TURN = (
    "<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
)  # around the question of a shipped prompt


class Line(msgspec.Struct, frozen=True):
    """One line of a prompt file."""

    prompt: str | None = None
    question: str | None = None
    messages: list[dict[str, Any]] | None = None
    kind: str | None = None
    where: str = msgspec.field(default="", name=":where")  # file:number of one that was read, no key of it


def data_sets(
    names: Sequence[str], *, files: Sequence[Path], count: int | None, seed: int
) -> dict[str, list[Line]]:
    """Lines by data set, at most ``count`` each.

    ``names`` are those of `BUILT_IN` or NAME=FILE; ``files`` are prompt files whose lines go to the data set
    of their kind, or of the file's name. Raises ValueError for an unknown name, a missing file, a bad line.
    """
    sets: dict[str, list[Line]] = {}
    for name in names:
        label, equals, file = name.partition("=")
        if not label or label in sets:
            raise ValueError(f"--dataset: expected names, each once, got {name!r}")
        sets[label] = read_lines(Path(file)) if equals else built_in(label, seed)
    for path in files:
        for line in read_lines(path):
            sets.setdefault(line.kind or path.stem, []).append(line)
    return {name: lines[:count] for name, lines in sets.items()}


def built_in(name: str, seed: int) -> list[Line]:
    """A data set of `BUILT_IN`: held-out questions of one kind, or windows of held-out library source."""
    if name == "library":
        return [Line(prompt=text) for text in library.windows(LIBRARY_WINDOWS, seed)]
    if name not in BUILT_IN:
        raise ValueError(f"--dataset: expected NAME=FILE or one of {', '.join(BUILT_IN)}, got {name!r}")
    questions = [one.prompt for one in models.prompts() if one.kind == name]
    return [Line(question=q.removeprefix(TURN[0]).removesuffix(TURN[1]), kind=name) for q in questions]


def read_lines(file: Path) -> list[Line]:
    """The lines of a prompt file. Raises ValueError naming file and line."""
    if not file.is_file():
        raise ValueError(f"{file}: expected a file of prompts, found none")
    lines = []
    for number, raw in enumerate(file.read_bytes().splitlines(), 1):
        if not raw.strip():
            continue
        try:
            line = msgspec.json.decode(raw, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}:{number}: {error}") from None
        given = [key for key in ("prompt", "question", "messages") if getattr(line, key)]
        if len(given) != 1:
            raise ValueError(
                f"{file}:{number}: expected one of prompt, question, messages, got "
                f"{' and '.join(given) or 'none'}"
            )
        lines.append(msgspec.structs.replace(line, where=f"{file}:{number}"))
    if not lines:
        raise ValueError(f"{file}: expected one prompt or more, got an empty file")
    return lines


def templated(line: Line, tokenizer: Any, *, thinking: bool | None = None) -> str:
    """A question or messages in the target's chat template. ``thinking``: its switch; None = as it stands.

    Raises ValueError for a switch that the template does not read, and for turns that it does not take.
    """
    if thinking is not None and THINKING not in str(tokenizer.chat_template):
        raise ValueError(
            f"thinking: expected a chat template that reads {THINKING}, got one that does not; leave it out"
        )
    turns = line.messages or [{"role": "user", "content": line.question}]
    switch = {} if thinking is None else {THINKING: thinking}
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **switch)
    except Exception as error:  # a template raises what it likes
        raise ValueError(
            f"{line.where or 'messages'}: expected turns that the target's chat template takes, got "
            f"{str(turns)[:80]}: {' '.join(str(error).split())}; give role and content as text"
        ) from None


def encode(line: Line, tokenizer: Any, *, thinking: bool | None = None) -> list[int]:
    """Token ids of a prompt. Raises ValueError for ``messages`` where the target has no chat template."""
    if line.prompt is not None:
        return tokenizer(line.prompt)["input_ids"]
    if tokenizer.chat_template:
        text = templated(line, tokenizer, thinking=thinking)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if line.question is None:
        raise ValueError("messages: the target has no chat template; give prompts as text")
    return tokenizer(line.question)["input_ids"]
