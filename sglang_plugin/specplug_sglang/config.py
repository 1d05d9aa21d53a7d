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
from typing import Any, NamedTuple

from specplug.options_file import merged, read_options
from specplug.served_draft import ServedDraft, served_draft

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

    def merged(self, content: dict[str, Any]) -> dict[str, Any]:
        """The file's options and those of the flags, which must agree."""
        flags = {
            "tree_budget": ("--speculative-num-draft-tokens", self.rows and self.rows - 1),
            "num_speculative_tokens": ("--speculative-dspark-block-size", self.depth),
            "cost_table": ("--speculative-dspark-sps-table-path", self.cost_table),
        }
        return merged(content, flags, variable=CONFIG)


def read_config_file() -> dict[str, Any]:
    """Content of the file SPECPLUG_CONFIG names, {} where it names none; keys are checked by `resolve`.

    Raises ValueError for a file that is missing, is not a JSON object, or names the draft.
    """
    content = read_options(CONFIG)
    if "model" in content:
        raise ValueError(f"{CONFIG}: model: SGLang takes it from --speculative-draft-model-path")
    return content


@functools.cache
def resolve(flags: Flags) -> ServedDraft:
    """Raises ValueError for a missing draft, and as `specplug.served_draft.served_draft`."""
    if flags.draft is None:
        raise ValueError(f"{ALGORITHM} needs a draft; name it with --speculative-draft-model-path")
    content = read_config_file()
    content.pop("dspark", None)  # read by specplug_sglang.dspark
    raw = {**flags.merged(content), "model": flags.draft}
    return served_draft(raw, engine="SGLang", target=flags.model, revision=flags.revision)


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


def settings() -> ServedDraft:
    """The settings of a process whose arguments are published."""
    from sglang.srt.runtime_context import get_model, get_spec

    return resolve(Flags.of(get_spec(), get_model().model_path))
