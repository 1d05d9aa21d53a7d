"""What the adapter overrides and calls in vLLM, against the signatures of any release's sources.

    python tests/vllm/signatures.py .../vllm-0.33.0/vllm > tests/vllm/vllm_0_33_signatures.txt

reads a source tree, which need not run here, and writes the signature of every vLLM function that the
adapter's sources override, call by an imported name, call on `self`, or reach through `super()`. Only text is
read, nothing is imported. A name that is not there is written down as absent.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ADAPTER = Path(__file__).parents[2] / "vllm_plugin" / "specplug_vllm"
ABSENT = "absent"
# Classes whose base is not written in the source: made when the target's own is known, or the first of two.
BASES = {"TreeModelState": ("vllm.v1.worker.gpu.model_states.default", "DefaultModelState")}
# Objects of vLLM that we hold, by the expression that names them.
HELD = {"self.sampler": ("vllm.v1.worker.gpu.sample.sampler", "Sampler")}

Symbol = tuple[str, str]  # module, and Class, Class.method or function as the adapter names it


class Use(NamedTuple):
    """One place of the adapter that leans on a signature."""

    symbol: Symbol
    place: str  # file:line
    override: inspect.Signature | None  # ours, where we override
    call: ast.Call | None  # ours, where we call

    @property
    def name(self) -> str:
        return f"{self.symbol[0]}:{self.symbol[1]}"


@functools.cache
def parse(file: Path) -> ast.Module | None:
    return ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else None


@functools.cache
def defined(file: Path) -> dict[str, ast.AST]:
    """Classes and functions of a module that are not inside another."""
    tree, found = parse(file), {}
    for node in _outside(tree.body if tree else []):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(node.name, node)
    return found


def _outside(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under an if or a try among them."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            for part in (node.body, node.orelse, getattr(node, "finalbody", [])):
                yield from _outside(part)


@functools.cache
def imported(file: Path) -> dict[str, Symbol]:
    tree = parse(file)
    return imports(tree) if tree else {}


def imports(module: ast.Module) -> dict[str, Symbol]:
    """Local name -> module and name, of what comes out of vLLM."""
    found: dict[str, Symbol] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for name in node.names:
                found[name.asname or name.name] = (node.module or "", name.name)
    return found


class Sources:
    """Functions and classes of a vLLM source tree, by the name they are imported by."""

    def __init__(self, root: Path) -> None:
        self.root = root  # the folder called vllm

    def file(self, module: str) -> Path:
        path = self.root.joinpath(*module.split(".")[1:])
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def definition(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Where a name of a module is defined, through re-exports."""
        file = self.file(module)
        if name in defined(file):
            return module, defined(file)[name]
        again = imported(file).get(name)
        return self.definition(*again) if again and again != (module, name) else None

    def method(self, module: str, cls: str, name: str) -> ast.FunctionDef | None:
        """A method of a class or of what it inherits from."""
        found = self.definition(module, cls)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        module, node = found
        for child in node.body:
            if isinstance(child, ast.FunctionDef) and child.name == name:
                return child
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name) and base.id != cls:
                inherited = self.method(module, base.id, name)
                if inherited is not None:
                    return inherited
        return None

    def signature(self, symbol: Symbol) -> str:
        """As text, without annotations; of a class what makes one. ABSENT where there is no such name."""
        module, name = symbol
        cls, _, method = name.partition(".")
        if method:
            found = self.method(module, cls, method)
            return ABSENT if found is None else _text(found.args)
        defined = self.definition(module, cls)
        if defined is None:
            return ABSENT
        node = defined[1]
        if not isinstance(node, ast.ClassDef):
            return _text(node.args)  # type: ignore[attr-defined]
        init = self.method(module, name, "__init__")
        return _text(init.args) if init is not None else f"self, {_fields(node)}"


def _text(arguments: ast.arguments) -> str:
    """Names and stars, `name=0` for one with a default."""
    bare = ast.arguments(
        [ast.arg(a.arg) for a in arguments.posonlyargs],
        [ast.arg(a.arg) for a in arguments.args],
        ast.arg(arguments.vararg.arg) if arguments.vararg else None,
        [ast.arg(a.arg) for a in arguments.kwonlyargs],
        [None if default is None else ast.Constant(0) for default in arguments.kw_defaults],
        ast.arg(arguments.kwarg.arg) if arguments.kwarg else None,
        [ast.Constant(0) for _ in arguments.defaults],
    )
    return ast.unparse(bare)


def _fields(node: ast.ClassDef) -> str:
    """Of a dataclass or named tuple."""
    return ", ".join(
        child.target.id + ("" if child.value is None else "=0")
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    )


def signature(text: str) -> inspect.Signature:
    """A text of :func:`_text` as something that arguments can be bound to."""
    namespace: dict[str, object] = {}
    exec(f"def made({text}): pass", namespace)
    made = namespace["made"]
    assert callable(made)
    return inspect.signature(made)


def uses(vllm: Sources, adapter: Path = ADAPTER) -> Iterator[Use]:
    """Every override and call; ``vllm`` tells which methods a base class has."""
    mixed = _mixed_in(adapter)
    for file in sorted(adapter.glob("*.py")):
        tree = parse(file)
        assert tree is not None
        known = imports(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                place = f"{file.name}:{node.lineno}"
                if isinstance(node.func, ast.Name) and node.func.id in known:
                    yield Use(known[node.func.id], place, None, node)
                elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in HELD:
                    module, cls = HELD[ast.unparse(node.func.value)]
                    yield Use((module, f"{cls}.{node.func.attr}"), place, None, node)
            if isinstance(node, ast.ClassDef):
                for base in {*_bases(node, known), *mixed.get(node.name, ())}:
                    yield from _of_class(vllm, node, base, file.name)


def _bases(node: ast.ClassDef, known: dict[str, Symbol]) -> Iterator[Symbol]:
    if node.name in BASES:
        yield BASES[node.name]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in known:
            yield known[base.id]
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id in known:
            module, name = known[base.value.id]
            yield f"{module}.{name}", base.attr


def _mixed_in(adapter: Path) -> dict[str, set[Symbol]]:
    """vLLM's classes that each of our mixins stands before."""
    found: dict[str, set[Symbol]] = {}
    for file in adapter.glob("*.py"):
        tree = parse(file)
        assert tree is not None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                theirs = set(_bases(node, imports(tree)))
                for base in node.bases:
                    if isinstance(base, ast.Name):
                        found.setdefault(base.id, set()).update(theirs)
    return found


def _of_class(vllm: Sources, node: ast.ClassDef, base: Symbol, file: str) -> Iterator[Use]:
    module, cls = base
    own = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    for method in node.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        place = f"{file}:{method.lineno}"
        if method.name != "__init__" and vllm.method(module, cls, method.name) is not None:
            yield Use((module, f"{cls}.{method.name}"), place, signature(_text(method.args)), None)
        for call in ast.walk(method):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            owner, name, place = ast.unparse(call.func.value), call.func.attr, f"{file}:{call.lineno}"
            ours = owner == "super()" or (owner == "self" and name not in own)
            if ours and vllm.method(module, cls, name) is not None:
                yield Use((module, f"{cls}.{name}"), place, None, call)


def wrong(use: Use, theirs: str) -> str:
    """Why a use does not fit a signature of vLLM; empty where it does."""
    if theirs == ABSENT:
        return f"{use.place}: {use.name} is not there"
    stock = signature(theirs)
    try:
        if use.override is not None:
            _takes_all(use.override, stock)
        if use.call is not None:
            _fits(use.call, stock)
    except TypeError as error:
        return f"{use.place}: {use.name}({theirs}): {error}"
    return ""


def _takes_all(ours: inspect.Signature, stock: inspect.Signature) -> None:
    """Whatever vLLM may pass to its own, by place or by name, ours takes as the same argument."""
    ordinary = [p for p in stock.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p for p in ordinary if p.kind != p.KEYWORD_ONLY]
    by_place = ours.bind(
        *(p.name for p in positional), **{p.name: p.name for p in ordinary[len(positional) :]}
    )
    for name, value in by_place.arguments.items():
        if isinstance(value, str) and value != name and not (name == "self" or value == "self"):
            raise TypeError(f"argument {value} lands in {name}")
    ours.bind(**{p.name: p.name for p in ordinary})
    ours.bind(**{p.name: p.name for p in ordinary if p.default is p.empty})


def _fits(call: ast.Call, stock: inspect.Signature) -> None:
    """The call's arguments find their places; behind a star nobody knows, and names alone are looked at."""
    names = {keyword.arg: 0 for keyword in call.keywords if keyword.arg is not None}
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    starred = starred or any(keyword.arg is None for keyword in call.keywords)
    takes_self = next(iter(stock.parameters), "") in ("self", "cls")
    if starred:
        stock.bind_partial(**names)
    else:
        stock.bind(*([0] * (len(call.args) + takes_self)), **names)


def read(file: Path) -> dict[str, str]:
    """Name -> signature, of a file that :func:`main` wrote."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return dict(line.split(" | ", 1) for line in lines if line and not line.startswith("#"))


def main() -> None:
    installed = Path(next(p for p in sys.path if (Path(p) / "vllm" / "version.py").is_file())) / "vllm"
    vllm = Sources(Path(sys.argv[1]))
    print(
        f"# Signatures of {Path(sys.argv[1]).parent.name} that the adapter leans on, read from its sources by"
    )
    print("# python tests/vllm/signatures.py; see there. Do not edit.")
    for name, symbol in sorted({use.name: use.symbol for use in uses(Sources(installed))}.items()):
        print(f"{name} | {vllm.signature(symbol)}")


if __name__ == "__main__":
    main()
