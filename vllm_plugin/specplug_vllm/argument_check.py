"""Let vLLM's own argument parser and configuration judge a command line; nothing is started, no weight read.

Called by `specplug.recipe_probe`, ``accept`` in a process of its own for each command.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence


def load() -> None:
    """Import what `accept` needs, and load plugins as ``vllm serve`` does."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    importlib.import_module("vllm.entrypoints.cli.serve")


def accept(command: Sequence[str], reached: Callable[[str], None]) -> None:
    """Parse ``vllm serve MODEL ...`` and make its engine configuration, reporting each stage when it is done.

    Raises what vLLM raises; its parser ends the process with SystemExit(2), the reason on stderr.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(_flags(command))
    if arguments.model_tag is not None:
        arguments.model = arguments.model_tag
    validate_parsed_serve_args(arguments)
    reached("parsed")
    AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    reached("config accepted")


def _flags(command: Sequence[str]) -> list[str]:
    if "serve" not in command:
        raise ValueError(f"command: expected vllm serve MODEL ..., got {' '.join(command)}")
    return list(command[list(command).index("serve") + 1 :])
