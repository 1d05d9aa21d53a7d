"""Attention of tree rows, in two passes merged by their log-sum-exp.

The *prefix pass* lets every window row see the committed prefix: the same for all rows, so the engine's own
fast kernel can do it without a mask. The *in-tree pass* lets a row see its ancestors and itself: the window's
keys and values are this step's own rows, so it needs no paging. Rows outside windows keep the engine's
ordinary path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from specplug_vllm.attention_trees import AttentionTrees


class TreeAttention(ABC):
    """Mixed in before a stock attention implementation; a backend's own class fills in the rest."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,  # [N, H, D]
        key: torch.Tensor,  # [N, Hkv, D]
        value: torch.Tensor,  # [N, Hkv, D]
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,  # [N, H * D] or [N, H, D], written in place
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        trees: AttentionTrees | None = getattr(attn_metadata, "specplug_trees", None)
        if trees is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if not trees.only_windows:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        query, out = (x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        key, value = (x.view(-1, self.num_kv_heads, self.head_size) for x in (key, value))
        in_prefix = self.prefix_pass(layer, query[trees.windows.rows], kv_cache, attn_metadata, trees)
        trees.attend(query, key, value, *in_prefix, out, self.scale)
        return output

    @abstractmethod
    def prefix_pass(
        self,
        layer: Any,
        queries: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        trees: AttentionTrees,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of [T, W, H, D] queries to each request's committed prefix: (out [T, W, H, D], lse [T, W,
        H]).
        """

    @staticmethod
    @abstractmethod
    def cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views [blocks, block, ...] that together hold every byte of a layer's cache slots."""
