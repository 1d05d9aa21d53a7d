"""Rounds of DDTREE in SGLang are those of the local loop, request by request: the same trees, from the same
features. vLLM is held against the same loop in tests/vllm/test_rounds.py.
"""

import local_models
import pytest
from comparing import differences
from prompts import varied
from sglang_rig import engine, tree

from specplug.local.loop import generate
from specplug.local.method import Method

pytestmark = pytest.mark.sglang

TOKENS = 24
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
BUDGET = 16


def rounds(kind, prompts, outputs, budget=BUDGET):
    """Rounds of the local loop after each prompt and its first token, which SGLang takes from the prefill."""
    begun = [[*prompt, output.ids[0]] for prompt, output in zip(prompts, outputs, strict=True)]
    method, draft = Method("tree", budget), local_models.draft(kind)
    batch = generate(local_models.target(), begun, method=method, draft=draft, limit=TOKENS - 1)
    assert batch.tokens == [output.ids[1:] for output in outputs]
    return [len(emitted) for emitted in batch.emitted]


def test_rounds_are_those_of_the_local_loop():
    prompts = varied()[:24]
    with engine(tree("dspark", BUDGET)) as running:
        outputs = running.generate(prompts, GREEDY)
    counted = [output.verifies for output in outputs]
    assert counted == rounds("dspark", prompts, outputs)
    assert counted != rounds("dspark", prompts, outputs, budget=BUDGET // 2)  # the control: another tree


def test_sglangs_triton_kernel_on_ragged_windows(plain, tmp_path):
    """Every verification by the stock extend kernel, interpreted: it needs nothing but the right pointers."""
    prompts = varied()[:3]
    config = tmp_path / "specplug.json"
    config.write_text(f'{{"explore": true, "record": "{tmp_path / "record"}"}}')
    env = {"SPECPLUG_RIG_SGLANG": "triton", "SPECPLUG_CONFIG": str(config)}
    with engine(tree("dflash", BUDGET), env=env | {"SGLANG_RAGGED_VERIFY_MODE": "compact"}) as running:
        outputs = running.generate(prompts, GREEDY)
    assert differences(plain.generate(prompts, GREEDY), outputs) == []
    assert any(output.meta["spec_cap_length"] < BUDGET + 1 for output in outputs)
