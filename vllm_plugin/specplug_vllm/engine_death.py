"""A server whose engine died ends with exit code 1.

Stock vLLM stops its web server then and ends with exit code 0, which a supervisor takes for a wanted end. The
function that stops it is wrapped where method ddtree is asked for, and only there. Delete when vLLM does this
itself.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from typing import Any

_MODULES = (  # the one that holds the function, and the one that imports it by name
    "vllm.entrypoints.launchers.launcher",
    "vllm.entrypoints.serve.exception_handling.handlers.vllm_error",
)
_NAME = "terminate_if_errored"
_MARK = "_specplug_original"


def fail_with_the_engine() -> None:
    """Wrap vLLM's function in an API server's process; elsewhere, and the second time, do nothing."""
    stock = getattr(sys.modules.get(_MODULES[0]), _NAME, None)
    if stock is None or hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def terminate_if_errored(server: Any, engine: Any) -> None:
        stopping = server.should_exit
        stock(server, engine)
        if server.should_exit and not stopping:
            atexit.register(_fail)

    setattr(terminate_if_errored, _MARK, stock)
    for name in _MODULES:
        if name in sys.modules:
            setattr(sys.modules[name], _NAME, terminate_if_errored)


def _fail() -> None:
    """Runs first of what runs at exit, and does all the rest: nothing else can set the code by then."""
    atexit.unregister(_fail)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
