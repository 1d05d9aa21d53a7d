"""Entry point of the group ``vllm.general_plugins``: runs in the API server, the engine core, every worker
and the model-inspection subprocess, so it is light, re-entrant, and leaves vLLM as it was when it has nothing
to do.

Two vLLM functions are wrapped, and both wrappers hand on what is not about method ddtree:

- ``EngineArgs.create_speculative_config``. There is no registry of speculative methods in vLLM
  (``SpeculativeConfig.method`` is a Literal and unknown keys are refused), so nothing else could accept
  ``"method": "ddtree"``. Delete the wrapper when vLLM has such a registry.
- ``SamplingParams._validate_spec_decode``, which refuses ``min_p`` and ``logit_bias`` with any speculation. A
  tree row is sampled as plain decoding samples it, these two included.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from typing import Any, NamedTuple

import specplug

OFF_SWITCH = "SPECPLUG_DISABLE"
STRICT = "SPECPLUG_STRICT"
_MARK = "_specplug_original"


class Status(NamedTuple):
    """Whether ``method: ddtree`` is accepted in this process, and why (not)."""

    active: bool
    reason: str


_status = Status(False, "register() has not run in this process")


def status() -> Status:
    """What :func:`register` decided in this process."""
    return _status


def register() -> None:
    """Teach vLLM's argument parsing the method ``ddtree``. Idempotent; never breaks vLLM unless asked to be
    strict.

    Raises:
        RuntimeError: only with ``SPECPLUG_STRICT=1``, when vLLM lacks the function we wrap.
    """
    global _status
    from vllm.logger import init_logger

    logger = init_logger("vllm.specplug")
    if os.environ.get(OFF_SWITCH, "") not in ("", "0"):
        _status = Status(False, f"switched off by {OFF_SWITCH}={os.environ[OFF_SWITCH]}")
        logger.info("specplug %s is %s; vLLM is left as it is.", specplug.__version__, _status.reason)
        return

    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams

    original = getattr(EngineArgs, "create_speculative_config", None)
    if original is None:
        _status = Status(
            False,
            "this vLLM has no EngineArgs.create_speculative_config, the function specplug wraps; "
            "install a vLLM that `specplug doctor` lists as tested",
        )
        if os.environ.get(STRICT, "") not in ("", "0"):
            raise RuntimeError(f"specplug refuses: {_status.reason}")
        logger.error("specplug %s is off: %s.", specplug.__version__, _status.reason)
        return
    if not hasattr(original, _MARK):
        EngineArgs.create_speculative_config = _accepting_ddtree(original)
        SamplingParams._validate_spec_decode = _accepting_row_stages(SamplingParams._validate_spec_decode)
    _status = Status(True, "method ddtree is accepted")
    announce()


def announce() -> None:
    """Log that the plugin is in this process.

    Called again when ddtree is asked for: an API server loads plugins before it sets up logging.
    """
    from vllm.logger import init_logger

    process = multiprocessing.current_process().name
    init_logger("vllm.specplug").info(
        "specplug %s loaded in %s (pid %d)", specplug.__version__, process, os.getpid()
    )


def _accepting_ddtree(original: Any) -> Any:
    @functools.wraps(original)
    def create_speculative_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        if not (self.speculative_config or getattr(self, "spec_method", None)):
            return original(self, target_model_config, target_parallel_config)
        from specplug_vllm.config import check_stock_method, create_tree_config, requested

        if not requested(self):
            check_stock_method(self)
            return original(self, target_model_config, target_parallel_config)
        announce()
        return create_tree_config(original, self, target_model_config, target_parallel_config)

    setattr(create_speculative_config, _MARK, original)
    return create_speculative_config


def _accepting_row_stages(original: Any) -> Any:
    @functools.wraps(original)
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if speculative_config is not None:
            from specplug_vllm.config import TreeSpeculativeConfig

            if isinstance(speculative_config, TreeSpeculativeConfig):
                return
        original(self, speculative_config)

    setattr(_validate_spec_decode, _MARK, original)
    return _validate_spec_decode
