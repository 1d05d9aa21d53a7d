"""A vLLM that is not asked for trees is what it was: the same answers to the last bit, two functions wrapped.

The same script runs in two fresh processes, with the plugin and with it switched off. It looks at every
attribute of every vLLM module and class before plugins are loaded and afterwards; what vLLM itself and the
test rig change is in both.
"""

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from specplug import models, server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

WRAPPED = {
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
    "vllm.sampling_params:SamplingParams._validate_spec_decode",
}
PLANTED = "vllm.v1.core.sched.scheduler:Scheduler.schedule"

SCRIPT = '''
import importlib, json, sys

MODULES = """
entrypoints.llm entrypoints.openai.api_server engine.arg_utils sampling_params config plugins
v1.engine.core v1.engine.core_client v1.engine.async_llm v1.engine.input_processor v1.engine.output_processor
v1.core.sched.scheduler v1.core.sched.async_scheduler v1.core.kv_cache_manager v1.structured_output
v1.executor.uniproc_executor v1.executor.multiproc_executor v1.worker.gpu_worker v1.worker.cpu_worker
v1.worker.gpu.model_runner v1.worker.gpu.model_states v1.worker.gpu.model_states.default
v1.worker.gpu.sample.sampler v1.worker.gpu.sample.penalties v1.worker.gpu.sample.bad_words
v1.worker.gpu.spec_decode.rejection_sampler v1.worker.gpu.spec_decode.adaptive_verification
v1.worker.gpu.spec_decode.dflash.speculator v1.worker.gpu.spec_decode.dspark.speculator
v1.attention.backends.registry v1.attention.backends.cpu_attn v1.metrics.loggers v1.spec_decode.metrics
model_executor.models.qwen3_dspark model_executor.models.registry
"""


def attributes():
    """Name -> object: of modules and of the classes in them, and what module- and class-level dicts hold."""
    found = {}

    def add(owner, name, value):
        found[f"{owner}{name}"] = value
        if type(value) is dict:
            for key, item in list(value.items()):
                if not name.startswith("__"):
                    found[f"{owner}{name}[{key!r:.60}]"] = item

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "vllm":
            continue
        for key, value in list(vars(module).items()):
            add(f"{name}:", key, value)
            if isinstance(value, type) and value.__module__ == name:
                for inner, attribute in list(vars(value).items()):
                    add(f"{name}:{value.__qualname__}.", inner, attribute)
    return found


def changed(before, after):
    loaded = {name.partition(":")[0] for name in before}
    names = {name for name in before if name not in after or after[name] is not before[name]}
    return names | {name for name in after if name not in before and name.partition(":")[0] in loaded}


def refusals(speculative_config):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    said = []
    for parameters in ({"min_p": 0.1}, {"logit_bias": {5: 3.0}}, {"top_p": 0.5}):
        try:
            SamplingParams(temperature=0.5, **parameters)._validate_spec_decode(speculative_config)
            said.append(None)
        except VLLMValidationError as error:
            said.append(str(error))
    return said


def answers(settings, speculative):
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    llm = LLM(**settings, speculative_config=speculative, max_num_seqs=4, seed=0)
    common = {"max_tokens": 12, "logprobs": 2, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=3, top_p=0.9, **common),
        SamplingParams(temperature=0.7, seed=4, repetition_penalty=1.2, **common),
        SamplingParams(temperature=0, min_tokens=4, stop_token_ids=list(range(10, 60)), **common),
    ]
    prompts = [{"prompt_token_ids": ids} for ids in ([17, 230, 44, 511, 90], [340, 5, 88], [92, 379, 40, 41])]
    outputs = llm.generate([prompt for prompt in prompts for _ in params], params * len(prompts))
    told = []
    for output in outputs:
        (one,) = output.outputs
        logprobs = [{token: (x.logprob, x.rank) for token, x in place.items()} for place in one.logprobs]
        told.append((one.token_ids, one.text, one.finish_reason, one.stop_reason, logprobs))
    refused = []
    for parameters in ({"min_p": 0.1}, {"logit_bias": {5: 3.0}}):
        try:
            llm.generate(prompts[:1], SamplingParams(temperature=0.5, seed=1, max_tokens=2, **parameters))
        except VLLMValidationError as error:
            refused.append(str(error))
    llm.llm_engine.engine_core.shutdown()
    return told, refused


def main():
    target, chain, serve = map(json.loads, sys.argv[1:])
    for name in MODULES.split():
        importlib.import_module("vllm." + name)
    before = attributes()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from specplug_vllm import plugin

    loaded = changed(before, attributes())
    settings = {"model": target, "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    configs = [EngineArgs(**settings, speculative_config=speculative).create_engine_config()
               for speculative in (None, chain)]
    result = {
        "status": plugin.status(),
        "loaded": sorted(loaded),
        "classes": [type(one.speculative_config).__name__ for one in configs],
        "workers": [one.parallel_config.worker_cls for one in configs],
        "schedulers": [str(one.scheduler_config.scheduler_cls) for one in configs],
        "hashes": [one.compute_hash() for one in configs],
        "refusals": [refusals(one.speculative_config) for one in configs],
        "answers": [answers(settings, speculative) for speculative in (None, chain)] if serve else [],
    }
    result["changed"] = sorted(changed(before, attributes()))
    from vllm.v1.core.sched.scheduler import Scheduler

    stock = Scheduler.schedule
    Scheduler.schedule = lambda self: stock(self)
    result["planted"] = sorted(changed(before, attributes()) - set(result["changed"]))
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
'''


class Pair(NamedTuple):
    """What the script tells with the plugin, and with it switched off."""

    on: dict[str, Any]
    off: dict[str, Any]


def run(folder: Any, *, serve: bool) -> Pair:
    script = folder / "untouched.py"
    script.write_text(SCRIPT)
    draft = str(models.path("quick", "dspark"))
    chain = {"method": "dspark", "model": draft, "num_speculative_tokens": 7}
    target = str(models.path("quick", "target"))
    command = [sys.executable, str(script), *map(json.dumps, (target, chain, serve))]
    told = []
    for switch in ("0", "1"):
        environment = server.engine_environment(on_gpu=False) | {
            "PYTHONHASHSEED": "0",  # a key of vLLM's is a hash
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "SPECPLUG_DISABLE": switch,
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=140)
        assert done.returncode == 0, done.stderr[-3000:]
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        told.append(json.loads(line.removeprefix("RESULT ")))
    assert [one["status"][0] for one in told] == [True, False]
    return Pair(*told)


@pytest.fixture(scope="module")
def configured(rig: None, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return run(tmp_path_factory.mktemp("configured"), serve=False)


@pytest.fixture(scope="module")
def served(rig: None, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return run(tmp_path_factory.mktemp("served"), serve=True)


def test_two_functions_are_wrapped_and_nothing_else(configured: Pair) -> None:
    """When plugins have been loaded, and still when a plain and a chain configuration have been made."""
    on, off = configured
    for moment in ("loaded", "changed"):
        assert set(on[moment]) - set(off[moment]) == WRAPPED
        assert set(off[moment]) - set(on[moment]) == set()
    assert on["planted"] == off["planted"] == [PLANTED]  # the control: one more would have been seen


def test_stock_configurations_are_stock(configured: Pair) -> None:
    on, off = configured
    for fact in ("classes", "workers", "schedulers", "hashes"):
        assert on[fact] == off[fact]
    assert on["classes"] == ["NoneType", "SpeculativeConfig"]
    assert not any("specplug" in name for name in on["workers"] + on["schedulers"])


def test_min_p_and_logit_bias_stay_refused_with_stock_methods(configured: Pair) -> None:
    on, off = configured
    plain, (min_p, logit_bias, top_p) = on["refusals"]
    assert plain == [None, None, None]
    assert "not yet supported with speculative decoding" in min_p
    assert "not yet supported with speculative decoding" in logit_bias
    assert top_p is None
    assert on["refusals"] == off["refusals"]


def test_stock_engines_answer_to_the_last_bit(served: Pair) -> None:
    """Plain decoding and the stock DSpark chain: tokens, texts, ends, log-probabilities and refusals."""
    on, off = served
    (plain, plain_refused), (chain, chain_refused) = on["answers"]
    assert on["answers"] == off["answers"]
    assert len({tuple(ids) for ids, *_ in plain}) > 6
    assert all(logprobs for *_, logprobs in plain + chain)
    assert plain_refused == []
    assert len(chain_refused) == 2


def test_stock_engines_leave_two_functions_wrapped(served: Pair) -> None:
    """After engines have run in the process, the worker among them."""
    on, off = served
    assert set(on["changed"]) - set(off["changed"]) == WRAPPED
    assert set(off["changed"]) - set(on["changed"]) == set()
