"""Entry point of the group ``sglang.srt.plugins``: runs in the launcher, the engine, every scheduler rank and
the detokenizer.

SGLang swallows what a plugin raises and serves without it. So this module imports nothing that can be
missing, and where the plugin was asked for by name it leaves with SystemExit, which SGLang lets through.
"""

import os
import sys
from typing import NamedTuple

OFF_SWITCH = "SPECPLUG_DISABLE"
STRICT = "SPECPLUG_STRICT"
ALGORITHM = "DDTREE"


class Status(NamedTuple):
    """Whether specplug is active in this process, and why (not)."""

    active: bool
    reason: str


def status() -> Status:
    """What :func:`register` did in this process."""
    if _set(OFF_SWITCH):
        return Status(False, f"switched off by {OFF_SWITCH}={os.environ[OFF_SWITCH]}")
    from specplug_sglang.install import hooked

    if not hooked():
        return Status(False, "register() has not run in this process")
    return Status(True, f"{ALGORITHM} is registered, DSPARK is upgraded")


def register() -> None:
    """Register DDTREE and every hook. Idempotent; SGLang is left as it is where SPECPLUG_DISABLE is set.

    Raises:
        SystemExit: the plugin cannot work, and DDTREE is on the command line or SPECPLUG_STRICT=1.
        Exception: the plugin cannot work and nothing asked for it; SGLang logs it and goes on without us.
    """
    if _set(OFF_SWITCH):
        return
    try:
        from specplug_sglang.install import install

        install()
    except Exception as error:
        if _wanted():
            reason = f"specplug refuses to start: {type(error).__name__}: {error}"
            sys.stderr.write(f"{reason}\n")
            sys.stderr.flush()
            raise SystemExit(reason) from error
        raise


def _set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def _wanted() -> bool:
    return _set(STRICT) or any(argument.upper().endswith(ALGORITHM) for argument in sys.argv)
