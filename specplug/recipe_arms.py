"""In what two arms of a recipe differ, so that one setting alone is compared.

A setting is one flag of the command, one environment variable, or one key of vLLM's ``--speculative-config``.
The way to speculate is one setting too, ``method`` (``--speculative-algorithm`` in SGLang): where it differs,
keys and flags of speculation that one arm alone has belong to it; those that both have must be equal. An arm
without speculation has the method "none".
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from specplug.recipe import Arm

SPECULATION = "speculation."  # prefix of the settings that may belong to the method
METHOD = SPECULATION + "method"
_METHOD_FLAGS = ("--speculative-algorithm", "--speculative-algo", "--spec-method")
_SPECULATION_VARIABLES = frozenset({"SGLANG_RAGGED_VERIFY_MODE", "SPECPLUG_CONFIG"})


def differences(one: Arm, other: Arm) -> list[str]:
    """Names of the settings that differ, sorted. Raises ValueError for a command that cannot be read."""
    first, second = settings(one), settings(other)
    another_method = first[METHOD] != second[METHOD]
    return [
        name.removeprefix(SPECULATION)
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
        and not (
            another_method
            and name.startswith(SPECULATION)
            and name != METHOD
            and (name in first) != (name in second)
        )
    ]


def settings(arm: Arm) -> dict[str, str]:
    """Every setting of an arm by name, as text."""
    found = {METHOD: "none"}
    for flag, value in _flags(arm.command):
        if flag in ("--speculative-config", "-sc"):
            found |= {SPECULATION + key: inner for key, inner in _config(value, arm.name).items()}
        elif flag in _METHOD_FLAGS:
            found[METHOD] = value
        elif flag.startswith("--speculative-"):
            found[SPECULATION + flag.removeprefix("--speculative-")] = value
        else:
            found[flag] = value
    for name, value in arm.environment.items():
        found[(SPECULATION if name in _SPECULATION_VARIABLES else "") + name] = value
    return found


def _flags(command: Sequence[str]) -> list[tuple[str, str]]:
    """(flag, its words joined), the program and its positional words first, under the name "program"."""
    groups: list[list[str]] = [["program"]]
    for word in command:
        if word.startswith("--") or word == "-sc":
            flag, _, value = word.partition("=")
            groups.append([flag, value] if value else [flag])
        else:
            groups[-1].append(word)
    return [(flag, " ".join(words)) for flag, *words in groups]


def _config(text: str, arm: str) -> dict[str, str]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"arm {arm}: --speculative-config: expected JSON, got {text!r}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"arm {arm}: --speculative-config: expected a JSON object, got {text}")
    return {key: json.dumps(value, sort_keys=True) for key, value in content.items()} | (
        {"method": str(content["method"])} if "method" in content else {}
    )
