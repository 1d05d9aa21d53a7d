"""Padded views of ragged windows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specplug.budget import allocate
from specplug.ragged import admit, window_index


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


def reference_admission(survival, capacities, nodes):
    """One node at a time: the best next node of any request."""
    taken = [0] * len(survival)
    for _ in range(nodes):
        open_ = [r for r in range(len(survival)) if taken[r] < capacities[r]]
        best = max(open_, key=lambda r: (survival[r][taken[r]], -r))
        taken[best] += 1
    return taken


@given(st.data())
def test_admission_takes_the_best_next_node_every_time(data):
    requests, budget = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 6))
    level = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0])  # few values: many ties
    rows = [
        sorted(data.draw(st.lists(level, min_size=budget, max_size=budget)), reverse=True)
        for _ in range(requests)
    ]
    capacities = [data.draw(st.integers(0, budget)) for _ in range(requests)]
    nodes = data.draw(st.integers(0, sum(capacities)))
    survival = torch.tensor(rows).view(requests, budget)
    got = admit(survival, torch.tensor(capacities, dtype=torch.int32), nodes)
    assert got.tolist() == reference_admission(rows, capacities, nodes)
    assert got.dtype == torch.int32


def test_a_child_above_its_parent_by_rounding_is_not_taken_alone():
    survival = torch.tensor([[0.5, 0.5 + 1e-7, 0.5 + 2e-7], [0.50000001, 0.1, 0.1]])
    assert admit(survival, torch.tensor([3, 3]), 1).sum() == 1
    for nodes in range(7):
        assert admit(survival, torch.tensor([3, 3]), nodes).sum() == nodes


def test_device_and_host_admit_the_same():
    generator = torch.Generator().manual_seed(5)
    survival = torch.rand(32, 16, generator=generator).sort(1, descending=True).values
    survival = (survival * 8).round() / 8  # ties
    caps = torch.randint(0, 17, (32,), generator=generator)
    live = int((torch.arange(16) < caps[:, None]).logical_and(survival > 0).sum())
    for nodes in (0, 1, 7, 100, live):
        host = allocate(survival.numpy(), caps.numpy(), nodes)
        assert admit(survival, caps, nodes).tolist() == host.tolist()
