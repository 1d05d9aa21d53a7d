"""benchmarks/policy.py: the averages by hand, and a small run that prints every losing cell."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "policy.py"


@pytest.fixture(scope="module")
def policy():
    spec = importlib.util.spec_from_file_location("benchmark_policy", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(policy, ours: list[float]):
    rates = {"plain": [100.0, 1000.0], "chain": [300.0, 500.0], "ours": ours}
    return [policy.Row("t", policy.ALL, rates)]


def test_averages_by_hand(policy):
    found = policy.single_best(rows(policy, [300.0, 1000.0]))
    assert found["loads alike"][0] == "chain"
    assert found["loads alike"][1] == pytest.approx(2**0.5)
    assert found["hours alike"] == ("plain", pytest.approx(1300 / 1100))
    assert found["tokens alike"] == ("chain", pytest.approx((1 / 300 + 1 / 500) / (1 / 300 + 1 / 1000)))


@pytest.mark.parametrize(
    ("ours", "kept"), [([300.0, 1000.0], True), ([290.0, 1000.0], False), ([297.0, 990.0], True)]
)
def test_promises_are_judged(policy, ours, kept):
    assert policy.kept(rows(policy, ours)) is kept
    text = "\n".join(policy.report(rows(policy, ours), [1, 64]))
    assert ("concurrency 1\n" in text) is (ours[0] < 300)


def test_a_mix_that_one_setting_serves_breaks_the_promise(policy):
    rates = {"plain": [100.0, 100.0], "chain": [300.0, 300.0], "ours": [310.0, 310.0]}
    assert not policy.kept([policy.Row("t", policy.ALL, rates)])


def test_a_small_run_names_its_cells():
    options = ("--cost", "compute-bound", "--concurrency", "1", "32", "--tokens", "1500", "--mixed-only")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=100, check=False
    )
    assert "compute-bound, all mixed" in done.stdout, done.stderr
    assert "2 cells: ours is slower than the best fixed policy in" in done.stdout
    assert "loads alike" in done.stdout
