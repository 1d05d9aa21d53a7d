"""Tree attention in two passes, committed prefix and verify window's own rows, merged by log-sum-exp.

With o_a, o_b the two normalised outputs and l_a, l_b their log-sum-exps,

    o = (exp(l_a) o_a + exp(l_b) o_b) / (exp(l_a) + exp(l_b))

is attention over the union of the keys (the online-softmax identity of FlashAttention, Dao et al. 2022). So
the prefix pass can be the host's fast kernel, unmasked, and the tree mask only meets the few rows computed in
this very step. Grouped heads: query head h reads key head h // (H / Hkv).
"""

from __future__ import annotations

import torch


def masked_attention(
    q: torch.Tensor,  # [R, W, H, D]
    k: torch.Tensor,  # [R, S, Hkv, D]
    v: torch.Tensor,  # [R, S, Hkv, D]
    mask: torch.Tensor,  # [R, W, S] bool, true = seen
    scale: float,
) -> torch.Tensor:
    """Reference in fp32, one softmax over all keys: [R, W, H, D]. A row that sees no key gives 0."""
    group = q.shape[2] // k.shape[2]
    keys, values = (x.float().repeat_interleave(group, 2) for x in (k, v))
    weight = torch.einsum("rwhd,rshd->rhws", q.float(), keys) * scale
    weight = weight.masked_fill(~mask[:, None], float("-inf")).softmax(-1).nan_to_num(nan=0.0)
    return torch.einsum("rhws,rshd->rwhd", weight, values)


def partial_attention(
    q: torch.Tensor,  # [R, W, H, D]
    k: torch.Tensor,  # [R, W, Hkv, D], keys of the same window rows
    v: torch.Tensor,  # [R, W, Hkv, D]
    mask: torch.Tensor,  # [R, W, W] bool, as from tree.ancestor_mask
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a part of the keys: (out [R, W, H, D] fp32, lse [R, W, H] fp32, natural log).

    A row that sees no key gives out 0 and lse -inf. Raises ValueError where H is not a multiple of Hkv.
    """
    requests, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"q: expected a multiple of the {kv_heads} key heads, got {heads} heads")
    grouped = q.float().view(requests, rows, kv_heads, heads // kv_heads, size)
    scores = torch.einsum("rwkgd,rskd->rwkgs", grouped, k.float()) * scale
    scores = scores.masked_fill(~mask[:, :, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weight = (scores - lse.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp()
    out = torch.einsum("rwkgs,rskd->rwkgd", weight, v.float())
    return out.reshape(requests, rows, heads, size), lse.reshape(requests, rows, heads)


def merge(
    out_a: torch.Tensor,  # [..., H, D]
    lse_a: torch.Tensor,  # [..., H] natural log
    out_b: torch.Tensor,  # [..., H, D]
    lse_b: torch.Tensor,  # [..., H]
) -> torch.Tensor:
    """Attention over the union of two disjoint key sets: [..., H, D] fp32.

    An infinite lse marks a side without keys: -inf by definition, +inf because FlashAttention 2 writes that
    for an empty sequence. Such a side weighs nothing, whatever its output holds; two such sides give 0.
    """
    lse = torch.stack((lse_a.float(), lse_b.float()))
    lse = lse.masked_fill(lse.isinf(), float("-inf"))
    weight = lse.softmax(0).nan_to_num(nan=0.0)[..., None]
    out = torch.stack((out_a.float(), out_b.float()))
    return (weight * out.masked_fill(weight == 0, 0.0)).sum(0)
