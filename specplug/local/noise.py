"""Sampling whose noise is a function of (seed, position, token) alone.

The token at a position is ``argmax(logits / T + g)`` with g Gumbel noise (the Gumbel-max trick: that is a
draw from softmax(logits / T)). Tree rows of one depth share a position and so their noise, and a request
draws the same token at a position whatever was drafted there: seeded output equals plain decoding token for
token.

The generator is SplitMix64 (Steele, Lea, Flood, 2014) used as a counter: the state of (seed, position, token)
is mix(mix(seed) + position * G) + (token + 1) * G. Integer arithmetic, so every device gives the same bits.
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd; SplitMix64's increment, as int64
MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_B = 0x94D049BB133111EB - (1 << 64)
MANTISSA_BITS = 52  # (k + 0.5) / 2^52 is exact in fp64 and never 0 or 1


def gumbel(
    seeds: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R, P] int64
    vocabulary: int,
) -> torch.Tensor:
    """Gumbel noise [R, P, V] fp32 of each (seed, position)."""
    token = torch.arange(1, vocabulary + 1, device=seeds.device)
    state = _mix(_mix(seeds)[:, None] + positions * GOLDEN)[..., None] + token * GOLDEN
    uniform = (_shift(_mix(state), 64 - MANTISSA_BITS).double() + 0.5) * 2.0**-MANTISSA_BITS
    return uniform.log().neg().log().neg().float()


def draw(
    logits: torch.Tensor,  # [R, W, V] any float dtype
    *,
    temperature: float,
    seeds: torch.Tensor,  # [R] int64
    first: torch.Tensor,  # [R] int64, position that row 0 draws
    depths: torch.Tensor,  # [R, W] int64, rows draw position first + depth
    max_depth: int,
) -> torch.Tensor:
    """The target's token of every row, [R, W] int64: the argmax of its scores."""
    if temperature == 0:  # not to copy the logits
        return logits.argmax(-1)
    return scores(
        logits, temperature=temperature, seeds=seeds, first=first, depths=depths, max_depth=max_depth
    ).argmax(-1)


def scores(
    logits: torch.Tensor,  # [R, W, V] any float dtype
    *,
    temperature: float,
    seeds: torch.Tensor,  # [R] int64
    first: torch.Tensor,  # [R] int64
    depths: torch.Tensor,  # [R, W] int64
    max_depth: int,
) -> torch.Tensor:
    """logits / T + noise, [R, W, V] fp32; at temperature 0 the logits, no noise read."""
    if temperature == 0:
        return logits.float()
    ahead = torch.arange(max_depth + 1, device=logits.device)
    noise = gumbel(seeds, first[:, None] + ahead, logits.shape[-1])
    index = depths[..., None].expand(-1, -1, logits.shape[-1])
    return logits.float() / temperature + noise.gather(1, index)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * MIX_A
    x = (x ^ _shift(x, 27)) * MIX_B
    return x ^ _shift(x, 31)
