"""The hook table (hooks.txt): every SGLang name the adapter relies on. Checked by DDTREE at start, by
``specplug doctor``, and by the tests; see `specplug.hook_table`."""

from __future__ import annotations

from pathlib import Path

from specplug.hook_table import HookStatus, check, package_root, read_hooks

HOOKS = read_hooks(Path(__file__).with_name("hooks.txt"))


def check_hooks(root: Path | None = None) -> list[HookStatus]:
    """Check the table against an installed SGLang, or against the ``sglang`` folder of a source tree.

    Raises ModuleNotFoundError where no SGLang is installed and no root is given.
    """
    return check(HOOKS, package_root("sglang") if root is None else root)


def moved() -> list[str]:
    """What no longer fits the installed SGLang."""
    return [f"{hook.name}: {hook.detail}" for hook in check_hooks() if not hook.ok]
