"""What a user may write in ``--speculative-config`` for ``"method": "ddtree"``.

One struct, `TreeOptions`, holds the keys that are ours. `parse_options` separates them from the host's keys
and refuses everything else before any weight is read: an unknown key (with the nearest known one), a wrong
type (a number in quotes and true/false for a number included), a value out of range. The depth depends on the
draft checkpoint, so it is resolved in a second step, `resolve_depth`.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from specplug.checkpoint import DraftCheckpoint

MAX_TREE_BUDGET = 256
"""Largest accepted node budget. Origin: derived, not tuned. 257 rows a request (root included) is what
benchmarks/tree_build.py covers, and four 64-bit ancestor words hold 256 nodes."""

MAX_CANDIDATES = 1024
"""Largest accepted candidate count C. Origin: derived. A parent-conditioned table is [gamma, C, C] fp32,
which at gamma 7 and C 1024 is 28 MiB a request; accepted length stops growing at C 16 to 32 on the shipped
models."""

_IGNORED_KEYS = frozenset({"method"})  # the host has already read it: it is why we were called


class TreeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The user's settings for draft trees.

    model: draft checkpoint, a local folder or a hub id (``org/name``).
    num_speculative_tokens: depth of the tree in tokens; None takes the draft checkpoint's own depth.
    tree_budget: nodes a tree may have, the root not counted; the verify width is tree_budget + 1 rows.
    candidates: tokens kept per depth (C) for parent-conditioned trees; trees without a Markov head do not use
    it.
    cost_table: file of ``specplug profile``; each step then verifies the nodes that pay. None: every node.
    cost_table_mismatch: "refuse" or "warn" where the table was measured for another engine, model or device.
    min_gain: predicted gain in tokens per second below which a round decodes plainly.
    calibration: file that turns draft probabilities into acceptance probabilities. None: as drafted.
    online: follow the costs and the acceptance seen in service; false: table and calibration as read.
    record: folder for the steps' times and every round's tree and outcome. None: nothing is written.
    kernels: "triton" or "torch" for a round's device work; "auto": Triton on a GPU, torch elsewhere
    and beyond Triton's limits.
    explore: profiling mode: shapes and node totals are drawn at random; needs ``record``.
    full_graphs: let the host capture the whole forward as a CUDA graph; false: all of it but attention.

    Raises ValueError when a value is out of range, or two options exclude each other.
    """

    model: str
    num_speculative_tokens: int | None = None
    tree_budget: int = 16
    candidates: int = 32
    cost_table: str | None = None
    cost_table_mismatch: Literal["refuse", "warn"] = "refuse"
    min_gain: float = 0.02
    calibration: str | None = None
    online: bool = True
    record: str | None = None
    explore: bool = False
    kernels: Literal["auto", "triton", "torch"] = "auto"
    full_graphs: bool = False

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ValueError(
                "model: expected the draft's folder or hub id, got an empty string; name the draft"
            )
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens: expected a depth of at least 1, got {self.num_speculative_tokens}; "
                "leave the key out to take the draft's own depth"
            )
        if self.tree_budget < 1:
            raise ValueError(
                f"tree_budget: expected 1..{MAX_TREE_BUDGET} nodes, got {self.tree_budget}; "
                "budget 0 would mean no tree: leave the method out instead"
            )
        if self.tree_budget > MAX_TREE_BUDGET:
            raise ValueError(
                f"tree_budget: expected 1..{MAX_TREE_BUDGET} nodes, got {self.tree_budget}; "
                f"lower it to {MAX_TREE_BUDGET}"
            )
        if not 1 <= self.candidates <= MAX_CANDIDATES:
            raise ValueError(
                f"candidates: expected 1..{MAX_CANDIDATES} tokens per depth, got {self.candidates}; "
                "leave the key out to take 32"
            )
        for key in ("cost_table", "calibration", "record"):
            named = getattr(self, key)
            if named is not None and not named.strip():
                raise ValueError(
                    f"{key}: expected a {'folder' if key == 'record' else 'file'}, got an empty string; "
                    "name it or leave the key out"
                )
        if not 0 <= self.min_gain < 1:
            raise ValueError(
                f"min_gain: expected a fraction, 0 up to 1, got {self.min_gain}; 0.02 is two percent"
            )
        if self.explore and not self.record:
            raise ValueError(
                "explore: expected a folder under the key record, got none; profiling writes what it measures"
            )
        if self.explore and self.cost_table:
            raise ValueError(
                "explore: expected no cost_table, got one; profiling draws budgets at random: leave one out"
            )

    @property
    def planned(self) -> bool:
        """Whether somebody looks at every step: to choose its nodes, or to write it down."""
        return bool(self.cost_table or self.record)


_FIELDS = {field.name: field for field in msgspec.structs.fields(TreeOptions)}


def parse_options(
    raw: Mapping[str, Any],
    *,
    passthrough: frozenset[str] = frozenset(),
) -> tuple[TreeOptions, dict[str, Any]]:
    """Split a speculative config into our options and the host's keys.

    ``passthrough`` names the keys of the host that are handed back untouched; a key that is ours stays ours
    even if it is named there. ``method`` is accepted and dropped. Raises ValueError for an unknown key, a
    missing ``model``, a wrong type or a value out of range.
    """
    ours: dict[str, Any] = {}
    host: dict[str, Any] = {}
    for key, value in raw.items():
        if key in _FIELDS:
            ours[key] = _checked(key, value)
        elif key in passthrough:
            host[key] = value
        elif key not in _IGNORED_KEYS:
            raise ValueError(_unknown_key(key, {*_FIELDS, *passthrough, *_IGNORED_KEYS}))
    missing = [name for name, field in _FIELDS.items() if field.required and name not in ours]
    if missing:
        raise ValueError(
            f"{missing[0]}: expected the draft's folder or hub id, got nothing; add it to the config"
        )
    return TreeOptions(**ours), host


def resolve_depth(options: TreeOptions, checkpoint: DraftCheckpoint) -> int:
    """Depth of the tree in tokens: the user's, or the checkpoint's where the user names none.

    A smaller depth than the checkpoint's is fine: a block drafter of block n drafts any shorter block too.
    Raises ValueError for a depth above the checkpoint's.
    """
    depth = options.num_speculative_tokens
    if depth is None:
        return checkpoint.depth
    if depth > checkpoint.depth:
        raise ValueError(
            f"num_speculative_tokens: expected 1..{checkpoint.depth} (the depth of {checkpoint.path}: "
            f"block_size {checkpoint.block_size}, {checkpoint.layout} layout), got {depth}; lower it or "
            "leave it out"
        )
    return depth


def _checked(key: str, value: object) -> object:
    """The value, if it has the type of field `key` without any conversion."""
    kind = _FIELDS[key].type
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError:
        expected, example = _expectation(kind)
        raise ValueError(
            f"{key}: expected {expected}, got {type(value).__name__} {value!r}; write {example}"
        ) from None


def _expectation(kind: Any) -> tuple[str, str]:
    """What a field of this type takes, and how it is written in JSON."""
    kinds = {option for option in get_args(kind) or (kind,) if option is not type(None)}
    if all(isinstance(option, str) for option in kinds):
        return "one of " + ", ".join(sorted(kinds)), "one of them in quotes"
    if bool in kinds:
        return "true or false", "it without quotes"
    if str in kinds:
        return "a string", '"..."'
    if float in kinds:
        return "a number", "a number without quotes, such as 0.02"
    return "a whole number", "a number without quotes, such as 16"


def _unknown_key(key: object, known: set[str]) -> str:
    nearest = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.6)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r} in the speculative config for ddtree; {hint}"
