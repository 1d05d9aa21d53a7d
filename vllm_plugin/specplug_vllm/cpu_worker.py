"""The CPU worker for trees."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from specplug_vllm.worker import TreeWorker


class CPUTreeWorker(TreeWorker, CPUWorker):
    """Stock CPU worker, tree drafter, tree attention."""

    def register_attention(self) -> None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, "specplug_vllm.cpu_attention.CPUTreeBackend")
