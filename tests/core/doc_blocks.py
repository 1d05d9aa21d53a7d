"""Commands in the project's documents, and a judge that says of each what is wrong with it.

A document's code is found in three places: fenced blocks (by their language), indented blocks (shell), and
code spans of tables and text that begin like a command. The judge knows every program a document may name; a
program it does not know is a fault. What only an engine can judge is judged again in tests/vllm/test_docs.py
and tests/sglang/test_docs.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specplug import cli, models
from specplug.config import parse_options

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
SHELL, LANGUAGES = "sh", {"sh", "json", "text", "python"}
NAME, NAMED = re.compile(r"(specplug|vllm)( [a-z]+)+( --[a-z-]+)?"), "name"  # of a command, or its option
SPAN = re.compile(r"`([^`]+)`")
BEGINS_COMMAND = re.compile(r"(specplug|vllm|ci/(demo|test|env|gpu\.sh)|python|pip|\.venvs/\w+/bin/\w+) ")
ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
SOURCES = ("specplug", "ci", "vllm_plugin", "sglang_plugin")

# Of vLLM's own SpeculativeConfig, what the documents use; tests/vllm/test_docs.py asks vLLM itself.
VLLM_METHODS = {"ngram", "draft_model", "mtp", "eagle", "eagle3", "medusa", "dflash", "dspark"}
VLLM_KEYS = {"method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min",
             "enable_adaptive_verification"}  # fmt: skip
SGLANG_ALGORITHMS = {"NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "DSPARK", "DDTREE"}
PLACEHOLDERS = {
    "TARGET": str(models.path("quick", "target")),
    "SMALL": str(models.path("quick", "target")),
    "DRAFT": str(models.path("quick", "dspark")),
}


class Block(NamedTuple):
    """A piece of code of a document."""

    file: Path
    line: int  # of its first line, from 1
    language: str  # one of LANGUAGES, or what the document says
    text: str

    @property
    def place(self) -> str:
        return f"{self.file.name}:{self.line}"


class Command(NamedTuple):
    """One command line, and the variables set for it in its line or earlier in its block."""

    block: Block
    words: tuple[str, ...]
    environ: dict[str, str]

    @property
    def program(self) -> str:
        return re.sub(r"^\.venvs/\w+/bin/", "", self.words[0])

    def __str__(self) -> str:
        return shlex.join(self.words)


def blocks(file: Path) -> Iterator[Block]:
    """Fenced and indented blocks. Indented lines count where a blank line is above and no list is open."""
    lines = file.read_text(encoding="utf-8").splitlines()
    number, in_list = 0, False
    while number < len(lines):
        line = lines[number]
        start = number
        if line.startswith("```"):
            language = line.removeprefix("```").strip().partition(" ")[0]
            number += 1
            while lines[number].rstrip() != "```":
                number += 1
            yield Block(file, start + 2, language, "\n".join(lines[start + 1 : number]))
        elif line.startswith("    ") and not in_list and (not start or not lines[start - 1].strip()):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            yield Block(file, start + 1, SHELL, "\n".join(one[4:] for one in lines[start:number]).rstrip())
            continue
        elif line.strip():
            in_list = bool(re.match(r"(-|\*|\d+\.) ", line)) or (in_list and line.startswith(" "))
        number += 1


def spans(file: Path) -> Iterator[Block]:
    """Code spans that begin like a command or are a speculative config; those with ... are not whole."""
    fenced = False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.startswith("```")
        if fenced or line.startswith("    "):
            continue
        for text in SPAN.findall(line):
            if "..." in text or "…" in text or text.endswith((" ", ":")):
                continue  # not whole, or a message
            if text.startswith('{"method"'):
                yield Block(file, number, "speculative", text)
            elif BEGINS_COMMAND.match(text) and "://" not in text:
                yield Block(file, number, NAMED if NAME.fullmatch(text) else SHELL, text)


def commands(block: Block) -> Iterator[Command]:
    """The command lines of a shell block; comments and blank lines are none."""
    exported: dict[str, str] = {}
    waiting = ""
    for line in block.text.splitlines():
        waiting += line
        if waiting.endswith("\\"):
            waiting = waiting[:-1] + " "
            continue
        words = shlex.split(waiting, comments=True)
        waiting = ""
        if not words:
            continue
        here = dict(exported)
        while words and ASSIGNMENT.fullmatch(words[0]):
            here.update([ASSIGNMENT.fullmatch(words.pop(0)).groups()])
        if words and words[0] == "export":
            exported.update(ASSIGNMENT.fullmatch(word).groups() for word in words[1:])
            here = dict(exported)
        yield Command(block, tuple(words), here)
    assert not waiting, f"{block.place}: the last line goes on nowhere"


def every_command() -> list[Command]:
    """All commands of all documents, each spelling once."""
    found: dict[tuple[str, ...], Command] = {}
    for file in DOCUMENTS:
        for block in (*blocks(file), *spans(file)):
            if block.language == SHELL:
                for command in commands(block):
                    found.setdefault((*command.words, *sorted(command.environ)), command)
    return list(found.values())


def judge(command: Command) -> None:
    """Raises ValueError, with the place, for a command that a reader could not run."""
    try:
        for name in command.environ:
            _known_variable(name)
        if not command.words:
            return
        program = command.program
        check = PROGRAMS.get(program) or (_ci if program.startswith("ci/") else None)
        if check is None:
            raise ValueError(
                f"unknown command {program!r}; programs the documents may use: {', '.join(PROGRAMS)}"
            )
        check(list(command.words[1:]) if check is not _ci else [program, *command.words[1:]])
    except ValueError as error:
        raise ValueError(f"{command.block.place}: {command}: {error}") from None


def namespace(words: Sequence[str]) -> Any:
    """What specplug's own command line makes of ``words``; raises ValueError where it refuses them."""
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        for module, _ in cli.COMMANDS.values():
            patch.setattr(module, "run", lambda arguments: taken.append(arguments) or 0)
        patch.setattr("signal.signal", lambda *arguments: None)
        try:
            cli.main(list(words))
        except SystemExit as end:
            if end.code:
                raise ValueError(f"specplug {shlex.join(words)}: the command line refuses it") from None
    return taken[0] if taken else None


def _specplug(words: list[str]) -> None:
    arguments = namespace(words)
    text = getattr(arguments, "speculative_config", None)
    if text is not None:
        speculative(text)


def _vllm(words: list[str]) -> None:
    if words[:1] == ["bench"]:
        return
    if words[:1] != ["serve"] or len(words) < 2 or words[1].startswith("-"):
        raise ValueError("expected vllm serve MODEL ...")
    if "--speculative-config" in words:
        speculative(words[words.index("--speculative-config") + 1])


def speculative(text: str) -> dict[str, Any]:
    """A ``--speculative-config``, judged by the struct that reads ours."""
    config = json.loads(text)
    if config.get("method") == "ddtree":
        parse_options(config)
    elif config.get("method") not in VLLM_METHODS or not config.keys() <= VLLM_KEYS:
        raise ValueError(
            f"{text}: not one of vLLM's methods {sorted(VLLM_METHODS)}, keys {sorted(VLLM_KEYS)}"
        )
    return config


def options_file(text: str) -> None:
    """The content of a file that SPECPLUG_CONFIG names."""
    content = json.loads(text)
    content.pop("dspark", None)
    parse_options({**content, "model": "DRAFT"})


def _python(words: list[str]) -> None:
    if words[:2] == ["-m", "sglang.launch_server"]:
        algorithm = words[words.index("--speculative-algorithm") + 1]
        if algorithm not in SGLANG_ALGORITHMS:
            raise ValueError(
                f"--speculative-algorithm {algorithm}: expected one of {sorted(SGLANG_ALGORITHMS)}"
            )
    elif words[:2] == ["-m", "build"]:
        if not set(words[2:]) <= {"--no-isolation", "--outdir", "OUT"}:
            raise ValueError(f"python -m build: unknown {words[2:]}")
    elif words and words[0].endswith(".py"):
        _script(words)
    else:
        raise ValueError("expected a script of this repository, -m build or -m sglang.launch_server")


def _script(words: list[str]) -> None:
    file = ROOT / words[0]
    if not file.is_file():
        raise ValueError(f"{words[0]}: no such file")
    source = file.read_text(encoding="utf-8")
    for word in words[1:]:
        flag = word.partition("=")[0]
        if flag.startswith("--") and f'"{flag}"' not in source:
            raise ValueError(f"{words[0]} has no {flag}")


def _pytest(words: list[str]) -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    known = {marker.partition(":")[0] for marker in markers} | {"and", "not", "or"}
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m" and not set(word.split()) <= known:
            raise ValueError(f"pytest -m {word!r}: unknown marker")
        if word.startswith("tests/") and not (ROOT / word.partition("::")[0]).exists():
            raise ValueError(f"{word}: no such file")


def _pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words[1:]:
        name = re.fullmatch(
            r"specplug(?:\[([\w,]+)\])?|dist/specplug-[\w.]+-py3-none-any\.whl|matplotlib|\.", word
        )
        if words[0] != "install" or not name or (name[1] and not {*name[1].split(",")} <= extras.keys()):
            raise ValueError(
                f"pip {shlex.join(words)}: expected install specplug, with an extra of {list(extras)}"
            )


def _ci(words: list[str]) -> None:
    file = ROOT / words[0]
    if not file.is_file() or not file.stat().st_mode & 0o100:
        raise ValueError(f"{words[0]}: no such program")
    if words[0] == "ci/demo":
        namespace(["demo", *words[1:]])
    elif words[0] in ("ci/test", "ci/env"):
        unknown = [word for word in words[1:] if f'"{word}"' not in file.read_text(encoding="utf-8")]
        if unknown:
            raise ValueError(f"{words[0]}: unknown {unknown[0]!r}")


def _curl(words: list[str]) -> None:
    urls = [word for word in words if "://" in word]
    if len(urls) != 1 or not urls[0].startswith("http://127.0.0.1:"):
        raise ValueError("expected one address on 127.0.0.1")
    if "-d" in words:
        json.loads(words[words.index("-d") + 1])


def named(text: str) -> None:
    """Raises ValueError unless ``specplug NAME [--OPTION]`` names a command and an option that it has."""
    program, *names = text.split()
    options = [names.pop()] if names[-1].startswith("--") else []
    if program == "vllm":
        if text not in ("vllm serve", "vllm bench serve"):
            raise ValueError(f"{text}: not a command of vLLM that the documents use")
        return
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        namespace([*names, "--help"])
    if options and not re.search(rf"{options[0]}\b", printed.getvalue()):
        raise ValueError(f"{text}: specplug {' '.join(names)} has no {options[0]}")


def _known_variable(name: str) -> None:
    pattern = re.compile(rf"\b{name}\b")
    for folder in SOURCES:
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and file.suffix in {"", ".py", ".sh"} and pattern.search(_read(file)):
                return
    raise ValueError(f"unknown variable {name}: nothing here reads or sets it")


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file != Path(__file__) else ""


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "specplug": _specplug,
    "vllm": _vllm,
    "python": _python,
    "pytest": _pytest,
    "pip": _pip,
    "curl": _curl,
    "export": lambda words: None,  # the variables are judged before
}
