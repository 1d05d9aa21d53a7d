"""Candidate tokens of each draft depth and the transition table that trees are grown from.

A table holds C candidates a depth and log q(candidate | parent). Drafts whose depths are independent (DFlash)
have one parent row, P = 1; drafts with a Markov head have a row for each candidate of the depth above, P = C.

Selection is exact and deterministic: by value, then by the smaller token id. Both orders are packed into one
int64 key, so ``topk`` has no ties left. Large vocabularies are cut into contiguous chunks first: the k best
chunks, by (maximum descending, chunk ascending), hold the k best tokens, because each better chunk holds a
better token. For growing trees log-probabilities become integer step costs, whose sums are exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

CHUNKS = (64, 4)  # tokens a chunk, the first c with V >= 4 c k: the two stages then sort at most V / 2 keys
SMALL = 1 << 13  # values in all rows, up to which one sort costs less than the steps of two
TOKEN_BITS = 32
FRACTION_BITS = 28  # of a nat in step costs: 2^-28 is 16 times finer than fp32 at 1 nat
STEP_NATS = 64  # dearest step; exp(-64) = 1.6e-28, never worth a verify row
DEAD = 1 << 40  # step cost of what must never become a node; live ones stay below 2^35


class TopTokens(NamedTuple):
    """The k best tokens of each row, best first."""

    values: torch.Tensor  # [..., k] as given; -inf = placeholder, never a live candidate
    tokens: torch.Tensor  # [..., k] int64, distinct also among placeholders


class TransitionTable(NamedTuple):
    """Log-probabilities of the candidates of every depth; -inf and NaN entries never become nodes."""

    tokens: torch.Tensor  # [R, gamma, C] int64 below 2^22, distinct among the live ones of a depth
    log_probs: torch.Tensor  # [R, gamma, P, C] fp32 <= 0; if P = C, row = candidate above (at depth 0 row 0)


def order_key(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that sort like (value descending, id ascending); values fp32 without NaN, ids below 2^32."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)  # monotone, also below zero
    return torch.sub(ids, ordered, alpha=1 << TOKEN_BITS)  # in int64, the type of ids


def top_tokens(
    log_probs: torch.Tensor,  # [..., V] fp32
    k: int,
) -> TopTokens:
    """The min(k, V) best tokens of each row by (value descending, token id ascending); NaN counts as -inf.

    Any finite scores do, logits included. Fixed shapes, no host read. Raises ValueError for a negative k or a
    dtype other than fp32.
    """
    if log_probs.dtype != torch.float32:
        raise ValueError(f"log_probs: expected float32, got {log_probs.dtype}; convert with .float()")
    if k < 0:
        raise ValueError(f"k: expected 0 or more candidates, got {k}")
    vocab = log_probs.shape[-1]
    k = min(k, vocab)
    scores = log_probs.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    token = torch.arange(vocab, device=scores.device)
    chunk = next((c for c in CHUNKS if vocab >= 4 * c * k), 1) if scores.numel() > SMALL else 1
    if chunk == 1 or not k:
        tokens = order_key(scores, token).topk(k, largest=False).indices
        return TopTokens(scores.gather(-1, tokens), tokens)
    if vocab % chunk:
        scores = torch.nn.functional.pad(scores, (0, -vocab % chunk), value=float("-inf"))
    best = scores.unflatten(-1, (-1, chunk)).amax(-1)
    chunks = order_key(best, token[: best.shape[-1]]).topk(k, largest=False, sorted=False).indices
    tokens = (chunks[..., None] * chunk + token[:chunk]).flatten(-2)
    values = scores.gather(-1, tokens)
    index = order_key(values, tokens).topk(k, largest=False).indices
    return TopTokens(values.gather(-1, index), tokens.gather(-1, index))


def factorised(
    logits: torch.Tensor,  # [R, gamma, V] any float dtype
    candidates: int,
) -> TransitionTable:
    """Table of a draft without a Markov head (P = 1), C = min(candidates, V), candidates best first.

    log q = logit - log Z in fp32, Z over the full vocabulary, temperature 1 whatever the request's. A row
    that holds a NaN or only -inf has no normaliser and so no live candidate.
    """
    logits = logits.float()
    values, tokens = top_tokens(logits, candidates)
    log_probs = values - logits.logsumexp(-1, keepdim=True)
    log_probs = log_probs.masked_fill(log_probs.isnan(), float("-inf"))
    return TransitionTable(tokens, log_probs[:, :, None])


def step_costs(log_probs: torch.Tensor, dead: int = DEAD) -> torch.Tensor:
    """``round(-log_prob * 2^28)`` in 0 .. 64 * 2^28 as int64, exact in fp32; ``dead`` for -inf and NaN.

    ``dead`` is a power of two, so fp32 holds it too.
    """
    costs = (log_probs * -(2.0**FRACTION_BITS)).round_().clamp_(0, STEP_NATS * 2.0**FRACTION_BITS)
    return torch.where(log_probs > float("-inf"), costs, float(dead)).long()


def tree_candidates(
    log_probs: torch.Tensor,  # [R, gamma, V] fp32, not empty
    budget: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and step costs by rank, [R, gamma, K] int64, that DDTree can use at a budget of 1 or more nodes.

    A token is in the tree only if the node that reaches it through the best tokens above is there too: no
    other node with this token comes earlier. So one selection over all depths, of K = B + gamma tokens in the
    order of those nodes, loses nothing. The best token of each depth is always taken; the others come by
    (path cost, deeper first, token id), and at most gamma best tokens stand among them. Chunks first, as in
    ``top_tokens``.
    """
    requests, gamma, vocab = log_probs.shape
    device = log_probs.device
    count = min(budget + gamma, gamma * vocab)
    chunk = 1 << math.isqrt(gamma * vocab // count).bit_length() - 1  # then both stages sort about as much
    padded = torch.nn.functional.pad(log_probs, (0, -vocab % chunk), value=float("-inf"))
    scores = padded.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    scores = scores.unflatten(-1, (-1, chunk))  # [R, gamma, chunks, tokens]
    chunks, stride = scores.shape[2], scores.shape[2] * chunk
    order_bits = (gamma * stride).bit_length()
    dead_path = gamma * STEP_NATS + 1 << FRACTION_BITS
    if dead_path << order_bits >= 1 << 63:
        raise ValueError(f"log_probs: expected depth^2 * vocabulary below 2^28, got {gamma}^2 * {vocab}")
    depth = torch.arange(gamma, device=device)

    def keys(step: torch.Tensor, above: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return ((step + above).clamp_max(dead_path) << order_bits) + order

    # Each chunk by its best token.
    chunk_steps = step_costs(scores.amax(-1))
    least, best_chunk = chunk_steps.min(-1)
    above = least.cumsum(1) - least  # [R, gamma] cost of the best tokens down to each depth
    order = (gamma - 1 - depth[:, None]) * chunks + torch.arange(chunks, device=device)
    chunk_keys = keys(chunk_steps, above[:, :, None], order).flatten(1)
    chosen = chunk_keys.topk(min(count, gamma * chunks), largest=False, sorted=False).indices
    # Each token of the chosen chunks.
    place = (chosen[:, :, None] * chunk + torch.arange(chunk, device=device)).flatten(1)
    step = step_costs(scores.flatten(1).gather(1, place))
    at = place // stride
    order = (gamma - 1 - 2 * at) * stride + place  # deeper first, then by token
    index = keys(step, above.gather(1, at), order).topk(count, largest=False).indices
    at, place, step = (x.gather(1, index) for x in (at, place, step))
    # One row a depth, in order; its best token whether it was chosen or not.
    same = at[:, :, None] == depth
    slot = at * count + (same.cumsum(1) * same).sum(2) - 1
    tokens = torch.zeros(requests, gamma * count, dtype=torch.int64, device=device)
    tokens = tokens.scatter(1, slot, place % stride).view(requests, gamma, count)
    costs = torch.full_like(tokens, DEAD).flatten(1).scatter(1, slot, step).view(requests, gamma, count)
    best = scores.gather(2, best_chunk[:, :, None, None].expand(-1, -1, 1, chunk))[:, :, 0]
    tokens[:, :, 0] = best_chunk * chunk + step_costs(best).argmin(-1)
    costs[:, :, 0] = least
    return tokens, costs
