"""Installs that are broken where SGLang would not notice: the server does not come up, and its log says why.

SGLang swallows what a plugin raises and serves without it. Each drill breaks a copy of the adapter, which
Python finds before the installed one.
"""

import shutil
from pathlib import Path

import pytest
from sglang_rig import dspark, launch, tree

import specplug_sglang

pytestmark = pytest.mark.sglang

BROKEN = "\nraise ImportError('half installed')\n"
BROKEN_IN_SCHEDULER = """
import multiprocessing

if multiprocessing.parent_process() is not None:
    raise ImportError("half installed")
"""


@pytest.mark.parametrize(
    ("flags", "env", "damage"),
    [(dspark(), {"SPECPLUG_STRICT": "1"}, BROKEN), (tree("dspark", 16), {}, BROKEN_IN_SCHEDULER)],
    ids=["DSPARK where strictness is asked for", "DDTREE in the scheduler only"],
)
def test_the_server_does_not_come_up(tmp_path, flags, env, damage):
    copy = tmp_path / "copy" / "specplug_sglang"
    shutil.copytree(Path(specplug_sglang.__file__).parent, copy)
    with (copy / "install.py").open("a") as module:
        module.write(damage)
    log = tmp_path / "log"
    process, _ = launch(flags, log=log, env=env | {"PYTHONPATH": str(copy.parent)})
    assert process.wait(timeout=200) != 0
    said = log.read_text()
    assert "specplug refuses to start: ImportError: half installed" in said
    assert "fired up" not in said
