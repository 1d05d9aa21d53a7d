"""Compile the kernels ahead of time for GPUs that are not here and read what each binary needs.

    python tests/kernels/aot.py                  # every kernel
    python tests/kernels/aot.py growth walk      # those of tests/kernels/aot_growth.py and aot_walk.py
    python tests/kernels/aot.py --write          # also record the figures in aot_table.json

No GPU and no CUDA toolkit: ptxas, cuobjdump and nvdisasm are part of the triton wheel. Never in a process
with TRITON_INTERPRET=1, where kernels are interpreted functions that cannot be compiled.

A file aot_<noun>.py next to this one gives `cases_<noun>() -> list[Case]` (what is compiled) and
`timings(device)` (what ci/gpu.sh times).
"""

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import specplug_kernels

FOLDER = Path(__file__).resolve().parent
TABLE = FOLDER / "aot_table.json"
NVIDIA_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# The most shared memory (LDS) one block may ask for, bytes: CUDA C++ programming guide, "technical
# specifications per compute capability" (163, 227, 227, 99 KiB); AMD CDNA 3 and 4 ISA guides (64, 160 KiB).
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.uint8: "u8",
}  # fmt: skip


class Case(NamedTuple):
    """One way of compiling a kernel, as its launcher does on the shapes that `name` tells.

    `signature`: parameter -> "*bf16", "i32", "constexpr", ...; `constexprs`: parameter -> value; `options`:
    num_warps, num_stages. Pointers count as 16-byte aligned, as torch allocates them.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, int]


class _Recorded:
    """A kernel that notes what it is launched with, and runs nothing."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, Any, Any]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def launched(name: str, kernel: Any, launch: Callable[[], object]) -> Case:
    """How ``kernel`` is launched, the first time, by a launcher: its types, block sizes and options.

    ``launch`` calls the launcher, with tensors on the device "meta": they have shapes and no memory.
    """
    launches: list[tuple[Any, Any, Any]] = []
    with ExitStack() as patches:
        for module in _modules():
            for key, value in list(vars(module).items()):
                if hasattr(value, "arg_names"):
                    patches.enter_context(mock.patch.object(module, key, _Recorded(value, launches)))
        launch()
    args, kwargs = next(rest for found, *rest in launches if found is kernel)
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constexprs = {}, {}
    for parameter in kernel.params:
        value = values.pop(parameter.name)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constexprs[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    return Case(name, kernel, signature, constexprs, values)


class Resources(NamedTuple):
    """What one thread (registers, local bytes) or one block (shared bytes) of a binary needs."""

    registers: int
    shared_bytes: int
    local_bytes: int  # stack and spilled registers: memory off the chip
    local_instructions: int  # LDL and STL, or scratch_*


def compile_case(case: Case, target: str) -> Any:
    """The compiled kernel of Triton's own `compile`; its `asm` holds every stage."""
    names = case.kernel.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if case.signature[name].startswith("*")
    }
    source = ASTSource(fn=case.kernel, signature=case.signature, constexprs=case.constexprs, attrs=aligned)
    return triton.compile(source, target=TARGETS[target], options=case.options)


def resources(case: Case, target: str) -> Resources:
    compiled = compile_case(case, target)
    shared = compiled.metadata.shared
    if "cubin" in compiled.asm:
        usage = _nvidia(compiled.asm["cubin"], "cuobjdump", "--dump-resource-usage")
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        sass = _nvidia(compiled.asm["cubin"], "nvdisasm", "-c")
        local = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?:LDL|STL)\b", sass, re.MULTILINE)
        return Resources(used["REG"], shared, used["STACK"] + used["LOCAL"], len(local))
    text = compiled.asm["amdgcn"]
    used = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
    local = re.findall(r"^\s+scratch_\w+", text, re.MULTILINE)
    return Resources(used["vgpr_count"], shared, used["private_segment_fixed_size"], len(local))


def _nvidia(cubin: bytes, tool: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [NVIDIA_BIN / tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def faults(name: str, target: str, found: Resources, allowed: dict[str, int] | None) -> list[str]:
    """What is wrong with a binary, one sentence a fault: `allowed` is its row of the table."""
    where = f"{name} for {target}"
    wrong = []
    if found.local_bytes or found.local_instructions:
        wrong.append(
            f"{where}: expected everything in registers, got {found.local_bytes} bytes of local memory and "
            f"{found.local_instructions} local-memory instructions; use smaller blocks or more warps"
        )
    if found.shared_bytes > SHARED_LIMIT[target]:
        wrong.append(
            f"{where}: expected at most {SHARED_LIMIT[target]} bytes of shared memory, all the chip has for "
            f"a block, got {found.shared_bytes}; use smaller blocks or fewer stages"
        )
    if allowed is None:
        wrong.append(f"{where}: expected a row in {TABLE.name}, got none; record it with aot.py --write")
        return wrong
    for key, limit in allowed.items():
        if getattr(found, key) > limit:
            wrong.append(
                f"{where}: expected {key} of at most {limit}, as recorded in {TABLE.name}, got "
                f"{getattr(found, key)}; if that is meant, record it with aot.py --write"
            )
    return wrong


def nouns() -> list[str]:
    return sorted(path.stem.removeprefix("aot_") for path in FOLDER.glob("aot_*.py"))


def kernels() -> set[str]:
    """Names of what specplug_kernels launches: its jitted functions called ..._kernel."""
    members = (item for module in _modules() for item in vars(module).items())
    return {name for name, value in members if name.endswith("_kernel") and hasattr(value, "arg_names")}


def _modules() -> list[Any]:
    found = pkgutil.iter_modules(specplug_kernels.__path__, "specplug_kernels.")
    return [importlib.import_module(module.name) for module in found]


def cases(noun: str) -> list[Case]:
    return getattr(importlib.import_module(f"aot_{noun}"), f"cases_{noun}")()


def read_table() -> dict[str, dict[str, dict[str, int]]]:
    """case -> target -> registers and shared_bytes; empty where nothing was recorded yet."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def measure(compiled: list[Case], targets: Iterable[str] = TARGETS) -> dict[str, dict[str, Resources]]:
    """case -> target -> what its binary needs."""
    return {case.name: {target: resources(case, target) for target in targets} for case in compiled}


def _print(found: dict[str, dict[str, Resources]]) -> None:
    width = max(map(len, found), default=4)
    print(f"{'case':{width}}  target  registers  shared bytes  local bytes  local instructions")
    for name, rows in found.items():
        for target, row in rows.items():
            print(
                f"{name:{width}}  {target:6}  {row[0]:9}  {row[1]:12}  {row[2]:11}  {row[3]:18}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("nouns", nargs="*", metavar="NOUN", help=f"any of: {', '.join(nouns())}; default all")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default all, repeatable")
    parser.add_argument("--write", action="store_true", help=f"record the figures in {TABLE.name}")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("aot.py: TRITON_INTERPRET=1 makes kernels uncompilable; unset it and run again")
    unknown = [noun for noun in options.nouns if noun not in nouns()]
    if unknown:
        parser.error(f"unknown noun {unknown[0]!r}; there are: {', '.join(nouns())}")
    found = {}
    for noun in options.nouns or nouns():
        found |= measure(cases(noun), options.target or list(TARGETS))
    _print(found)
    table = read_table()
    if options.write:
        if not options.nouns and not options.target:
            table = {}
        for name, rows in found.items():
            kept = {
                key: {"registers": row.registers, "shared_bytes": row.shared_bytes}
                for key, row in rows.items()
            }
            table[name] = table.get(name, {}) | kept
        TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
    wrong = [
        fault
        for name, rows in found.items()
        for target, row in rows.items()
        for fault in faults(name, target, row, table.get(name, {}).get(target))
    ]
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
