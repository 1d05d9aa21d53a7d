"""Moves of accepted rows, in place: features, and paged caches in every layout that the adapters meet."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.window import commit
from specplug_kernels.moves import MAX_DEPTH, PathMoves, RowMoves, group_views, move_kv, move_rows

FEW = settings(max_examples=15, deadline=None, derandomize=True)


@st.composite
def paths(draw):
    """(path [R, D + 1], num_emitted [R], starts [R], rows of the step), windows apart from each other."""
    depth = draw(st.sampled_from([1, 2, 3, 5, 16]))
    requests = draw(st.integers(0, 3))
    path, emitted, starts, row = torch.zeros(requests, depth + 1, dtype=torch.int64), [], [], 0
    for r in range(requests):
        width = draw(st.integers(1, 20))
        row += draw(st.integers(0, 2))
        columns = sorted(draw(st.sets(st.integers(1, max(width - 1, 1)), max_size=min(depth, width - 1))))
        path[r, 1 : len(columns) + 1] = torch.tensor(columns, dtype=torch.int64)
        emitted.append(len(columns) + 1)
        starts.append(row)
        row += width
    return path, torch.tensor(emitted, dtype=torch.int32), torch.tensor(starts, dtype=torch.int64), row + 2


def random_bits(shape, dtype, seed=0):
    """Any bits at all: NaN with payloads, infinities, denormals."""
    g = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=g, dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


def moved(rows, path, emitted, starts):
    """By hand: all is read from the old rows."""
    new = rows.clone()
    for r in range(path.shape[0]):
        for k in range(1, int(emitted[r])):
            new[int(starts[r]) + k] = rows[int(starts[r]) + int(path[r, k])]
    return new


def path_moves(device, path, emitted, starts):
    strided = torch.stack((starts, starts), 1).to(device)[:, 0]  # as windows.rows[:, 0]
    return PathMoves(path.to(device), emitted.to(device), strided)


@FEW
@given(
    paths(),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64]),
    st.sampled_from([(1,), (3,), (16,), (2, 40), (144,)]),
)
def test_features_move_as_by_hand(device, guarded, case, dtype, shape):
    path, emitted, starts, num_rows = case
    rows = random_bits((num_rows, *shape), dtype)
    view, check = guarded(rows.shape, dtype, device)
    view.copy_(rows)
    move_rows(view, path_moves(device, path, emitted, starts))
    assert torch.equal(bits(view), bits(moved(rows.view(torch.uint8), path, emitted, starts)))
    check()


@FEW
@given(paths())
def test_given_moves_are_those_of_the_core_and_of_the_path(device, case):
    path, emitted, starts, num_rows = case
    depth = path.shape[1] - 1
    window = starts[:, None] + torch.arange(20 + 1)
    moves = commit(SimpleNamespace(rows=window), path, emitted)
    rows = torch.randn(num_rows + 21, 32)
    want = rows.clone()
    moves.move(want)
    by_path, by_row = rows.to(device, copy=True), rows.to(device, copy=True)
    move_rows(by_path, path_moves(device, path, emitted, starts))
    source, destination = (t.view(-1, depth).to(device) for t in (moves.source, moves.destination))
    move_rows(by_row, RowMoves(source, destination))
    assert torch.equal(by_path.cpu(), want)
    assert torch.equal(by_row.cpu(), want)


# name: (shape of the memory, its view [blocks, block, heads, head size])
LAYOUTS = {
    "NHD": (lambda n, b, h, d: (n, b, h, d), lambda memory: memory),
    "HND": (lambda n, b, h, d: (n, h, b, d), lambda memory: memory.transpose(1, 2)),
    "packed keys": (
        lambda n, b, h, d: (n, h, d, b),
        lambda memory: memory.permute(0, 3, 1, 2),
    ),  # vLLM on a CPU
    "beside values": (lambda n, b, h, d: (n, 2, b, h, d), lambda memory: memory[:, 1]),
}


def moved_slots(view, slots, path, emitted, starts):
    """By hand, into ``view`` on the CPU."""
    block, old = view.shape[1], view.clone()
    for r in range(path.shape[0]):
        for k in range(1, int(emitted[r])):
            source, target = int(slots[starts[r] + path[r, k]]), int(slots[starts[r] + k])
            view[target // block, target % block] = old[source // block, source % block]


@pytest.mark.parametrize("head_size", [32, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(paths(), st.integers(0, 100), st.sampled_from([torch.float16, torch.float32, torch.float8_e5m2]))
def test_caches_of_every_layout_move_in_one_launch(device, layout, head_size, case, seed, dtype):
    """Slots anywhere in the cache, two layers; whatever is not moved stays bit for bit."""
    path, emitted, starts, num_rows = case
    blocks = -(-num_rows // 4) + 1
    slots = torch.randperm(4 * blocks, generator=torch.Generator().manual_seed(seed))[:num_rows]
    shape, view = LAYOUTS[layout]
    layers = [random_bits(shape(blocks, 4, 2, head_size), dtype, seed=i) for i in range(2)]
    on_device = [layer.to(device, copy=True) for layer in layers]
    (caches,) = group_views([view(layer) for layer in on_device])
    move_kv(caches, path_moves(device, path, emitted, starts), slots.to(device))
    for layer, got in zip(layers, on_device, strict=True):
        moved_slots(
            view(layer.view(torch.int8) if dtype.itemsize == 1 else layer), slots, path, emitted, starts
        )
        assert torch.equal(bits(got), bits(layer))


def test_given_slots_move_and_negative_ones_stay(device):
    memory = torch.arange(24.0).view(6, 2, 1, 2)
    want = memory.clone().view(12, 2)
    want[[1, 2]] = memory.view(12, 2)[[2, 9]]
    got = memory.to(device, copy=True)
    source = torch.tensor([[2, 9, -1, 4]], device=device)
    destination = torch.tensor([[1, 2, 5, -1]], device=device)
    move_kv(group_views([got])[0], RowMoves(source, destination))
    assert torch.equal(got.cpu().view(12, 2), want)


def test_an_address_that_is_no_multiple_of_16_bytes(device):
    memory = torch.arange(1 + 4 * 2 * 16, dtype=torch.float32, device=device)
    view = memory[1:].view(2, 2, 2, 16)
    want = view.cpu().clone()
    want[0, 1] = want[1, 0]
    source, destination = torch.tensor([[2]], device=device), torch.tensor([[1]], device=device)
    move_kv(group_views([view])[0], RowMoves(source, destination))
    assert torch.equal(view.cpu(), want)
    assert memory[0] == 0


def test_views_are_grouped_by_geometry(device):
    views = [torch.zeros(3, 4, 2, d, dtype=t, device=device) for d, t in ((8, torch.half), (16, torch.half))]
    views += [views[0].clone(), views[0].bfloat16(), views[0].transpose(1, 2).contiguous().transpose(1, 2)]
    groups = group_views(views)
    assert [len(group.views) for group in groups] == [2, 1, 1, 1]
    assert groups[0].addresses.tolist() == [views[0].data_ptr(), views[2].data_ptr()]


def test_an_overlapping_chain_of_moves_reads_before_it_writes(device):
    """A cycle, which no order of single moves gets right: the negative control is each of the two orders."""
    rows = torch.arange(4.0)[:, None].repeat(1, 16)
    source, destination = torch.tensor([[2, 3, 1]]), torch.tensor([[1, 2, 3]])
    got = rows.to(device, copy=True)
    move_rows(got, RowMoves(source.to(device), destination.to(device)))
    assert got[:, 0].tolist() == [0, 2, 3, 1]
    for order in ([0, 1, 2], [2, 1, 0]):
        one_by_one = rows.clone()
        for k in order:
            one_by_one[destination[0, k]] = one_by_one[source[0, k]].clone()
        assert not torch.equal(got.cpu(), one_by_one)


def test_launchers_refuse_what_their_kernels_do_not_take(device):
    path = torch.zeros(1, 3, dtype=torch.int64, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    rows = torch.zeros(4, 8, device=device)
    moves = PathMoves(path, one, one)
    with pytest.raises(ValueError, match="rows: expected dimensions 1 to 1 contiguous"):
        move_rows(rows.T, moves)
    with pytest.raises(ValueError, match="num_emitted: expected dtype int32, got int64"):
        move_rows(rows, moves._replace(num_emitted=one.long()))
    with pytest.raises(ValueError, match=r"destination: expected shape \[1, 3\], got \[1, 2\]"):
        move_rows(rows, RowMoves(path, path[:, :2]))
    with pytest.raises(
        ValueError, match=f"moves: expected at most {MAX_DEPTH} a request, got {MAX_DEPTH + 1}"
    ):
        move_rows(rows, moves._replace(path=torch.zeros(1, MAX_DEPTH + 2, dtype=torch.int64, device=device)))
    (caches,) = group_views([torch.zeros(2, 2, 1, 8, device=device)])
    with pytest.raises(ValueError, match="slots: expected the slot of each row to follow a path, got None"):
        move_kv(caches, moves)
    with pytest.raises(ValueError, match=r"cache view: expected shape \[any, any, any, any\], got \[4, 8\]"):
        group_views([rows])
