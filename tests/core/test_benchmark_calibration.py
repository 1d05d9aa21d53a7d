"""The calibration benchmark judges held-out prompts, halves a planted error and writes what it fitted."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from specplug.calibration import read_calibration
from specplug.local.records import RoundRecord, append

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "calibration.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=100, check=False
    )


def write_rounds(folder: Path) -> None:
    """Chains of an over-confident draft: accepted with e^L squared at T = 0, to the power 1.5 at 0.8."""
    random = np.random.RandomState(3)
    rounds = []
    for temperature, power in ((0.0, 2.0), (0.8, 1.5)):
        for number in range(600):
            steps = -random.exponential(0.4, 3)
            accepted = np.logical_and.accumulate(random.rand(3) < np.exp(power * steps))
            rounds.append(
                RoundRecord(
                    dataset="toy",
                    temperature=temperature,
                    method="chain",
                    prompt=number % 10,
                    round=number // 10,
                    tokens=[1, 2, 3],
                    parents=[-1, 0, 1],
                    depths=[1, 2, 3],
                    ranks=[0, 0, 0],
                    log_probs=np.cumsum(steps).tolist(),
                    survivals=None,
                    accepted=accepted.tolist(),
                )
            )
    append(folder / "rounds.jsonl", rounds)


def test_the_error_is_halved_on_held_out_prompts(tmp_path):
    write_rounds(tmp_path)
    done = run(str(tmp_path), "--save", str(tmp_path / "c.json"))
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[1:]]
    assert [row[:4] for row in rows] == [["chain", "0", "600", "1800"], ["chain", "0.8", "600", "1800"]]
    assert all(float(row[5]) < float(row[4]) / 2 for row in rows)
    assert [regime.max_temperature for regime in read_calibration(tmp_path / "c.json").regimes] == [0.0, None]


def test_nothing_recorded_and_too_many_folds_are_refused(tmp_path):
    (tmp_path / "rounds.jsonl").write_bytes(b"")
    assert "no recorded rounds" in run(str(tmp_path)).stderr
    write_rounds(tmp_path)
    done = run(str(tmp_path), "--folds", "11")
    assert done.returncode == 2
    assert "--folds: expected 2..10 (prompts), got 11" in done.stderr
