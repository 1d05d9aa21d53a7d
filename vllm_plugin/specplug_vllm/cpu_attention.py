"""Tree attention on vLLM's CPU backend. For correctness on machines without a GPU, not for speed."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from specplug.attention import partial_attention
from specplug_vllm.attention import TreeAttention
from specplug_vllm.attention_trees import AttentionTrees

# The packing of a cache block under this instruction set, read off csrc/cpu/cpu_attn_vec.hpp of vLLM 0.32.0:
# keys as [head_size, block], values as [block, head_size].
_ISA = "vec"


def key_value_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a cache [blocks, kv_heads, block, 2 * head]: keys [blocks, kv_heads, head, block], values [..,
    block, head].
    """
    blocks, kv_heads, block, width = kv_cache.shape
    head = width // 2
    keys, values = kv_cache.view(blocks, kv_heads, 2 * block, head).chunk(2, dim=2)
    keys = keys.as_strided(
        (blocks, kv_heads, head, block), (keys.stride(0), keys.stride(1), block, 1), keys.storage_offset()
    )
    return keys, values


class CPUTreeBuilder(CPUAttentionMetadataBuilder):
    """Keeps the cache in the one packing :func:`key_value_views` reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa == "amx":  # chosen for bf16 where the chip has it; "vec" serves every dtype
            self.isa = _ISA
            self._set_isa_to_layers(self.layer_names)
        if self.isa != _ISA:
            raise ValueError(
                f"method ddtree reads the CPU cache packed for {_ISA!r} and this layer's is {self.isa!r}; "
                "use an x86 machine, a block size divisible by 32 and a head size divisible by 32."
            )


class CPUTreeImpl(TreeAttention, CPUAttentionBackendImpl):
    """Prefix pass in plain torch over gathered blocks."""

    def prefix_pass(
        self,
        layer: Any,
        queries: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        trees: AttentionTrees,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = key_value_views(kv_cache)
        block = values.shape[2]
        blocks = -(-trees.max_prefix_len // block)
        table = attn_metadata.block_table[trees.requests, :blocks].long()
        keys = keys[table].permute(0, 1, 4, 2, 3).flatten(1, 2)  # [T, L, Hkv, D]
        values = values[table].permute(0, 1, 3, 2, 4).flatten(1, 2)
        committed = torch.arange(keys.shape[1]) < trees.prefix_lens[:, None]  # [T, L]
        values = values.masked_fill(~committed[:, :, None, None], 0.0)  # never written: may be NaN
        seen = committed[:, None, :].expand(-1, queries.shape[1], -1)
        return partial_attention(queries, keys, values, seen, self.scale)

    @staticmethod
    def cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys, values = key_value_views(kv_cache)
        return keys.permute(0, 3, 1, 2), values.transpose(1, 2)


class CPUTreeBackend(CPUAttentionBackend):
    """Registered over CPU_ATTN in workers that draft trees."""

    @staticmethod
    def get_impl_cls() -> type[CPUTreeImpl]:
        return CPUTreeImpl

    @staticmethod
    def get_builder_cls() -> type[CPUTreeBuilder]:
        return CPUTreeBuilder
