"""The plugin in every process of a real server, switched off, and facing a vLLM whose seams have moved."""

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_rig import ends_within, processes

from specplug import models, server
from specplug.cost import from_probes, write_cost_table
from specplug.cost_curves import Probe

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

TARGET = models.path("quick", "target")
DFLASH = models.path("quick", "dflash")
TREE = {"method": "ddtree", "model": str(DFLASH), "tree_budget": 8}


@contextlib.contextmanager
def api_server(
    log: Path, *arguments: str, speculative: dict[str, Any] | None = None, **environment: str
) -> Iterator[server.Server]:
    """The server as `python -m`, the older of the two ways to start it."""
    port = server.free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET)]
    command += ["--host", server.HOST, "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "2", *arguments]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    settings = server.engine_environment(on_gpu=False) | environment
    with server.running(command, port=port, log=log, environment=settings) as started:
        yield started


def test_loaded_in_every_process(tmp_path: Path) -> None:
    """API server, engine core and worker are processes of their own; each has the plugin, all are ended.

    The worker's counters come out of the API server's metrics endpoint.
    """
    log, table = tmp_path / "server.log", tmp_path / "cost.json"
    rows = [
        Probe(shape="tree", requests=1, tokens=n, context=0.0, median_seconds=0.1 + 1e-6 * n)
        for n in (1, 8, 64)
    ]
    write_cost_table(table, from_probes(rows))
    with api_server(log, speculative={**TREE, "cost_table": str(table), "online": False}) as started:
        started.wait_ready("tree")
        group = processes(started.process.pid)
        answer = started.post(
            "/v1/completions", {"model": str(TARGET), "prompt": "hello", "max_tokens": 8, "temperature": 0}
        )
        assert answer["usage"]["completion_tokens"] == 8
        metrics = {}
        for line in started.get("/metrics").splitlines():
            if line.startswith("specplug:"):
                name, _, value = line.rpartition(" ")
                metrics[name] = float(value)
    steps = {
        shape: metrics[f'specplug:steps_total{{shape="{shape}"}}'] for shape in ("plain", "chain", "tree")
    }
    assert steps["tree"] >= 1
    assert metrics["specplug:nodes_verified_total"] >= metrics["specplug:nodes_accepted_total"]
    assert metrics["specplug:tokens_emitted_total"] >= 2
    text = log.read_text(errors="replace")
    accepted = re.findall(r"\(APIServer pid=(\d+)\).* method ddtree over a dflash draft, (.*)", text)
    assert [int(pid) for pid, _ in accepted] == [started.process.pid]
    assert "depth 7, 8 nodes a request" in accepted[0][1]
    assert f"budgets from the cost table {table}" in text
    loaded = dict(re.findall(r"specplug \S+ loaded in (\S+) \(pid (\d+)\)", text))
    assert set(loaded) == {"MainProcess", "EngineCore", "VllmWorker-0"}
    assert int(loaded["MainProcess"]) == started.process.pid
    assert group[int(loaded["EngineCore"])].startswith("VLLM::EngineCore")
    assert group[int(loaded["VllmWorker-0"])].startswith("VLLM::Worker")
    assert ends_within(started.process.pid, seconds=20), processes(started.process.pid)


def test_switched_off_refuses_trees(tmp_path: Path) -> None:
    """SPECPLUG_DISABLE=1 leaves stock vLLM, which does not know the method: the server ends and says so.

    That a plain server works with this switch set is shown in test_server_stream.py, whose reference it is.
    """
    log = tmp_path / "server.log"
    with api_server(log, speculative=TREE, SPECPLUG_DISABLE="1") as started:
        with pytest.raises(RuntimeError, match=r"ended with exit code [1-9]"):
            started.wait_ready("tree")
        assert started.process.returncode > 0
    text = log.read_text(errors="replace")
    said = next(line for line in text.splitlines() if "Input should be 'ngram'" in line)  # vLLM's own words
    assert "input_value='ddtree'" in said
    assert "EngineCore pid=" not in text  # no engine was started


def test_refused_config_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with api_server(log, speculative={**TREE, "tree_buget": 4}) as started:
        with pytest.raises(RuntimeError, match=r"unknown key 'tree_buget'.*did you mean 'tree_budget'"):
            started.wait_ready("tree")
        assert started.process.returncode > 0
    assert "EngineCore pid=" not in log.read_text(errors="replace")


def moved(root: Path, path: str, old: str, new: str) -> Path:
    """A copy of the installed vLLM's sources in which one name has changed."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    from specplug_vllm.hooks import HOOKS

    for file in {hook.path for hook in HOOKS}:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / file, root / file)
    source = (root / path).read_text()
    assert old in source
    (root / path).write_text(source.replace(old, new))
    return root


@pytest.mark.parametrize(
    ("path", "old", "new", "missing"),
    [
        ("v1/worker/gpu/model_runner.py", "custom_sampler", "sampler_hook", "custom_sampler"),
        (
            "v1/worker/gpu/model_states/interface.py",
            "def postprocess_state",
            "def after_step",
            "postprocess_state",
        ),
        ("v1/worker/gpu/sample/sampler.py", "expanded_local_pos", "local_pos", "expanded_local_pos"),
    ],
    ids=["no longer called", "renamed", "argument renamed"],
)
def test_moved_seam_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, old: str, new: str, missing: str
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    import specplug_vllm.config
    from specplug_vllm.hooks import check_hooks

    load_general_plugins()
    root = moved(tmp_path, path, old, new)
    broken = [hook for hook in check_hooks(root) if not hook.ok]
    assert broken
    assert all(hook.name.startswith(path) for hook in broken)
    assert any(missing in hook.name + hook.detail for hook in broken)

    settings: dict[str, Any] = {"model": str(TARGET), "dtype": "float32", "max_model_len": 256}
    monkeypatch.setattr(specplug_vllm.config, "check_hooks", lambda: check_hooks(root))
    with pytest.raises(ValueError, match="does not fit this vLLM") as raised:
        EngineArgs(**settings, speculative_config=TREE).create_engine_config()
    message = str(raised.value)
    assert path in message
    assert "specplug doctor" in message  # the fix
    assert "\n" not in message
    # Neither plain decoding nor a stock drafter needs our seams.
    assert EngineArgs(**settings).create_engine_config().speculative_config is None
    stock = {"method": "dflash", "model": str(DFLASH), "num_speculative_tokens": 4}
    config = EngineArgs(**settings, speculative_config=stock).create_engine_config()
    assert config.speculative_config.method == "dflash"


def test_vllm_without_the_wrapped_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin turns itself off and says so; SPECPLUG_STRICT=1 asks it to fail instead."""
    from vllm.engine.arg_utils import EngineArgs

    from specplug_vllm import plugin

    monkeypatch.setattr(plugin, "_status", plugin.status())  # put back afterwards
    monkeypatch.delattr(EngineArgs, "create_speculative_config")
    plugin.register()
    active, reason = plugin.status()
    assert not active
    assert "create_speculative_config" in reason
    assert not hasattr(EngineArgs, "create_speculative_config")  # nothing was put in its place
    monkeypatch.setenv("SPECPLUG_STRICT", "1")
    with pytest.raises(RuntimeError, match=r"specplug refuses: .*create_speculative_config"):
        plugin.register()


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_off_switch_leaves_the_function_alone(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from specplug_vllm import plugin

    monkeypatch.setattr(plugin, "_status", plugin.status())
    stock = getattr(EngineArgs.create_speculative_config, plugin._MARK, EngineArgs.create_speculative_config)
    monkeypatch.setattr(EngineArgs, "create_speculative_config", stock)
    monkeypatch.setenv("SPECPLUG_DISABLE", value)
    plugin.register()
    assert EngineArgs.create_speculative_config is stock
    assert plugin.status() == (False, f"switched off by SPECPLUG_DISABLE={value}")
    monkeypatch.setenv("SPECPLUG_DISABLE", "0")
    plugin.register()
    assert plugin.status().active
    wrapped = EngineArgs.create_speculative_config
    assert getattr(wrapped, plugin._MARK) is stock
    plugin.register()  # vLLM loads plugins more than once a process
    assert EngineArgs.create_speculative_config is wrapped
