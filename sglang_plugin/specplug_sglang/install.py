"""Registers DDTREE and wraps the SGLang functions that need it, through SGLang's own hook registry.

SGLang only logs a hook whose target is gone, so `unapplied` looks at every target afterwards.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from specplug_sglang import config

_SPECULATIVE = "sglang.srt.speculative"
_UPGRADES = ("admission", "dspark", "rounds", "status")

_hooked: list[str] = []


def install() -> None:
    """Idempotent. Imports SGLang's registries, no model and no worker."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from specplug_sglang.algorithm import TreeAlgorithm

    if _hooked:
        return
    SpeculativeAlgorithm.register(config.ALGORITHM, supports_overlap=True, spec_class=TreeAlgorithm)(_worker)
    for path, around in _hooks().items():
        HookRegistry.register(path, around, HookType.AROUND)
        _hooked.append(path)


def unapplied() -> list[str]:
    """What is wrong with the hooks of this process; empty when every one is in place."""
    faults = [] if _hooked else ["specplug's hooks were not registered in this process"]
    for path in _hooked:
        try:
            if not hasattr(pkgutil.resolve_name(path), "__wrapped__"):
                faults.append(f"{path}: the hook was not applied")
        except (ImportError, AttributeError) as error:
            faults.append(f"{path}: {error}")
    return faults


def faults_here() -> list[str]:
    """Why this installation cannot be relied on: hooks that are not in place, SGLang names that moved."""
    from specplug_sglang.hooks import moved

    return unapplied() or moved()


def hooked() -> tuple[str, ...]:
    """Dotted paths of the functions that are wrapped in this process."""
    return tuple(_hooked)


def _hooks() -> dict[str, Callable[..., Any]]:
    hooks: dict[str, Callable[..., Any]] = {
        "sglang.srt.utils.hf_transformers.config.get_config": _get_config,
        f"{_SPECULATIVE}.dspark_components.dspark_config.resolve_runtime_config": _runtime_config,
        f"{_SPECULATIVE}.dflash_utils.resolve_dflash_verify_mask_policy": _mask_policy,
        "sglang.srt.model_executor.model_runner.ModelRunner.decode_num_tokens_per_req": _decode_rows,
        "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len": _row_headroom,
    }
    for name in _UPGRADES:
        hooks.update(importlib.import_module(f"specplug_sglang.{name}").AROUND)
    return hooks


def _worker(server_args: Any) -> type:
    """The worker class of one rank; runs in the scheduler process before anything is loaded."""
    faults = unapplied()
    if faults:
        raise RuntimeError(f"specplug refuses DDTREE: {'; '.join(faults)}")
    from specplug_sglang.model import register_model
    from specplug_sglang.worker import TreeWorker

    register_model()
    return TreeWorker


def _get_config(original: Any, *args: Any, **kwargs: Any) -> Any:
    """DFlash drafts load through DSPARK's draft path while DDTREE runs."""
    loaded = original(*args, **kwargs)
    if config.active():
        from specplug_sglang.model import adapt

        return adapt(loaded)
    return loaded


def _runtime_config(original: Any, **kwargs: Any) -> Any:
    """DSPARK's verify window is depth + 1 rows; a tree's is budget + 1."""
    if not config.active():
        return original(**kwargs)
    chosen = config.settings()
    resolved = original(**{**kwargs, "speculative_num_draft_tokens": chosen.depth + 1})
    return type(resolved)(
        gamma=chosen.depth,
        verify_num_draft_tokens=chosen.width,
        mask_token_id=resolved.mask_token_id,
    )


def _mask_policy(original: Any, *args: Any, **kwargs: Any) -> tuple[str, bool]:
    """A captured verify reads the mask: without it the graph would verify a chain."""
    name, masked = original(*args, **kwargs)
    return name, masked or config.active()


def _decode_rows(original: Any, self: Any, **kwargs: Any) -> int:
    """Fill-in drafts are given the verify window's width; the block is narrower."""
    if self.is_draft_worker and config.active():
        return config.settings().query_rows
    return original(self, **kwargs)


def _row_headroom(original: Any) -> int:
    """Slots a request's row holds past the context: a step reserves two windows, which SGLang counts only
    where pages are larger than a slot. Without them the last steps would write behind the row."""
    headroom: int = original()
    if config.active():
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

        headroom = max(headroom, get_alloc_reserve_per_decode())
    return headroom
