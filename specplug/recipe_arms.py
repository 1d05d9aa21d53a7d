"""In what two arms of a recipe differ, so that one setting alone is compared.

A setting is one flag of the command, one environment variable, or one key of vLLM's ``--speculative-config``.
The way to speculate is one setting too, ``method`` (``--speculative-algorithm`` in SGLang): where it differs,
keys and flags of speculation that one arm alone has belong to it; those that both have must be equal. An arm
without speculation has the method "none", one that leaves the method to vLLM has "automatic".

A flag is read as the engines' parsers read it: by its short name, shortened, with underscores, after ``=``,
and as vLLM's dotted keys, ``--speculative-config.method X``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from specplug.recipe import Arm

SPECULATION = "speculation."  # prefix of the settings that may belong to the method
METHOD = SPECULATION + "method"
_CONFIG = "--speculative-config"
_KEY_FLAGS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
_SPECULATION_VARIABLES = frozenset({"SGLANG_RAGGED_VERIFY_MODE", "SPECPLUG_CONFIG"})
# Other names of flags in vLLM 0.32 and SGLang 0.5.23.
_ALIASES = {
    **{"-sc": _CONFIG, "-cc": "--compilation-config", "-ac": "--attention-config", "-q": "--quantization"},
    **{"-O": "--optimization-level", "-ep": "--enable-expert-parallel"},
    **dict.fromkeys(("-tp", "--tp", "--tp-size"), "--tensor-parallel-size"),
    **dict.fromkeys(("-pp", "--pp", "--pp-size"), "--pipeline-parallel-size"),
    **dict.fromkeys(("-dp", "--dp", "--dp-size"), "--data-parallel-size"),
    **dict.fromkeys(("--ep", "--ep-size"), "--expert-parallel-size"),
    "--speculative-draft-model": "--speculative-draft-model-path",
}
# The shortest form that argparse completes to a flag by which an arm speculates.
_SHORTEST = {
    "--specu": _CONFIG,
    "--speculative-al": "--speculative-algorithm",
    **{"--spec-me": "--spec-method", "--spec-mo": "--spec-model", "--spec-t": "--spec-tokens"},
}
# Flags that take several words; behind the first word of another flag stand positional ones.
_SEVERAL = frozenset(
    f"--{name}"
    for name in (
        "served-model-name", "middleware", "lora-modules", "lora-paths", "lora-target-modules",
        "logits-processors", "ignore-patterns", "allowed-media-domains", "allowed-origins",
        "kv-cache-dtype-skip-layers", "cpu-offload-params", "offload-params", "collect-detailed-traces",
        "numa-bind-cpus", "sleep-preserve-parameter-names", "log-requests-target", "custom-weight-loader",
        "encoder-urls", "encoder-register-urls", "flashinfer-autotune-skip-ops",
        "uvicorn-access-log-exclude-prefixes", "tokenizer-metrics-allowed-custom-labels",
    )
)  # fmt: skip
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


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
    """Every setting of an arm by name, as text. Raises ValueError for one that is given in two ways."""
    flags = _flags(arm.command, arm.name)
    found = {METHOD: "none"}
    speculation = _speculation(flags, arm.name)
    if speculation is not None:
        found |= {SPECULATION + key.replace("-", "_"): _text(value) for key, value in speculation.items()}
        found[METHOD] = str(speculation.get("method") or "automatic")
    for flag, value in flags.items():
        if flag == "--speculative-algorithm":
            found[METHOD] = value
        elif flag.startswith("--speculative-"):
            found[SPECULATION + flag.removeprefix("--speculative-")] = value
        else:
            found[flag] = value
    for name, value in arm.environment.items():
        found[(SPECULATION if name in _SPECULATION_VARIABLES else "") + name] = value
    return found


def _speculation(flags: dict[str, str], arm: str) -> dict[str, Any] | None:
    """vLLM's --speculative-config, with the keys that are flags too; these flags are taken out."""
    text = flags.pop(_CONFIG, None)
    config: dict[str, Any] | None = None
    if text is not None:
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arm {arm}: {_CONFIG}: expected JSON, got {text!r}: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"arm {arm}: {_CONFIG}: expected a JSON object, got {text}")
    for flag in _KEY_FLAGS.keys() & flags.keys():
        key, value = _KEY_FLAGS[flag], flags.pop(flag)
        config = config or {}
        if key in config:
            raise ValueError(f"arm {arm}: {flag}: expected it or {_CONFIG}'s {key}, got both; give one")
        config[key] = _value(value)
    return config


def _flags(command: Sequence[str], arm: str) -> dict[str, str]:
    """Flags with their words, the last of a name; the program and its positional words are "program".

    Dotted keys become the JSON object they stand for. Raises ValueError where it differs from one that is
    also given: vLLM then takes the dotted keys alone.
    """
    program: list[str] = []
    groups: list[tuple[str, list[str]]] = []
    for word in command:
        if word.startswith("-") and word != "-m" and not _NUMBER.fullmatch(word):
            if word[:2] in ("-q", "-O") and len(word) > 2:  # -qfp8, -O3
                word = f"{word[:2]}={word[2:].removeprefix('=')}"
            flag, equals, value = word.partition("=")
            groups.append((_name(flag), [value] if equals else []))
        elif groups and (not groups[-1][1] or groups[-1][0] in _SEVERAL or _NUMBER.fullmatch(word)):
            groups[-1][1].append(word)
        else:
            program.append(word)
    found, dotted = {"program": " ".join(program)}, dict[str, dict[str, Any]]()
    for flag, words in groups:
        base, dot, key = flag.partition(".")
        if dot:
            _put(dotted.setdefault(base, {}), key.split("."), " ".join(words))
        else:
            text = " ".join(words)
            found[flag] = _text(_value(text)) if isinstance(_value(text), dict) else text
    for flag, content in dotted.items():
        if flag in found and _value(found[flag]) != content:
            raise ValueError(
                f"arm {arm}: {flag}: expected JSON or dotted keys, got {found[flag]} and {_text(content)}: "
                "the engine takes the second alone; give one"
            )
        found[flag] = _text(content)
    return found


def _name(flag: str) -> str:
    """A flag's long name with dashes; what follows a dot is a key, and stays."""
    base, dot, key = flag.partition(".")
    if base.startswith("--"):
        base = base.replace("_", "-")
    for shortest, full in _SHORTEST.items():
        if base.startswith(shortest) and full.startswith(base):
            base = full
    return _ALIASES.get(base, base) + dot + key


def _put(content: dict[str, Any], keys: Sequence[str], text: str) -> None:
    """Set the key of a nested object; ``KEY+`` adds to its list, words apart by commas."""
    for key in keys[:-1]:
        inner = content.get(key)
        content[key] = content = inner if isinstance(inner, dict) else {}
    last = keys[-1]
    if last.endswith("+"):
        before = content.get(last[:-1])
        content[last[:-1]] = [*(before if isinstance(before, list) else []), *text.split(",")]
    else:
        content[last] = _value(text)


def _value(text: str) -> Any:
    """What JSON says, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
