"""What a request may ask for: AROUND SGLang's ``validate_dflash_request``, which every request passes.

Stock DSPARK serves penalties, min_new_tokens and min-p as if they were not there. Here they are honoured
(`specplug_sglang.sampling`, `specplug_sglang.dspark`) or refused with a reason, as a request that cannot run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specplug_sglang import config
from specplug_sglang.sampling import count


def validate(original: Callable[[Any, bool], str | None], req: Any, enable_overlap: bool) -> str | None:
    """SGLang's reason not to serve the request, or ours, or None."""
    reason = original(req, enable_overlap)
    if reason is not None:
        return reason
    from specplug_sglang import dspark

    if config.active():
        reason = _of_tree(req)
        if reason is None and req.custom_logit_processor is not None:
            count("a request with a custom_logit_processor is decoded without drafts")
    elif dspark.upgraded():
        reason = _of_chain(req)
    if reason is not None:
        count(f"refused a request: {reason}")
        req.sampling_params.min_p = 0.0  # SGLang prefills a refused request all the same, and must survive it
    return reason


def _of_tree(req: Any) -> str | None:
    if req.return_hidden_states:
        return "DDTREE does not return hidden states: they are not reordered to the accepted path."
    if req.return_sampling_mask:
        return "DDTREE does not return sampling masks: they are not reordered to the accepted path."
    if req.sampling_params.min_p > 0 and _seeded():
        return "min_p does not work with --enable-deterministic-inference in SGLang; leave min_p out."
    return None


def _of_chain(req: Any) -> str | None:
    params = req.sampling_params
    if params.min_p > 0 and params.top_p < 1:
        return "DSPARK does not serve min_p together with top_p below 1; give one of them."
    if params.top_k > 1 and _seeded():
        return (
            "DSPARK draws its acceptance without the request's seed, so --enable-deterministic-inference "
            "does not hold for sampled requests; use temperature 0, or the algorithm DDTREE."
        )
    return None


def _seeded() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


AROUND = {"sglang.srt.speculative.dflash_utils.validate_dflash_request": validate}
