"""Tables of the names an adapter relies on in its engine, checked by reading the engine's source.

Reading is fast, safe in any process, and works on a release that this machine cannot run. A check says what
is missing, so an engine that moved a seam is refused in one sentence instead of failing at the first request.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

KINDS = ("patch", "subclass", "seam", "use")


class Hook(NamedTuple):
    """One seam. ``kind``: patch (we wrap it), subclass (we override it), seam (the engine calls or reads what
    we give it), use (we call it)."""

    path: str  # file below the engine's package
    symbol: str  # function, Class or Class.method in that file
    kind: str
    why: str
    params: tuple[str, ...] = ()  # arguments it must take
    mentions: tuple[str, ...] = ()  # names and attributes its body must contain


class HookStatus(NamedTuple):
    """Result for one row of a table."""

    name: str
    ok: bool
    detail: str


def read_hooks(file: Path) -> tuple[Hook, ...]:
    """A table from a file: a hook a line, the fields in their order between bars, arguments and names between
    blanks. Lines that start with # and empty lines are not rows.

    Raises ValueError for a line of other fields.
    """
    hooks = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        fields = [field.strip() for field in line.split("|")]
        if not line.strip() or line.startswith("#"):
            continue
        if len(fields) != len(Hook._fields) or fields[2] not in KINDS:
            raise ValueError(f"{file}:{number}: expected {' | '.join(Hook._fields)}, got {line!r}")
        path, symbol, kind, why, params, mentions = fields
        hooks.append(Hook(path, symbol, kind, why, tuple(params.split()), tuple(mentions.split())))
    return tuple(hooks)


def package_root(package: str) -> Path:
    """Folder of an installed package, which is not imported. Raises ModuleNotFoundError without it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"{package} is not installed in this environment; install it beside specplug."
        )
    return Path(spec.origin).parent


def check(hooks: Iterable[Hook], root: Path) -> list[HookStatus]:
    """Check a table against the package folder ``root``, row by row."""
    hooks = tuple(hooks)
    # Parsed here and dropped on return: the trees of an engine's files are some 20 MB.
    modules = {path: _parse(root / path) for path in dict.fromkeys(hook.path for hook in hooks)}
    return [_check(modules[hook.path], hook) for hook in hooks]


def _parse(file: Path) -> ast.Module | None:
    return ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else None


def _check(module: ast.Module | None, hook: Hook) -> HookStatus:
    name = f"{hook.path}:{hook.symbol}"
    if module is None:
        return HookStatus(name, False, f"no such file in this release; {hook.why}")
    node = _find(module, hook.symbol)
    if node is None:
        return HookStatus(name, False, f"not found; {hook.why}")
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        taken = {
            argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        }
        absent = [param for param in hook.params if param not in taken]
        if absent:
            return HookStatus(name, False, f"takes no argument {', '.join(absent)}; {hook.why}")
    absent = [mention for mention in hook.mentions if mention not in _names(node)]
    if absent:
        return HookStatus(name, False, f"no longer refers to {', '.join(absent)}; {hook.why}")
    return HookStatus(name, True, f"{hook.kind}: {hook.why}")


def _find(module: ast.Module, symbol: str) -> ast.AST | None:
    node: ast.AST = module
    for name in symbol.split("."):
        found = [
            child
            for child in ast.walk(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name and child is not node
        ]
        if not found:
            return None
        node = found[0]
    return node


def _names(node: ast.AST) -> set[str]:
    names: set[str] = set()
    for child in ast.walk(node):
        match child:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name))
            ):
                names.add(name)
            case ast.Constant(value=str(name)):
                names.add(name)
    return names
