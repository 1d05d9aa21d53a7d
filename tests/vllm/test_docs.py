"""Every `vllm serve` of the documents, judged by vLLM's own parser and configuration; nothing is started."""

import json
import shutil
from typing import get_args

import pytest
from doc_blocks import DOCUMENTS, PLACEHOLDERS, ROOT, every_command, spans

from specplug import models

pytestmark = pytest.mark.vllm

SMALL = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
ABSENT = {"eagle3", "mtp"}  # their drafts are not here: the names of method and keys alone


def configs() -> list[str]:
    """Every speculative config of the documents, once."""
    found = {
        block.text: None for file in DOCUMENTS for block in spans(file) if block.language == "speculative"
    }
    for command in every_command():
        words = command.words
        if command.program == "vllm" and "--speculative-config" in words:
            found[words[words.index("--speculative-config") + 1]] = None
    return list(found)


def present(text: str) -> dict:
    """The config with the shipped models in place of the names that stand for a reader's."""
    config = json.loads(text)
    if config.get("method") == "dflash":
        return {**config, "model": str(models.path("quick", "dflash"))}
    return {key: PLACEHOLDERS.get(value, value) if key == "model" else value for key, value in config.items()}


@pytest.fixture
def accept(tmp_path, monkeypatch):
    """vLLM's verdict on a config; the files the documents name are there."""
    shutil.copy(ROOT / "recipes" / "measured" / "cost-local-cpu.json", tmp_path / "cost.json")
    calibration = ROOT / "specplug" / "recordings" / "deep-thin-calibration.json"
    shutil.copy(calibration, tmp_path / "calibration.json")
    monkeypatch.chdir(tmp_path)
    from vllm.plugins import load_general_plugins

    from specplug_vllm.argument_check import accept as judge

    load_general_plugins()

    def accept(config: dict) -> list[str]:
        stages: list[str] = []
        speculative = ["--speculative-config", json.dumps(config)]
        judge(["vllm", "serve", PLACEHOLDERS["TARGET"], *SMALL, *speculative], stages.append)
        return stages

    return accept


def test_vllm_accepts_every_speculative_config_of_the_documents(accept):
    from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod

    texts = configs()
    assert len(texts) > 6
    for text in texts:
        config = present(text)
        if config["method"] in ABSENT:
            assert config["method"] in names(SpeculativeMethod), text
            assert config.keys() <= SpeculativeConfig.__dataclass_fields__.keys(), text
        else:
            assert accept(config) == ["parsed", "config accepted"], text


def test_a_config_that_vllm_would_refuse_is_found(accept):
    for wrong in (
        {"method": "ngrams", "num_speculative_tokens": 2},
        {"method": "ddtree", "model": "/no/such"},
    ):
        with pytest.raises(ValueError, match=r"ngrams|/no/such"):
            accept(wrong)


def names(literal) -> set[str]:
    """All the words of a nested Literal."""
    return {word for one in get_args(literal) for word in ([one] if isinstance(one, str) else names(one))}
