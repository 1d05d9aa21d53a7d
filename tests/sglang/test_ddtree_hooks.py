"""The hook table fits the installed SGLang, and a name that moves is noticed; the plugin in its process."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specplug.hook_table import package_root
from specplug_sglang.hooks import HOOKS, check_hooks

pytestmark = pytest.mark.sglang


def test_every_row_fits_the_installed_sglang():
    assert [status for status in check_hooks() if not status.ok] == []


def test_rows_are_unique():
    assert len({(hook.path, hook.symbol, hook.why) for hook in HOOKS}) == len(HOOKS)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{Path(hook.path).stem}:{hook.symbol}"[:60])
def test_a_name_that_moved_is_found(tmp_path, hook):
    source, target = package_root("sglang") / hook.path, tmp_path / hook.path
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)
    (own,) = [status for status in check_hooks(tmp_path) if status.name == f"{hook.path}:{hook.symbol}"][:1]
    assert own.ok
    leaf = hook.symbol.rpartition(".")[2]
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == leaf:
            node.name = f"{leaf}_moved"
    target.write_text(ast.unparse(tree))
    moved = [status for status in check_hooks(tmp_path) if status.name == f"{hook.path}:{hook.symbol}"]
    assert all(not status.ok and "not found" in status.detail for status in moved)


def test_a_name_that_moved_ends_the_start(monkeypatch):
    from specplug_sglang import config, hooks, install
    from specplug_sglang.algorithm import TreeAlgorithm

    monkeypatch.setattr(config, "request", lambda: None)
    monkeypatch.setattr(install, "unapplied", list)
    monkeypatch.setattr(hooks, "moved", lambda: ["srt/a.py:B: not found"])
    algorithm = TreeAlgorithm("DDTREE", lambda server_args: None, supports_overlap=True)
    with pytest.raises(ValueError, match=r"refuses DDTREE .*: srt/a.py:B: not found.*`specplug doctor`"):
        algorithm.handle_server_args(None)


def test_importing_the_entry_point_imports_nothing_heavy():
    code = (
        "import sys, specplug_sglang.plugin; "
        "print(sorted({'torch', 'sglang', 'msgspec', 'specplug'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
