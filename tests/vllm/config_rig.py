"""Configurations of vLLM for trees, without an engine and without weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specplug import models

DFLASH = str(models.path("quick", "dflash"))  # block of 8 fill-in rows: depth 7
DSPARK = str(models.path("quick", "dspark"))  # block of 7 anchor-first rows: depth 7

Configure = Callable[..., Any]


def copied(source: str, folder: Path, *, weights: bool, **changes: Any) -> str:
    """A copy of a checkpoint with other values in its config.json."""
    folder.mkdir()
    for file in Path(source).iterdir():
        if weights or file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def tree(model: str = DFLASH, **keys: Any) -> dict[str, Any]:
    return {"method": "ddtree", "model": model, **keys}


def refusal(configure: Configure, speculative: dict[str, Any] | None, **engine: Any) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - callers check the message
        configure(speculative, **engine)
    return str(raised.value)
