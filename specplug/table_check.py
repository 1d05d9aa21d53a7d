"""Whether a cost table may be used here: what it was measured for, does it say anything, does it fit. And
whether a calibration can be used at all."""

from __future__ import annotations

from typing import Literal, NamedTuple

from specplug.checkpoint import read_draft
from specplug.config import TreeOptions
from specplug.cost import check_provenance, read_cost_table
from specplug.hub import checkpoint_folder
from specplug.provenance import Provenance, config_hash


class Verdict(NamedTuple):
    """warning: it is used although it was measured for something else; off: it is read and does nothing."""

    state: Literal["ok", "warning", "off", "failed"]
    detail: str


def judge(
    options: TreeOptions, *, target: str | None, draft: str | None, engine: str, engine_version: str
) -> Verdict:
    """The verdict on ``options.cost_table``, without starting the engine: device and dtype are not compared.

    A target or a draft that is None is not compared either. Never raises for a table or a model that cannot
    be read: that is a failed verdict.
    """
    assert options.cost_table is not None
    try:
        table = read_cost_table(options.cost_table)
        folder = None if target is None else checkpoint_folder(target, files=["config.json"])
        here = Provenance(
            engine=engine,
            engine_version=engine_version,
            target=target or "",
            draft=draft or "",
            target_hash="" if folder is None else config_hash(folder),
            draft_hash="" if draft is None else config_hash(read_draft(draft).path),
        )
    except FileNotFoundError as error:
        return Verdict(
            "failed",
            f"cost_table: expected a file, found no {error.filename}; measure one with specplug profile",
        )
    except OSError as error:
        return Verdict("failed", f"cost_table: cannot read {error.filename}: {error.strerror}")
    except ValueError as error:
        return Verdict("failed", f"cost_table: {error}")
    measured = f"{options.cost_table}: measured for {table.provenance or 'an unknown engine'}"
    wrong = check_provenance(table, here)
    if wrong and options.cost_table_mismatch == "refuse":
        return Verdict("failed", f"{measured}; {'; '.join(wrong)}")
    if not table.informative:
        return Verdict("off", f"{measured}; {'; '.join([*wrong, table.reason])}")
    if wrong:
        return Verdict("warning", f"{measured}, used all the same; {'; '.join(wrong)}")
    unchecked = "" if target is not None else ", target not compared (give --model)"
    if draft is None:
        unchecked = ", target and draft not compared"
    return Verdict(
        "ok", f"{measured}; {len(table.verify)} probes up to {table.max_tokens} rows; fits{unchecked}"
    )


def judge_calibration(options: TreeOptions) -> Verdict:
    """The verdict on ``options.calibration``; a file that cannot be read is a failed one."""
    assert options.calibration is not None
    from specplug.calibration import (
        read_served_calibration,  # here, so that `specplug --help` imports no torch
    )

    try:
        fitted = read_served_calibration(options.calibration)
    except FileNotFoundError as error:
        return Verdict(
            "failed",
            f"calibration: expected a file, found no {error.filename}; make one with specplug record "
            "--calibration",
        )
    except OSError as error:
        return Verdict("failed", f"calibration: cannot read {error.filename}: {error.strerror}")
    except ValueError as error:
        return Verdict("failed", f"calibration: {error}")
    pair = " + ".join(filter(None, (fitted.target, fitted.draft))) or "an unknown pair"
    return Verdict(
        "ok", f"{options.calibration}: fitted for {pair}, {len(fitted.regimes)} temperature range(s)"
    )
