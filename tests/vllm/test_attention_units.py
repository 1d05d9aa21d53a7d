"""Tree attention without an engine: the cache layouts, and both passes merged, against one masked softmax."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from specplug.attention import masked_attention
from specplug.tree import ancestor_mask
from specplug.window import Commit, lay_out_windows
from specplug_kernels.ops import torch_ops

pytestmark = pytest.mark.vllm

HEADS, KV_HEADS, HEAD = 4, 2, 32
SCALE = HEAD**-0.5
# One step: a prefill piece of 5 rows, a tree of 6 nodes, a tree of 3 nodes (one of them not live).
PARENTS = torch.tensor([[-1] * 6, [-1, 0, 0, -1, 1, 4], [-1, -1, 0, -1, -1, -1]], dtype=torch.int32)
DEPTHS = torch.tensor([[0] * 6, [1, 2, 2, 1, 3, 4], [1, 1, 2, 0, 0, 0]], dtype=torch.int32)
DRAFTED = torch.tensor([0, 6, 3])
LIVE = torch.tensor([0, 6, 2])
COMMITTED = [40, 67, 9]  # tokens in the cache before the step
ROWS = [5, 7, 4]


def lay_out(parents=PARENTS):
    return lay_out_windows(
        ends=torch.tensor(ROWS).cumsum(0),
        drafted=DRAFTED,
        parents=parents,
        depths=DEPTHS,
        live=LIVE,
        width=7,
        num_rows=sum(ROWS),
        max_depth=4,
    )


class Cache:
    """A paged cache in logical form, [blocks, block, Hkv, D], with shuffled blocks for each request."""

    def __init__(self, block, generator):
        self.block = block
        per_request = -(-80 // block)
        self.table = (1 + torch.randperm(3 * per_request, generator=generator)).view(3, per_request)
        shape = (1 + 3 * per_request, block, KV_HEADS, HEAD)
        self.keys = torch.randn(shape, generator=generator)
        self.values = torch.randn(shape, generator=generator)

    def slots(self, request, positions):
        return self.table[request, positions // self.block] * self.block + positions % self.block

    def committed(self, request):
        slots = self.slots(request, torch.arange(COMMITTED[request]))
        return self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots]

    def forget_uncommitted(self):
        """What was never written may be anything."""
        for request in range(3):
            slots = self.slots(request, torch.arange(COMMITTED[request], self.table.shape[1] * self.block))
            self.keys.view(-1, KV_HEADS, HEAD)[slots] = float("nan")
            self.values.view(-1, KV_HEADS, HEAD)[slots] = float("nan")


def attention_trees(windows):
    from specplug_vllm.model_state import AttentionTrees

    requests = torch.tensor([1, 2])
    windows = windows.select(requests, sum(ROWS))
    return AttentionTrees(
        windows=windows,
        attend=torch_ops().attention(windows),
        requests=requests,
        prefix_lens=torch.tensor([COMMITTED[1], COMMITTED[2]], dtype=torch.int32),
        max_prefix_len=80,
        only_windows=False,
    )


def expected_rows(cache, query, key, value):
    """Every tree row by brute force: the committed tokens, its ancestors, itself; one softmax."""
    want = {}
    masks = ancestor_mask(PARENTS, LIVE, max_depth=4)
    first = 0
    for request, rows in enumerate(ROWS):
        nodes = int(DRAFTED[request])
        if nodes:
            window = slice(first, first + nodes + 1)
            keys, values = cache.committed(request)
            mask = torch.cat(
                [
                    torch.ones(nodes + 1, len(keys), dtype=torch.bool),
                    masks[request, : nodes + 1, : nodes + 1],
                ],
                1,
            )
            out = masked_attention(
                query[None, window],
                torch.cat([keys, key[window]])[None],
                torch.cat([values, value[window]])[None],
                mask[None],
                SCALE,
            )[0]
            want.update({first + i: row for i, row in enumerate(out)})
        first += rows
    return want


@pytest.fixture
def step():
    generator = torch.Generator().manual_seed(3)

    def rows(heads):
        return torch.randn(sum(ROWS), heads, HEAD, generator=generator)

    return SimpleNamespace(generator=generator, query=rows(HEADS), key=rows(KV_HEADS), value=rows(KV_HEADS))


class Ordinary:
    """The engine's path below ours: it must be left to answer for rows outside windows."""

    def __init__(self):
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = HEADS, KV_HEADS, HEAD, SCALE

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output):
        output.fill_(7.0)
        return output


def run_merged(implementation, cache, kv_cache, step, parents=PARENTS):
    """``forward`` of an implementation whose stock part is replaced by :class:`Ordinary`."""
    from specplug_vllm.attention import TreeAttention

    class Merged(TreeAttention, Ordinary):
        prefix_pass = implementation.prefix_pass
        cache_views = None
        vllm_flash_attn_version = 2

    metadata = SimpleNamespace(
        specplug_trees=attention_trees(lay_out(parents)), block_table=cache.table.to(torch.int32)
    )
    output = torch.zeros(sum(ROWS), HEADS, HEAD)
    return Merged().forward(None, step.query, step.key, step.value, kv_cache, metadata, output)


def check_merged(output, want):
    for row in range(sum(ROWS)):
        if row in want:
            torch.testing.assert_close(output[row], want[row], rtol=1e-5, atol=1e-5)
        else:
            assert (output[row] == 7.0).all()


def packed_for_cpu(cache):
    """The cache as vLLM's own CPU operator writes it."""
    from vllm import _custom_ops as ops

    blocks = cache.keys.shape[0]
    packed = torch.full((blocks, KV_HEADS, cache.block, 2 * HEAD), float("nan"))
    halves = packed.view(blocks, KV_HEADS, 2 * cache.block, HEAD).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        cache.keys.flatten(0, 1),
        cache.values.flatten(0, 1),
        *halves,
        torch.arange(blocks * cache.block),
        "vec",
    )
    return packed


@pytest.mark.parametrize("block", [32, 64])
def test_cpu_views_read_what_the_cpu_operator_packed(step, block):
    from specplug_vllm.cpu_attention import key_value_views

    cache = Cache(block, step.generator)
    keys, values = key_value_views(packed_for_cpu(cache))
    assert torch.equal(keys.permute(0, 3, 1, 2), cache.keys)
    assert torch.equal(values.permute(0, 2, 1, 3), cache.values)


@pytest.mark.parametrize("block", [32, 64])
def test_cpu_rows_equal_one_masked_softmax(step, block):
    from specplug_vllm.cpu_attention import CPUTreeImpl

    cache = Cache(block, step.generator)
    want = expected_rows(cache, step.query, step.key, step.value)
    cache.forget_uncommitted()
    check_merged(run_merged(CPUTreeImpl, cache, packed_for_cpu(cache), step), want)


def test_a_row_sees_no_sibling(step):
    """Control of the comparison: a causal window, where rows above are seen, gives other numbers."""
    from specplug_vllm.cpu_attention import CPUTreeImpl

    cache = Cache(32, step.generator)
    want = expected_rows(cache, step.query, step.key, step.value)
    chains = torch.arange(-1, 5, dtype=torch.int32).expand(3, 6)
    output = run_merged(CPUTreeImpl, cache, packed_for_cpu(cache), step, parents=chains)
    with pytest.raises(AssertionError):
        check_merged(output, want)


def moves(cache):
    """Overlapping moves over a block boundary, and a row moved onto itself."""
    positions = torch.tensor([3, 33, 34, 66, 70, 1])
    targets = torch.tensor([3, 32, 33, 34, 67, 70])
    return cache.slots(1, positions), cache.slots(1, targets)


def move_slots(implementation, packed, cache):
    source, destination = moves(cache)
    slots = torch.cat([source, destination])  # row i of the step is kept in slots[i]
    rows = torch.arange(len(slots))
    commit = Commit(rows[: len(source)], rows[len(source) :])
    torch_ops().cache_mover(implementation.cache_views(packed))(commit, slots)


def moved(tensor, source, destination):
    want = tensor.clone()
    for start, end in zip(source.tolist(), destination.tolist(), strict=True):
        want.flatten(0, 1)[end] = tensor.flatten(0, 1)[start]
    return want


@pytest.mark.parametrize("block", [32, 64])
def test_cpu_move(step, block):
    from specplug_vllm.cpu_attention import CPUTreeImpl, key_value_views

    cache = Cache(block, step.generator)
    packed = packed_for_cpu(cache)
    move_slots(CPUTreeImpl, packed, cache)
    keys, values = key_value_views(packed)
    assert torch.equal(keys.permute(0, 3, 1, 2), moved(cache.keys, *moves(cache)))
    assert torch.equal(values.permute(0, 2, 1, 3), moved(cache.values, *moves(cache)))


def flash_attn_varlen_func(
    *,
    q,
    k,
    v,
    cu_seqlens_q,
    max_seqlen_q,
    seqused_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    block_table,
    num_splits,
    fa_version,
    return_softmax_lse,
):
    """What vLLM's FlashAttention promises of this call, in plain torch: (out [rows, H, D], lse [H, rows])."""
    assert not causal
    assert return_softmax_lse
    assert fa_version == 2
    assert num_splits == 0  # FlashAttention 2 takes no other
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert q.is_contiguous()
    assert k.shape[1:] == v.shape[1:] == (k.shape[1], KV_HEADS, HEAD)
    assert max_seqlen_k >= int(seqused_k.max())
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for i, length in enumerate(seqused_k.tolist()):
        first, last = cu_seqlens_q[i : i + 2].tolist()
        assert last - first <= max_seqlen_q
        keys, values = (x[block_table[i].long()].flatten(0, 1)[:length] for x in (k, v))
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[first:last], keys) * softmax_scale
        lse[:, first:last] = scores.logsumexp(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, lse


@pytest.fixture
def flash_tree_impl(monkeypatch):
    """The CUDA implementation, importable here because FlashAttention's function is stood in for."""
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    monkeypatch.delitem(sys.modules, "specplug_vllm.cuda_attention", raising=False)
    module = importlib.import_module("specplug_vllm.cuda_attention")
    yield module.FlashTreeImpl
    sys.modules.pop("specplug_vllm.cuda_attention", None)


def packed_for_flash(cache):
    """[blocks, Hkv, block, 2 * D]: the plain layout of vLLM's FlashAttention backend."""
    return torch.cat([cache.keys, cache.values], -1).transpose(1, 2).contiguous()


@pytest.mark.parametrize("block", [16, 32])
def test_flash_rows_equal_one_masked_softmax(step, flash_tree_impl, block):
    cache = Cache(block, step.generator)
    want = expected_rows(cache, step.query, step.key, step.value)
    cache.forget_uncommitted()
    packed = packed_for_flash(cache)
    implementation = type("Sized", (), {"prefix_pass": flash_tree_impl.prefix_pass})
    check_merged(run_merged(implementation, cache, packed, step), want)


@pytest.mark.parametrize("block", [16, 32])
def test_flash_move(step, flash_tree_impl, block):
    cache = Cache(block, step.generator)
    packed = packed_for_flash(cache)
    move_slots(flash_tree_impl, packed, cache)
    keys, values = packed.transpose(1, 2).split(HEAD, -1)
    assert torch.equal(keys, moved(cache.keys, *moves(cache)))
    assert torch.equal(values, moved(cache.values, *moves(cache)))


def test_tree_backends_name_their_classes(flash_tree_impl):
    """What the workers register resolves to our implementations, below vLLM's own backend names."""
    from specplug_vllm import cpu_attention, cuda_attention

    assert cpu_attention.CPUTreeBackend.get_impl_cls() is cpu_attention.CPUTreeImpl
    assert cpu_attention.CPUTreeBackend.get_builder_cls() is cpu_attention.CPUTreeBuilder
    assert cpu_attention.CPUTreeBackend.get_name() == "CPU_ATTN"
    assert cuda_attention.FlashTreeBackend.get_impl_cls() is flash_tree_impl
    assert cuda_attention.FlashTreeBackend.get_name() == "FLASH_ATTN"


def test_an_engine_with_another_attention_backend_is_refused():
    from specplug_vllm.refusals import check_attention_layers

    stock = SimpleNamespace(impl=SimpleNamespace())
    with pytest.raises(ValueError, match=r"layer model\.layers\.0.*start the engine in a process of its own"):
        check_attention_layers({"model.layers.0": stock})
