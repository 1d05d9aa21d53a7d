"""Let SGLang's own argument parser and resolution judge a command line; nothing is started, no weight read.

Called by `specplug.recipe_probe`, ``accept`` in a process of its own for each command.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence


def load() -> None:
    """Import what `accept` needs, and load plugins as ``sglang.launch_server`` does."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    importlib.import_module("sglang.srt.server_args")


def accept(command: Sequence[str], reached: Callable[[str], None]) -> None:
    """Parse ``python -m sglang.launch_server ...`` and resolve it, reporting each stage when it is done.

    Raises what SGLang raises; its parser ends the process with SystemExit(2), the reason on stderr.
    """
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(_flags(command))
    reached("parsed")
    arguments.resolve_once()
    reached("config accepted")


def _flags(command: Sequence[str]) -> list[str]:
    for start in ("sglang.launch_server", "serve"):
        if start in command:
            return list(command[list(command).index(start) + 1 :])
    raise ValueError(f"command: expected python -m sglang.launch_server ..., got {' '.join(command)}")
