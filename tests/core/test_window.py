"""Windows of ragged trees against a plain Python layout, and commits against moving rows one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specplug.verify import walk
from specplug.window import WindowBuffers, commit, lay_out_windows


@st.composite
def steps(draw):
    """A step: per request ordinary rows before the window, drafted nodes, live nodes, and a random tree."""
    budget, gamma = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        drafted = draw(st.integers(0, budget))
        live = draw(st.integers(0, drafted))
        parents, depths = [], []
        for j in range(budget):
            shallow = [-1] + [i for i in range(j) if depths[i] < gamma]
            parents.append(draw(st.sampled_from(shallow)))
            depths.append(1 if parents[-1] == -1 else depths[parents[-1]] + 1)
        tokens = [draw(st.integers(0, 2)) for _ in range(budget)]
        requests.append((draw(st.integers(0, 3)), drafted, live, parents, depths, tokens))
    return budget, gamma, draw(st.integers(0, 3)), requests


def lay_out(step, *, more=0):
    """Windows of a step; ``more`` requests of padding behind its own."""
    budget, gamma, padding, requests = step
    requests = requests + [(0, -1, 0, [-1] * budget, [0] * budget, [])] * more
    lengths = torch.tensor([before + drafted + 1 for before, drafted, *_ in requests])
    ends = lengths.cumsum(0)
    total = int(ends[-1]) + padding
    width = max(drafted for _, drafted, *_ in requests) + 1
    windows = lay_out_windows(
        ends=ends,
        drafted=torch.tensor([r[1] for r in requests]),
        parents=torch.tensor([r[3] for r in requests], dtype=torch.int32),
        depths=torch.tensor([r[4] for r in requests], dtype=torch.int32),
        live=torch.tensor([r[2] for r in requests]),
        width=width,
        num_rows=total,
        max_depth=gamma,
    )
    return windows, ends.tolist(), total, width


FIELDS = ("rows", "inside", "mask", "depths", "column_of_row", "in_window")


@given(steps(), st.integers(1, 3))
def test_padding_requests_have_no_window(step, more):
    of, want = len(step[3]), lay_out(step)[0]
    windows, _, total, _ = lay_out(step, more=more)
    for name in FIELDS[:4]:
        assert torch.equal(getattr(windows, name)[:of], getattr(want, name)), name
    for name in FIELDS[4:]:
        assert torch.equal(getattr(windows, name), getattr(want, name)), name
    assert not windows.inside[of:].any()
    assert 0 <= int(windows.rows.min()) <= int(windows.rows.max()) < total


@given(steps())
def test_buffers_hold_a_step_at_addresses_of_their_own(step):
    windows, _, total, _ = lay_out(step)
    buffers = WindowBuffers(windows, requests=len(step[3]) + 2, rows=total + 1)
    first = buffers.hold(windows)
    for name in FIELDS:
        assert torch.equal(getattr(first, name), getattr(windows, name)), name
    again = buffers.hold(lay_out(step, more=2)[0])
    for name in ("rows", "mask", "column_of_row", "in_window"):
        assert (
            getattr(first, name).data_ptr()
            == getattr(again, name).data_ptr()
            != getattr(windows, name).data_ptr()
        )


def ancestors(parents, node):
    while node != -1:
        yield node
        node = parents[node]


@given(steps())
def test_layout_is_the_plain_one(step):
    requests = step[3]
    windows, ends, total, width = lay_out(step)
    linear = torch.arange(100, 100 + total)
    positions = windows.positions(linear).tolist()
    expected = linear.tolist()
    seen_rows = set()
    for r, (_, drafted, live, parents, depths, _) in enumerate(requests):
        root = ends[r] - drafted - 1
        assert windows.inside[r].tolist() == [column <= drafted for column in range(width)]
        for column in range(drafted + 1):
            row = root + column
            seen_rows.add(row)
            assert windows.rows[r, column] == row
            assert windows.column_of_row[row] == r * width + column
            node = column - 1
            real = 0 <= node < live
            expected[row] = 100 + root + (depths[node] if real else 0)
            visible = {0, column} | ({a + 1 for a in ancestors(parents, node)} if real else set())
            assert set(windows.mask[r, column].nonzero().flatten().tolist()) == visible
    assert positions == expected
    assert set(windows.in_window.nonzero().flatten().tolist()) == seen_rows
    assert 0 <= int(windows.rows.min()) <= int(windows.rows.max()) < total


@given(steps())
def test_scatter_replaces_window_rows_only(step):
    windows, _, total, width = lay_out(step)
    into = torch.arange(total * 2, dtype=torch.float32).view(total, 2)
    values = torch.full((len(step[3]), width, 2), -1.0)
    result = windows.scatter(values, into)
    assert torch.equal(result[windows.in_window], torch.full_like(result[windows.in_window], -1.0))
    assert torch.equal(result[~windows.in_window], into[~windows.in_window])


@given(steps(), st.data())
def test_select_equals_laying_out_those_requests(step, data):
    windows, _, total, _ = lay_out(step)
    chosen = data.draw(st.lists(st.sampled_from(range(len(step[3]))), unique=True, min_size=1))
    part = windows.select(torch.tensor(chosen), total)
    assert torch.equal(part.rows, windows.rows[chosen])
    assert torch.equal(part.mask, windows.mask[chosen])
    for place, r in enumerate(chosen):
        for column in range(step[3][r][1] + 1):
            assert part.column_of_row[windows.rows[r, column]] == place * part.rows.shape[1] + column
    assert int(part.in_window.sum()) == sum(step[3][r][1] + 1 for r in chosen)


@given(steps(), st.data())
def test_commit_moves_the_accepted_path_to_the_front(step, data):
    _, gamma, _, requests = step
    windows, ends, total, width = lay_out(step)
    tokens = torch.tensor([r[5] for r in requests])[:, : width - 1]
    sampled = torch.tensor([[data.draw(st.integers(0, 3)) for _ in range(width)] for _ in requests])
    parents = torch.tensor([r[3] for r in requests], dtype=torch.int32)[:, : width - 1]
    live = torch.tensor([r[2] for r in requests])
    result = walk(parents, tokens, live, sampled, max_depth=gamma)
    rows = torch.arange(total)
    expected = rows.clone()
    for r, (_, drafted, *_rest) in enumerate(requests):
        root = ends[r] - drafted - 1
        for k in range(1, int(result.num_emitted[r])):
            expected[root + k] = root + int(result.path[r, k])
    commit(windows, result.path, result.num_emitted).move(rows)
    for r, (_, drafted, *_rest) in enumerate(requests):
        root, kept = ends[r] - drafted - 1, int(result.num_emitted[r])
        assert torch.equal(rows[root : root + kept], expected[root : root + kept])
    assert torch.equal(rows[~windows.in_window], torch.arange(total)[~windows.in_window])


def test_commit_without_a_moved_row_changes_nothing():
    """Negative control of the above: the identity path must be told from a real move."""
    windows, *_ = lay_out((3, 3, 0, [(0, 3, 3, [-1, -1, 1], [1, 1, 2], [0, 1, 2])]))
    chain = torch.tensor([[0, 1, 2, 0]])
    branch = torch.tensor([[0, 2, 3, 0]])
    for path, moved in ((chain, False), (branch, True)):
        rows = torch.arange(4)
        commit(windows, path, torch.tensor([3])).move(rows)
        assert torch.equal(rows, torch.arange(4)) is not moved


def test_width_must_fit_the_trees():
    with pytest.raises(ValueError, match="window width"):
        lay_out_windows(
            ends=torch.tensor([5]),
            drafted=torch.tensor([3]),
            parents=torch.full((1, 3), -1, dtype=torch.int32),
            depths=torch.ones(1, 3, dtype=torch.int32),
            live=torch.tensor([3]),
            width=5,
            num_rows=5,
            max_depth=1,
        )
