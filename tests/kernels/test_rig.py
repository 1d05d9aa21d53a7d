"""What the kernel tests stand on: the interpreter is on here and nowhere else, guards see a stray store."""

import os

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def fill(out, n, BLOCK: tl.constexpr):
    """out[0:n] = 0, 1, ...; with n past the end of `out` it writes where it must not."""
    place = tl.arange(0, BLOCK)
    tl.store(out + place, place.to(tl.float32).to(out.dtype.element_ty), mask=place < n)


@triton.jit
def total(x, out, BLOCK: tl.constexpr):
    """Uses Triton's own device functions (sum, sort), which must be interpreted too."""
    values = tl.sort(tl.load(x + tl.arange(0, BLOCK)))
    tl.store(out, tl.sum(values, 0))


def test_the_interpreter_is_on_exactly_for_tests_of_this_folder(device):
    if device.type == "cpu":
        assert os.environ["TRITON_INTERPRET"] == "1"
        assert type(fill).__name__ == type(tl.sum).__name__ == "InterpretedFunction"
    else:
        assert type(fill).__name__ == "JITFunction"


def test_a_kernel_that_uses_device_functions_runs(device):
    out = torch.zeros(1, dtype=torch.int64, device=device)
    total[(1,)](torch.arange(16, device=device), out, BLOCK=16)
    assert out.item() == 120


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (1, 3), (2, 3, 1)])
def test_a_kernel_that_stays_inside_passes_the_guards(guarded, device, shape, dtype):
    view, check = guarded(shape, dtype, device)
    fill[(1,)](view, view.numel(), BLOCK=16)
    assert view.flatten().tolist() == list(range(view.numel()))
    check()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_one_element_too_many_is_seen(guarded, device, dtype):
    view, check = guarded((5,), dtype, device)
    fill[(1,)](view, 6, BLOCK=16)
    with pytest.raises(
        AssertionError, match=r"after the output of shape \(5,\) were overwritten, the first 0 b"
    ):
        check()


def test_an_element_before_the_output_is_seen(guarded, device):
    view, check = guarded((4,), torch.int32, device)
    torch.as_strided(view, (1,), (1,), view.storage_offset() - 1)[0] = 7
    with pytest.raises(AssertionError, match="before the output"):
        check()


def test_an_output_that_was_not_written_is_no_result(guarded, device):
    for dtype in (torch.int64, torch.int32):
        view, _ = guarded((3,), dtype, device)
        assert (view < -1).all()
    view, _ = guarded((3,), torch.float32, device)
    assert (view.abs() < 1e-10).all()
    assert (view != 0).all()
