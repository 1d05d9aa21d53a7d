"""Options and draft together, as an engine will run them, checked before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specplug.checkpoint import DraftCheckpoint, read_draft
from specplug.config import TreeOptions, parse_options, resolve_depth
from specplug.planning import check_files
from specplug.serving import TREE, serving


class ServedDraft(NamedTuple):
    """DDTree as it will run."""

    options: TreeOptions
    checkpoint: DraftCheckpoint
    depth: int  # gamma
    notes: tuple[str, ...] = ()  # what the engine does otherwise than the checkpoint says, to be logged

    @property
    def budget(self) -> int:
        """Nodes of a tree, the root not counted."""
        return self.options.tree_budget

    @property
    def width(self) -> int:
        """Rows of a verify window."""
        return self.budget + 1

    @property
    def query_rows(self) -> int:
        """Rows of the draft's block."""
        return self.depth + (self.checkpoint.layout == "fill_in")


def served_draft(
    raw: Mapping[str, Any],  # as `specplug.config.parse_options`
    *,
    engine: str,  # as `specplug.serving` writes it
    target: str,
    revision: str | None = None,  # of the draft
) -> ServedDraft:
    """Raises ValueError for an unknown or impossible option, files that cannot be used, and a draft that the
    engine does not serve."""
    options, _ = parse_options(raw)
    check_files(options)
    draft = read_draft(options.model, revision=revision)
    ways = serving(draft, model=options.model, target=target)
    way = next(way for way in ways if (way.engine, way.way) == (engine, TREE))
    if way.reason is not None:
        raise ValueError(way.reason)
    # A tree of B nodes is at most B deep, and the draft's block may share the verify window's B + 1 slots.
    depth = min(resolve_depth(options, draft), options.tree_budget)
    return ServedDraft(options, draft, depth, way.notes)
