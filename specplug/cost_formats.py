"""The three files a cost table is read from: our own, and SGLang's step and additive tables.

Ours is a superset of the step table, so SGLang loads it: it has that table's three keys, and SGLang reads
over the rest. SGLang takes any file with the substring of the additive table's first key for an additive
table, so that substring is nowhere in ours.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from specplug.cost_curves import Lookup, Probe, check_seconds
from specplug.jsonfile import Struct, read_struct
from specplug.provenance import Provenance

VERSION = 1
ADDITIVE_MARK = "bias_seconds"  # SGLang looks for it in the text of a file


class StepTable(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's step table: steps a second at a number of rows; of the last probe at or below, else the first.

    Keys of its writers beyond these three are read over.
    """

    sample_batch_tokens: list[int]
    sample_steps_per_sec: list[float]
    max_batch_tokens: int

    def __post_init__(self) -> None:
        _check_axis("sample_batch_tokens", self.sample_batch_tokens, least=1)
        _check_lengths(self, "sample_steps_per_sec", "sample_batch_tokens")
        for rate in self.sample_steps_per_sec:
            check_seconds("sample_steps_per_sec", rate)
        if self.max_batch_tokens < self.sample_batch_tokens[-1]:
            raise ValueError(
                f"max_batch_tokens: expected at least the last of sample_batch_tokens, "
                f"{self.sample_batch_tokens[-1]}, got {self.max_batch_tokens}"
            )


class AdditiveTable(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's additive table: bias + interp(alpha, requests) + interp(theta, requests + budget), clamped."""

    bias_seconds: float
    bs_probes: list[int]  # requests
    alpha_seconds: list[float]
    m_probes: list[int]  # rows
    theta_seconds: list[float]

    def __post_init__(self) -> None:
        check_seconds("bias_seconds", self.bias_seconds)
        _check_axis("bs_probes", self.bs_probes, least=1)
        _check_axis("m_probes", self.m_probes, least=0)
        _check_lengths(self, "alpha_seconds", "bs_probes")
        _check_lengths(self, "theta_seconds", "m_probes")
        for name in ("alpha_seconds", "theta_seconds"):
            bad = [value for value in getattr(self, name) if not math.isfinite(value)]
            if bad:
                raise ValueError(f"{name}: expected finite numbers, got {bad[0]}")
        least = self.bias_seconds + min(self.alpha_seconds) + min(self.theta_seconds)
        if least <= 0:
            raise ValueError(
                f"bias_seconds: expected a step to cost more than 0 s everywhere, got {least} s at its "
                "cheapest; measure again"
            )


class CostFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Our own file. ``content_hash`` is `digest` of the rest."""

    format_version: int
    lookup: Lookup
    provenance: Provenance | None
    graph_sizes: list[int]
    verify: list[Probe]
    draft: list[Probe]
    sample_batch_tokens: list[int]  # these three for SGLang; not read by us
    sample_steps_per_sec: list[float]
    max_batch_tokens: int
    content_hash: str = ""

    def __post_init__(self) -> None:
        if self.format_version != VERSION:
            raise ValueError(
                f"format_version: expected {VERSION}, got {self.format_version}; use the specplug that wrote "
                "it"
            )


class _Kind(msgspec.Struct):
    """What tells the formats apart."""

    format_version: Any = msgspec.UNSET
    bias_seconds: Any = msgspec.UNSET
    sample_batch_tokens: Any = msgspec.UNSET


def read_file(path: Path | str) -> CostFile | StepTable | AdditiveTable:
    """Read any of the three.

    Raises ValueError for a file above 16 MiB, text that is not JSON, a file of no known format, a value that
    is missing, of a wrong type or out of range, and a content hash that is not the content's.
    """
    kind = _read(path, _Kind)
    if kind.format_version is not msgspec.UNSET:
        ours = _read(path, CostFile)
        if ours.content_hash != digest(ours):
            raise ValueError(
                f"{path}: content_hash: expected {digest(ours)}, got {ours.content_hash!r}; the file was "
                "changed after it was measured: measure again with specplug profile"
            )
        return ours
    if kind.bias_seconds is not msgspec.UNSET:
        return _read(path, AdditiveTable)
    if kind.sample_batch_tokens is not msgspec.UNSET:
        return _read(path, StepTable)
    raise ValueError(
        f"{path}: expected a cost table, with the key format_version, sample_batch_tokens or "
        f"{ADDITIVE_MARK}, got none of them; make one with specplug profile"
    )


def _read(path: Path | str, kind: type[Struct]) -> Struct:
    return read_struct(path, kind, what="a cost table", fix="measure again with specplug profile")


def write_file(path: Path | str, file: CostFile | StepTable | AdditiveTable) -> None:
    """Write a table; ours gets its content hash. Raises ValueError where SGLang would misread ours."""
    if isinstance(file, CostFile):
        # As it will be read: a whole number given for a float is then a float, in the hash as well.
        file = msgspec.json.decode(msgspec.json.encode(file), type=CostFile)
        file = msgspec.structs.replace(file, content_hash=digest(file))
    data = msgspec.json.format(msgspec.json.encode(file), indent=1)
    if isinstance(file, CostFile) and ADDITIVE_MARK.encode() in data:
        raise ValueError(f"provenance: must not contain {ADDITIVE_MARK!r}, by which SGLang tells its tables")
    Path(path).write_bytes(data + b"\n")


def digest(file: CostFile) -> str:
    """SHA-256 of the content, whatever the layout of the text."""
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(file, content_hash=""))).hexdigest()


def _check_axis(name: str, values: Sequence[int], *, least: int) -> None:
    if not values:
        raise ValueError(f"{name}: expected one probe or more, got none; measure again")
    if values[0] < least:
        raise ValueError(f"{name}: expected numbers of at least {least}, got {values[0]}")
    for before, after in pairwise(values):
        if after <= before:
            raise ValueError(
                f"{name}: expected strictly rising numbers, got {after} after {before}; sort them"
            )


def _check_lengths(table: msgspec.Struct, name: str, axis: str) -> None:
    expected, got = len(getattr(table, axis)), len(getattr(table, name))
    if expected != got:
        raise ValueError(f"{name}: expected {expected} values, one for each of {axis}, got {got}")
