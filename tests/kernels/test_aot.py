"""The kernels compile for every supported GPU, in registers alone and within each chip's shared memory.

In processes of their own: here kernels are interpreted. The figures and their ceiling: aot.py,
aot_table.json.
"""

import json
import os
import subprocess
import sys
from typing import Any

import aot
import pytest

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]  # half a minute on a quiet core
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
ALL_CASES = "[case for noun in aot.nouns() for case in aot.cases(noun)]"
Figures = dict[str, dict[str, aot.Resources]]
Table = dict[str, dict[str, dict[str, int]]]


def in_a_fresh_process(expression: str) -> Any:
    """What an expression over the modules aot and too_large gives, through JSON."""
    code = f"import json, aot, too_large; print(json.dumps({expression}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=aot.FOLDER, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def figures(expression: str) -> Figures:
    found = in_a_fresh_process(expression)
    return {
        case: {target: aot.Resources(*row) for target, row in rows.items()} for case, rows in found.items()
    }


def faults(found: Figures, table: Table) -> list[str]:
    return [
        fault
        for case, rows in found.items()
        for target, row in rows.items()
        for fault in aot.faults(case, target, row, table.get(case, {}).get(target))
    ]


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_case_fits_the_chip_and_its_row_of_the_table(target):
    found = figures(f"aot.measure({ALL_CASES}, [{target!r}])")
    assert found
    assert faults(found, aot.read_table()) == []


@pytest.fixture(scope="module")
def controls() -> Figures:
    return figures("too_large.measure()")


def recorded(found: Figures) -> Table:
    """The table that `aot.py --write` would make of them."""
    return {
        case: {
            target: {"registers": row.registers, "shared_bytes": row.shared_bytes}
            for target, row in rows.items()
        }
        for case, rows in found.items()
    }


def test_a_kernel_that_fits_is_without_fault(controls):
    fits = {"fits": controls["fits"]}
    assert faults(fits, recorded(fits)) == []


def test_a_kernel_that_spills_is_seen_on_every_chip(controls):
    spills = {"spills": controls["spills"]}
    found = faults(spills, recorded(spills))
    assert len(found) == len(aot.TARGETS)
    assert all("expected everything in registers" in fault for fault in found)


def test_a_kernel_with_too_much_shared_memory_is_seen_on_the_chips_that_have_less(controls):
    crowded = {"crowded": controls["crowded"]}
    found = faults(crowded, recorded(crowded))
    assert [fault.split(": ")[0] for fault in found] == ["crowded for sm_120", "crowded for gfx942"]
    assert all("all the chip has for a block" in fault for fault in found)


@pytest.mark.parametrize("figure", ["registers", "shared_bytes"])
def test_a_figure_above_the_table_is_seen(controls, figure):
    table = recorded({"crowded": controls["crowded"]})
    table["crowded"]["sm_90"][figure] -= 1
    (fault,) = faults({"crowded": {"sm_90": controls["crowded"]["sm_90"]}}, table)
    assert fault.startswith(f"crowded for sm_90: expected {figure} of at most")


def test_a_case_without_a_row_is_seen(controls):
    (fault,) = faults({"fits": {"sm_80": controls["fits"]["sm_80"]}}, {})
    assert "expected a row in aot_table.json, got none" in fault


def test_every_kernel_has_a_case():
    kernels = in_a_fresh_process("sorted(aot.kernels())")
    compiled = in_a_fresh_process(f"sorted({{case.kernel.__name__ for case in {ALL_CASES}}})")
    assert kernels
    assert kernels == compiled


def test_the_table_has_no_rows_of_cases_that_are_gone():
    names = in_a_fresh_process(f"[case.name for case in {ALL_CASES}]")
    assert len(names) == len(set(names))
    assert sorted(aot.read_table()) == sorted(names)
