"""benchmarks/kernel_traffic.py: it counts what a launch moves, and the memory-bound kernels move little more
than they must.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(
    os.environ.get("SPECPLUG_KERNEL_DEVICE", "cpu") != "cpu", reason="traffic is counted in the interpreter"
)
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernel_traffic.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_kernel_traffic", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@triton.jit
def scale(x, out, n, TWICE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < n)
    if TWICE:
        values += tl.load(x + place, mask=place < n)
    one = tl.load(x + tl.zeros_like(place))  # one address, whatever the lanes
    tl.store(out + place, values * one, mask=place < n)


def case(benchmark, dtype=torch.float32, *, twice: bool, launches: int = 1):
    n = 100
    x, out = torch.ones(n, dtype=dtype), torch.empty(n, dtype=dtype)

    def launch():
        for _ in range(launches):
            scale[(4,)](x, out, n, TWICE=twice, BLOCK=32)

    return benchmark.Case("scale", launch, 2 * n * dtype.itemsize * launches, "moved")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_each_address_counts_once_an_access_and_once_a_launch(benchmark, dtype):
    size = dtype.itemsize
    once = benchmark.measure(case(benchmark, dtype, twice=False)).traffic
    assert (once.launches, once.moved, once.touched) == (1, (2 * 100 + 4) * size, 2 * 100 * size)
    twice = benchmark.measure(case(benchmark, dtype, twice=True)).traffic
    assert (twice.launches, twice.moved, twice.touched) == (1, (3 * 100 + 4) * size, 2 * 100 * size)


def test_a_second_launch_touches_everything_again(benchmark):
    traffic = benchmark.measure(case(benchmark, twice=False, launches=2)).traffic
    assert (traffic.launches, traffic.touched) == (2, 2 * 2 * 100 * 4)


def test_reading_the_input_twice_exceeds_the_limit(benchmark):
    assert benchmark.measure(case(benchmark, twice=False)).within
    assert not benchmark.measure(case(benchmark, twice=True)).within


def test_counting_ends_with_its_block(benchmark):
    builder, executor = benchmark.interpreter.InterpreterBuilder, benchmark.interpreter.GridExecutor
    before = builder.create_masked_load, builder.create_masked_store, executor.__call__
    with pytest.raises(RuntimeError, match="inside"), benchmark.counting():
        raise RuntimeError("inside")
    assert before == (builder.create_masked_load, builder.create_masked_store, executor.__call__)


@pytest.mark.parametrize("name", ["candidates", "attention", "moves", "compaction", "history", "trees"])
def test_memory_bound_kernels_move_at_most_a_tenth_more_than_they_must(benchmark, name):
    torch.manual_seed(0)
    rows = [benchmark.measure(one) for one in benchmark.CASES[name]()]
    assert [row.case.name for row in rows if not row.within] == []
    assert all(row.traffic.launches > 0 and row.traffic.touched > 0 for row in rows)
    # The fewest bytes are no overstatement: such a launch cannot move less than what it depends on.
    bound = [row for row in rows if row.case.bound]
    assert [row.case.name for row in bound if row.traffic.moved < 0.99 * row.case.fewest] == []
