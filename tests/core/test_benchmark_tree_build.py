"""The tree-build benchmark runs, compares the trees it times and prints every cell."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tree_build.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=100, check=False
    )


def test_every_cell_is_printed():
    done = run("--vocab", "40", "--gamma", "2", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    cells = [line.split("|")[0].split() for line in done.stdout.splitlines() if line.count("|") == 3][1:]
    assert cells == [[b, n] for b in ("1", "8", "32") for n in ("16", "64", "256")]


def test_every_conditioned_cell_is_printed():
    done = run("--conditioned", "--candidates", "6", "--gamma", "2", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    cells = [line.split("|")[0].split() for line in done.stdout.splitlines() if line.count("|") == 3][1:]
    assert cells == [[b, n] for b in ("1", "8", "32") for n in ("16", "64", "256")]


def test_no_repeats_are_refused():
    done = run("--repeats", "0")
    assert done.returncode == 2
    assert "--repeats: expected 1 or more, got 0" in done.stderr
