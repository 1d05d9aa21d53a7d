"""A server that is asked for DDTREE and cannot have it does not come up, and says why."""

import subprocess
import sys
from pathlib import Path

import pytest
from sglang_rig import launch, tree

pytestmark = pytest.mark.sglang

DRILL = Path(__file__).parent / "drill.py"
BROKEN = (
    "import sys, specplug_sglang.install as install, specplug_sglang.plugin as plugin\n"
    "def fail(): raise ImportError('a broken installation')\n"
    "install.install = fail\n"
    "sys.argv = ['launch_server', *{arguments!r}]\n"
    "try: plugin.register()\n"
    "except Exception as error: print('swallowed by SGLang:', error)\n"
)


def broken(*arguments, **variables):
    """register() of an installation that cannot work, as SGLang calls it."""
    import os

    return subprocess.run(
        [sys.executable, "-c", BROKEN.format(arguments=arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )


def test_a_broken_plugin_ends_a_server_that_asked_for_it():
    done = broken("--speculative-algorithm", "DDTREE")
    assert done.returncode == 1
    assert "specplug refuses to start: ImportError: a broken installation" in done.stderr
    assert broken("--speculative-algorithm=ddtree").returncode == 1
    assert broken("--speculative-algorithm", "DSPARK", SPECPLUG_STRICT="1").returncode == 1


def test_a_broken_plugin_leaves_other_servers_alone():
    done = broken("--speculative-algorithm", "DSPARK")
    assert (done.returncode, done.stdout) == (0, "swallowed by SGLang: a broken installation\n")


def test_switched_off_it_does_nothing():
    done = broken("--speculative-algorithm", "DDTREE", SPECPLUG_DISABLE="1")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("flags", "variables", "reason"),
    [
        ({}, {"SPECPLUG_TEST_DRILL": "launcher"}, "resolve_runtime_config: the hook was not applied"),
        ({}, {"SPECPLUG_TEST_DRILL": "scheduler"}, "resolve_runtime_config: the hook was not applied"),
        ({}, {"SGLANG_PLUGINS": "specplug_rig"}, "Unknown speculative algorithm name: DDTREE"),
        ({"enable_lora": True, "max_lora_rank": 8}, {}, "DDTREE refuses: --enable-lora is set"),
    ],
    ids=["hook lost", "hook lost in the scheduler", "plugin left out", "engine feature"],
)
def test_the_server_ends_with_the_reason(tmp_path, flags, variables, reason):
    log = tmp_path / "server.log"
    env = dict(variables)
    if "SPECPLUG_TEST_DRILL" in env:
        env["SPECPLUG_RIG_SGLANG_LOAD"] = str(DRILL)
    process, _ = launch(tree("dspark", 16, **flags), log=log, env=env)
    assert process.wait(timeout=200) != 0
    assert reason in log.read_text()
