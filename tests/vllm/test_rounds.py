"""Rounds of `ddtree` in vLLM are those of the local loop, request by request: the same trees, from the same
features. SGLang is held against the same loop in tests/sglang/test_acceptance.py.

vLLM's CPU kernel of rms_norm takes one weight: it norms the context keys of all draft layers with that of
the first, which makes drafts a little worse and changes no output. The GPU kernel takes one a layer; here
torch does the norm.
"""

from unittest import mock

import local_models
import pytest
import torch
from engine_rig import engine, tree
from prompts import varied

from specplug.local.loop import generate
from specplug.local.method import Method

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("rig")]

TOKENS = 24
BUDGET = 16


def norm_by_layer(self, keys):  # [L, tokens, heads, head size]
    weights = self._k_norm_weights[:, None, None]
    return keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + self._rms_norm_eps) * weights


def rounds(kind, prompts, outputs, budget=BUDGET):
    """Tokens of each round of the local loop after a prompt and its first token, which the prefill gives."""
    begun = [[*prompt, output.ids[0]] for prompt, output in zip(prompts, outputs, strict=True)]
    method, draft = Method("tree", budget), local_models.draft(kind)
    batch = generate(local_models.target(), begun, method=method, draft=draft, limit=TOKENS - 1)
    assert batch.tokens == [output.ids[1:] for output in outputs]
    # vLLM counts what is left at the end, the loop what was emitted.
    cut = [sum(emitted) - (TOKENS - 1) for emitted in batch.emitted]
    return [[*emitted[:-1], emitted[-1] - over] for emitted, over in zip(batch.emitted, cut, strict=True)]


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_rounds_are_those_of_the_local_loop(kind):
    from vllm import SamplingParams
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    prompts = varied()[:24]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with (
        mock.patch.object(DFlashQwen3Model, "_normalize_context_k", norm_by_layer),
        engine(tree(kind, BUDGET)) as running,
        running.traced() as trace,
    ):
        outputs = running.generate(prompts, params)
    ours = [trace[request] for request in sorted(trace, key=int)]
    cut = [[*steps[:-1], steps[-1] - sum(steps) + TOKENS - 1] for steps in ours]
    assert cut == rounds(kind, prompts, outputs)
    assert cut != rounds(kind, prompts, outputs, budget=BUDGET // 2)  # the control: another tree
