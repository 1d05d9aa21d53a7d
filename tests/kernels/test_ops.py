"""Torch or Triton: who is chosen, and every function of the two sets on the same inputs.

The kernels have their own property tests; here it is the wrapping that is under test: order of arguments and
fields, views of the persistent buffers, and that neither set is a copy of the other.
"""

import dataclasses

import pytest
import torch

from specplug.candidates import TransitionTable
from specplug.heads import MarkovHead, Projection
from specplug.tree import DraftTree
from specplug.vocabulary import DraftVocabulary
from specplug.window import Commit, lay_out_windows
from specplug_kernels import attention, budget, candidates, growth, moves, ops

MOST, REQUESTS, DEPTH, BUDGET = 5, 3, 3, 6  # MOST: requests the buffers are made for
VOCAB, RANK, HIDDEN, COUNT = 40, 8, 16, 4
HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 4


@pytest.fixture
def g():
    return torch.Generator().manual_seed(7)


@pytest.fixture(scope="module")
def both(device):
    """(torch's set, Triton's)."""
    triton = ops.make_ops("triton", device, requests=MOST, depth=DEPTH, budget=BUDGET)
    return ops.make_ops("torch", device, requests=MOST, depth=DEPTH, budget=BUDGET), triton


def same(expected, got):
    """Exactly equal, or equal to 1e-5 where floats were computed."""
    fields = expected if isinstance(expected, tuple) else dataclasses.astuple(expected)
    others = got if isinstance(got, tuple) else dataclasses.astuple(got)
    for want, have in zip(fields, others, strict=True):
        assert want.dtype == have.dtype
        if want.is_floating_point():
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(want, have)


def logits(g, device, dtype=torch.float32):
    return (3 * torch.randn(REQUESTS, DEPTH, VOCAB, generator=g)).to(device, dtype)


def head(g, device, kind, rows=VOCAB):
    w1, w2 = (torch.randn(n, RANK, generator=g).to(device) for n in (VOCAB, rows))
    gate = Projection(
        torch.randn(RANK, HIDDEN + RANK, generator=g).to(device), torch.randn(RANK, generator=g).to(device)
    )
    return MarkovHead(w1, w2, 0.5, gate=gate if kind == "gated" else None)


def tables(g, device, reference):
    """A table of each kind: one parent row, and one a candidate."""
    anchors = torch.arange(REQUESTS, device=device)
    return [
        reference.factorised(logits(g, device), COUNT),
        reference.conditioned(logits(g, device), head(g, device, "vanilla"), anchors, COUNT),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factorised(both, g, device, dtype):
    scores = logits(g, device, dtype)
    same(*(each.factorised(scores, COUNT) for each in both))


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
@pytest.mark.parametrize("reduced", [False, True])
def test_conditioned(both, g, device, kind, reduced):
    rows = VOCAB // 2 if reduced else VOCAB
    vocabulary = DraftVocabulary(2 * torch.arange(rows, device=device)) if reduced else None
    more = {"hidden": torch.randn(REQUESTS, DEPTH, HIDDEN, generator=g).to(device), "vocabulary": vocabulary}
    args = logits(g, device)[..., :rows], head(g, device, kind, rows), torch.arange(REQUESTS, device=device)
    same(*(each.conditioned(*args, COUNT, **more) for each in both))


def test_trees_and_chains(both, g, device):
    for table in tables(g, device, both[0]):
        same(*(each.grow(table, BUDGET) for each in both))
        same(*(each.greedy_chain(table) for each in both))


def test_a_wrong_function_shows(both, g, device):
    """Control of the comparison: a table with two tokens exchanged grows another tree."""
    table = tables(g, device, both[0])[0]
    swapped = TransitionTable(table.tokens.flip(-1), table.log_probs)
    with pytest.raises(AssertionError):
        same(both[0].grow(table, BUDGET), both[1].grow(swapped, BUDGET))


def test_walk(both, g, device):
    tree = both[0].grow(tables(g, device, both[0])[0], BUDGET)
    sampled = torch.nn.functional.pad(tree.tokens, (1, 0)).roll(-1, 1)  # each row draws the next node's token
    blocked = torch.zeros(REQUESTS, BUDGET, dtype=torch.bool, device=device)
    blocked[1, 0] = True
    args = tree.parents, tree.tokens, tree.counts, sampled
    results = [each.walk(*args, max_depth=DEPTH, blocked=blocked) for each in both]
    same(*results)
    assert results[0].num_emitted.max() > 1
    assert both[1].walk(*args, max_depth=DEPTH).tokens.data_ptr() != results[1].tokens.data_ptr()


@pytest.mark.parametrize("nodes", [0, 1, 7])
def test_admit(both, g, device, nodes):
    survival = torch.rand(REQUESTS, BUDGET, generator=g).sort(1, descending=True).values.to(device)
    capacities = torch.tensor([BUDGET, 0, 4], dtype=torch.int32, device=device)
    results = [each.admit(survival, capacities, nodes) for each in both]
    assert torch.equal(*results)
    assert results[0].sum() == nodes


def test_a_batch_above_the_budget_kernel_keeps_torch():
    cells = ops.triton_ops(torch.device("cpu"), requests=budget.MAX_CELLS // 8, depth=1, budget=8)
    above = ops.triton_ops(torch.device("cpu"), requests=budget.MAX_CELLS // 8 + 1, depth=1, budget=8)
    assert cells.admit is not ops.admit
    assert above.admit is ops.admit


def step(each, device, width=BUDGET + 1):
    """Windows of three requests behind two ordinary rows: 6, 0 and 3 nodes, of the last 2 are live."""
    parents = torch.tensor([[-1, 0, 0, -1, 1, 4], [-1] * 6, [-1, 0, -1, -1, -1, -1]], dtype=torch.int32)
    depths = torch.tensor([[1, 2, 2, 1, 3, 4], [0] * 6, [1, 2, 0, 0, 0, 0]], dtype=torch.int32)
    return lay_out_windows(
        ends=torch.tensor([9, 10, 14], device=device),
        drafted=torch.tensor([6, 0, 3], device=device),
        parents=parents.to(device),
        depths=depths.to(device),
        live=torch.tensor([6, 0, 2], dtype=torch.int32, device=device),
        width=width,
        num_rows=14,
        max_depth=4,
        visibility=each.visibility,
    )


@pytest.mark.parametrize("selected", [None, [0, 2]])
def test_attention(both, g, device, selected):
    rows, outputs = 14, []

    def random(*shape):
        return torch.randn(shape, generator=g).to(device)

    query, key, value = (random(rows, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    requests = REQUESTS if selected is None else len(selected)
    prefix = random(requests, BUDGET + 1, HEADS, SIZE), random(requests, BUDGET + 1, HEADS)
    prefix[1][0] = float("-inf")  # a request without a prefix
    for each in both:
        windows = step(each, device)
        if selected is not None:
            windows = windows.select(torch.tensor(selected, device=device), rows)
        output = torch.full((rows, HEADS, SIZE), 7.0, device=device)
        each.attention(windows)(query, key, value, *prefix, output, SIZE**-0.5)
        outputs.append(output)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    outside = [0, 1] + ([9] if selected is not None else [])
    assert (outputs[1][outside] == 7).all()
    assert (outputs[1][2:9] != 7).any()


def some_moves(device):
    """Two requests' moves: an accepted path of 3 that overlaps its window, and one of 1."""
    source, destination = [3, 5, 8, 12, 10, 10], [3, 4, 5, 11, 10, 10]
    return Commit(torch.tensor(source, device=device), torch.tensor(destination, device=device))


def test_move_rows(both, g, device):
    rows = torch.randn(14, 5, generator=g).to(device)
    moved = [rows.clone(), rows.clone()]
    for each, one in zip(both, moved, strict=True):
        each.move_rows(some_moves(device), one)
    assert torch.equal(*moved)
    assert torch.equal(moved[1][[4, 5, 11]], rows[[5, 8, 12]])


def test_cache_movers(both, g, device):
    """Two layers, each with keys and values in layouts of their own."""

    def caches():
        packed = torch.arange(2 * 4 * KV_HEADS * BLOCK * 2 * SIZE, device=device).float()
        for layer in packed.view(2, 4, KV_HEADS, BLOCK, 2 * SIZE):
            yield layer.transpose(1, 2)[..., :SIZE]
            yield layer[..., SIZE:].transpose(1, 2)

    slots = torch.randperm(4 * BLOCK, generator=g)[:14].to(device)
    moved = [list(caches()), list(caches())]
    for each, views in zip(both, moved, strict=True):
        each.cache_mover(views)(some_moves(device), slots)
    assert all(torch.equal(a, b) for a, b in zip(*moved, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(moved[1], caches(), strict=True))
    both[1].cache_mover([])(some_moves(device), slots)  # a group whose layers are all the draft's


def test_buffers_are_made_once(both, g, device):
    triton = both[1]
    table = tables(g, device, both[0])[0]
    survival = torch.rand(REQUESTS, BUDGET, generator=g).to(device)
    capacities = torch.full((REQUESTS,), BUDGET, dtype=torch.int32, device=device)

    def addresses():
        tree, chain = triton.grow(table, BUDGET), triton.greedy_chain(table)
        words = triton.visibility(tree.parents, tree.counts, max_depth=DEPTH)
        names = [field.name for field in dataclasses.fields(DraftTree)]
        drafted = [getattr(each, name) for each in (tree, chain) for name in names]
        return [out.data_ptr() for out in (*drafted, words, triton.admit(survival, capacities, 7))]

    first = addresses()
    assert addresses() == first
    assert len(set(first)) == len(first)


def settings(**changes):
    given = {"on_gpu": True, "budget": 64, "candidates": 64, "depth": 16, "head_size": 256, "vocab": 262_144}
    return {**given, **changes}


def test_who_is_chosen(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ops.choose("auto", **settings()) == ("triton", "")
    assert ops.choose("auto", **settings(on_gpu=False)) == ("torch", "")
    assert ops.choose("triton", **settings(on_gpu=False)).kind == "triton"
    for gpu in (True, False):
        assert ops.choose("torch", **settings(on_gpu=gpu)) == ("torch", "")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert ops.choose("triton", **settings()).kind == "triton"
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET=1.*\"torch\""):
        ops.choose("triton", **settings(on_gpu=False))
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: None)
    assert ops.choose("auto", **settings()) == ("torch", "Triton is not installed")
    with pytest.raises(ValueError, match="not installed"):
        ops.choose("triton", **settings())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 65}, "tree_budget of at most 64, and it is 65"),
        ({"candidates": 65}, "candidates of at most 64, and it is 65"),
        ({"depth": 17}, "num_speculative_tokens of at most 16, and it is 17"),
        ({"head_size": 264}, "head size of at most 256, and it is 264"),
        ({"head_size": 100}, "multiples of 8, and it is 100"),
        ({"vocab": 262_145}, "vocabulary of at most 262144, and it is 262145"),
    ],
)
def test_sizes_beyond_the_kernels(change, message):
    assert ops.choose("auto", **settings(**change)).kind == "torch"
    assert message in ops.choose("auto", **settings(**change)).reason
    with pytest.raises(ValueError, match=message) as error:
        ops.choose("triton", **settings(**change))
    assert "\n" not in str(error.value)


def test_limits_are_the_kernels():
    assert ops.MAX_BUDGET == growth.MAX_NODES == attention.MAX_WIDTH - 1
    assert ops.MAX_CANDIDATES == growth.MAX_CANDIDATES == candidates.MAX_CANDIDATES
    assert ops.MAX_DEPTH == moves.MAX_DEPTH <= growth.MAX_NODES  # a chain's nodes
    assert (ops.MAX_HEAD_SIZE, ops.HEAD_SIZE_UNIT) == (attention.MAX_HEAD_SIZE, attention.ALIGN)
    assert ops.MAX_VOCAB == candidates.MAX_VOCAB
