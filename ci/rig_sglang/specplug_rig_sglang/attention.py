"""SGLang's torch_native attention, with target verification added: draft trees and ragged layouts.

The semantics are those of SGLang's Triton backend. Request b has `lens[b]` query rows behind a prefix of
`seq_lens[b]` cached tokens; `custom_mask`, where there is one, holds `lens[b] * (seq_lens[b] + lens[b])`
booleans a request, row-major, back to back. Without one, a causal layer sees a chain, an encoder-only layer
(a draft block) everything. Rows past `sum(lens)` pad a compact layout: their output is 0.
"""

import os
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

from specplug_rig_sglang.activate import SWITCH


class ReferenceAttention(TorchNativeAttnBackend):
    takes_tree_masks = True  # DDTREE refuses backends that do not say so

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            locations = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, locations, k, v)

        spec = forward_batch.spec_info
        layout = getattr(spec, "ragged_verify_layout", None)
        rows = forward_batch.batch_size
        lens = [int(spec.draft_token_num)] * rows if layout is None else layout.verify_lens.tolist()
        prefixes = forward_batch.seq_lens.tolist()
        mask = spec.custom_mask
        if mask is not None:
            needed = sum(n * (prefix + n) for n, prefix in zip(lens, prefixes, strict=True))
            assert mask.numel() == needed, (
                f"custom_mask: expected {needed} booleans for {lens} rows behind {prefixes} tokens, "
                f"got {mask.numel()}"
            )
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [rows of all requests, heads, head size]
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        tables = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices].long()
        attend = _attend_triton if os.environ[SWITCH] == "triton" and mask is not None else _attend
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        attend(layer, q, keys, values, tables, lens, prefixes, mask, out)
        return out.view(q.shape[0], -1)


def _attend(layer, q, keys, values, tables, lens, prefixes, mask, out) -> None:
    """One request after the other, in torch."""
    causal = layer.attn_type != AttentionType.ENCODER_ONLY
    start = bits = 0
    for table, n, prefix in zip(tables, lens, prefixes, strict=True):
        if mask is not None:
            visible = mask[bits : bits + n * (prefix + n)].view(n, prefix + n).bool()
            bits += visible.numel()
        else:
            visible = torch.ones(n, prefix + n, dtype=torch.bool)
            if causal:
                visible = visible.tril(prefix)
        tokens = table[: prefix + n]
        out[start : start + n] = scaled_dot_product_attention(
            q[None, start : start + n].transpose(1, 2),
            keys[None, tokens].transpose(1, 2).to(q.dtype),
            values[None, tokens].transpose(1, 2).to(q.dtype),
            attn_mask=visible,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            scale=layer.scaling,
        )[0].transpose(0, 1)
        start += n


def _attend_triton(layer, q, keys, values, tables, lens, prefixes, mask, out) -> None:
    """All requests in one call of SGLang's own extend kernel, with the pointers of a ragged batch."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    def pointers(sizes: list[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(sizes)])

    used = sum(lens)
    cached = [table[:prefix] for table, prefix in zip(tables, prefixes, strict=True)]
    new = [table[prefix : prefix + n] for table, prefix, n in zip(tables, prefixes, lens, strict=True)]
    own = torch.cat(new)
    extend_attention_fwd(
        q[:used].contiguous(),
        keys[own].contiguous(),
        values[own].contiguous(),
        out[:used],
        keys,
        values,
        pointers(lens).int(),
        pointers(prefixes).int(),
        torch.cat(cached),
        mask,
        True,  # causal
        pointers([n * (prefix + n) for n, prefix in zip(lens, prefixes, strict=True)]),
        max(lens),
        1.0,  # k_scale
        1.0,  # v_scale
        sm_scale=layer.scaling,
    )
