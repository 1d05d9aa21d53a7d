"""A custom logits processor that takes the row above for its history is exact: its requests draft chains.

The control lets the same requests draft trees, where the row above is often a sibling.
"""

import pytest
import torch
from comparing import differences
from engine_rig import engine, tree
from prompts import short
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

pytestmark = pytest.mark.vllm

PROMPTS = short(6)


class NotLikeTheLastTwo(LogitsProcessor):
    """Lowers the tokens near the sum of the last two: what it does depends on both."""

    def __init__(self, vllm_config, req_states):
        self.req_states = req_states

    def apply(self, logits, ctx):
        slots = ctx.expanded_idx_mapping
        committed = self.req_states.all_token_ids.gpu[
            slots, (self.req_states.total_len.gpu[slots] - 2).long()
        ]
        above = torch.roll(ctx.input_ids, 1)
        before = torch.where(ctx.expanded_local_pos > 0, above, committed.to(above.dtype))
        near = (ctx.input_ids + before).long()[:, None] + torch.arange(200)
        return logits.scatter_add_(1, near % logits.shape[1], torch.full(near.shape, -4.0))


def run(speculative_config, *, trees_for_all=False):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with engine(speculative_config, logits_processors=[NotLikeTheLastTwo]) as running:
        if trees_for_all:
            running.state._custom_processors = False
        counted = running.generate(PROMPTS, greedy)
        return counted, getattr(running.state, "chain_requests", {})


@pytest.fixture(scope="module")
def expected(rig):
    outputs, _ = run(None)
    return outputs


def test_processor_changes_the_text(plain, expected):
    from vllm import SamplingParams

    without = plain.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert differences(without, expected)


@pytest.mark.parametrize("draft", ["dflash", "dspark"])
def test_chains_equal_plain(expected, draft):
    outputs, chains = run(tree(draft, 16))
    assert differences(expected, outputs) == []
    assert chains == {"custom logits processors": len(PROMPTS)}


def test_trees_would_not(expected):
    outputs, _ = run(tree("dspark", 16), trees_for_all=True)
    assert differences(expected, outputs)
