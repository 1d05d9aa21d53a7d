"""The command line in this process, for the tests of the commands."""

import signal

import pytest

from specplug import cli


def run(*argv: object) -> int:
    """Exit code of ``specplug ARGV``; the process's own signal handlers are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in argv])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return ended.value.code
