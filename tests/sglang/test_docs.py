"""Every `sglang.launch_server` of the documents, judged by SGLang's own parser and resolution; nothing is
started."""

import re
import shutil

import pytest
from doc_blocks import DOCUMENTS, PLACEHOLDERS, ROOT, SGLANG_ALGORITHMS, blocks, commands

pytestmark = pytest.mark.sglang

CPU = ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--disable-cuda-graph"]


def launches() -> list:
    """Every command that starts SGLang, once, with the options file of its page where its block names one."""
    found = {}
    for file in DOCUMENTS:
        page = list(blocks(file))
        files = [block.text for block in page if block.language == "json"]
        for block in page:
            for command in commands(block) if block.language == "sh" else ():
                if command.words[:3] == ("python", "-m", "sglang.launch_server"):
                    options = files[0] if "SPECPLUG_CONFIG" in command.environ else None
                    found.setdefault(command.words, pytest.param(command, options, id=block.place))
    return list(found.values())


@pytest.mark.parametrize(("command", "options"), launches())
def test_sglang_accepts_every_launch_of_the_documents(command, options, tmp_path, monkeypatch):
    from sglang.srt.plugins import load_plugins

    from specplug_sglang.argument_check import accept

    shutil.copy(ROOT / "recipes" / "measured" / "cost-local-cpu.json", tmp_path / "cost.json")
    if options is not None:
        (tmp_path / command.environ["SPECPLUG_CONFIG"]).write_text(options)
    for name, value in command.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    load_plugins()
    stages: list[str] = []
    accept([PLACEHOLDERS.get(word, word) for word in command.words] + CPU, stages.append)
    assert stages == ["parsed", "config accepted"]


def test_a_launch_that_sglang_would_refuse_is_found(tmp_path, monkeypatch):
    from sglang.srt.plugins import load_plugins

    from specplug_sglang.argument_check import accept

    load_plugins()
    start = ["python", "-m", "sglang.launch_server", "--model-path", PLACEHOLDERS["TARGET"], *CPU]
    with pytest.raises(ValueError, match="DDTREE needs a draft"):
        accept([*start, "--speculative-algorithm", "DDTREE"], lambda stage: None)
    with pytest.raises(SystemExit):
        accept([*start, "--speculative-algoritm", "DDTREE"], lambda stage: None)


def test_the_algorithms_of_the_documents_are_sglangs():
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    table = (ROOT / "docs" / "choosing.md").read_text().partition("## The command of each")[2]
    named = set(re.findall(r"\| `([A-Z0-9]+)` \|$", table, re.M))
    assert len(named) > 5
    assert named <= SGLANG_ALGORITHMS
    for name in SGLANG_ALGORITHMS:
        assert SpeculativeAlgorithm.from_string(name) is not None
    with pytest.raises(ValueError, match="DTREE"):
        SpeculativeAlgorithm.from_string("DTREE")
