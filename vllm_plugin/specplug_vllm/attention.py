"""Attention of tree rows, in two passes merged by their log-sum-exp.

The *prefix pass* lets every window row see the committed prefix: the same for all rows, so the engine's own
fast kernel can do it without a mask. The *in-tree pass* lets a row see its ancestors and itself: the window's
keys and values are this step's own rows, so it needs no paging. Rows outside windows keep the engine's
ordinary path.
"""

from __future__ import annotations

from typing import Any

import torch

from specplug.attention import merge, partial_attention
from specplug_vllm.model_state import AttentionTrees


class TreeAttention:
    """Mixed in before a stock attention implementation; needs :meth:`prefix_pass` and :meth:`move_kv`."""

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
        rows = trees.windows.rows
        queries = query.view(-1, self.num_heads, self.head_size)[rows]  # [T, W, H, D]
        keys = key.view(-1, self.num_kv_heads, self.head_size)[rows]
        values = value.view(-1, self.num_kv_heads, self.head_size)[rows]
        in_prefix = self.prefix_pass(layer, queries, kv_cache, attn_metadata, trees)
        in_tree = partial_attention(queries, keys, values, trees.windows.mask, self.scale)
        merged = merge(*in_prefix, *in_tree)
        flat = output.view(-1, self.num_heads, self.head_size)
        covered = trees.windows.column_of_row.shape[0]
        flat[:covered] = trees.windows.scatter(merged, flat[:covered])
        return output

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
        raise NotImplementedError

    @staticmethod
    def move_kv(kv_cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy cache slots ``source`` to ``destination`` (both [M] int64), all read before any is written."""
        raise NotImplementedError
