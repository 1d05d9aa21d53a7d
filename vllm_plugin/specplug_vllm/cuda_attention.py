"""Tree attention on vLLM's FlashAttention backend: its own kernel does the prefix pass and returns the
log-sum-exp.

Written from the source of vLLM 0.32.0 and not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from specplug_vllm.attention import TreeAttention
from specplug_vllm.attention_trees import AttentionTrees


class FlashTreeBuilder(FlashAttentionMetadataBuilder):
    """With ``full_graphs`` false, attention stays outside captured graphs: its shapes are those of the step.

    vLLM then falls back from full to piecewise CUDA graphs by itself and says so in its log.
    """

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        stock = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        # A captured forward serves windows alone, no prefill rows: never ALWAYS.
        ours = AttentionCGSupport.NEVER
        if vllm_config.speculative_config.options.full_graphs:
            ours = AttentionCGSupport.UNIFORM_BATCH
        return min(stock, ours, key=lambda support: support.value)


class FlashTreeImpl(TreeAttention, FlashAttentionImpl):
    """Non-causal FlashAttention over the committed length, every window padded to the step's width."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.fa4_hd256:  # its kernel wants page-aligned lengths and block tables of exact width
            raise ValueError(
                "method ddtree does not serve FlashAttention 4's kernel for head size 256; "
                "use a model with another head size or leave method ddtree out."
            )

    def prefix_pass(
        self,
        layer: Any,
        queries: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        trees: AttentionTrees,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)  # [blocks, block, Hkv, D] each
        requests, width = queries.shape[:2]
        starts = torch.arange(requests + 1, dtype=torch.int32, device=queries.device) * width
        out, lse = fa_utils.flash_attn_varlen_func(
            q=queries.flatten(0, 1).contiguous(),
            k=canonicalize_singleton_dim_strides(keys),
            v=canonicalize_singleton_dim_strides(values),
            cu_seqlens_q=starts,
            max_seqlen_q=width,
            seqused_k=trees.prefix_lens,
            max_seqlen_k=trees.max_prefix_len,
            softmax_scale=self.scale,
            causal=False,
            block_table=attn_metadata.block_table[trees.requests],
            # FlashAttention 3 plans its splits on the device, in this call, up to the bound the host gives.
            num_splits=attn_metadata.max_num_splits if trees.captured else 0,
            fa_version=self.vllm_flash_attn_version,
            return_softmax_lse=True,
        )
        # lse is [H, T * W]
        return out.view(queries.shape), lse.view(-1, requests, width).permute(1, 2, 0)

    @staticmethod
    def cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (kv_cache.transpose(1, 2),)  # keys and values side by side


class FlashTreeBackend(FlashAttentionBackend):
    """Registered over FLASH_ATTN in workers that draft trees."""

    @staticmethod
    def get_impl_cls() -> type[FlashTreeImpl]:
        return FlashTreeImpl

    @staticmethod
    def get_builder_cls() -> type[FlashTreeBuilder]:
        return FlashTreeBuilder
