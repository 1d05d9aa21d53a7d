"""``kernels: triton`` gives the tokens of ``kernels: torch`` and of plain decoding; a round launches what it
should and reads nothing on the host.

The kernels run in Triton's interpreter, which is slow: shallow trees, few tokens.
"""

import dataclasses
from unittest import mock

import numpy
import pytest
import torch
from comparing import differences
from engine_rig import engine, tree
from host_reads import HostReads, host_reads, launches
from prompts import short

from specplug.cost import from_probes, write_cost_table
from specplug.cost_curves import Probe
from specplug_kernels.ops import torch_ops

pytestmark = pytest.mark.vllm

DEPTH, BUDGET, CANDIDATES, TOKENS = 2, 5, 4, 5
LAYERS, TAPS, VIEWS = 4, 3, 2  # of the target: layers, captured features; keys and values apart on a CPU
COUNT = 16
PROMPTS = short(COUNT)

VERIFY = {
    "ancestor_words_kernel": 1,
    "in_tree_kernel": LAYERS,
    "_walk_kernel": 1,
    "_move_kv_kernel": VIEWS,
    "_move_rows_kernel": TAPS,
}
DRAFT = {
    "dflash": {"scan_kernel": 1, "select_kernel": 1, "grow_kernel": 1},
    "dspark": {"scan_kernel": DEPTH, "select_kernel": DEPTH, "score_kernel": DEPTH, "grow_kernel": 1},
}


def options(draft, kernels, **more):
    sizes = {"num_speculative_tokens": DEPTH, "candidates": CANDIDATES}
    return tree(draft, BUDGET, kernels=kernels, **sizes, **more)


def sampling(count, tokens=TOKENS):
    """Greedy and seeded requests in turn, the latter at two temperatures."""
    from vllm import SamplingParams

    def of(i):
        seeded = {"temperature": 0.8 if i % 4 == 1 else 1.2, "seed": i} if i % 2 else {"temperature": 0.0}
        return SamplingParams(**seeded, max_tokens=tokens, ignore_eos=True)

    return [of(i) for i in range(count)]


@pytest.fixture(scope="module")
def table(rig, tmp_path_factory):
    """File of a cost table under which likely nodes pay and unlikely ones do not."""

    def probe(rows, seconds, requests=1):
        return Probe(shape="tree", requests=requests, tokens=rows, context=0.0, median_seconds=seconds)

    rows = [probe(n, 1.0 + 0.02 * n) for n in (1, 2, 8, 64, 1024)]
    file = tmp_path_factory.mktemp("cost") / "table.json"
    write_cost_table(file, from_probes(rows, [probe(0, 1e-3, n) for n in (1, 24)]))
    return str(file)


def run(running, params=None):
    """(outputs, tokens a round by prompt, our host reads, launches a step)."""
    with host_reads(running) as reads, launches(running) as steps, running.traced() as trace:
        got = running.generate(PROMPTS, params or sampling(COUNT))
    rounds = [tokens for _, tokens in sorted(trace.items(), key=lambda item: int(item[0]))]
    return got, rounds, reads.found, steps


@pytest.mark.parametrize("draft", [pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
def test_triton_is_torch_is_plain(plain, draft):
    expected = plain.generate(PROMPTS, sampling(COUNT))
    with engine(options(draft, "torch"), max_num_seqs=COUNT) as running:
        got, rounds, reads, steps = run(running)
        assert differences(expected, got) == []
        assert reads == {}
        assert not any(steps), "kernels: torch launched one of ours"
    with engine(options(draft, "triton"), max_num_seqs=COUNT) as running:
        got, same_rounds, reads, steps = run(running)
        assert differences(expected, got) == []
        # The same trees were drafted: every round of every request emits as many tokens.
        assert same_rounds == rounds
        assert max(map(max, rounds)) == DEPTH + 1
        assert reads == {}
        assert len(steps) >= 3
        assert steps[0] == DRAFT[draft]
        assert steps[1:] == [VERIFY | DRAFT[draft]] * len(steps[1:])
        a_broken_kernel_shows(running, plain)


def a_broken_kernel_shows(running, plain):
    """Control of the comparison: attention in which no node sees a node, itself included."""
    prompts, longer = PROMPTS[:8], sampling(8, tokens=14)
    speculator = running.runner.speculator
    blind = dataclasses.replace(
        torch_ops(),
        visibility=lambda parents, live, *, max_depth: torch.zeros_like(parents, dtype=torch.int64),
        attention=speculator.ops.attention,
    )
    with mock.patch.object(speculator, "ops", blind):
        assert differences(plain.generate(prompts, longer), running.generate(prompts, longer))


def test_sizes_beyond_the_kernels_are_refused_at_start(rig):
    with (
        pytest.raises(ValueError, match=r"kernels: .*tree_budget of at most 64, and it is 65; use \"torch\""),
        engine(tree("dspark", 65, kernels="triton")),
    ):
        pass


@pytest.mark.parametrize("backend", ["TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"])
def test_other_attention_backends_are_refused_on_cuda(backend):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from specplug_vllm.refusals import check_cuda_attention

    for served in (None, AttentionBackendEnum.FLASH_ATTN.name):
        check_cuda_attention(served)
    with pytest.raises(ValueError, match=f"--attention-backend is {backend}, and .*; leave it out") as error:
        check_cuda_attention(AttentionBackendEnum[backend].name)
    assert "\n" not in str(error.value)


def test_budgets_of_a_cost_table(plain, table):
    """And one request that drafts chains."""
    from specplug_vllm import model_state

    params = sampling(COUNT)
    params[0].repetition_penalty = 1.3
    chains = mock.patch.object(
        model_state,
        "chain_reasons",
        lambda asked, _: ["thinking_token_budget"] if asked.repetition_penalty > 1 else [],
    )
    options_ = options("dspark", "triton", cost_table=table, online=False)
    with engine(options_, max_num_seqs=COUNT) as running, chains:
        got, rounds, reads, steps = run(running, params)
        kept = torch.tensor([step["_admit_kernel"] for step in steps])
    assert differences(plain.generate(PROMPTS, params), got) == []
    assert sum(step["chain_kernel"] for step in steps) >= 2
    assert max(map(max, rounds)) > 1
    assert reads == {}
    assert kept.max() == 1
    assert kept.sum() >= 2, "the table must trim trees, or this tests nothing"


def test_a_host_read_in_a_round_is_found(rig):
    """Control of the reads: a device value that acceptance asks for is counted, with its place."""
    from specplug_vllm import acceptance

    stock = acceptance.window_index

    def reading(starts, counts, width):
        counts.max().item()
        return stock(starts, counts, width)

    with (
        engine(options("dspark", "torch")) as running,
        mock.patch.object(acceptance, "window_index", reading),
    ):
        reads = run(running)[2]
    assert reads
    assert all(read.startswith("item at specplug_vllm.acceptance:") for read in reads)


READING = [
    "x.item()",
    "x.tolist()",
    "x.numpy()",
    "int(x.sum())",
    "bool(x.any())",
    "if x.any(): pass",
    "x.cpu()",
]
READING += ["x[x > 1]", "x[x > 1] = 0", "x.nonzero()", "torch.where(x > 1)", "f'{x[0]}'", "x.to('cpu')"]
READING += ["numpy.asarray(x)", "range(x[0])", "torch.equal(x, x)", "3 in x", "x.masked_select(x > 1)"]
QUIET = [
    "x[x]",
    "torch.where(x > 1, x, 0)",
    "x.shape[0]",
    "x.to('cpu', non_blocking=True).tolist()",
    "len(x)",
]
QUIET += ["int(host[:2].max())", "(host + 1).tolist()", "x.data_ptr()", "x.sum().to(torch.int32)", "x[1]"]


@pytest.mark.parametrize(("line", "found"), [(s, True) for s in READING] + [(s, False) for s in QUIET])
@pytest.mark.parametrize("caller", ["specplug_vllm.fake", "vllm.fake"])
def test_what_counts_as_a_read(line, found, caller):
    reads, host = HostReads(), torch.tensor([0, 1, 2])
    reads.keep(host)
    names = {"__name__": caller, "x": torch.tensor([2, 1, 0]), "host": host, "torch": torch, "numpy": numpy}
    with reads:
        try:
            exec(line, names)
        except RuntimeError:
            assert line == "x.item()"  # three values: asked for all the same
    assert bool(reads.found) == (found and caller != "vllm.fake")
