"""Padded rows to ragged ones and back, bit for bit, and where each window starts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.ragged import window_index
from specplug_kernels.compaction import compact, expand, row_starts

FEW = settings(max_examples=20, deadline=None, derandomize=True)


@st.composite
def windows(draw):
    """(padded [R, W, ...] of random bits, counts [R])."""
    requests, width = draw(st.integers(0, 4)), draw(st.sampled_from([1, 2, 5, 65]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn]))
    shape = (requests, width, *draw(st.sampled_from([(), (1,), (7,), (32,), (3, 16)])))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = torch.Size(shape).numel() * dtype.itemsize
    padded = torch.randint(0, 256, (size,), generator=g, dtype=torch.uint8).view(dtype).view(shape)
    return padded, torch.randint(0, width + 1, (requests,), generator=g)


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


@FEW
@given(windows(), st.integers(0, 2))
def test_compact_is_the_rows_one_after_another(device, guarded, window, spare):
    padded, counts = window
    rows = [padded[r, j] for r in range(len(counts)) for j in range(int(counts[r]))]
    starts = row_starts(counts.to(device))
    num_rows = len(rows) + spare
    got = compact(padded.to(device), starts, num_rows)
    view, check = guarded(got.shape, got.dtype, device)
    before = bits(view).clone()
    compact(padded.to(device), starts, num_rows, out=view)
    if rows:
        want = torch.stack([row.view(torch.int8) if padded.element_size() == 1 else row for row in rows])
        assert torch.equal(bits(got[: len(rows)]), bits(want))
        assert torch.equal(bits(view[: len(rows)]), bits(want))
    assert not bits(got[len(rows) :]).any()
    assert torch.equal(bits(view[len(rows) :]).flatten(), before.flatten()[bits(view[: len(rows)]).numel() :])
    check()


@FEW
@given(windows(), st.sampled_from([0, 1, 4, 80]))
def test_expand_is_plain_indexing_with_zeros_past_the_end(device, guarded, window, width):
    padded, counts = window
    starts = row_starts(counts.to(device))
    ragged = compact(padded.to(device), starts, int(counts.sum()) + 1)
    view, check = guarded((len(counts), width, *padded.shape[2:]), padded.dtype, device)
    got = expand(ragged, starts, width, out=view)
    index, valid = window_index(starts[:-1].cpu(), counts, width)
    words = ragged.cpu().view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[padded.element_size()]
    )
    want = words[index] * valid.view(*valid.shape, *[1] * (padded.ndim - 2))
    assert torch.equal(bits(got), bits(want))
    check()


@pytest.mark.parametrize("requests", [0, 1, 3, 256, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_starts_are_the_exclusive_sum(device, guarded, requests, dtype):
    counts = torch.randint(0, 66, (requests,), generator=torch.Generator().manual_seed(1)).to(dtype)
    out, check = guarded((requests + 1,), torch.int32, device)
    want = [0]
    for count in counts.tolist():
        want.append(want[-1] + count)
    assert row_starts(counts.to(device), out=out).tolist() == want
    check()


def test_rows_at_a_stride_and_a_row_that_is_no_multiple_of_anything(device):
    wide = torch.arange(2 * 3 * 10, device=device).view(2, 3, 10)
    starts = torch.tensor([0, 1, 4], device=device)
    got = compact(wide[:, :, :7], starts, 4)
    assert torch.equal(got, torch.cat((wide[0, :1, :7], wide[1, :, :7])))
    back = torch.full((2, 4, 9), -5, device=device)
    expand(got, starts, 4, out=back[:, :, :7])
    assert torch.equal(back[0, :1, :7], wide[0, :1, :7])
    assert not back[0, 1:, :7].any()
    assert (back[:, :, 7:] == -5).all()


def test_wrong_counts_give_other_rows(device):
    """Negative control of the comparisons above."""
    padded = torch.arange(6, device=device).view(2, 3)
    right, wrong = (row_starts(torch.tensor(counts, device=device)) for counts in ([1, 2], [2, 1]))
    assert compact(padded, right, 3).tolist() == [0, 3, 4]
    assert compact(padded, wrong, 3).tolist() == [0, 1, 3]


def test_windows_that_do_not_fit_are_cut_and_nothing_is_written_outside(device, guarded):
    padded = torch.arange(6, dtype=torch.int64, device=device).view(2, 3)
    out, check = guarded((3,), torch.int64, device)
    compact(padded, torch.tensor([0, 2, 5], device=device), 3, out=out)
    assert out.tolist() == [0, 1, 3]
    check()


@pytest.mark.parametrize(
    ("starts", "out", "message"),
    [
        (torch.zeros(2), None, "starts: expected dtype int32 or int64, got float32"),
        (torch.zeros(2, dtype=torch.int32), None, r"starts: expected shape \[3\], got \[2\]"),
        (
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(4, 5),
            r"ragged: expected shape \[3, 5\], got \[4, 5\]",
        ),
        (
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(3, 5).half(),
            "ragged: expected dtype float32, got float16",
        ),
    ],
)
def test_a_launcher_refuses_what_its_kernel_does_not_take(starts, out, message):
    with pytest.raises(ValueError, match=message):
        compact(torch.zeros(2, 2, 5), starts, 3, out=out)
