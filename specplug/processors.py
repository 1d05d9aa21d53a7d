"""Logits processing that depends on a row's history, per path of a draft tree.

The history of a window row is the committed tokens plus the tokens on its path, its own token last. Rows that
merely stand before it are siblings, not history: counting them is the fault of a linear implementation on a
tree. Every function here is pure, batched, and the same on a chain, a tree or a root alone; formulas and
order (repetition, frequency, presence, then bias and bad words in the host's order) are those of vLLM and of
Hugging Face Transformers.

Notation: R requests, W = B + 1 window rows, V vocabulary, gamma tree depth. The root's token is committed, so
the caller's counts include it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Ancestors(NamedTuple):
    """The tokens below the root on the path to each window row."""

    tokens: torch.Tensor  # [R, W, gamma] int64, in order, the row's own token last; 0 past the depth
    depths: torch.Tensor  # [R, W] int64, tokens that count: 0 for the root and for padding


def ancestors(
    parents: torch.Tensor,  # [R, B] int32, -1 = root
    tokens: torch.Tensor,  # [R, B] int64
    depths: torch.Tensor,  # [R, B] int32, 1..gamma, 0 for padding
    *,
    max_depth: int,
) -> Ancestors:
    """Path tokens of every window row. ``max_depth`` is gamma; nodes deeper than it are not supported."""
    above = torch.nn.functional.pad(parents.long() + 1, (1, 0))  # window rows; the root is its own parent
    own = torch.nn.functional.pad(tokens, (1, 0))
    depth = torch.nn.functional.pad(depths.long(), (1, 0))
    row = torch.arange(above.shape[1], device=parents.device).expand_as(above)
    path = torch.zeros(*above.shape, max_depth + 1, dtype=torch.int64, device=parents.device)
    for _ in range(max_depth):
        # column depth - 1; the root writes into the spare last column
        column = depth.gather(1, row) - 1
        column = torch.where(column >= 0, column, max_depth)
        path = path.scatter(2, column[..., None], own.gather(1, row)[..., None])
        row = above.gather(1, row)
    return Ancestors(path[..., :max_depth], depth)


def penalise(
    logits: torch.Tensor,  # [R, W, V] any float dtype
    path: Ancestors,
    *,
    output_counts: torch.Tensor,  # [R, V] int32, how often each token was committed after the prompt
    in_prompt: torch.Tensor,  # [R, V] bool
    repetition: torch.Tensor,  # [R] fp32 > 0, 1 = off
    frequency: torch.Tensor,  # [R] fp32, 0 = off
    presence: torch.Tensor,  # [R] fp32, 0 = off
) -> torch.Tensor:
    """Repetition, frequency and presence penalties, [R, W, V] fp32.

    Repetition (Keskar et al. 2019) divides positive and multiplies other logits of every token seen in prompt
    or output; then ``frequency * count`` and ``presence * (count > 0)`` are subtracted, over the output only
    (OpenAI's definition). Memory: R * W * V int32 beside the logits.
    """
    seen = torch.arange(path.tokens.shape[2], device=logits.device) < path.depths[..., None]
    counts = output_counts[:, None].expand(-1, logits.shape[1], -1).int()
    counts = counts.scatter_add(2, path.tokens, seen.int())
    present = counts > 0
    logits = logits.float()
    scale = torch.where(present | in_prompt[:, None], repetition[:, None, None], 1.0)
    logits = torch.where(logits > 0, logits / scale, logits * scale)
    return logits - frequency[:, None, None] * counts - presence[:, None, None] * present


def add_bias(
    logits: torch.Tensor,  # [R, W, V] any float dtype
    *,
    tokens: torch.Tensor,  # [R, N] int64, biased tokens, any valid token past the count
    values: torch.Tensor,  # [R, N] fp32, -inf forbids
    counts: torch.Tensor,  # [R] int32, biased tokens of each request
) -> torch.Tensor:
    """Logit bias, [R, W, V] fp32. It needs no history; a token named twice gets the sum."""
    live = torch.arange(tokens.shape[1], device=logits.device) < counts[:, None]
    values = torch.where(live, values.float(), 0.0)
    shape = (-1, logits.shape[1], -1)
    return logits.float().scatter_add(2, tokens[:, None].expand(shape), values[:, None].expand(shape))


def above_min_p(
    logits: torch.Tensor,  # [N, V] any float dtype
    *,
    temperatures: torch.Tensor,  # [N, 1] above 0
    min_p: torch.Tensor,  # [N] 0..1
) -> torch.Tensor:
    """The logits, -inf below ``min_p`` of the likeliest token's probability; 0 forbids nothing."""
    probabilities = (logits / temperatures).softmax(-1)
    floor = probabilities.amax(-1, keepdim=True) * min_p[:, None]
    return logits.masked_fill(probabilities < floor, float("-inf"))


class BadWords(NamedTuple):
    """Forbidden token sequences, K of at most L tokens a request, aligned to the *end* of the last axis."""

    tokens: torch.Tensor  # [R, K, L] int64, last token at L - 1; anything valid before the word's start
    lengths: torch.Tensor  # [R, K] int32, 1..L; 0 = no word

    @classmethod
    def of(cls, words: list[list[list[int]]], device: torch.device | str | None = None) -> BadWords:
        """From token lists, one list of words a request. Raises ValueError for an empty word."""
        if any(not word for request in words for word in request):
            raise ValueError("bad words: expected at least one token a word, got an empty list; leave it out")
        count = max((len(request) for request in words), default=0)
        length = max((len(word) for request in words for word in request), default=1)
        rows = [[[0] * (length - len(word)) + word for word in request] for request in words]
        rows = [request + [[0] * length] * (count - len(request)) for request in rows]
        lengths = [[len(word) for word in request] + [0] * (count - len(request)) for request in words]
        return cls(
            torch.tensor(rows, dtype=torch.int64, device=device).view(len(words), count, length),
            torch.tensor(lengths, dtype=torch.int32, device=device).view(len(words), count),
        )


def ban(
    logits: torch.Tensor,  # [R, W, V] any float dtype
    path: Ancestors,
    words: BadWords,
    *,
    recent: torch.Tensor,  # [R, H] int64, the last committed tokens, newest at H - 1; H >= L - 1
    recent_counts: torch.Tensor,  # [R] int32, how many of them count (fewer early in a request)
) -> torch.Tensor:
    """-inf for the last token of every bad word whose other tokens end the row's history; [R, W, V] fp32.

    Whether the prompt counts as history is the caller's choice of ``recent``: vLLM takes the output only,
    Transformers prompt and output. Raises ValueError where ``recent`` is too short for the longest word.
    """
    width, history = words.tokens.shape[2], recent.shape[1]
    if history < width - 1:
        raise ValueError(f"recent: expected at least {width - 1} committed tokens a request, got {history}")
    rows = logits.shape[1]
    committed = recent[:, None].expand(-1, rows, -1)
    line = torch.cat([committed, path.tokens], 2)  # history of a row ends at column H + depth - 1
    match = (words.lengths > 0)[:, None].expand(-1, rows, -1)
    for back in range(1, width):
        column = history + path.depths - back  # [R, W]
        exists = column >= history - recent_counts[:, None]
        token = line.gather(2, column.clamp_min(0)[..., None])  # [R, W, 1]
        same = (token == words.tokens[:, None, :, width - 1 - back]) & exists[..., None]
        match = match & (same | (words.lengths <= back)[:, None])
    last = words.tokens[:, None, :, width - 1].expand(-1, rows, -1)
    return logits.float().scatter_add(2, last, torch.where(match, float("-inf"), 0.0))
