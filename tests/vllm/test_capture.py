"""Full CUDA graphs, played on a CPU (fake_graph): the captured target forward reads fixed buffers alone.

One capture at the padded shape serves every later step: other requests, trees, lengths, paddings, and chains.
"""

import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fake_graph import FakeGraph, capturing, library
from test_attention_units import HEAD, HEADS, KV_HEADS, SCALE, packed_for_cpu, packed_for_flash
from test_attention_units import Cache as ThreeRequests
from test_attention_units import flash_attn_varlen_func as flash_stand_in

from specplug.attention import masked_attention
from specplug.tree import ancestor_mask
from specplug.window import WindowBuffers, lay_out_windows
from specplug_kernels.ops import make_ops

pytestmark = pytest.mark.vllm

CONTEXT = 80  # the longest prefix a captured forward may meet
REQUESTS, BUDGET, DEPTH = 3, 6, 4
ROWS = REQUESTS * (BUDGET + 1)
CHAIN = [*range(-1, DEPTH - 1), -1, -1]
# Steps of up to three requests: (committed tokens, node rows, live nodes, parents).
STEPS = {
    "two trees": [(40, 6, 6, [-1, 0, 0, -1, 1, 4]), (67, 6, 3, [-1, -1, 0, -1, -1, -1])],
    "a chain, the other without drafts": [(3, 6, DEPTH, CHAIN), (79, 0, 0, [-1] * 6)],
    "full": [(n, 6, 6, parents) for n, parents in ((0, CHAIN), (31, [-1, -1, -1, 2, 1, 0]), (64, CHAIN))],
    "trimmed": [(12, 2, 2, [-1, 0, 0, 1, 1, 1]), (13, 5, 4, [-1, 0, 1, 0, 3, 2])],
    "one": [(50, 6, 5, [-1, 0, -1, 2, 0, 1])],
}
GARBAGE = 7.0


def parts(step):
    """(committed, drafted, live, parents) of a step's requests, as tensors."""
    return [torch.tensor(list(column), dtype=torch.int32) for column in zip(*step, strict=True)]


def lay_out(step, ops, *, padding_rows=0):
    """As the ModelState does: real requests, then padding without a window (``padding_rows`` - 1 nodes)."""
    _, drafted, live, parents = parts(step)
    missing = REQUESTS - len(step)
    ends = torch.cat((drafted + 1, torch.zeros(missing, dtype=torch.int32))).cumsum(0)
    return lay_out_windows(
        ends=ends,
        drafted=torch.cat((drafted, torch.full((missing,), padding_rows - 1, dtype=torch.int32))),
        parents=torch.cat((parents, torch.full((missing, BUDGET), -1, dtype=torch.int32))),
        depths=torch.ones(REQUESTS, BUDGET, dtype=torch.int32),
        live=torch.cat((live, torch.zeros(missing, dtype=torch.int32))),
        width=BUDGET + 1,
        num_rows=ROWS,
        max_depth=DEPTH,
        visibility=ops.visibility,
    )


class Ordinary:
    """The engine's path below ours: a captured forward has no rows for it."""

    def __init__(self):
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = HEADS, KV_HEADS, HEAD, SCALE

    def forward(self, *args):
        raise AssertionError("the engine's own attention was captured")


class Forward:
    """One attention layer, captured once, and the buffers it was captured with."""

    def __init__(self, implementation, packed, kind):
        from specplug_vllm.attention import TreeAttention
        from specplug_vllm.attention_trees import GraphBuffers

        self.ops = make_ops(kind, torch.device("cpu"), requests=REQUESTS + 1, depth=DEPTH, budget=BUDGET)
        self.generator = generator = torch.Generator().manual_seed(5)
        self.cache = ThreeRequests(32, generator)
        self.packed = packed(self.cache)
        self.query, self.key, self.value = (
            torch.randn(ROWS, heads, HEAD, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.output = torch.full((ROWS, HEADS, HEAD), GARBAGE)
        self.block_table = self.cache.table.to(torch.int32)
        # As vLLM captures: every request a whole window, nothing committed, no live node.
        dummy = [(0, BUDGET, 0, [-1] * BUDGET)] * REQUESTS
        self.buffers = GraphBuffers(lay_out(dummy, self.ops), requests=REQUESTS + 1)
        own = {"prefix_pass": implementation.prefix_pass, "cache_views": None, "vllm_flash_attn_version": 2}
        self.layer = type("Layer", (TreeAttention, Ordinary), own)()
        self.graph = FakeGraph()
        trees = self.hold(dummy)
        with torch.inference_mode(), capturing(self.graph):
            self.run(trees)

    def hold(self, step, **kwargs):
        return self.buffers.hold(
            lay_out(step, self.ops, **kwargs),
            parts(step)[0],
            attention=self.ops.attention,
            max_prefix_len=CONTEXT,
        )

    def run(self, trees):
        metadata = SimpleNamespace(specplug_trees=trees, block_table=self.block_table, max_num_splits=0)
        arguments = (self.query, self.key, self.value, self.packed, metadata, self.output)
        self.layer.forward(None, *arguments)

    def replayed(self, step, **kwargs):
        """The layer's output once the step is in the buffers."""
        self.hold(step, **kwargs)
        self.query.normal_(generator=self.generator)
        self.output.fill_(GARBAGE)
        self.graph.replay()
        return self.output

    def expected(self, step):
        """By brute force: one softmax over the committed tokens, the ancestors and the row itself."""
        want = torch.full_like(self.output, GARBAGE)
        _, _, live, parents = parts(step)
        masks, first = ancestor_mask(parents, live, max_depth=DEPTH), 0
        for i, (committed, nodes, *_) in enumerate(step):
            window = slice(first, first + nodes + 1)
            slots = self.cache.slots(i, torch.arange(committed))
            keys, values = (x.flatten(0, 1)[slots] for x in (self.cache.keys, self.cache.values))
            mask = torch.cat(
                (torch.ones(nodes + 1, committed, dtype=torch.bool), masks[i, : nodes + 1, : nodes + 1]), 1
            )
            want[window] = masked_attention(
                self.query[None, window],
                torch.cat((keys, self.key[window]))[None],
                torch.cat((values, self.value[window]))[None],
                mask[None],
                SCALE,
            )[0]
            first += nodes + 1
        return want


@pytest.fixture
def cpu():
    from specplug_vllm.cpu_attention import CPUTreeImpl

    return CPUTreeImpl, packed_for_cpu


@pytest.fixture
def flash(monkeypatch):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", library(flash_stand_in), raising=False)
    monkeypatch.delitem(sys.modules, "specplug_vllm.cuda_attention", raising=False)
    module = importlib.import_module("specplug_vllm.cuda_attention")
    yield module
    sys.modules.pop("specplug_vllm.cuda_attention", None)


def close(got, want):
    return torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("backend", "kind"), [("cpu", "torch"), ("cpu", "triton"), ("flash", "torch")])
def test_one_capture_serves_every_step(rig, cpu, flash, backend, kind):
    forward = Forward(*(cpu if backend == "cpu" else (flash.FlashTreeImpl, packed_for_flash)), kind)
    assert forward.graph.launches == (["in_tree_kernel"] if kind == "triton" else [])
    for name, step in STEPS.items():
        got = forward.replayed(step)
        assert close(got, forward.expected(step)), name
        assert (got[sum(1 + nodes for _, nodes, *_ in step) :] == GARBAGE).all(), "the padding wrote a row"


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_padding_with_a_window_of_its_own_spoils_a_row(rig, cpu, kind):
    """Control: counts of 0 in place of -1 are windows of a root."""
    forward, step = Forward(*cpu, kind), STEPS["two trees"]
    assert not close(forward.replayed(step, padding_rows=1), forward.expected(step))
    assert close(forward.replayed(step), forward.expected(step))


@pytest.mark.parametrize("field", ["rows", "mask", "column_of_row", "in_window"])
def test_a_tensor_made_anew_is_not_read(cpu, field):
    """Control: each of the buffers is one that the captured forward reads, so none may be left out."""
    forward, stock = Forward(*cpu, "torch"), WindowBuffers.hold

    def hold(self, windows):
        kept = self._fields[field].clone()
        held = stock(self, windows)
        self._fields[field].copy_(kept)
        return held

    with mock.patch.object(WindowBuffers, "hold", hold):
        good = [close(forward.replayed(step), forward.expected(step)) for step in STEPS.values()]
    assert not all(good)


def test_a_bound_of_the_captured_step_is_too_small(cpu):
    """Control: numbers of the host are those of the capture, so they must hold for every step."""
    with mock.patch(f"{__name__}.CONTEXT", 32):
        forward = Forward(*cpu, "torch")
    step = STEPS["two trees"]
    assert not close(forward.replayed(step), forward.expected(step))


def test_buffers_keep_their_addresses(cpu):
    forward = Forward(*cpu, "torch")

    def tensors(step):
        trees = forward.hold(step)
        windows = trees.windows
        read = (windows.rows, windows.mask, windows.column_of_row, windows.in_window)
        return [(x.data_ptr(), x.shape, x.stride()) for x in (*read, trees.requests, trees.prefix_lens)]

    assert len({str(tensors(step)) for step in STEPS.values()}) == 1


def test_a_step_wider_than_the_buffers_is_refused(cpu):
    forward = Forward(*cpu, "torch")
    windows = lay_out(STEPS["full"], forward.ops)
    with pytest.raises(RuntimeError, match=r"windows\.rows: expected at most \[2, 7\], got \[3, 7\]"):
        WindowBuffers(windows, requests=2, rows=ROWS).hold(windows)


def test_a_host_read_cannot_be_captured():
    """Control of the double."""
    x = torch.tensor([2, 0])
    for read in (lambda: x[0].item(), lambda: x[x > 1], lambda: x.nonzero(), lambda: bool(x.any())):
        with (
            pytest.raises(RuntimeError, match="not permitted when a stream is capturing"),
            capturing(FakeGraph()),
        ):
            read()


def test_the_flash_prefix_pass_is_captured_at_fixed_lengths(flash):
    """Its arguments in a capture are the padded sizes, the model's longest context, and FlashAttention 3's
    bound on splits; the batch's own lengths come from the device."""
    from vllm.v1.attention.backends import fa_utils

    calls = []

    def record(**kwargs):
        calls.append(kwargs)
        out = kwargs["q"]
        return out, torch.zeros(HEADS, len(out))

    layer = SimpleNamespace(head_size=HEAD, scale=SCALE, vllm_flash_attn_version=3)
    cache = torch.zeros(4, KV_HEADS, 16, 2 * HEAD)
    metadata = SimpleNamespace(block_table=torch.zeros(REQUESTS, 5, dtype=torch.int32), max_num_splits=32)
    trees = SimpleNamespace(
        prefix_lens=torch.zeros(REQUESTS, dtype=torch.int32),
        requests=torch.arange(REQUESTS),
        max_prefix_len=CONTEXT,
    )
    queries = torch.zeros(REQUESTS, BUDGET + 1, HEADS, HEAD)
    with mock.patch.object(fa_utils, "flash_attn_varlen_func", record):
        for trees.captured in (True, False):
            flash.FlashTreeImpl.prefix_pass(layer, None, queries, cache, metadata, trees)
    captured, eager = calls
    assert (captured["max_seqlen_q"], captured["max_seqlen_k"]) == (BUDGET + 1, CONTEXT)
    assert captured["cu_seqlens_q"].tolist() == [0, 7, 14, 21]
    assert captured["seqused_k"] is trees.prefix_lens
    assert (captured["num_splits"], eager["num_splits"]) == (32, 0)


def test_full_graphs_are_asked_for_by_the_option_alone(flash):
    from vllm.v1.attention.backend import AttentionCGSupport

    def support(wanted):
        options = SimpleNamespace(full_graphs=wanted)
        config = SimpleNamespace(speculative_config=SimpleNamespace(options=options))
        return flash.FlashTreeBuilder.get_cudagraph_support(config, None)

    assert support(False) is AttentionCGSupport.NEVER
    assert support(True) is AttentionCGSupport.UNIFORM_BATCH


def test_a_captured_forward_is_given_windows_alone():
    from specplug_vllm.attention_trees import check_captured_batch

    def batch(rows, requests=2, drafts=12):
        return SimpleNamespace(
            num_scheduled_tokens=torch.tensor(rows).numpy(),
            num_tokens=sum(rows),
            num_reqs=requests,
            num_draft_tokens=drafts,
        )

    check_captured_batch(batch([7, 7]), 7, for_capture=False)
    check_captured_batch(batch([7, 7], drafts=0), 7, for_capture=True)
    with pytest.raises(RuntimeError, match="expected a step of windows of at most 7 rows"):
        check_captured_batch(batch([7, 7, 5], requests=3), 7, for_capture=False)  # 5 rows of a prefill
    with pytest.raises(RuntimeError, match="and 8 of one request; set full_graphs to false"):
        check_captured_batch(batch([8, 7], drafts=0), 7, for_capture=True)
