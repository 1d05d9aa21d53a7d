"""The documents: every command can be run, every link leads somewhere, every figure has its command, and the
two READMEs say the same.
"""

import re
import runpy
import shutil
from pathlib import Path

import pytest
from commands import run
from doc_blocks import (
    DOCUMENTS,
    LANGUAGES,
    PLACEHOLDERS,
    ROOT,
    Block,
    Command,
    blocks,
    commands,
    every_command,
    judge,
    named,
    namespace,
    options_file,
    spans,
    speculative,
)

from specplug.recording_source import shipped

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
CHEAP = {"inspect", "simulate", "advise"}  # commands that are run here, not only parsed
QUICK = ["--tokens", "400"]  # of a replay; what a reader runs replays more
PROSE = [*DOCUMENTS, ROOT / "DESIGN.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_every_block_is_of_a_known_language(file):
    assert [block.place for block in blocks(file) if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_every_command_is_one_a_reader_can_run(file):
    for block in (*blocks(file), *spans(file)):
        if block.language == "sh":
            for command in commands(block):
                judge(command)
        elif block.language == "speculative":
            speculative(block.text)
        elif block.language == "name":
            named(block.text)
        elif block.language == "python":
            compile(block.text, block.place, "exec")
        elif block.language == "json" and file.name == "configuration.md":
            options_file(block.text)


WRONG = {
    "specplugg inspect DRAFT": "unknown command 'specplugg'",
    "rm -r OUT": "unknown command 'rm'",
    "specplug inspect": "the command line refuses it",
    "specplug simulate --concurency 4": "the command line refuses it",
    """vllm serve TARGET --speculative-config '{"method": "ddtree", "model": "D", "tree_bugdet": 9}'""":
        "did you mean 'tree_budget'",
    """vllm serve TARGET --speculative-config '{"method": "ddtree"}'""": "expected the draft's folder",
    """vllm serve TARGET --speculative-config '{"method": "treedd", "model": "D"}'""":
        "not one of vLLM's methods",
    "vllm serve": "expected vllm serve MODEL",
    "python -m sglang.launch_server --speculative-algorithm DTREE": "expected one of",
    "python benchmarks/nothing.py": "no such file",
    "python benchmarks/budget.py --sorted": "has no --sorted",
    "ci/tests": "no such program",
    "ci/test cores": "unknown 'cores'",
    "ci/demo --bugdet 3": "the command line refuses it",
    ".venvs/vllm/bin/pytest tests/core/test_nothing.py": "no such file",
    ".venvs/vllm/bin/pytest -m fast": "unknown marker",
    "pip install 'specplug[gpu]'": "with an extra of",
    "SPECPLUG_OFF=1 specplug doctor": "unknown variable SPECPLUG_OFF",
    "export SPECPLUG_OFF=1": "unknown variable SPECPLUG_OFF",
    "curl http://elsewhere/v1 -d '{}'": "127.0.0.1",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_command_that_cannot_work_is_found(text, tmp_path):
    """The control of the test above, as a document would hold it: fenced, indented, or in a table."""
    document = tmp_path / "page.md"
    for written in (f"```sh\n{text}\n```\n", f"Text:\n\n    {text}\n\nText.\n"):
        document.write_text(written)
        with pytest.raises(ValueError, match=re.escape(WRONG[text])):
            [judge(command) for block in blocks(document) for command in commands(block)]


def test_a_command_that_is_not_there_is_found():
    named("specplug doctor")
    named("specplug doctor --engine")
    with pytest.raises(ValueError, match="the command line refuses it"):
        named("specplug doktor")
    with pytest.raises(ValueError, match="has no --engines"):
        named("specplug doctor --engines")
    with pytest.raises(ValueError, match="not a command of vLLM"):
        named("vllm server")


def test_code_is_found_where_it_stands(tmp_path):
    document = tmp_path / "page.md"
    document.write_text(
        "Text `specplug doctor`, `specplug`, `tree_budget`.\n\n    ci/env vllm  # why\n\n- a list\n\n"
        "    goes on\n\n| a | `python x.py --y` |\n\n"
        "```sh\nA=1 vllm serve \\\n    TARGET\nexport B=2\nci/test\n```\n"
    )
    assert [(block.line, block.text) for block in blocks(document)] == [
        (3, "ci/env vllm  # why"),
        (12, "A=1 vllm serve \\\n    TARGET\nexport B=2\nci/test"),
    ]
    assert [block.text for block in spans(document)] == ["specplug doctor", "python x.py --y"]
    found = [one for block in blocks(document) for one in commands(block)]
    assert [(one.words, one.environ) for one in found] == [
        (("ci/env", "vllm"), {}),
        (("vllm", "serve", "TARGET"), {"A": "1"}),
        (("export", "B=2"), {"B": "2"}),
        (("ci/test",), {"B": "2"}),
    ]


def cheap() -> list[Command]:
    found = [one for one in every_command() if one.program == "specplug" and one.words[1:2]]
    whole = [
        one
        for one in found
        if one.words[1] in CHEAP or one.words[1:3] in (("recipe", "list"), ("recipe", "show"))
    ]
    return [one for one in whole if len(one.words) > 2 or one.words[1] != "inspect"]


@pytest.mark.parametrize("command", cheap(), ids=str)
def test_cheap_commands_are_run(command, tmp_path, monkeypatch, capsys):
    shutil.copy(ROOT / "recipes" / "measured" / "cost-local-cpu.json", tmp_path / "cost.json")
    shutil.copy(shipped("deep-thin"), tmp_path / "rounds.npz")
    monkeypatch.chdir(ROOT if command.words[1] == "recipe" else tmp_path)
    words = [PLACEHOLDERS.get(word, word) for word in command.words[1:]]
    replays = words[0] in ("simulate", "advise") and "--rate" not in words
    assert run(*words, *(QUICK if replays else [])) == 0
    assert capsys.readouterr().out


def test_the_configuration_reference_is_what_the_structs_say():
    script = runpy.run_path(str(ROOT / "scripts" / "write_configuration.py"))
    assert (ROOT / "docs" / "configuration.md").read_text() == script["document"](), (
        "out of date; run scripts/write_configuration.py"
    )
    refusals = (ROOT / "sglang_plugin" / "specplug_sglang" / "refusals.py").read_text()
    refused = set(re.findall(r"options\.(\w+)", refusals)) - {"cost_table", "explore"}  # by mode alone
    assert refused == script["NOT_FOR_SGLANG"].keys()


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def slug(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(file: Path) -> list[str]:
    missing = []
    for link in LINK.findall(file.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (file.parent / name).resolve() if name else file
        headings = (
            re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            if target.suffix == ".md" and target.is_file()
            else []
        )
        if not target.exists() or (anchor and anchor not in map(slug, headings)):
            missing.append(link)
    return missing


@pytest.mark.parametrize("file", PROSE, ids=lambda file: file.name)
def test_links_resolve(file):
    assert broken_links(file) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One: two\n[a](nowhere.md) [b](#one-two) [c](#three) [d](page.md#one-two) [e](page.md#x)\n"
    )
    assert broken_links(page) == ["nowhere.md", "#three", "page.md#x"]


@pytest.mark.parametrize("file", PROSE, ids=lambda file: file.name)
def test_nothing_points_out_of_the_repository(file):
    for path in re.findall(r"\.\./[\w./-]*", file.read_text(encoding="utf-8")):
        there = (file.parent / path.rstrip(".")).resolve()
        assert there.is_relative_to(ROOT), path
        assert there.exists(), path


def test_every_page_is_in_the_index():
    index = LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert {file.name for file in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(index)


@pytest.mark.parametrize("file", PROSE, ids=lambda file: file.name)
def test_nothing_is_left_to_be_filled_in(file):
    text = file.read_text(encoding="utf-8")
    assert re.findall(r"^[A-Z]+$|^.*: [A-Z0-9]{4,}$|TODO|TBD", text, re.M) == []


def test_the_readme_is_short():
    for file in (ENGLISH, CHINESE):
        assert len(file.read_text(encoding="utf-8").splitlines()) < 200


def figures(file: Path) -> list[list[str]]:
    """The numbers of every row of every table."""
    rows = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [re.findall(r"\d+(?:[.,]\d+)*", row) for row in rows]


def shell(file: Path) -> list[str]:
    """Every command of the document, in its order, as one line each."""
    found = [one for block in blocks(file) if block.language == "sh" for one in commands(block)]
    return [f"{one} {one.environ}" for one in found]


def test_both_readmes_have_the_same_commands_figures_and_links():
    english, chinese = ENGLISH.read_text(encoding="utf-8"), CHINESE.read_text(encoding="utf-8")
    assert shell(ENGLISH) == shell(CHINESE)
    assert len(shell(ENGLISH)) > 5
    assert figures(ENGLISH) == figures(CHINESE)
    assert sorted(block.text for block in spans(ENGLISH)) == sorted(block.text for block in spans(CHINESE))
    assert set(LINK.findall(english)) - {"README.zh-CN.md"} == set(LINK.findall(chinese)) - {"README.md"}


def unmeasured(text: str, heading: str) -> list[str]:
    """Rows of the table under a heading that state a number without a command."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert rows, f"no table under {heading}"
    bare = []
    before = False
    for row in rows:
        last = row.strip("| ").split(" | ")[-1]
        has = bool(list(spans_of(last))) or (before and last.startswith(("the same", "同上")))
        before |= has
        bare += [] if has else [row]
    return bare


def spans_of(text: str) -> list[str]:
    return re.findall(r"`((?:specplug|python|ci/)[^`]*)`", text)


def test_every_figure_has_its_command():
    assert unmeasured(ENGLISH.read_text(encoding="utf-8"), "Measured") == []
    assert unmeasured(CHINESE.read_text(encoding="utf-8"), "实测") == []
    bare = "\n## Measured\n\n| a | b | c |\n|---|---|---|\n| x | 1 | `ci/demo` |\n| y | 2 | - |\n"
    assert unmeasured(bare, "Measured") == ["| y | 2 | - |"]


def sources() -> str:
    """Every string of the packages as it is printed: neighbouring literals joined, holes as ...."""
    text = "\n".join(
        file.read_text(encoding="utf-8")
        for folder in ("specplug", "vllm_plugin", "sglang_plugin", "kernels", "ci")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.is_file() and (file.suffix == ".py" or (file.parent == ROOT / "ci" and not file.suffix))
    )
    return re.sub(r"([\"'])\n\s*f?[\"']", "", text)


def unknown_messages(text: str) -> list[str]:
    """Messages of the first column of the tables, in backticks, that no source prints.

    Those of the engines are introduced by the engine's name."""
    printed = sources()
    unknown = []
    for row in text.splitlines():
        cell = row.strip("| ").split(" | ")[0]
        if not row.startswith("| ") or re.match(r"\w+: |`specplug:|`the acceptance", cell):
            continue
        pieces = [piece for span in re.findall(r"`([^`]+)`", cell) for piece in span.split("...")]
        unknown += [piece for piece in pieces if piece.strip() and piece not in printed]
    return unknown


def test_messages_of_the_troubleshooting_are_those_of_the_code():
    assert unknown_messages((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")) == []
    assert unknown_messages("| `method ddtree refuses: ` | `no such` |\n| `it refused: ... x` | b |\n") == [
        "it refused: "
    ]


def test_a_parsed_command_holds_what_was_written():
    arguments = namespace(["simulate", "--concurrency", "1", "8"])
    assert (arguments.command, arguments.concurrency) == ("simulate", [1, 8])
    assert Block(ROOT / "README.md", 3, "sh", "").place == "README.md:3"
