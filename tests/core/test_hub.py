"""Hub ids: looked up through huggingface_hub alone, weights only once the config is accepted."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specplug.checkpoint import read_draft


def test_hub_id_goes_to_huggingface_hub(toy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    folder, asked = toy("dflash").path, []

    def snapshot(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert read_draft("org/draft-dflash", revision="abc").path == folder
    assert {(repo, revision) for repo, revision, _ in asked} == {("org/draft-dflash", "abc")}
    assert asked[0][2] == ["config.json"]  # weights are fetched only once the config is accepted
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    asked.clear()
    with pytest.raises(ValueError, match="org/draft-dflash: not a block drafter"):
        read_draft("org/draft-dflash")
    assert len(asked) == 1


def test_offline_hub_id_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"missing file: org/none is no local folder.*HF_HUB_OFFLINE is set"):
        read_draft("org/none")


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="needs huggingface_hub; install it"):
        read_draft("org/none")
