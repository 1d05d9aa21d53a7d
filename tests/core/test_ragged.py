"""Padded views of ragged windows."""

import pytest
import torch

from specplug.ragged import window_index


@pytest.mark.parametrize("counts", [[1], [3, 1, 5], [0, 2, 0, 4, 0], [7, 0], [2, 2, 2]])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_windows_are_slices_of_the_flat_rows(counts, width):
    starts = [sum(counts[:r]) for r in range(len(counts))]
    flat = torch.arange(100, 100 + sum(counts))
    index, valid = window_index(torch.tensor(starts), torch.tensor(counts), width)
    assert index.shape == valid.shape == (len(counts), width)
    gathered = flat[index]  # raises if an index leaves the flat rows
    for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert gathered[r][valid[r]].tolist() == flat[start : start + count][:width].tolist()
        assert valid[r].tolist() == [column < count for column in range(width)]
        if count:
            assert set(gathered[r].tolist()) <= set(flat[start : start + count].tolist())


def test_int32_layouts_are_accepted():
    index, valid = window_index(
        torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32), 2
    )
    assert index.dtype == torch.int64
    assert index.tolist() == [[0, 1], [2, 2]]
    assert valid.tolist() == [[True, True], [True, False]]
