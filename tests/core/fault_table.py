"""Kinds of mistakes seen in other speculative decoders: the table fault_classes.txt of each engine's tests.

A line is ``class | what went wrong | answer``. The answer names the tests that keep the fault out, as
``FILE::FUNCTION`` below tests/, or is a sentence why there is none. A test's file is read, not imported, so
it may be another engine's.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]


class Check(NamedTuple):
    name: str  # of the class: letter and title
    what: str
    tests: tuple[str, ...]
    reason: str  # why there is no test, "" where there is one

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def checks(engine: str) -> list[Check]:
    """The lines of an engine's table; ``engine``: the folder of its tests."""
    found = []
    for line in (TESTS / engine / "fault_classes.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, what, answer = line.split(" | ")
            tests = tuple(answer.split()) if "::" in answer else ()
            found.append(Check(name, what, tests, "" if tests else answer))
    return found


def fault(one: Check) -> str:
    """What is wrong with a line; empty when nothing is."""
    if gone := absent(one.tests):
        return f"no such test: {', '.join(gone)}; name the one that took its place"
    if len(set(one.tests)) < len(one.tests):
        return "a test is named twice"
    if not one.tests and not (one.reason.endswith(".") and len(one.reason.split()) > 5):
        return f"neither tests nor a sentence: {one.reason!r}"
    return ""


def absent(tests: tuple[str, ...]) -> list[str]:
    """Those that name no test function of a file below tests/."""
    parts = [(test, *test.partition("::")[::2]) for test in tests]
    return [
        test
        for test, file, function in parts
        if function not in functions(file) or not function.startswith("test_")
    ]


@functools.cache
def functions(file: str) -> frozenset[str]:
    """Names of the functions of a file below tests/; none where there is no such file."""
    path = TESTS / f"{file}.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))
