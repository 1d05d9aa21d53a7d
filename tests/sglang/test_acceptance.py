"""Rounds of DDTREE in SGLang are those of the local loop, request by request: the same trees, from the same
features. vLLM is held against the same loop in tests/vllm/test_rounds.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import local_models
import numpy as np
import pytest
from comparing import differences
from prompts import varied
from sglang_rig import engine, tree

from specplug.local.loop import generate
from specplug.local.method import Method
from specplug.recording_source import read_recording

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


def test_rounds_are_those_of_the_local_loop_and_are_recorded(tmp_path):
    prompts = varied()[:24]
    config = tmp_path / "specplug.json"
    config.write_text(f'{{"record": "{tmp_path / "record"}"}}')
    with engine(tree("dspark", BUDGET), overlap=True, env={"SPECPLUG_CONFIG": str(config)}) as running:
        outputs = running.generate(prompts, GREEDY)
    counted = [output.verifies for output in outputs]
    assert counted == rounds("dspark", prompts, outputs)
    assert counted != rounds("dspark", prompts, outputs, budget=BUDGET // 2)  # the control: another tree
    check_recording(tmp_path / "record", outputs)


def check_recording(folder, outputs):
    """The rounds on disk are those the requests had, in whatever order they began; the commands read them."""
    recording = read_recording(folder)
    assert (recording.about.source, recording.budget) == (f"engine, tree {BUDGET}", BUDGET)
    assert set(recording.requests.temperature.tolist()) == {0.0}
    rounds = np.bincount(recording.request)
    emitted = np.bincount(recording.request, 1 + recording.accepted.sum(1))
    assert (emitted >= TOKENS - 1).all()  # the first token is the prefill's
    assert sorted(rounds) == sorted(output.verifies for output in outputs)
    assert (recording.counts == BUDGET).all()
    command = Path(sys.executable).with_name("specplug"), "simulate", "--recording", folder
    few = "--concurrency", "2", "--tokens", "1000", "--json"
    done = subprocess.run([*command, *few], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


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
