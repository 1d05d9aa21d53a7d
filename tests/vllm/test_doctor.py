"""`specplug doctor` against the real vLLM: what it says is loaded, off or broken is so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A start takes 30 s on a quiet machine; the limit leaves room for a loaded one.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def doctor(*arguments: str, **environ: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and checks by name."""
    command = [Path(sys.executable).with_name("specplug"), "doctor", "--json", *arguments]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=250)
    answer = json.loads(done.stdout)
    assert answer["ok"] == (done.returncode == 0)
    return done.returncode, {check["name"]: check for check in answer["checks"]}


def test_every_engine_process_has_the_plugin_and_a_request_is_served_with_trees():
    code, checks = doctor()
    assert {name: check["state"] for name, check in checks.items() if check["state"] != "ok"} == {}
    assert code == 0
    assert {"APIServer", "EngineCore", "Worker", "plugin", "hook table", "one request"} <= set(checks)


def test_the_off_switch_is_seen_and_the_plugin_is_off():
    code, checks = doctor(SPECPLUG_DISABLE="1")
    assert code == 1
    assert checks["SPECPLUG_DISABLE"]["state"] == "off"
    assert checks["plugin"]["state"] == "off"
    assert "SPECPLUG_DISABLE" in checks["plugin"]["detail"]
    assert checks["engine processes"]["state"] == "skipped"


def test_a_vllm_that_cannot_be_imported_is_a_failed_check_not_a_crash(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcuda is missing')\n")
    code, checks = doctor("--no-start", PYTHONPATH=str(tmp_path))
    assert code == 1
    assert checks["plugin"] == {
        "name": "plugin",
        "state": "failed",
        "detail": "ImportError: libcuda is missing",
    }


def test_a_vllm_without_the_function_we_wrap_turns_the_plugin_off(tmp_path):
    """A stand-in for another release: the real vLLM with the seam renamed before the plugin looks for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Rename:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'specplug_vllm.plugin':\n"
        "            sys.meta_path.remove(self)\n"
        "            from vllm.engine.arg_utils import EngineArgs\n"
        "            del EngineArgs.create_speculative_config\n"
        "sys.meta_path.insert(0, Rename())\n"
    )
    code, checks = doctor("--no-start", PYTHONPATH=str(tmp_path))
    assert code == 1
    assert checks["plugin"]["state"] == "off"
    assert "create_speculative_config" in checks["plugin"]["detail"]
