"""The CUDA worker for trees."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from specplug_vllm.refusals import check_cuda_attention
from specplug_vllm.worker import TreeWorker


class CUDATreeWorker(TreeWorker, Worker):
    """Stock GPU worker, tree drafter, tree attention."""

    def register_attention(self) -> None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        attention: Any = self.vllm_config.attention_config
        check_cuda_attention(attention.backend.name if attention.backend else None)
        attention.backend = AttentionBackendEnum.FLASH_ATTN
        register_backend(AttentionBackendEnum.FLASH_ATTN, "specplug_vllm.cuda_attention.FlashTreeBackend")
