"""Command line of specplug; `specplug --help` lists the commands.

Exit codes: 0 all is as asked, 1 something asked for failed or is off, 2 the arguments cannot work, 130 and
143 for Ctrl-C and SIGTERM, after everything that was started has been ended, 141 for a closed output.
"""

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import specplug
from specplug import (
    advise,
    bench,
    demo,
    doctor,
    evaluate,
    inspection,
    profile,
    recipe_command,
    record,
    simulate,
)

COMMANDS = {
    "demo": (demo, "serve the shipped tiny model with stock vLLM: plain, chain and tree, side by side"),
    "doctor": (
        doctor,
        "say what is installed, what is active in which engine process, and what is refused and why",
    ),
    "bench": (bench, "measure serving under load: speculation against plain decoding, everything else equal"),
    "evaluate": (
        evaluate,
        "measure a draft on a target: accepted length, wall clock and exactness of chain and trees",
    ),
    "record": (
        record,
        "record a draft at every position of a target's answers, to replay any policy over them",
    ),
    "profile": (
        profile,
        "measure what a step costs on this machine: the table that tells the engine how much to verify",
    ),
    "simulate": (
        simulate,
        "replay recorded rounds through a cost table: plain, chain, fixed trees and ours at every load",
    ),
    "advise": (advise, "say which setting to use at a load, what it should gain, and when not to speculate"),
    "recipe": (recipe_command, "pinned settings with the result they should give: list, show, check, run"),
    "inspect": (inspection, "say what a draft checkpoint is: kind, layout, depth, heads"),
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script; never returns."""
    parser = argparse.ArgumentParser(
        prog="specplug", description="Draft-tree speculative decoding for stock vLLM and SGLang."
    )
    parser.add_argument("--version", action="version", version=f"specplug {specplug.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, (module, summary) in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name, help=summary, description=(module.__doc__ or "").partition("\n")[0]
        )
        module.add_arguments(parsers[name])
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parsers[arguments.command].error(_unrecognised(unknown, parsers[arguments.command]))
    # SIGTERM and a closed terminal unwind like Ctrl-C, so that a started server is ended on the way.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_by_signal)
    try:
        code = COMMANDS[arguments.command][0].run(arguments)
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        print(f"\nspecplug {arguments.command}: interrupted; what it had started is ended", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        print(f"specplug {arguments.command}: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        print(f"specplug {arguments.command}: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # who read the output has ended, as in `specplug recipe list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        print(f"specplug {arguments.command}: {_said(error)}", file=sys.stderr)
        sys.exit(1 if error.filename is None else 2)


def _said(error: OSError) -> str:
    """One sentence: which path, and what the system says of it."""
    if error.filename is None:  # no path of the user's, such as a full disk or a library's own
        return " ".join(str(error).split())
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    reason = error.strerror or type(error).__name__
    return f"{name}: expected a path that can be read or written, got {reason!r}; name another one"


def _unrecognised(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    known = [name for action in parser._actions for name in action.option_strings]
    nearest = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"unrecognized arguments: {' '.join(unknown)}{hint}"


def _exit_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    print(f"\nspecplug: {signal.Signals(number).name}; ending what was started", file=sys.stderr)
    sys.exit(128 + number)
