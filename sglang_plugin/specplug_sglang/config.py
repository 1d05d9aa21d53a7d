"""The settings of DDTREE: SGLang's own flags, and the JSON file that SPECPLUG_CONFIG names.

SGLang has no option field for plugins. Its flags keep their meaning: ``--speculative-draft-model-path`` is
the draft, ``--speculative-num-draft-tokens`` the rows of a verify window (nodes + 1),
``--speculative-dspark-block-size`` the depth, ``--speculative-dspark-sps-table-path`` the cost table. The
file holds the keys of `specplug.config.TreeOptions` except ``model``. What is given twice must agree.

Settings are resolved in the launcher, where a mistake is refused before any weight is read, and again in
every scheduler rank from the same flags and the same file.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from specplug.checkpoint import DraftCheckpoint, read_draft
from specplug.config import TreeOptions, parse_options, resolve_depth
from specplug.planning import check_files
from specplug.serving import TREE, serving

CONFIG = "SPECPLUG_CONFIG"
ALGORITHM = "DDTREE"
HOST_KEYS: frozenset[str] = frozenset()  # of a speculative config; SGLang has flags instead


class Flags(NamedTuple):
    """What SGLang's command line says about the draft. None = not given."""

    model: str
    draft: str | None
    revision: str | None
    rows: int | None  # --speculative-num-draft-tokens
    depth: int | None  # --speculative-dspark-block-size
    cost_table: str | None  # --speculative-dspark-sps-table-path

    @classmethod
    def of(cls, view: Any, model: str) -> Flags:
        """From ServerArgs while they are resolved, or from the published ``get_spec()``."""
        return cls(
            model=model,
            draft=view.speculative_draft_model_path,
            revision=view.speculative_draft_model_revision,
            rows=view.speculative_num_draft_tokens,
            depth=view.speculative_dspark_block_size,
            cost_table=view.speculative_dspark_sps_table_path,
        )


class Settings(NamedTuple):
    """DDTREE as it will run."""

    options: TreeOptions
    checkpoint: DraftCheckpoint
    depth: int  # gamma

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


def read_config_file() -> dict[str, Any]:
    """Content of the file SPECPLUG_CONFIG names, {} where it names none; keys are checked by `resolve`.

    Raises ValueError for a file that is missing, is not a JSON object, or names the draft.
    """
    name = os.environ.get(CONFIG)
    if not name:
        return {}
    try:
        content = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{CONFIG}: cannot read {name}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{CONFIG}: {name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{CONFIG}: {name}: expected a JSON object, got {type(content).__name__}")
    if "model" in content:
        raise ValueError(f"{CONFIG}: {name}: model: SGLang takes it from --speculative-draft-model-path")
    return content


@functools.cache
def resolve(flags: Flags) -> Settings:
    """Raises ValueError for a missing draft, an unknown or impossible option, files that cannot be used, and
    a draft that this adapter does not serve."""
    if flags.draft is None:
        raise ValueError(f"{ALGORITHM} needs a draft; name it with --speculative-draft-model-path")
    raw = read_config_file()
    raw.pop("dspark", None)  # read by specplug_sglang.dspark
    for key, flag, value in (
        ("tree_budget", "--speculative-num-draft-tokens", flags.rows and flags.rows - 1),
        ("num_speculative_tokens", "--speculative-dspark-block-size", flags.depth),
        ("cost_table", "--speculative-dspark-sps-table-path", flags.cost_table),
    ):
        if value is None:
            continue
        if raw.setdefault(key, value) != value:
            raise ValueError(f"{key}: {CONFIG} says {raw[key]!r} and {flag} says {value!r}; keep one")
    options, _ = parse_options({**raw, "model": flags.draft})
    check_files(options)
    draft = read_draft(flags.draft, revision=flags.revision)
    ways = serving(draft, model=flags.draft, target=flags.model)
    refusal = next(way.reason for way in ways if (way.engine, way.way) == ("SGLang", TREE))
    if refusal is not None:
        raise ValueError(refusal)
    # A tree of B nodes is at most B deep, and the draft's block shares the verify window's B + 1 slots.
    return Settings(options, draft, min(resolve_depth(options, draft), options.tree_budget))


_requested = False


def request() -> None:
    """Remember that this process resolves arguments that ask for DDTREE, and forget earlier ones."""
    global _requested
    _requested = True
    resolve.cache_clear()  # the file may have changed since


def active() -> bool:
    """Whether DDTREE runs, or is being set up, in this process."""
    from sglang.srt.runtime_context import get_spec

    try:
        return get_spec().speculative_algorithm == ALGORITHM
    except Exception:  # nothing is published before the arguments are resolved
        return _requested


def settings() -> Settings:
    """The settings of a process whose arguments are published."""
    from sglang.srt.runtime_context import get_model, get_spec

    return resolve(Flags.of(get_spec(), get_model().model_path))
