"""Offline engines and processes: the configuration reaches children whole, no child outlives its engine.

vLLM forces the start method `spawn` on a CPU, whatever VLLM_WORKER_MULTIPROC_METHOD says, so the engine is
started that way; that the plugin also survives `fork` is tested without an engine.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_rig import ends_within

from specplug import models, server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

TARGET = str(models.path("quick", "target"))
PROMPTS = [[17, 230, 44, 511, 90], [340, 5, 88], list(range(100, 160))]
COUNT = 24


def tree_config(draft: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    speculative = {"method": "ddtree", "model": str(models.path("quick", draft)), "tree_budget": 24}
    settings = {"model": TARGET, "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    return EngineArgs(**settings, speculative_config=speculative).create_engine_config()


CHILD = """
import json, pickle, sys
config = pickle.loads(sys.stdin.buffer.read())
speculative = config.speculative_config
print(json.dumps([
    type(speculative).__name__, speculative.method, speculative.tree_depth, speculative.tree_candidates,
    speculative.num_speculative_tokens, speculative.max_num_new_slots_for_drafting,
    config.num_lookahead_tokens, config.parallel_config.worker_cls, config.compute_hash(),
]))
"""


@pytest.mark.parametrize("draft", ["dflash", "dspark"])
def test_config_reaches_a_fresh_process(draft: str) -> None:
    """What `spawn` does: pickled, and read where nothing of ours has been imported."""
    import pickle

    config = tree_config(draft)
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps(config),
        capture_output=True,
        check=True,
        timeout=150,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    slots = 7 if draft == "dflash" else 6  # rows of a block of depth 7, less the one already scheduled
    worker = "specplug_vllm.cpu_worker.CPUTreeWorker"
    assert found[:6] == ["TreeSpeculativeConfig", draft, 7, 32, 24, slots]
    assert found[7:] == [worker, config.compute_hash()]
    assert found[6] == config.num_lookahead_tokens


def in_child(channel: Any) -> None:
    import vllm.plugins
    from vllm.engine.arg_utils import EngineArgs

    from specplug_vllm import plugin

    vllm.plugins.plugins_loaded = False  # as in a child that loads plugins itself
    vllm.plugins.load_general_plugins()
    wrapped = EngineArgs.create_speculative_config
    stock = getattr(wrapped, plugin._MARK)
    config = tree_config("dspark").speculative_config
    channel.send((hasattr(stock, plugin._MARK), plugin.status().active, config.num_speculative_tokens))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_plugin_in_a_child(method: str) -> None:
    """Loaded again in a child, it wraps vLLM's function once, also where the parent had wrapped it before."""
    tree_config("dspark")
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=in_child, args=(theirs,))
    child.start()
    theirs.close()
    wrapped_twice, active, budget = ours.recv()
    child.join()
    assert (wrapped_twice, active, budget, child.exitcode) == (False, True, 24, 0)


ENGINE = """
import json, os, sys
from vllm import LLM, SamplingParams

def main():
    target, speculative, prompts, count = map(json.loads, sys.argv[1:])
    settings = {"model": target, "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    llm = LLM(**settings, max_num_seqs=4, speculative_config=speculative, disable_log_stats=False)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    accepted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    print("RESULT", json.dumps([[list(o.outputs[0].token_ids) for o in outputs], accepted]))

if __name__ == "__main__":
    main()
"""


def test_engine_in_processes_of_its_own(tmp_path: Path) -> None:
    """Greedy decoding as transformers does it, drafts accepted, nothing left when the script has ended."""
    script = tmp_path / "offline.py"
    script.write_text(ENGINE)
    speculative = {"method": "ddtree", "model": str(models.path("quick", "dflash")), "tree_budget": 24}
    arguments = [sys.executable, str(script), *map(json.dumps, (TARGET, speculative, PROMPTS, COUNT))]
    environment = {
        **server.engine_environment(on_gpu=False),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    started = subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = started.communicate(timeout=150)
    except BaseException:
        os.killpg(started.pid, signal.SIGKILL)
        raise
    assert started.returncode == 0, printed[-3000:]
    line = next(line for line in printed.splitlines() if line.startswith("RESULT "))
    token_ids, accepted = json.loads(line.removeprefix("RESULT "))
    assert token_ids == [greedy(prompt) for prompt in PROMPTS]
    assert accepted > 0
    assert "loaded in EngineCore" in printed
    assert "loaded in VllmWorker-0" in printed
    assert ends_within(started.pid, seconds=20), "a process of the group outlived the script"


LEFT_WORKING = """
import json, sys
from vllm import LLM, SamplingParams

target, draft, prompt_ids, count = map(json.loads, sys.argv[1:])
settings = {"model": target, "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
for keys, engine in (({"tree_budget": 0}, {}), ({}, {"enable_lora": True})):
    try:
        LLM(**settings, speculative_config={"method": "ddtree", "model": draft, **keys}, **engine)
    except ValueError as error:
        print("REFUSED", error)
plain = LLM(**settings)
params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
output = plain.generate([{"prompt_token_ids": prompt_ids}], params)
print("TOKENS", json.dumps(list(output[0].outputs[0].token_ids)))
"""


def test_refusal_leaves_vllm_working(tmp_path: Path) -> None:
    """Two refused engines, then a plain one in the same process: greedy decoding as transformers does it."""
    script = tmp_path / "left_working.py"
    script.write_text(LEFT_WORKING)
    draft = str(models.path("quick", "dflash"))
    arguments = [sys.executable, str(script), *map(json.dumps, (TARGET, draft, PROMPTS[0], COUNT))]
    environment = {**server.engine_environment(on_gpu=False), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    refused = [line for line in lines if line.startswith("REFUSED ")]
    assert len(refused) == 2
    assert "tree_budget" in refused[0]
    assert "--enable-lora" in refused[1]
    tokens = [json.loads(line.removeprefix("TOKENS ")) for line in lines if line.startswith("TOKENS ")]
    assert tokens == [greedy(PROMPTS[0])]


def greedy(prompt: list[int]) -> list[int]:
    """Greedy continuation by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(COUNT):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
