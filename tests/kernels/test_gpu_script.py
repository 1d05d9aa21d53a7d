"""ci/gpu/time_kernels.py, rehearsed in the interpreter: every launch has a time, a failing one is told."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import aot
import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("SPECPLUG_KERNEL_DEVICE", "cpu") != "cpu",
    reason="on a GPU ci/gpu.sh runs the script itself",
)
SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "gpu" / "time_kernels.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("time_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("SPECPLUG_KERNEL_DEVICE", "cpu")
    return module


def run(script, monkeypatch, out: Path, *arguments: str) -> tuple[int, list[dict], str]:
    """Exit code, rows of timings.json, text of timings.md."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(out), *arguments])
    with pytest.raises(SystemExit) as ended:
        script.main()
    report = json.loads((out / "timings.json").read_text())
    return ended.value.code, report["rows"], (out / "timings.md").read_text()


def test_every_kernel_has_launches_that_run_and_say_their_bytes(script, monkeypatch, tmp_path):
    code, rows, table = run(script, monkeypatch, tmp_path / "made")
    assert code == 0
    assert {row["kernel"] for row in rows} == set(aot.nouns())
    assert [
        row["launch"] for row in rows if row["error"] or row["eager_us"] <= 0 or row["ideal_bytes"] <= 0
    ] == []
    assert len({(row["kernel"], row["launch"]) for row in rows}) == len(rows)
    assert all(f"| {row['kernel']} | {row['launch']} |" in table for row in rows)


@pytest.fixture
def one_fails(script, monkeypatch, tmp_path) -> None:
    """Two launches in place of the kernels': one runs, one raises."""
    (tmp_path / "aot_fake_launches.py").write_text(
        "def timings(device):\n"
        "    return [('runs', lambda: None, 8), ('fails', lambda: 1 / 0, 8), ('runs too', lambda: None, 8)]\n"
    )
    monkeypatch.setattr(script, "KERNEL_TESTS", tmp_path)
    monkeypatch.delitem(sys.modules, "aot_fake_launches", raising=False)


@pytest.mark.usefixtures("one_fails")
def test_a_failing_launch_is_told_and_the_others_are_measured(script, monkeypatch, tmp_path):
    code, rows, table = run(script, monkeypatch, tmp_path)
    assert code == 1
    assert [row["error"] for row in rows] == ["", "ZeroDivisionError: division by zero", ""]
    assert [row["eager_us"] is None for row in rows] == [False, True, False]
    assert "| fake_launches | fails | 8 | - | - | - | ZeroDivisionError: division by zero |" in table


def test_a_kernel_whose_inputs_cannot_be_made_is_told(script, monkeypatch, tmp_path):
    (tmp_path / "aot_no_inputs.py").write_text(
        "def timings(device):\n    raise RuntimeError('no memory\\nleft')\n"
    )
    monkeypatch.setattr(script, "KERNEL_TESTS", tmp_path)
    code, rows, _ = run(script, monkeypatch, tmp_path)
    assert code == 1
    assert [(row["kernel"], row["error"]) for row in rows] == [("no_inputs", "RuntimeError: no memory")]


@pytest.mark.usefixtures("one_fails")
def test_what_there_was_no_time_for_is_listed(script, monkeypatch, tmp_path):
    code, rows, _ = run(script, monkeypatch, tmp_path, "--seconds", "0")
    assert code == 1
    assert [row["error"] for row in rows] == ["not measured: out of time"] * 3


def test_the_share_of_the_copy_bandwidth(script):
    facts = {"copy GB/s": 4000.0}
    row = script.Row("moves", "rows", ideal_bytes=8_000_000, warm_us=1.0, cold_us=4.0, eager_us=9.0)
    assert (
        script.markdown(facts, [row]).splitlines()[-1]
        == "| moves | rows | 8,000,000 | 1.0 | 4.0 | 9.0 | 50% |"
    )
