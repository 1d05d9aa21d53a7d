"""The CUDA worker for trees."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from specplug_vllm.worker import TreeWorker


class CUDATreeWorker(TreeWorker, Worker):
    """Stock GPU worker, tree drafter, tree attention."""

    def register_attention(self) -> None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        chosen: Any = self.vllm_config.attention_config.backend
        if chosen not in (None, AttentionBackendEnum.FLASH_ATTN):
            raise ValueError(
                f"method ddtree serves the attention backend FLASH_ATTN on CUDA, got {chosen.name}; "
                "leave --attention-backend out or set it to FLASH_ATTN."
            )
        self.vllm_config.attention_config.backend = AttentionBackendEnum.FLASH_ATTN
        register_backend(AttentionBackendEnum.FLASH_ATTN, "specplug_vllm.cuda_attention.FlashTreeBackend")
