"""SGLang's own DSPARK, upgraded: our budget where SGLang ranks a table, and honest sampling parameters.

Everything else stays stock, the kernels and the device's ranking of live survivals among them. A DSPARK chain
is drawn from the draft, so its budget keeps SGLang's causal rule: the total comes from survivals of two
steps ago. SGLANG_RAGGED_VERIFY_MODE keeps its meaning: static verifies whole chains, cap-accept computes them
and accepts what the budget would verify, compact computes that alone, and drafts nothing in a round that is
better decoded plainly.

``SPECPLUG_DISABLE=1``, or ``"dspark": false`` in the file SPECPLUG_CONFIG names, leaves SGLang's as it is.
The other keys it may hold for DSPARK are `KEYS`; the table may also come with
``--speculative-dspark-sps-table-path``, in SGLang's two formats or in ours.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from specplug.config import TreeOptions, parse_options
from specplug.options_file import merged
from specplug.planning import check_files
from specplug.relay import SHAPES, SurvivalRelay
from specplug.sts import read_sts
from specplug_sglang import config
from specplug_sglang.plugin import STRICT

if TYPE_CHECKING:
    import torch

    from specplug.budget import Plan
    from specplug.cost_curves import Shape
    from specplug.policies import Policy

logger = logging.getLogger(__name__)

ALGORITHM = "DSPARK"
SWITCH = "dspark"
KEYS = frozenset({"cost_table", "cost_table_mismatch", "online"})
MIN_SURVIVAL = 1e-6  # SGLang's ranking on the device passes over less

_running: ChainBudget | None = None
_upgraded = False


class ChainBudget:
    """What a step drafts and its total, in place of SGLang's ``compute_verify_token_budget``."""

    def __init__(self, policy: Policy, *, depth: int) -> None:
        self.policy = policy
        self.plan: Plan | None = None  # of the step under way
        self.shape: Shape = "chain"  # of the step under way
        self._relay = SurvivalRelay(budget=depth, depth=depth)
        self._context = 0.0  # mean committed tokens of the batch

    def choose(self, batch: Any) -> None:
        """The shape of the coming step, before its total."""
        if batch.seq_lens_cpu is not None and len(batch.seq_lens_cpu):
            self._context = float(batch.seq_lens_cpu.float().mean())
        self.shape = self.policy.draft(len(batch.reqs), context=self._context)

    def total(self, survival: torch.Tensor) -> Plan:
        """``survival``: [R, gamma] fp32 on the host, non-increasing, of SGLang's lagged confidences; 0 in the
        rows of a step that drafted nothing."""
        rows = survival.numpy()
        rows = np.where(rows >= MIN_SURVIVAL, rows, 0).astype(np.float32)
        # SGLang takes a request it has not seen for certain, to the last token.
        drafted = SHAPES.index("chain") * ((rows[:, :1] > 0) & (rows[:, -1:] < 1))
        self.plan = self._relay.plan(
            self.policy,
            np.concatenate([rows, rows, drafted], 1, dtype=np.float32),
            np.ones(len(rows), bool),
            shape=self.shape,
            context=self._context,
        )
        return self.plan


def upgraded() -> bool:
    """Whether this process runs DSPARK with our worker."""
    return _upgraded


def run(budget: ChainBudget | None) -> None:
    """From now on ``budget`` decides in this process; None: SGLang does."""
    global _running
    _running = budget


def switched_on() -> bool:
    """Raises ValueError where the switch is not true or false."""
    value = config.read_config_file().get(SWITCH, True)
    if not isinstance(value, bool):
        raise ValueError(f"{config.CONFIG}: {SWITCH}: expected true or false, got {value!r}")
    return value


def options(view: Any) -> TreeOptions:
    """The options for DSPARK, of ServerArgs while they are resolved or of the published ``get_spec()``.

    Raises ValueError for a key that means nothing to chains, a table given twice, and files that cannot be
    read.
    """
    raw = {key: value for key, value in config.read_config_file().items() if key != SWITCH}
    for key in raw:
        if key in TreeOptions.__struct_fields__ and key not in KEYS:
            known = ", ".join(sorted({*KEYS, SWITCH}))
            raise ValueError(f"{config.CONFIG}: {key} is for DDTREE; DSPARK takes {known}")
    table = "--speculative-dspark-sps-table-path", view.speculative_dspark_sps_table_path or None
    raw = merged(raw, {"cost_table": table}, variable=config.CONFIG)
    parsed, _ = parse_options({**raw, "model": view.speculative_draft_model_path or ALGORITHM})
    check_files(parsed)
    if view.speculative_dspark_confidence_sts_path:
        read_sts(view.speculative_dspark_confidence_sts_path)
    return parsed


def _check(original: Any, server_args: Any) -> None:
    """SGLang's checks, then ours, before any weight is read."""
    original(server_args)
    if switched_on():
        from sglang.srt.arg_groups import speculative_hook

        options(speculative_hook.resolving_view(server_args))


def _create_worker(original: Any, self: Any, server_args: Any) -> Any:
    """The stock worker's class, or ours over it; says in one log line which."""
    stock = original(self, server_args)
    if self.name != ALGORITHM:
        return stock
    from specplug_sglang.install import faults_here

    faults = faults_here()
    if faults and os.environ.get(STRICT, "") not in ("", "0"):
        raise RuntimeError(f"specplug refuses DSPARK on this SGLang: {'; '.join(faults)}")
    if faults or not switched_on():
        why = "; ".join(faults) or f'"{SWITCH}": false'
        logger.log(
            logging.ERROR if faults else logging.INFO,
            "specplug: DSPARK, pid %d: SGLang's own planner and sampling run: %s.",
            os.getpid(),
            why,
        )
        return stock
    from specplug_sglang.chains import ChainWorker

    global _upgraded
    _upgraded = True
    return type(f"Specplug{stock.__name__}", (ChainWorker, stock), {})


def _budget(original: Any, *, history_survival_probs: Any, sps_table: Any, cfg: Any) -> Any:
    if _running is None:
        return original(history_survival_probs=history_survival_probs, sps_table=sps_table, cfg=cfg)
    from sglang.srt.speculative.dspark_components.dspark_planner import VerifyBudgetDecision

    plan = _running.total(history_survival_probs[:, : cfg.resolved_max_verify_len()])
    known = np.isfinite(plan.seconds) and plan.seconds > 0
    return VerifyBudgetDecision(
        budget=plan.nodes,
        predicted_step_seconds=plan.seconds if known else None,
        predicted_theta=plan.tokens / plan.seconds if known else None,
    )


_SPECULATIVE = "sglang.srt.speculative"
AROUND = {
    "sglang.srt.arg_groups.speculative_hook._handle_dspark": _check,
    f"{_SPECULATIVE}.spec_info.SpeculativeAlgorithm.create_worker": _create_worker,
    f"{_SPECULATIVE}.dspark_components.dspark_planner.compute_verify_token_budget": _budget,
}
