"""Lossless acceptance of tokens that were *sampled* from a draft: speculative sampling and its chain.

A token y drawn from q is kept with probability min(1, p(y) / q(y)); otherwise the positive part of p - q,
normalised, is drawn from instead (Leviathan et al. 2023, Chen et al. 2023, theorem 1). The result has law p
and equals y with probability sum of min(p, q). It holds only if q is the very distribution y was drawn from,
so ``sample`` hands out the token and its q together, and ratios of half-precision probabilities are refused.

Written as a *coupling*: ``coupled`` replaces the target's own draw at a row by one of the same law that
coincides with y as often as possible. The walk (`specplug.verify`) stays the only acceptance rule. On
children that were chosen, not drawn, this rule is biased; the walk alone is right there.

All randomness comes in as uniform numbers in [0, 1), so a host can key it by (seed, position) and a test can
enumerate it. Probabilities are normalised and compared in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specplug.verify import Walk, walk


class Draw(NamedTuple):
    """A sampled draft token and the law it was sampled from; never separate the two."""

    tokens: torch.Tensor  # [...] int64
    probabilities: torch.Tensor  # [..., V] fp32 or fp64, sums to 1; all zero where nothing could be drawn


def draw(
    weights: torch.Tensor,  # [..., V] fp32 or fp64, >= 0
    uniform: torch.Tensor,  # [...] fp64 in [0, 1)
) -> torch.Tensor:
    """Tokens [...] int64 with probability proportional to ``weights``: the inverse cumulative sum, in fp64.

    Token t comes for uniform in [W(t - 1), W(t)) / W(V). A token without weight is never drawn; a row without
    any weight gives token 0.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[..., -1:].contiguous()
    index = torch.searchsorted(cumulative, uniform.double()[..., None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # rounding may push the product up to the total
    return torch.minimum(index, last)[..., 0]


def sample(
    logits: torch.Tensor,  # [..., V] any float dtype, processed as the draft's sampler processes them
    uniform: torch.Tensor,  # [...] fp64 in [0, 1)
    *,
    temperature: torch.Tensor,  # [...] > 0
) -> Draw:
    """Draw one draft token a row from softmax(logits / temperature), computed in fp32.

    The probabilities returned are those drawn from, whatever the dtype of the logits.
    """
    probabilities = (logits.float() / temperature.float()[..., None]).softmax(-1)
    return Draw(draw(probabilities, uniform), probabilities)


def coupled(
    target: torch.Tensor,  # [..., V] fp32 or fp64, p
    proposal: Draw,  # [...] y and its law q
    *,
    accept_uniform: torch.Tensor,  # [...] fp64 in [0, 1)
    residual_uniform: torch.Tensor,  # [...] fp64 in [0, 1)
) -> torch.Tensor:
    """A draw from p, [...] int64, that equals y with probability min(1, p(y) / q(y)).

    Where q is all zero nothing was proposed and p is drawn from. Raises ValueError for probabilities in half
    precision: their ratio is not the ratio of what was sampled.
    """
    for name, tensor in (("target", target), ("proposal", proposal.probabilities)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name}: expected fp32 or fp64 probabilities, got {tensor.dtype}; take the softmax in fp32 "
                "and pass the tensor that was sampled from"
            )
    p, q = (_normalised(x) for x in (target, proposal.probabilities))
    token = proposal.tokens[..., None]
    at_p, at_q = (x.gather(-1, token)[..., 0] for x in (p, q))
    accepted = (accept_uniform.double() * at_q < at_p) & (at_q > 0)
    residual = (p - q).clamp_min(0)
    # p = q up to rounding leaves nothing over; a rejection then is a rounding event and p itself is right
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return torch.where(accepted, proposal.tokens, draw(residual, residual_uniform))


def accept_chain(
    proposal: Draw,  # tokens [R, G] int64, probabilities [R, G, V]
    counts: torch.Tensor,  # [R] int32, drafted tokens of each request, at most G
    target: torch.Tensor,  # [R, G + 1, V] fp32 or fp64, p at the root and after each drafted token
    *,
    accept_uniform: torch.Tensor,  # [R, G] fp64 in [0, 1)
    draw_uniform: torch.Tensor,  # [R, G + 1] fp64 in [0, 1), for residuals and for the token after the chain
) -> Walk:
    """Speculative sampling of a chain: keep drafted tokens until the first rejection, then one token more.

    E[accepted] = sum over k of the product over i <= k of sum min(p_i, q_i). Returns the same `Walk` as a
    tree (D = G). Raises ValueError where ``target`` does not have one row more than the chain.
    """
    requests, depth = proposal.tokens.shape
    if tuple(target.shape[:2]) != (requests, depth + 1):
        raise ValueError(
            f"target: expected [R, G + 1, V], R, G + 1 = {(requests, depth + 1)}, got {tuple(target.shape)}"
        )
    step = torch.arange(depth, device=proposal.tokens.device)
    drafted = step < counts[:, None]
    live = Draw(proposal.tokens, proposal.probabilities * drafted[..., None])
    rows = coupled(target[:, :-1], live, accept_uniform=accept_uniform, residual_uniform=draw_uniform[:, :-1])
    after = draw(target[:, -1], draw_uniform[:, -1])
    parents = (step - 1).int().expand(requests, -1)
    return walk(parents, proposal.tokens, counts, torch.cat([rows, after[:, None]], 1), max_depth=depth)


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    """In fp64, summing to 1; rows of zeros stay."""
    weights = weights.double()
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, weights)
