"""Nothing that comes with a checkpoint is executed, unless the user trusts it by vLLM's own switch."""

import json
import shutil
from pathlib import Path

import pytest

from specplug import models
from specplug.inspection import inspect

pytestmark = pytest.mark.vllm

TRAP = """
from pathlib import Path
from transformers import PretrainedConfig

Path({mark!r}).touch()


class TrapConfig(PretrainedConfig):
    model_type = "trap"
"""


def trapped(part: str, folder: Path, mark: Path) -> Path:
    """A shipped checkpoint that asks for its own code, which leaves a mark when it runs."""
    shutil.copytree(models.path("quick", part), folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "trap.TrapConfig", "AutoModel": "trap.TrapModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "trap.py").write_text(TRAP.format(mark=str(mark)))
    return folder


@pytest.mark.parametrize("part", ["dflash", "dspark", "target"])
def test_nothing_in_a_checkpoint_is_executed(rig, tmp_path, monkeypatch, part):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    load_general_plugins()
    mark = tmp_path / "executed"
    folder = trapped(part, tmp_path / "checkpoint", mark)
    draft = str(models.path("quick", "dspark") if part == "target" else folder)
    target = str(folder if part == "target" else models.path("quick", "target"))
    speculative = {"method": "ddtree", "model": draft}
    settings = {"model": target, "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    EngineArgs(**settings, speculative_config=speculative).create_engine_config()
    if part != "target":
        assert inspect(draft, target)
    assert not mark.exists()


def test_the_trap_works(tmp_path, monkeypatch):
    """The control: whoever trusts the checkpoint executes it."""
    from transformers import AutoConfig
    from transformers.utils import hub

    monkeypatch.setattr(hub, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "executed"
    folder = trapped("target", tmp_path / "checkpoint", mark)
    AutoConfig.from_pretrained(str(folder), trust_remote_code=True)
    assert mark.exists()
