"""The batch's best nodes: equal to specplug.ragged.admit to the last tie."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import ragged
from specplug_kernels.budget import MAX_CELLS, admit

FEW = settings(max_examples=40, deadline=None, derandomize=True)
ULP = 1 - 2**-24
VALUES = [1.0, ULP, 0.5, 0.25, 1e-30, 1e-45, 0.0, -0.0, float("nan"), float("inf")]


@st.composite
def batches(draw):
    """(survival, capacities, nodes): few distinct values, so many ties; rows in order or not."""
    requests, budget = draw(st.integers(0, 5)), draw(st.sampled_from([1, 2, 3, 8, 11]))
    values = draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    survival = torch.tensor(values)[torch.randint(0, len(values), (requests, budget), generator=g)]
    if draw(st.booleans()):
        survival = survival.sort(1, descending=True).values
    capacities = torch.randint(0, budget + 1, (requests,), generator=g).int()
    return survival, capacities, draw(st.integers(0, int(capacities.sum())))


@FEW
@given(batches(), st.booleans())
def test_admits_as_the_reference(device, guarded, batch, on_device):
    survival, capacities, nodes = batch
    want = ragged.admit(survival, capacities, nodes)
    out, check = guarded(capacities.shape, torch.int32, device)
    wanted = torch.tensor([nodes], dtype=torch.int32, device=device) if on_device else nodes
    got = admit(survival.to(device), capacities.to(device), wanted, out=out)
    assert torch.equal(got.cpu(), want)
    assert int(got.sum()) == nodes
    check()


@FEW
@given(batches())
def test_rows_by_index_and_in_place_of_the_capacities(device, batch):
    """As the manager calls it: survival of every slot, a batch of some, the result over the capacities."""
    survival, capacities, nodes = batch
    slots = torch.arange(capacities.shape[0]).flip(0) * 2 + 1
    store = torch.full((2 * capacities.shape[0] + 1, survival.shape[1] + 2), 7.0)
    store[slots, :-2] = survival
    taken = capacities.to(device, copy=True)
    width = survival.shape[1]
    admit(store.to(device)[:, :width], taken, nodes, rows=slots.int().to(device), out=taken)
    assert torch.equal(taken.cpu(), ragged.admit(survival, capacities, nodes))


@pytest.mark.parametrize(("requests", "budget"), [(256, 64), (200, 60), (1, 64), (1000, 16)])
def test_the_largest_batches(device, requests, budget):
    g = torch.Generator().manual_seed(0)
    survival = torch.rand(requests, budget, generator=g).cumprod(1)
    survival = torch.where(torch.rand(requests, 1, generator=g) < 0.5, survival, survival[:1])  # ties across
    capacities = torch.randint(0, budget + 1, (requests,), generator=g).int()
    nodes = int(capacities.sum()) // 2
    got = admit(survival.to(device), capacities.to(device), nodes).cpu()
    assert torch.equal(got, ragged.admit(survival, capacities, nodes))


def test_all_equal_goes_to_the_lower_request(device):
    survival, capacities = torch.full((3, 4), 0.5, device=device), torch.full((3,), 4, device=device)
    assert admit(survival, capacities, 6).tolist() == [4, 2, 0]


def test_more_nodes_than_capacities_hold(device):
    survival, capacities = torch.rand(3, 4, device=device), torch.tensor([0, 4, 2], device=device)
    assert admit(survival, capacities, 100).tolist() == [0, 4, 2]


def test_an_ulp_decides(device):
    """Negative control: values that differ in their last bit are not ties."""
    survival, capacities = torch.tensor([[ULP], [1.0]], device=device), torch.tensor([1, 1], device=device)
    assert admit(survival, capacities, 1).tolist() == [0, 1]
    assert admit(torch.ones_like(survival), capacities, 1).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"survival": torch.zeros(2, 3).double()}, "survival: expected dtype float32, got float64"),
        ({"survival": torch.zeros(3, 3)}, r"survival: expected shape \[2, 3\], got \[3, 3\]"),
        ({"nodes": -1}, "nodes: expected at least 0, got -1"),
        ({"nodes": torch.zeros(1)}, "nodes: expected dtype int32, got float32"),
        ({"rows": torch.zeros(3, dtype=torch.int32)}, r"rows: expected shape \[2\], got \[3\]"),
        ({"survival": torch.zeros(2, 2 * MAX_CELLS)}, "survival: expected at most 16384 cells"),
    ],
)
def test_a_launcher_refuses_what_its_kernel_does_not_take(change, message):
    arguments = {
        "survival": torch.zeros(2, 3),
        "capacities": torch.ones(2, dtype=torch.int32),
        "nodes": 1,
        "rows": None,
    }
    with pytest.raises(ValueError, match=message):
        admit(**(arguments | change))
