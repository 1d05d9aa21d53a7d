#!/usr/bin/env python3
"""Write docs/configuration.md: every option of the two engines, from the structs that read them.

`scripts/write_configuration.py` writes the file, `--check` only says whether it is up to date (exit code 1
where it is not). Names, types and defaults come from `specplug.config.TreeOptions`, descriptions from its
docstring, accepted ranges from asking the struct itself, the flags of SGLang from `specplug_sglang.config`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec

from specplug.config import TreeOptions
from specplug_kernels import ops
from specplug_sglang import dspark
from specplug_sglang.config import CONFIG, Flags

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "configuration.md"
VLLM_CONFIG = ROOT / "vllm_plugin" / "specplug_vllm" / "config.py"
NUMBERS = (
    -1,
    0,
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
    257,
    512,
    1024,
    1025,
    2048,
    4096,
)  # asked of a whole number
NOT_FOR_SGLANG = {"kernels": '`"torch"` or `"auto"` alone', "full_graphs": "`false` alone"}

HEAD = """# Configuration

Made by `scripts/write_configuration.py` from the structs that read these options; a test compares. Do not
edit by hand.

An unknown key is refused and the nearest known one named, so is a value of the wrong type (a number in
quotes) or out of range, before any weight is read. [choosing.md](choosing.md) says which setting to start
with.
"""

VLLM = """
## vLLM: `--speculative-config`

```sh
vllm serve TARGET --speculative-config '{"method": "ddtree", "model": "DRAFT", "tree_budget": 16}'
```

"""

VLLM_AFTER = """
`-` and `_` in a key are the same. The budget bounds the depth too: a tree of B nodes is no deeper than B. A
request verifies `tree_budget` + 1 rows, its root among them.

The Triton kernels take a `tree_budget` up to {budget}, `candidates` up to {candidates} (of drafts with
a Markov head), a depth up to {depth}, head sizes up to {head} that are multiples of {unit}, and a vocabulary
up to {vocab:,}. Beyond one of these `"auto"` runs torch for all of a round's device work, and the log says
why; `"triton"` is refused at the start.

Keys of vLLM that keep their meaning: {host}.
"""

SGLANG = """
## SGLang: flags, and the file that `SPECPLUG_CONFIG` names

SGLang has no option field for plugins. Its own flags keep their meaning; the rest stands in a JSON file.

```sh
export SPECPLUG_CONFIG=specplug.json SGLANG_RAGGED_VERIFY_MODE=compact
python -m sglang.launch_server --model-path TARGET --speculative-algorithm DDTREE \\
    --speculative-draft-model-path DRAFT --speculative-num-draft-tokens 17 --disable-cuda-graph
```

where `specplug.json` holds, for instance:

```json
{"cost_table": "cost.json", "min_gain": 0.05}
```

"""

SGLANG_AFTER = """
What a flag and the file both say must agree. `SGLANG_RAGGED_VERIFY_MODE` is SGLang's: `static` verifies
whole trees, `cap-accept` computes them and accepts what the budget would verify, `compact` computes that
alone. With `cost_table` or `explore` DDTREE needs `compact`, and `compact` needs `--disable-cuda-graph`.

`dspark` (true or false, default true) is a switch: false leaves SGLang's own `DSPARK` as it is.
"""

VARIABLES = """
## Environment variables

| variable | meaning |
|---|---|
| `SPECPLUG_CONFIG` | SGLang: the JSON file above |
| `SPECPLUG_DISABLE=1` | the plugin does nothing; the engine is stock and refuses `ddtree` / `DDTREE` |
| `SPECPLUG_STRICT=1` | a plugin that cannot load is an error, not a log line |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where it differs")
    check = parser.parse_args().check
    text = document()
    if check:
        current = TARGET.read_text(encoding="utf-8") if TARGET.is_file() else None
        sys.exit(None if current == text else f"{TARGET}: out of date; run scripts/write_configuration.py")
    TARGET.write_text(text, encoding="utf-8")


def document() -> str:
    """The whole text of docs/configuration.md."""
    host = ", ".join(f"`{key}`" for key in host_keys())
    return "".join(
        (
            HEAD,
            VLLM,
            vllm_table(),
            VLLM_AFTER.format(
                host=host,
                budget=ops.MAX_BUDGET,
                candidates=ops.MAX_CANDIDATES,
                depth=ops.MAX_DEPTH,
                head=ops.MAX_HEAD_SIZE,
                unit=ops.HEAD_SIZE_UNIT,
                vocab=ops.MAX_VOCAB,
            ),
            SGLANG,
            sglang_table(),
            SGLANG_AFTER,
            VARIABLES,
        )
    )


def vllm_table() -> str:
    texts = descriptions()
    rows = [
        (f"`{field.name}`", values(field), shown_default(field), texts[field.name])
        for field in msgspec.structs.fields(TreeOptions)
    ]
    return table(("key", "value", "default", "meaning"), rows)


def sglang_table() -> str:
    flags = {"model": "--speculative-draft-model-path", **flags_of_keys()}
    rows = []
    for field in msgspec.structs.fields(TreeOptions):
        flag = f"`{flags[field.name]}`" if field.name in flags else "-"
        if field.name == "tree_budget":
            flag += " = nodes + 1"
        in_file = "no" if field.name == "model" else NOT_FOR_SGLANG.get(field.name, "yes")
        rows.append((f"`{field.name}`", flag, in_file, "yes" if field.name in dspark.KEYS else "no"))
    rows.append((f"`{dspark.SWITCH}`", "-", "yes", "yes"))
    return table(("key", "SGLang's flag", "in the file, DDTREE", "in the file, DSPARK"), rows)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def descriptions() -> dict[str, str]:
    """key -> its description in the docstring of `TreeOptions`; raises KeyError later for one without."""
    names = [field.name for field in msgspec.structs.fields(TreeOptions)]
    found: dict[str, str] = {}
    current = None
    for line in (TreeOptions.__doc__ or "").splitlines():
        start = re.match(r"(\w+): (.*)", line.strip())
        if start and start[1] in names:
            current, found[start[1]] = start[1], start[2]
        elif not line.strip():
            current = None
        elif current is not None:
            found[current] += f" {line.strip()}"
    return {key: text.rstrip(".").replace("``", "`").replace("None", "absent") for key, text in found.items()}


def values(field: msgspec.structs.FieldInfo) -> str:
    """What the key takes, its range found by asking the struct."""
    kinds = [kind for kind in get_args(field.type) or (field.type,) if kind is not type(None)]
    if all(isinstance(kind, str) for kind in kinds):
        return " or ".join(f'`"{kind}"`' for kind in kinds)
    (kind,) = kinds
    if kind is int:
        taken = [number for number in NUMBERS if accepted(field.name, number)]
        return f"{taken[0]} to {taken[-1]}" if taken[-1] < NUMBERS[-1] else f"{taken[0]} or more"
    if kind is float:
        taken = [number for number in (-0.01, 0.0, 0.5, 0.99, 1.0, 2.0) if accepted(field.name, number)]
        assert taken == [0.0, 0.5, 0.99], taken
        return "0 or more, below 1"
    return {bool: "true, false", str: "text"}[kind]


def accepted(key: str, value: Any) -> bool:
    try:
        TreeOptions(**{"model": "draft", key: value})
    except ValueError:
        return False
    return True


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    return "-" if field.default is None else f"`{msgspec.json.encode(field.default).decode()}`"


def host_keys() -> list[str]:
    """Keys that specplug_vllm.config hands on, read from its source: importing it would import vLLM."""
    for node in ast.parse(VLLM_CONFIG.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HOST_KEYS":
            assert isinstance(node.value, ast.Call)
            return sorted(ast.literal_eval(node.value.args[0]))
    raise AssertionError(f"{VLLM_CONFIG}: no HOST_KEYS")


def flags_of_keys() -> dict[str, str]:
    """key -> SGLang's flag, as the refusal of two that differ names it."""
    given = Flags(model="target", draft="draft", revision=None, rows=17, depth=7, cost_table="table")
    found = {}
    for key in given.merged({}):
        try:
            given.merged({key: "another"})
        except ValueError as error:
            (found[key],) = re.findall(rf"{CONFIG} says \S+ and (--\S+) says", str(error))
    return found


if __name__ == "__main__":
    main()
