"""Whether a cost table may be used here: what it was measured for, does it say anything, does it fit."""

from __future__ import annotations

from typing import Literal, NamedTuple

from specplug.checkpoint import read_draft
from specplug.config import TreeOptions
from specplug.cost import check_provenance, read_cost_table
from specplug.hub import checkpoint_folder
from specplug.provenance import Provenance, config_hash


class Verdict(NamedTuple):
    """off: the table is read and does nothing, or is used although it was measured for something else."""

    state: Literal["ok", "off", "failed"]
    detail: str


def judge(options: TreeOptions, *, target: str | None, engine: str, engine_version: str) -> Verdict:
    """The verdict on ``options.cost_table``, without starting the engine: device and dtype are not compared.

    ``target`` None leaves the target uncompared too. Never raises for a table or a model that cannot be read:
    that is a failed verdict.
    """
    assert options.cost_table is not None
    try:
        table = read_cost_table(options.cost_table)
        folder = None if target is None else checkpoint_folder(target, files=["config.json"])
        here = Provenance(
            engine=engine,
            engine_version=engine_version,
            target=target or "",
            draft=options.model,
            target_hash="" if folder is None else config_hash(folder),
            draft_hash=config_hash(read_draft(options.model).path),
        )
    except (ValueError, OSError) as error:
        return Verdict("failed", str(error))
    measured = f"{options.cost_table}: measured for {table.provenance or 'an unknown engine'}"
    wrong = check_provenance(table, here)
    if wrong:
        state: Literal["off", "failed"] = "failed" if options.cost_table_mismatch == "refuse" else "off"
        return Verdict(state, f"{measured}; {'; '.join(wrong)}")
    if not table.informative:
        return Verdict("off", f"{measured}; {table.reason}")
    unchecked = "" if target is not None else ", target not compared (give --model)"
    return Verdict(
        "ok", f"{measured}; {len(table.verify)} probes up to {table.max_tokens} rows; fits{unchecked}"
    )
