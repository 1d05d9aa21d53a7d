"""Tables of supported features in docs/: every row names a test that exists, or says that it has none.

A table with a column "evidence" is one. A test is named as `tests/FILE.py::FUNCTION`; its file is read, not
imported, so it may be any engine's.
"""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEST_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
BY_READING = "by reading only"


class Row(NamedTuple):
    page: str
    feature: str
    state: str
    evidence: str


def heading(cells: list[str]) -> bool:
    """Whether a row only names what the rows below it are about."""
    return cells[0].startswith("**") and not any(cells[1:])


def rows(page: str, text: str) -> list[Row]:
    """Rows of every table whose last column is the evidence, and the one before it the state."""
    found: list[Row] = []
    wanted = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if not cells:
            wanted = False
        elif cells[-1] == "evidence":
            wanted = True
        elif wanted and not set(cells[0]) <= set("-: ") and not heading(cells):
            found.append(Row(page, cells[0], cells[-2], cells[-1]))
    return found


@functools.cache
def functions(file: str) -> frozenset[str]:
    """Names of the test functions of a file; none where there is no such file."""
    path = ROOT / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def absent(text: str) -> list[str]:
    """Test ids of a text that name no test."""
    return [
        f"{file}::{name}"
        for file, name in TEST_ID.findall(text)
        if name not in functions(file) or not name.startswith("test_")
    ]


def fault(row: Row) -> str:
    """What is wrong with a row; empty when nothing is."""
    if gone := absent(row.evidence):
        return f"{row.page}: {row.feature}: no such test: {', '.join(gone)}"
    shown = bool(TEST_ID.search(row.evidence)) or BY_READING in row.evidence
    if row.state == "untested":
        return "" if not shown else f"{row.page}: {row.feature}: untested, and its evidence is {row.evidence}"
    return "" if shown else f"{row.page}: {row.feature}: names no test and does not say '{BY_READING}'"


def all_rows() -> list[Row]:
    return [row for page in PAGES for row in rows(page.name, page.read_text(encoding="utf-8"))]


def test_every_row_has_its_evidence():
    assert [said for row in all_rows() if (said := fault(row))] == []


def test_every_test_that_a_page_names_exists():
    assert [(page.name, absent(page.read_text(encoding="utf-8"))) for page in PAGES] == [
        (page.name, []) for page in PAGES
    ]


@pytest.mark.parametrize("page", ["vllm.md", "sglang.md"])
def test_both_engines_have_a_table(page):
    found = [row for row in all_rows() if row.page == page]
    assert len(found) > 25
    assert len({(row.feature, row.evidence) for row in found}) == len(found)
    # A promise rests on tests; what nobody could run is the smaller part.
    assert sum(bool(TEST_ID.search(row.evidence)) for row in found) > 0.7 * len(found)


TABLE = """
| feature | state | evidence |
|---|---|---|
| a | served | `tests/core/test_support_tables.py::test_every_row_has_its_evidence` |
| b | served | by reading only |
| c | untested | - |
| d | refused | `tests/core/test_support_tables.py::test_that_is_gone` |
| e | served | `tests/core/test_nothing.py::test_every_row_has_its_evidence` |
| f | served | `tests/core/test_support_tables.py::rows` |
| g | served | everybody knows |
| **more** | | |
| h | served | - |
| i | untested | `tests/core/test_support_tables.py::test_every_row_has_its_evidence` |

| key | meaning |
|---|---|
| j | none of these |
"""


def test_a_row_without_evidence_is_found():
    found = rows("page", TABLE)
    assert [row.feature for row in found] == list("abcdefghi")
    assert [row.feature for row in found if fault(row)] == list("defghi")
