"""Load an engine plugin as the engine would, in a process of its own, and print what it says as one line of
JSON.

`python -m specplug.plugin_probe ENGINE` is run by `specplug doctor`, so that a plugin which crashes, or an
engine which cannot be imported, is a line of the report and not the end of it. The core must not import an
adapter (the layers of DESIGN.md), so everything goes through the entry point and the names the adapter is
asked to have: in the entry point's module a function `status()`, beside it a module `hooks` with
`check_hooks()` and a module `config` with `HOST_KEYS`, the host's keys that a speculative config may hold,
and `read_config_file()` where the adapter has a file of options.
"""

import importlib
import importlib.metadata
import json
import sys
from typing import Any

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
NAME = "specplug"


def entry_point(engine: str) -> importlib.metadata.EntryPoint | None:
    """Our entry point as the engine's plugin loader sees it; None where it is not visible."""
    return next(iter(importlib.metadata.entry_points(group=GROUPS[engine], name=NAME)), None)


def probe(engine: str) -> dict[str, Any]:
    """Register the plugin and collect its status, hook table and the host's keys it passes on."""
    found = entry_point(engine)
    if found is None:
        raise RuntimeError(f"no entry point {NAME!r} in the group {GROUPS[engine]!r}")
    found.load()()
    status = importlib.import_module(found.module).status()
    package = found.module.rpartition(".")[0]
    hooks = importlib.import_module(f"{package}.hooks").check_hooks()
    config = importlib.import_module(f"{package}.config")
    answer = {"config": _config_file(config)} if hasattr(config, "read_config_file") else {}
    return answer | {
        "active": status.active,
        "reason": status.reason,
        "hooks": [{"name": hook.name, "ok": hook.ok, "detail": hook.detail} for hook in hooks],
        "host_keys": sorted(config.HOST_KEYS),
    }


def _config_file(config: Any) -> dict[str, Any] | str:
    """What the adapter reads from its own config file, or the sentence it refuses it with."""
    try:
        content: dict[str, Any] = config.read_config_file()
    except ValueError as error:
        return str(error)
    return content


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))
