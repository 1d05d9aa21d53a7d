"""A whole vLLM whose target forward, and whose drafting, are replayed from full CUDA graphs, played on a CPU.

vLLM's own manager captures and dispatches. What stands in for CUDA is fake_graph, so nothing is shown here of
streams, of memory or of speed.
"""

from unittest import mock

import pytest
import torch
from comparing import differences
from engine_rig import engine, tree
from fake_graph import FakeGraph, capturing, full_graphs
from host_reads import host_reads
from prompts import short

from specplug.window import WindowBuffers

pytestmark = pytest.mark.vllm

DEPTH, BUDGET, LAYERS = 3, 6, 4
TOKENS = 10
SIZE = 3  # requests that a graph is captured for


def options(kernels):
    return tree("dspark", BUDGET, kernels=kernels, num_speculative_tokens=DEPTH, candidates=4)


def answers(model, count, tokens):
    """Greedy, all of one length: rounds are uniform until the last."""
    from vllm import SamplingParams

    return model.generate(short(count), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))


def all_chains():
    """Every new request drafts chains."""
    from specplug_vllm import model_state

    return mock.patch.object(model_state, "chain_reasons", return_value=["thinking_token_budget"])


def test_replayed_rounds_give_the_tokens_of_plain_decoding(plain):
    with engine(options("torch")) as running, full_graphs(running, [SIZE]) as graphs:
        (graph,) = graphs.values()
        for count in (SIZE, SIZE - 1):  # the latter is padded
            before = graph.replays
            with host_reads(running) as reads:
                assert differences(answers(plain, count, TOKENS), answers(running, count, TOKENS)) == []
            assert reads.found == {}
            assert graph.replays >= before + 2

        before = graph.replays
        with all_chains():
            assert differences(answers(plain, 1, TOKENS), answers(running, 1, TOKENS)) == []
        assert not running.state.branches
        assert graph.replays >= before + 2, "rounds of chains go through the same graph"

        stale_buffers_show(running, plain)
        drafting_is_replayed(running.runner.speculator)


def stale_buffers_show(running, plain):
    """Control: the layout of a step that is not copied to the buffers."""
    with mock.patch.object(WindowBuffers, "hold", lambda self, windows: windows):
        assert differences(answers(plain, SIZE, TOKENS), answers(running, SIZE, TOKENS))


def drafting_is_replayed(speculator, requests=4):
    """Trees of a captured draft follow the hidden states of the replay, and lie where they should."""
    queries = requests * speculator.num_query_per_req
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, queries, speculator.hidden_size, generator=generator)
    read = hidden[0].clone()
    store, tokens = speculator.store, speculator.tree_tokens[:requests]

    def trees():
        return [x.clone() for x in (tokens, store.parents, store.depths, store.counts, store.log_probs)]

    def draft():
        speculator._generate_draft(requests, queries, None, None, None)

    speculator.sample_indices[: requests * DEPTH] = torch.arange(requests * DEPTH)
    # The last request is the padding: its tree must go to the spare slot.
    speculator.sample_idx_mapping[: requests * DEPTH] = torch.tensor([2, 0, 5, -1]).repeat_interleave(DEPTH)
    graph = FakeGraph()
    with torch.inference_mode(), mock.patch.object(speculator, "_run_model", return_value=read):
        with capturing(graph):
            draft()
        first = trees()
        read.copy_(hidden[1])
        graph.replay()
        replayed = trees()
        for x in (tokens, store.parents, store.depths, store.counts, store.log_probs):
            x.zero_()
        draft()
        again = trees()
    live = torch.tensor([2, 0, 5])
    assert torch.equal(replayed[0], again[0])
    for name, got, want in zip(
        ("parents", "depths", "counts", "log_probs"), replayed[1:], again[1:], strict=True
    ):
        assert torch.equal(got[live], want[live]), name
    assert not torch.equal(first[0], replayed[0]), "other hidden states must give other trees"
    assert (again[3][[1, 3, 4]] == 0).all(), "a slot of nobody was written"


@pytest.mark.slow
def test_replayed_rounds_with_triton_kernels(plain):
    with engine(options("triton")) as running, full_graphs(running, [2]) as graphs:
        (graph,) = graphs.values()
        assert graph.launches == ["in_tree_kernel"] * LAYERS
        for count in (2, 1):
            assert differences(answers(plain, count, TOKENS), answers(running, count, TOKENS)) == []
        assert graph.replays >= 4
        drafting_is_replayed(running.runner.speculator)


def test_full_graphs_are_refused_on_a_cpu(rig):
    with (
        pytest.raises(
            ValueError, match=r"full_graphs: expected false on a CPU, .*, got true; leave the key out"
        ),
        engine({**options("torch"), "full_graphs": True}),
    ):
        pass
