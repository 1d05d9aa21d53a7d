"""The hook table fits this vLLM and notices one that moved a seam; loading is idempotent and can be off."""

import re
from pathlib import Path

import pytest

from specplug_vllm import hooks, plugin

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def installed():
    import importlib.util

    return Path(importlib.util.find_spec("vllm").origin).parent


@pytest.fixture
def changed(installed, tmp_path, monkeypatch):
    """Status of one hook on a copy of its file with one name replaced everywhere."""

    def status(hook, old=None):
        text = (installed / hook.path).read_text(encoding="utf-8")
        if old is not None:
            text, count = re.subn(rf"\b{old}\b", "gone_elsewhere", text)
            assert count
        target = tmp_path / str(old) / hook.path  # parsed files are remembered by path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        monkeypatch.setattr(hooks, "HOOKS", (hook,))
        (result,) = hooks.check_hooks(tmp_path / str(old))
        return result

    return status


def test_installed_vllm_fits():
    assert [status for status in hooks.check_hooks() if not status.ok] == []


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: f"{hook.path}:{hook.symbol}")
def test_a_change_is_reported(changed, hook):
    assert changed(hook).ok
    last = hook.symbol.split(".")[-1]
    if last != "__init__":  # every class has one
        assert not changed(hook, last).ok
    for name in (*hook.params, *hook.mentions):
        status = changed(hook, name)
        assert not status.ok, f"{name} is gone and nobody noticed"
        assert status.name == f"{hook.path}:{hook.symbol}"
        assert name in status.detail or name in hook.symbol.split(".")


def test_a_missing_file_is_reported(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "HOOKS", hooks.HOOKS[:1])
    (status,) = hooks.check_hooks(tmp_path)
    assert not status.ok
    assert "no such file" in status.detail


def test_no_vllm_at_all(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="install it beside specplug"):
        hooks.check_hooks()


def test_register_twice_wraps_once(monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.delenv(plugin.OFF_SWITCH, raising=False)
    plugin.register()
    wrapped = EngineArgs.create_speculative_config
    plugin.register()
    assert EngineArgs.create_speculative_config is wrapped
    assert not hasattr(getattr(wrapped, plugin._MARK), plugin._MARK)
    assert plugin.status().active


def test_off_switch_leaves_vllm_alone(monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    stock = getattr(EngineArgs.create_speculative_config, plugin._MARK, EngineArgs.create_speculative_config)
    monkeypatch.setattr(EngineArgs, "create_speculative_config", stock)
    monkeypatch.setattr(plugin, "_status", plugin.status())
    monkeypatch.setenv(plugin.OFF_SWITCH, "1")
    plugin.register()
    assert EngineArgs.create_speculative_config is stock
    assert plugin.status() == (False, f"switched off by {plugin.OFF_SWITCH}=1")


@pytest.mark.parametrize("strict", [False, True])
def test_a_vllm_without_the_wrapped_function(monkeypatch, strict):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.delattr(EngineArgs, "create_speculative_config")
    monkeypatch.setattr(plugin, "_status", plugin.status())
    monkeypatch.delenv(plugin.OFF_SWITCH, raising=False)
    monkeypatch.setenv(plugin.STRICT, "1" if strict else "0")
    if strict:
        with pytest.raises(RuntimeError, match="specplug refuses: this vLLM has no"):
            plugin.register()
    else:
        plugin.register()
    assert not plugin.status().active
    assert "create_speculative_config" in plugin.status().reason
