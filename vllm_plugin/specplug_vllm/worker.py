"""What both workers do: our attention backend before the model is loaded, our drafter in place of the stock
one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class TreeWorker(ABC):
    """Mixed in before a stock worker through vLLM's public option ``worker_cls``."""

    def init_device(self) -> None:
        if not self.use_v2_model_runner:
            raise RuntimeError(
                "method ddtree needs vLLM's V2 model runner and this worker runs V1 (its log says why); "
                "remove the option that V2 does not support."
            )
        self.register_attention()
        super().init_device()
        from specplug_vllm import ranks
        from specplug_vllm.grammar import TreeTokensHandler, served
        from specplug_vllm.planning import engine_facts, plan
        from specplug_vllm.speculator import tree_speculator

        runner: Any = self.model_runner
        self.facts = engine_facts(runner.vllm_config, runner.device)
        self.policy = plan(runner.vllm_config, self.facts)
        ranks.compare(runner.vllm_config, self.facts, self.policy)
        runner.speculator = tree_speculator(runner.vllm_config, runner.device)
        if served(runner.vllm_config):
            runner.draft_tokens_handler = TreeTokensHandler(runner.device, runner.speculator.store)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        if self.policy is not None:
            from specplug_vllm.planning import attach_manager

            attach_manager(self.model_runner, self.facts, self.policy)

    @abstractmethod
    def register_attention(self) -> None:
        """Put the tree-aware backend in place of the platform's, in this process only."""
