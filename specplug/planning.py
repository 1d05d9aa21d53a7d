"""From an adapter's options to the policy that decides its steps, and the files it is made from."""

from __future__ import annotations

import logging

from specplug.budget import Planner
from specplug.calibration import read_served_calibration
from specplug.config import TreeOptions
from specplug.cost import check_provenance, read_cost_table
from specplug.policies import Explorer, FullTrees, Policy
from specplug.step_log import EngineFacts


def check_files(options: TreeOptions) -> None:
    """Raise ValueError for a cost table or a calibration that cannot be used, whatever the engine."""
    try:
        if options.cost_table is not None:
            read_cost_table(options.cost_table)
        if options.calibration is not None:
            read_served_calibration(options.calibration)
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None


def choose_policy(
    options: TreeOptions,
    here: EngineFacts,
    *,
    budget: int,  # most nodes of a request
    depth: int,  # most nodes of a chain
    trees: bool = True,  # False: the engine drafts chains alone
    one_rank_decides: bool = False,  # the others follow it
    logger: logging.Logger,
) -> Policy:
    """The policy of one engine; says in the log which and why.

    Where every rank of several decides for itself, from numbers all of them have, nothing is corrected
    online: their clocks differ. Raises ValueError for a table that cannot be read, or was measured for
    something else and ``cost_table_mismatch`` is "refuse".
    """
    policy: Policy
    if options.cost_table is None:
        policy = Explorer() if options.explore else FullTrees()
        logger.info("specplug: %s.", policy.reason)
        return policy
    table = read_cost_table(options.cost_table)
    wrong = check_provenance(table, here.provenance())
    if wrong:
        text = f"cost_table {options.cost_table}: {'; '.join(wrong)}"
        if options.cost_table_mismatch == "refuse":
            raise ValueError(
                f'{text}. Run `specplug profile` on this engine, or add "cost_table_mismatch": "warn".'
            )
        logger.warning("specplug: %s. Used all the same: cost_table_mismatch is warn.", text)
    online = options.online and (one_rank_decides or here.tensor_parallel == 1)
    policy = Planner(table, budget=budget, depth=depth, min_gain=options.min_gain, online=online, trees=trees)
    logger.info(
        "specplug: budgets from the cost table %s (%s), %s%s.",
        options.cost_table,
        table.provenance or "origin unknown",
        "corrected online" if online else "not corrected online",
        f"; {policy.reason}" if policy.reason else "",
    )
    return policy
