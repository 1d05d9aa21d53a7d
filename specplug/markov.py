"""Transition tables of block drafters with a vanilla Markov head (DSpark): logits + scale W2 W1[parent].

The candidates of depth d are the C best of the *mixed* logits ``U_d + scale W2 E[W1[parent]]``, the
expectation over the reach probabilities of the candidates above (the anchor alone at depth 0). The C best of
U_d alone miss the true token a quarter of the time (measured on tiny DSpark drafts: 7 % of accepted length at
32 nodes); mixing reads W2 once a depth for the whole batch, which a chain pays anyway.

Every candidate is then scored with each parent's own bias. Its exact normaliser would read all of W2 per
parent; instead log Z of the mixed logits is corrected by the candidates' own change, ``Z(parent) = Z(mix) -
sum_C exp(mix) + sum_C exp(U + bias(parent))``, exact at depth 0 and for C = V. What lies outside the
candidates is taken to weigh under every parent as it does under the mixture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specplug.candidates import TransitionTable, top_tokens


@dataclass(frozen=True)
class MarkovHead:
    """Low-rank bias of the next token's logits by the token before (``markov_head.markov_w{1,2}.weight``)."""

    w1: torch.Tensor  # [V, r] embedding of the parent token, target vocabulary
    w2: torch.Tensor  # [V_draft, r] output rows, exactly as many as the draft's logits have columns
    scale: float = 1.0  # what the host multiplies its logits by

    def __post_init__(self) -> None:
        if self.w1.dim() != 2 or self.w2.dim() != 2 or self.w1.shape[1] != self.w2.shape[1]:
            raise ValueError(
                "MarkovHead: expected w1 [V, r] and w2 [V_draft, r] of one rank, "
                f"got {tuple(self.w1.shape)} and {tuple(self.w2.shape)}"
            )
        if self.w2.shape[0] > self.w1.shape[0]:
            raise ValueError(
                f"MarkovHead: w2 has {self.w2.shape[0]} rows but w1 knows only {self.w1.shape[0]} tokens; "
                "cut the padding rows off w2"
            )


def conditioned(
    logits: torch.Tensor,  # [R, gamma, V_draft] any float dtype, without the bias
    head: MarkovHead,
    anchors: torch.Tensor,  # [R] int64, last committed token, target vocabulary
    candidates: int,
) -> TransitionTable:
    """Parent-conditioned table, P = C = min(candidates, V_draft), "mix" candidates, best mixed logit first.

    Token ids of logits, w2, w1 and anchors are the same ids. The loop is over depth only. A depth whose
    logits hold a NaN has no live candidate, nor has any below it. Raises ValueError where the width of
    ``logits`` is not the rows of ``head.w2`` or the number of anchors is not R.
    """
    _check(logits, head, anchors)
    requests, gamma, _ = logits.shape
    dead = float("-inf")
    parent_tokens = anchors.long()[:, None]  # [R, P]
    reach = torch.zeros(requests, 1, device=logits.device)  # [R, P] log-probability of reaching each parent
    tokens, tables = [], []
    for depth in range(gamma):
        base = logits[:, depth].float()
        embedded = head.w1[parent_tokens].float()  # [R, P, r]
        mean = (reach.softmax(-1)[:, None] @ embedded)[:, 0]
        mixed = base + head.scale * (mean.to(head.w2.dtype) @ head.w2.T).float()
        mixed_values, chosen = top_tokens(mixed, candidates)
        log_z = mixed.logsumexp(-1)[:, None, None]
        bias = head.scale * (embedded @ head.w2[chosen].float().transpose(1, 2))  # [R, P, C]
        scores = base.gather(1, chosen)[:, None] + bias
        mixed_values = mixed_values[:, None]
        shift = torch.maximum(scores, mixed_values).amax(-1, keepdim=True)
        outside = (log_z - shift).exp() - (mixed_values - shift).exp().sum(-1, keepdim=True)
        total = outside.clamp_min(0.0) + (scores - shift).exp().sum(-1, keepdim=True)
        log_probs = scores - shift - total.log()  # [R, P, C]
        reach = (reach[:, :, None] + log_probs).logsumexp(1)
        parent_tokens = chosen
        tokens.append(chosen)
        rows = torch.nn.functional.pad(log_probs, (0, 0, 0, chosen.shape[1] - log_probs.shape[1]), value=dead)
        tables.append(rows.masked_fill(rows.isnan(), dead).clamp_max(0.0))
    return _stack(tokens, tables, logits, min(candidates, logits.shape[2]))


def conditioned_reference(
    logits: torch.Tensor,  # [R, gamma, V_draft]
    head: MarkovHead,
    anchors: torch.Tensor,  # [R] int64
) -> TransitionTable:
    """Every token under every parent, normalised over the full vocabulary: P = C = V_draft, ids ascending.

    The specification that ``conditioned`` approximates; [R, gamma, V, V], for small vocabularies only.
    """
    _check(logits, head, anchors)
    requests, gamma, vocab = logits.shape
    bias = head.scale * (head.w1.float() @ head.w2.float().T)  # [V, V_draft]
    log_probs = torch.full((requests, gamma, vocab, vocab), float("-inf"))
    for r in range(requests):
        for depth in range(gamma):
            parents = [int(anchors[r])] if depth == 0 else list(range(vocab))
            for row, parent in enumerate(parents):
                log_probs[r, depth, row] = torch.log_softmax(logits[r, depth].float() + bias[parent], -1)
    return TransitionTable(torch.arange(vocab).expand(requests, gamma, vocab), log_probs)


def _check(logits: torch.Tensor, head: MarkovHead, anchors: torch.Tensor) -> None:
    if logits.dim() != 3 or logits.shape[2] != head.w2.shape[0]:
        raise ValueError(
            f"logits: expected [R, gamma, {head.w2.shape[0]}], one column a row of w2, "
            f"got {tuple(logits.shape)}; cut the padding off the wider one"
        )
    if tuple(anchors.shape) != (logits.shape[0],):
        raise ValueError(f"anchors: expected [{logits.shape[0]}] token ids, got {tuple(anchors.shape)}")


def _stack(
    tokens: list[torch.Tensor], tables: list[torch.Tensor], logits: torch.Tensor, width: int
) -> TransitionTable:
    if tables:
        return TransitionTable(torch.stack(tokens, 1), torch.stack(tables, 1))
    requests = logits.shape[0]
    return TransitionTable(
        torch.empty(requests, 0, width, dtype=torch.int64, device=logits.device),
        torch.empty(requests, 0, width, width, device=logits.device),
    )
