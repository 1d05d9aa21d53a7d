"""What a measurement was made on: engine, models, device. Stored with a cost table and compared before use.

A model is told apart by the SHA-256 of its config.json: a path or a hub id says less. A step's cost follows
from the config, not from the weights.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The facts; an empty string and 0 mean unknown."""

    engine: str = ""  # "vllm", "sglang", "local"
    engine_version: str = ""
    target: str = ""  # as the user named it
    draft: str = ""
    target_hash: str = ""  # SHA-256 of config.json
    draft_hash: str = ""
    device: str = ""  # see `device_name`
    dtype: str = ""  # "float32", "bfloat16", ...
    tensor_parallel: int = 0
    context: int = 0  # longest context measured, tokens
    date: str = ""  # ISO 8601
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "context"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 (unknown) or more, got {getattr(self, name)}")

    def __str__(self) -> str:
        engine = f"{self.engine} {self.engine_version}".strip()
        pair = " + ".join(filter(None, (self.target, self.draft)))
        parallel = f"tp {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        facts = [fact for fact in (engine, pair, self.device, self.dtype, parallel, self.date) if fact]
        return ", ".join(facts) or "nothing known"


def mismatches(measured: Provenance, expected: Provenance) -> list[str]:
    """One sentence for each fact that differs; a fact unknown on either side matches anything.

    Names of models are compared only where a hash is unknown; versions without a local part ("+cpu").
    Context, date and command are not compared.
    """
    pairs = {
        name: (getattr(measured, name), getattr(expected, name))
        for name in ("engine", "engine_version", "device", "dtype", "tensor_parallel")
    }
    for model in ("target", "draft"):
        hashes = getattr(measured, f"{model}_hash"), getattr(expected, f"{model}_hash")
        names = getattr(measured, model), getattr(expected, model)
        if not all(hashes):
            pairs[model] = names
        elif hashes[0] != hashes[1]:
            pairs[model] = (f"{names[0]} (config.json {hashes[0][:12]})", f"{names[1]} ({hashes[1][:12]})")
    return [
        f"{name.replace('_', ' ')}: measured for {known}, here it is {here}"
        for name, (known, here) in pairs.items()
        if known and here and _comparable(known) != _comparable(here)
    ]


def file_hash(file: Path | str) -> str:
    """SHA-256 of a file, hex."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def config_hash(folder: Path) -> str:
    """SHA-256 of a checkpoint's config.json, hex. Raises ValueError where there is none."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder}: expected a checkpoint folder with a config.json, found none")
    return file_hash(file)


def device_name(device: torch.device) -> str:
    """A GPU's own name; of a CPU the model and the threads of one operator, because costs depend on both."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()}, {torch.get_num_threads()} thread(s)"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if os.access(cpuinfo, os.R_OK):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return f"CPU {line.partition(':')[2].strip()}"
    return f"CPU {platform.processor() or platform.machine()}"


def _comparable(fact: object) -> object:
    return fact.partition("+")[0] if isinstance(fact, str) else fact
