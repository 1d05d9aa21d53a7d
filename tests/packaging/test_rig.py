"""The CPU rig is visible only while Triton's interpreter is asked for and no GPU can be used."""

import os
import subprocess
import sys

import pytest

activate = pytest.importorskip("specplug_rig.activate")

NAMES = (
    "from importlib.metadata import entry_points as e;"
    "print(*e(group='triton.backends').names, *e(group='vllm.general_plugins').names)"
)


def python(code: str, interpret: str | None) -> str:
    """Output of a fresh Python with TRITON_INTERPRET set to `interpret`, or unset."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if interpret is not None:
        environment["TRITON_INTERPRET"] = interpret
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("interpret", [None, "", "0"])
def test_entry_points_are_invisible_without_the_interpreter(interpret):
    assert {"cpu", "specplug_rig"}.isdisjoint(python(NAMES, interpret).split())


def test_entry_points_are_visible_with_the_interpreter():
    assert {"cpu", "specplug_rig"} <= set(python(NAMES, "1").split())


def test_a_child_of_a_process_without_the_interpreter_may_have_it():
    child = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {NAMES!r}], env=os.environ)"
    assert "cpu" not in python(child, None).split()
    with_it = child.replace("subprocess.run", "os.environ['TRITON_INTERPRET'] = '1'; subprocess.run")
    assert "cpu" in python(with_it, None).split()


def test_nothing_of_the_rig_but_its_switch_is_imported_at_start():
    prefixes = ("specplug_rig", "triton", "torch")
    code = f"import sys; print(*(name for name in sys.modules if name.startswith({prefixes})))"
    assert python(code, "1").split() == ["specplug_rig", "specplug_rig.activate"]


@pytest.mark.parametrize(
    ("torch_version", "driver", "present"),
    [
        ("2.13.0+cpu", True, False),
        ("2.13.0+cpu", False, False),
        ("2.13.0", True, True),
        ("2.13.0", False, False),
        ("2.13.0+cu130", True, True),
        ("", True, True),  # torch not installed
    ],
)
def test_a_gpu_counts_where_a_driver_and_a_torch_that_can_use_it_are(
    tmp_path, torch_version, driver, present
):
    node = tmp_path / "nvidiactl"
    if driver:
        node.touch()
    gpu = {"torch_version": torch_version, "gpu_files": [tmp_path / "kfd", node]}
    assert activate.gpu_present(**gpu) is present
    assert activate.wanted({"TRITON_INTERPRET": "1"}, **gpu) is not present
    assert not activate.wanted({"TRITON_INTERPRET": "0"}, **gpu)


@pytest.mark.vllm
@pytest.mark.parametrize(("interpret", "expected"), [(None, "False"), ("1", "True")])
def test_vllm_turns_triton_on_exactly_when_the_rig_is_active(interpret, expected):
    code = "from vllm.triton_utils import HAS_TRITON; print(); print(HAS_TRITON)"
    assert python(code, interpret).splitlines()[-1] == expected


KERNELS = """
import torch, triton, triton.language as tl
from specplug_rig import interpreter

@triton.jit
def dot(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a, b = tl.load(a_ptr + m * K + k[None, :]), tl.load(b_ptr + k[:, None] * N + n)
    tl.store(c_ptr + m * N + n, tl.dot(a, b))

@triton.jit
def integer_mask(x_ptr, y_ptr, mask_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=tl.load(mask_ptr + i), other=-1))

@triton.jit
def mask_of_two_conditions(x_ptr, y_ptr, mask_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    mask = (tl.load(mask_ptr) == 0) and (tl.load(mask_ptr + 1) == 1)
    tl.store(y_ptr + i, tl.load(x_ptr + i), mask=mask)

@triton.jit
def asserting(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "not positive")

a, b, c = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16(), torch.zeros(16, 16)

def dot_error():
    dot[(1,)](a, b, c, 16, 16, 32)
    return (c - a.float() @ b.float()).abs().max().item()

def stored(kernel):
    x, y, mask = torch.arange(8), torch.zeros(8, dtype=torch.int64), torch.arange(8, dtype=torch.int32) % 2
    try:
        kernel[(1,)](x, y, mask, 8)
        return y.tolist()
    except Exception:
        return "refused"

def masks():
    return stored(integer_mask), stored(mask_of_two_conditions)

def assert_or_pass():
    try:
        asserting[(1,)](torch.zeros(1))
        return "passed"
    except Exception:
        return "asserted"

"""


@pytest.mark.vllm
def test_the_interpreter_is_wrong_before_the_repair_and_right_after(tmp_path):
    script = tmp_path / "kernels_under_test.py"  # a file, since Triton reads the source of what it decorates
    script.write_text(
        KERNELS
        + "print(dot_error() > 1, *masks(), assert_or_pass(), sep=';')\n"
        + "interpreter.install(); interpreter.install()\n"
        + "print(dot_error() < 1e-4, *masks(), assert_or_pass(), sep=';')\n"
        + "interpreter.install(device_asserts=True)\n"
        + "print(assert_or_pass())"
    )
    before, after, with_asserts = python(f"import runpy; runpy.run_path({str(script)!r})", "1").splitlines()
    assert before == "True;refused;refused;passed"
    assert after == "True;[-1, 1, -1, 3, -1, 5, -1, 7];[0, 1, 2, 3, 4, 5, 6, 7];passed"
    assert with_asserts == "asserted"


SAMPLING = """
import torch
import vllm
from vllm.v1.worker.cpu import shm  # gives torch.cuda its stand-ins
from vllm.v1.worker.gpu.sample import gumbel, sampler
from specplug_rig import vllm_kernels

stock = gumbel.gumbel_sample
vllm_kernels.register()
torch.manual_seed(0)
logits = torch.randn(24, 1500).mul(3).round()  # two blocks of the kernel, and many ties
of_row = torch.arange(24) % 4
seeds, positions = torch.arange(4), torch.arange(24)
options = {"apply_temperature": True, "is_drafting": False, "use_fp64": False}

def both(temperature):
    rows = (logits, of_row, temperature, seeds, positions)
    return sampler.gumbel_sample(*rows, **options), stock(*rows, **options)

for temperature in ([0.0, 0, 0, 0], [0.8, 0, 1.3, 0], [0.7, 1, 1, 2]):
    ours, kernel = both(torch.tensor(temperature))
    print(torch.equal(ours, kernel), bool((ours == logits.argmax(-1)).all()))
"""


@pytest.mark.vllm
def test_sampling_is_vllms_with_and_without_noise(tmp_path):
    script = tmp_path / "sampling.py"
    script.write_text(SAMPLING)
    printed = python(f"import runpy; runpy.run_path({str(script)!r})", "1").splitlines()
    assert printed[-3:] == ["True True", "True False", "True False"]
