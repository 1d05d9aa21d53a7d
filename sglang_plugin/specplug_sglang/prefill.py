"""Prefill of both workers: SGLang's own, with the request's parameters, its first token remembered."""

from __future__ import annotations

from typing import Any

from specplug_sglang.sampling import PathSampler
from specplug_sglang.steps import StepWatch


class WatchedPrefill:
    """Mixed in before DSparkWorkerV2."""

    _paths: PathSampler
    _watch: StepWatch

    def _forward_prefill(self, batch: Any, on_publish: Any, pp_proxy_tensors: Any = None) -> Any:
        self._watch.interrupted()
        if batch.forward_mode.is_idle():
            return super()._forward_prefill(batch, on_publish, pp_proxy_tensors)
        with self._paths.prefilling(batch):
            result = super()._forward_prefill(batch, on_publish, pp_proxy_tensors)
        self._paths.prefilled(batch, result.next_token_ids)
        return result
