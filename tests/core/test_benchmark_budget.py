"""The budget benchmark runs and prints every part."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "budget.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=100, check=False
    )


def test_every_part_is_printed():
    done = run("--requests", "5", "--budget", "9", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    parts = [line[:10].strip() for line in done.stdout.splitlines()[2:]]
    assert parts == ["sort", "verify", "allocate", "curve", "outlooks", "draft", "mean step"]


def test_no_repeats_are_refused():
    done = run("--repeats", "0")
    assert done.returncode == 2
    assert "--repeats: expected 1 or more, got 0" in done.stderr
