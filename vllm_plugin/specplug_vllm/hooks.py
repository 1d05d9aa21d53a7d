"""The hook table (hooks.txt): every vLLM name the adapter relies on. Checked by ``method: ddtree`` at start,
by ``specplug doctor``, and by the tests; see `specplug.hook_table`."""

from __future__ import annotations

from pathlib import Path

from specplug.hook_table import HookStatus, check, package_root, read_hooks

HOOKS = read_hooks(Path(__file__).with_name("hooks.txt"))


def check_hooks(root: Path | None = None) -> list[HookStatus]:
    """Check the table against an installed vLLM, or against the ``vllm`` folder of a source tree.

    Raises ModuleNotFoundError where no vLLM is installed and no root is given.
    """
    return check(HOOKS, package_root("vllm") if root is None else root)
