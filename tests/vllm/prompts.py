"""Prompts as token ids, cut from the standard library's own text: what the quick target was trained on."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from tokenizers import Tokenizer

from specplug import models

SOURCES = (
    "argparse",
    "ast",
    "calendar",
    "dataclasses",
    "difflib",
    "enum",
    "fractions",
    "inspect",
    "pickle",
    "tarfile",
)


@functools.cache
def tokenizer(name: str = "quick") -> Tokenizer:
    return Tokenizer.from_file(str(models.path(name, "target") / "tokenizer.json"))


@functools.cache
def source_ids(module: str) -> tuple[int, ...]:
    """The first tokens of a standard library module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")[:9000]
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


def cut(index: int, length: int) -> tuple[int, ...]:
    """``length`` tokens of one of the sources; different for every ``index``."""
    ids = source_ids(SOURCES[index % len(SOURCES)])
    start = 200 + 137 * (index // len(SOURCES))
    assert start + length <= len(ids)
    return ids[start : start + length]


def short(count: int) -> list[tuple[int, ...]]:
    """Prompts of 12 to 40 tokens."""
    return [cut(i, 12 + (7 * i) % 29) for i in range(count)]


def varied() -> list[tuple[int, ...]]:
    """44 prompts: short, long, repeated text, one token, and lengths on both sides of block boundaries."""
    boundaries = [16, 32, 48, 64, 96]
    around = [cut(20 + i, length) for i, length in enumerate(b + d for b in boundaries for d in (-1, 0, 1))]
    long = [cut(50 + i, 230 + 17 * i) for i in range(8)]
    repeated = [cut(60 + i, 3 + 2 * i) * (24 - 3 * i) for i in range(6)]
    single = [cut(70 + i, 1) for i in range(3)]
    return short(12) + around + long + repeated + single
