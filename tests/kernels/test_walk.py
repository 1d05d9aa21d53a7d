"""The walk kernel against specplug.verify: rectangles, ragged rows of an engine, the order after it."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import verify
from specplug.ragged import window_index
from specplug.verify import Walk
from specplug_kernels.walk import MAX_BUDGET, path_permutation, walk

pytestmark = pytest.mark.filterwarnings("ignore:.*overflow")
FEW = settings(max_examples=30, deadline=None, derandomize=True)


class Trees(NamedTuple):
    parents: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    sampled: torch.Tensor
    blocked: torch.Tensor | None
    max_depth: int


@st.composite
def trees(draw, min_requests=0):
    """Random trees over 3 tokens, so that walks go deep and siblings share tokens; some nodes blocked."""
    requests = draw(st.integers(min_requests, 3))
    budget = draw(st.sampled_from([0, 1, 2, 5, 8, 13]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    parents = torch.stack(
        [torch.randint(-1, i, (requests,), generator=g) for i in range(budget)], 1
    ) if budget else torch.zeros(requests, 0)  # fmt: skip
    kinds = draw(st.integers(1, 3))
    blocked = torch.rand(requests, budget, generator=g) < 0.2 if draw(st.booleans()) else None
    return Trees(
        parents.int(),
        torch.randint(0, kinds, (requests, budget), generator=g),
        torch.randint(0, budget + 1, (requests,), generator=g).int(),
        torch.randint(0, kinds, (requests, budget + 1), generator=g),
        blocked,
        draw(st.sampled_from([0, 1, 3, 7, 16])),
    )


def on(device, *tensors):
    return [None if t is None else t.to(device) for t in tensors]


def buffers(guarded, device, requests, max_depth):
    steps = (requests, max_depth + 1)
    views, checks = zip(
        guarded(steps, torch.int64, device),
        guarded((requests,), torch.int32, device),
        guarded(steps, torch.int64, device),
        strict=True,
    )
    return Walk(*views), checks


def equal(got: Walk, want: Walk) -> bool:
    return all(torch.equal(a.cpu(), b) and a.dtype == b.dtype for a, b in zip(got, want, strict=True))


def reference(case: Trees) -> Walk:
    parents, tokens, counts, sampled, blocked, max_depth = case
    return verify.walk(parents, tokens, counts, sampled, max_depth=max_depth, blocked=blocked)


@FEW
@given(trees())
def test_rectangles_walk_as_the_reference(device, guarded, case):
    out, checks = buffers(guarded, device, case.tokens.shape[0], case.max_depth)
    parents, tokens, counts, sampled, blocked = on(device, *case[:5])
    got = walk(parents, tokens, counts, sampled, max_depth=case.max_depth, blocked=blocked, out=out)
    assert equal(got, reference(case))
    for check in checks:
        check()


@FEW
@given(trees(min_requests=1), st.data())
def test_ragged_rows_walk_as_the_adapter_does_with_torch(device, guarded, case, data):
    """Flat sampled tokens and input ids; trees cut from a wider store; more nodes scheduled than drafted."""
    requests, budget = case.tokens.shape
    drafted = torch.tensor([data.draw(st.integers(int(n), budget)) for n in case.counts])
    starts = torch.nn.functional.pad((drafted + 1).cumsum(0), (1, 0)).int()
    flat = [torch.full((int(starts[-1]),), 99), torch.full((int(starts[-1]),), 99, dtype=torch.int32)]
    flat_blocked = None if case.blocked is None else torch.zeros(int(starts[-1]), dtype=torch.bool)
    for r in range(requests):
        first, n = int(starts[r]), int(drafted[r])
        flat[0][first : first + n + 1] = case.sampled[r, : n + 1]
        flat[1][first + 1 : first + 1 + n] = case.tokens[r, :n]
        if flat_blocked is not None:
            flat_blocked[first + 1 : first + 1 + n] = case.blocked[r, :n]
    sampled, input_ids = flat
    index, _ = window_index(starts[:-1], starts.diff(), budget + 1)
    want = verify.walk(
        case.parents,
        input_ids[index][:, 1:].long(),
        case.counts,
        sampled[index],
        max_depth=case.max_depth,
        blocked=None if flat_blocked is None else flat_blocked[index][:, 1:],
    )
    store = torch.nn.functional.pad(case.parents, (0, 3), value=0).to(device)
    out, checks = buffers(guarded, device, requests, case.max_depth)
    input_ids, counts, sampled, starts, blocked = on(
        device, input_ids, case.counts, sampled, starts, flat_blocked
    )
    got = walk(
        store[:, :budget],
        input_ids,
        counts,
        sampled,
        max_depth=case.max_depth,
        blocked=blocked,
        starts=starts,
        out=out,
    )
    assert equal(got, want)
    for check in checks:
        check()


def chain_with_twins(device):
    """Nodes 0 and 1 are children of the root with the same token; each has a child with token 7."""
    parents = torch.tensor([[-1, -1, 1, 0]], dtype=torch.int32, device=device)
    tokens = torch.tensor([[5, 5, 7, 7]], device=device)
    counts = torch.tensor([4], dtype=torch.int32, device=device)
    sampled = torch.tensor([[5, 7, 7, 1, 2]], device=device)
    return parents, tokens, counts, sampled


def test_of_siblings_with_one_token_the_first_is_entered(device):
    got = walk(*chain_with_twins(device), max_depth=3)
    assert got.path.tolist() == [[0, 1, 4, 0]]
    assert got.tokens.tolist() == [[5, 7, 2, -1]]
    assert got.num_emitted.tolist() == [3]


def test_a_blocked_twin_leaves_the_other(device):
    blocked = torch.tensor([[True, False, False, False]], device=device)
    got = walk(*chain_with_twins(device), max_depth=3, blocked=blocked)
    assert got.path.tolist() == [[0, 2, 3, 0]]
    assert not torch.equal(got.path, walk(*chain_with_twins(device), max_depth=3).path)  # negative control


def test_nodes_past_the_count_and_their_token_zero_are_never_entered(device):
    parents = torch.full((2, 3), -1, dtype=torch.int32, device=device)
    tokens, sampled = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    counts = torch.tensor([0, 1], dtype=torch.int64, device=device)
    got = walk(parents, tokens.to(device), counts, sampled.to(device), max_depth=2)
    assert got.num_emitted.tolist() == [1, 2]
    assert got.tokens.tolist() == [[0, -1, -1], [0, 0, -1]]


def test_the_depth_bounds_the_walk(device):
    chain = torch.arange(-1, 63, dtype=torch.int32, device=device)[None]
    same = torch.zeros(1, 65, dtype=torch.int64, device=device)
    counts = torch.tensor([64], device=device)
    for depth in (15, 16, 64):
        got = walk(chain, same[:, 1:], counts, same, max_depth=depth)
        assert got.num_emitted.tolist() == [depth + 1]
        assert got.path.tolist() == [list(range(depth + 1))]


def test_a_node_without_a_row_in_its_window_and_a_window_without_rows(device):
    """Padding requests of a captured graph own no rows; a tree may have been cut to fewer rows."""
    parents = torch.tensor([[-1, 0]] * 3, dtype=torch.int32, device=device)
    counts = torch.tensor([2, 2, 2], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device)
    ones = torch.ones(5, dtype=torch.int64, device=device)
    got = walk(parents, ones, counts, ones, max_depth=2, starts=starts)
    assert got.num_emitted.tolist() == [2, 0, 3]
    assert got.tokens.tolist() == [[1, 1, -1], [-1, -1, -1], [1, 1, 1]]
    assert got.path.tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 2]]


@FEW
@given(trees(), st.sampled_from([0, 1, 40]))
def test_the_order_is_the_references_and_a_permutation(device, guarded, case, extra):
    result = reference(case)
    width = case.tokens.shape[1] + 1 + extra
    out, check = guarded((case.tokens.shape[0], width), torch.int64, device)
    got = path_permutation(*on(device, result.path, result.num_emitted), width, out=out).cpu()
    assert torch.equal(got, verify.path_permutation(result.path, result.num_emitted, width))
    assert torch.equal(got.sort(1).values, torch.arange(width).expand_as(got))
    check()


def test_the_order_of_a_wrong_walk_is_another(device):
    """Negative control of the comparison above."""
    path = torch.tensor([[0, 2, 0]], device=device)
    counts = torch.tensor([2], dtype=torch.int32, device=device)
    assert path_permutation(path, counts, 4).tolist() == [[0, 2, 1, 3]]
    assert path_permutation(path, counts - 1, 4).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": torch.zeros(2, 3, dtype=torch.int64)}, "parents: expected dtype int32, got int64"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int64)}, r"tokens: expected shape \[2, 3\], got \[2, 2\]"),
        ({"sampled": torch.zeros(2, 3, dtype=torch.int64)}, r"sampled: expected shape \[2, 4\]"),
        ({"tokens": torch.zeros(3, 2, dtype=torch.int64).T}, "tokens: expected dimensions 1 to 1 contiguous"),
        ({"blocked": torch.zeros(2, 3)}, "blocked: expected dtype bool, got float32"),
        ({"starts": torch.zeros(2, dtype=torch.int32)}, r"tokens: expected shape \[2\], got \[2, 3\]"),
        (
            {"parents": torch.zeros(2, MAX_BUDGET + 1, dtype=torch.int32)},
            "parents: expected at most 1024 nodes",
        ),
        ({"max_depth": -1}, "max_depth: expected at least 0, got -1"),
    ],
)
def test_a_launcher_refuses_what_its_kernel_does_not_take(change, message):
    arguments = {
        "parents": torch.zeros(2, 3, dtype=torch.int32),
        "tokens": torch.zeros(2, 3, dtype=torch.int64),
        "counts": torch.zeros(2, dtype=torch.int32),
        "sampled": torch.zeros(2, 4, dtype=torch.int64),
        "max_depth": 2,
    }
    with pytest.raises(ValueError, match=message):
        walk(**(arguments | change))
