"""DraftTree invariants, row-wise selection and the ancestor mask."""

from dataclasses import fields, replace

import pytest
import torch

from specplug.ddtree import build_tree
from specplug.tree import DraftTree, ancestor_mask, sibling_links


def some_trees(requests: int, budget: int, seed: int = 0) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(requests, 4, 6, generator=generator).mul(2).log_softmax(-1)
    log_probs[0, 0, 2:] = float("-inf")  # one request with few nodes
    log_probs[0, 1:] = float("-inf")
    return build_tree(log_probs, budget)


def seen_from(parents: list[int], count: int, width: int) -> list[list[bool]]:
    """Visibility by climbing from each row, one at a time."""
    rows = []
    for row in range(width):
        seen = {0, row}
        node = row - 1 if row <= count else -1
        while node >= 0:
            seen.add(node + 1)
            node = parents[node]
        rows.append([column in seen for column in range(width)])
    return rows


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 16, 33])
def test_ancestor_mask_is_climbing_to_the_root(budget):
    tree = some_trees(3, budget)
    mask = ancestor_mask(tree.parents, tree.counts, max_depth=4)
    expected = [
        seen_from(parents, count, budget + 1)
        for parents, count in zip(tree.parents.tolist(), tree.counts.tolist(), strict=True)
    ]
    assert mask.tolist() == expected


def test_ancestor_mask_ignores_what_lies_in_the_padding():
    tree = some_trees(3, 16)
    dirty = torch.where(torch.arange(16) < tree.counts[:, None], tree.parents, 5)
    expected = ancestor_mask(tree.parents, tree.counts, max_depth=4)
    assert torch.equal(ancestor_mask(dirty, tree.counts, max_depth=4), expected)
    assert not torch.equal(ancestor_mask(dirty, torch.full_like(tree.counts, 16), max_depth=4), expected)


def test_too_small_a_max_depth_loses_ancestors():
    chain = torch.arange(-1, 5, dtype=torch.int32)[None]
    count = torch.tensor([6], dtype=torch.int32)
    assert ancestor_mask(chain, count, max_depth=6)[0].tolist() == torch.ones(7, 7).tril().bool().tolist()
    assert not ancestor_mask(chain, count, max_depth=4)[0, 6, 1]


@pytest.mark.parametrize(("mine", "theirs"), [(5, 9), (9, 5), (0, 3), (4, 4)])
def test_select_takes_whole_rows_and_pads_the_narrower(mine, theirs):
    a, b = some_trees(3, mine, seed=1), some_trees(3, theirs, seed=2)
    chosen = a.select(torch.tensor([True, False, True]), b)
    chosen.validate()
    assert chosen.budget == max(mine, theirs)
    for row, source in enumerate((a, b, a)):
        for field in fields(DraftTree):
            got, expected = getattr(chosen, field.name)[row], getattr(source, field.name)[row]
            assert torch.equal(got[: source.budget] if got.dim() else got, expected)


def test_select_refuses_another_number_of_requests():
    with pytest.raises(ValueError, match="of 3 requests"):
        some_trees(3, 4).select(torch.tensor([True, False]), some_trees(3, 4))


@pytest.mark.parametrize(
    ("field", "request_node", "value"),
    [
        ("parents", (1, 2), 2),  # its own parent
        ("parents", (1, 2), -2),
        ("depths", (1, 3), 7),
        ("scores", (1, 4), 0.0),  # above the node before
        ("scores", (1, 0), 0.5),  # above probability 1
        ("tokens", (0, 9), 3),  # padding that is not padding
        ("counts", (1,), 11),
    ],
)
def test_validate_finds_every_planted_fault(field, request_node, value):
    tree = some_trees(2, 10)
    tree.validate()
    broken = getattr(tree, field).clone()
    assert broken[request_node] != value
    broken[request_node] = value
    with pytest.raises(ValueError, match=f"request {request_node[0]}"):
        replace(tree, **{field: broken}).validate()


def test_validate_finds_equal_siblings():
    tree = some_trees(2, 10)
    top = [j for j, parent in enumerate(tree.parents[1].tolist()) if parent == -1]
    tree.tokens[1, top[1]] = tree.tokens[1, top[0]]
    with pytest.raises(ValueError, match="already a child"):
        tree.validate()


def test_shapes_are_checked_when_a_tree_is_made():
    tree = some_trees(2, 10)
    with pytest.raises(ValueError, match=r"DraftTree\.scores"):
        replace(tree, scores=tree.scores[:, :5])
    with pytest.raises(ValueError, match=r"DraftTree\.counts"):
        replace(tree, counts=tree.counts[:1])


def test_links_lead_to_every_child_in_order():
    tree = some_trees(5, 9)
    first, following = sibling_links(tree.parents, tree.counts)
    for r, count in enumerate(tree.counts.tolist()):
        parents = tree.parents[r].tolist()[:count]
        for row in range(tree.budget + 1):
            children, at = [], int(first[r, row])
            while at >= 0:
                children.append(at - 1)
                at = int(following[r, at])
            wanted = [node for node, parent in enumerate(parents) if parent == row - 1]
            assert children == (wanted if row <= count else [])


def test_a_chain_is_a_tree():
    tree = DraftTree.chain(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    tree.validate()
    assert tree.parents.tolist() == [[-1, 0, 1]] * 2
    assert tree.depths.tolist() == [[1, 2, 3]] * 2
    assert tree.counts.tolist() == [3, 3]
