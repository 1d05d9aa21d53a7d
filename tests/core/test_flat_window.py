"""The flat mask and the positions of a window, against loops over requests, rows and bits."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specplug.flat_window import flat_mask, flat_window
from specplug.tree import DraftTree


@st.composite
def batches(draw):
    """Trees of one width, the tokens before them, and how many rows of each are verified."""
    budget = draw(st.integers(1, 6))
    trees, prefixes, rows = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, budget))
        trees.append([draw(st.integers(-1, node - 1)) for node in range(count)])
        prefixes.append(draw(st.integers(0, 9)))
        rows.append(draw(st.integers(1, budget + 1)))
    return budget, trees, prefixes, rows


def batch(budget, parents):
    """DraftTrees of given parents; token of node j is j + 1."""
    tree = DraftTree.empty(len(parents), budget)
    for request, row in enumerate(parents):
        depths = []
        for node, parent in enumerate(row):
            depths.append(1 if parent < 0 else depths[parent] + 1)
            tree.parents[request, node], tree.depths[request, node] = parent, depths[-1]
            tree.tokens[request, node], tree.scores[request, node] = node + 1, -float(node)
        tree.counts[request] = len(row)
    return tree


@given(batches())
def test_a_row_sees_its_prefix_and_its_path(drawn):
    budget, parents, prefixes, rows = drawn
    prefix = torch.tensor(prefixes)
    windows = flat_window(batch(budget, parents), torch.full_like(prefix, 77), prefix, max_depth=budget)
    expected = []
    for request, (committed, verified) in enumerate(zip(prefixes, rows, strict=True)):
        for row in range(verified):
            path = {0, row}
            node = row - 1
            while 0 <= node < len(parents[request]):
                path.add(node + 1)
                node = parents[request][node]
            expected += [True] * committed + [column in path for column in range(verified)]
    size = sum(r * (p + r) for r, p in zip(rows, prefixes, strict=True))
    assert flat_mask(windows.sees, prefix, torch.tensor(rows), size).tolist() == expected


@given(batches())
def test_a_row_stands_at_its_depth(drawn):
    budget, parents, prefixes, _ = drawn
    prefix = torch.tensor(prefixes)
    tree = batch(budget, parents)
    windows = flat_window(tree, torch.full_like(prefix, 77), prefix, max_depth=budget)
    for request, committed in enumerate(prefixes):
        depths = [0, *tree.depths[request].tolist()]
        assert windows.positions[request].tolist() == [committed + depth for depth in depths]
        assert windows.ids[request].tolist() == [77, *tree.tokens[request].tolist()]
