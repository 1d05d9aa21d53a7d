"""Transition tables of block drafters with a Markov head (DSpark): logits + scale W2 u(parent).

u is the head's latent vector (specplug.heads): W1[parent], or with a gated head also a function of the
position's hidden state. The candidates of depth d are the C best of the *mixed* logits ``U_d + scale W2
E[u(parent)]``, the expectation over the reach probabilities of the candidates above (the anchor alone at
depth 0). The C best of U_d alone miss the true token a quarter of the time (measured on tiny DSpark drafts:
7 % of accepted length at 32 nodes); mixing reads W2 once a depth for the whole batch, which a chain pays
anyway.

Every candidate is then scored with each parent's own bias. Its exact normaliser would read all of W2 per
parent; instead log Z of the mixed logits is corrected by the candidates' own change, ``Z(parent) = Z(mix) -
sum_C exp(mix) + sum_C exp(U + bias(parent))``, exact at depth 0 and for C = V. What lies outside the
candidates is taken to weigh under every parent as it does under the mixture.

A reduced draft vocabulary scores and ranks draft ids; parents and the table's tokens are target ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import embedding, pad

from specplug.candidates import TransitionTable, top_tokens
from specplug.heads import MarkovHead
from specplug.vocabulary import DraftVocabulary

__all__ = ["MarkovHead", "Scored", "check_inputs", "conditioned", "conditioned_reference", "score_candidates"]


class Scored(NamedTuple):
    """Candidates of one depth and their log-probabilities under each parent."""

    chosen: torch.Tensor  # [R, C] int64 draft ids, best mixed logit first
    log_probs: torch.Tensor  # [R, P, C] fp32, NaN where the depth is dead


def score_candidates(
    base: torch.Tensor,  # [R, V_draft] fp32, without the bias
    latents: torch.Tensor,  # [R, P, r] fp32, u of every parent
    reach: torch.Tensor,  # [R, P] fp32, log-probability of reaching each parent; -inf = not a parent
    head: MarkovHead,
    candidates: int,
) -> Scored:
    """The "mix" candidates of one depth and the corrected log-probabilities; the module's formulas."""
    mean = (reach.softmax(-1)[:, None] @ latents)[:, 0]
    mixed = base + head.project(mean)
    values, chosen = top_tokens(mixed, candidates)
    shares = mixed.softmax(-1).gather(1, chosen)
    # What lies outside the candidates, as one more logit beside theirs.
    outside = values[:, :1] + ((1 - shares.sum(-1, keepdim=True)).clamp_min(0.0) / shares[:, :1]).log()
    bias = head.scaled(latents @ embedding(chosen, head.w2).float().transpose(1, 2))  # [R, P, C]
    scores = base.gather(1, chosen)[:, None] + bias
    everything = torch.cat((scores, outside[:, None].expand(-1, scores.shape[1], -1)), -1)
    return Scored(chosen, everything.log_softmax(-1)[..., :-1])


def conditioned(
    logits: torch.Tensor,  # [R, gamma, V_draft] any float dtype, without the bias
    head: MarkovHead,
    anchors: torch.Tensor,  # [R] int64, last committed token, target vocabulary
    candidates: int,
    *,
    hidden: torch.Tensor | None = None,  # [R, gamma, H], what the logits were made from; gated heads need it
    vocabulary: DraftVocabulary | None = None,  # None: draft ids are target ids
) -> TransitionTable:
    """Parent-conditioned table, P = C = min(candidates, V_draft), "mix" candidates, best mixed logit first.

    The loop is over depth only. A depth whose logits hold a NaN has no live candidate, nor has any below it.
    Raises ValueError where the width of ``logits`` is not the rows of ``head.w2``, the number of anchors is
    not R, hidden states are missing, or the head is an rnn: its bias depends on the whole path, which no
    table holds (``specplug.pathwise`` grows its trees).
    """
    _check(logits, head, anchors, hidden, vocabulary)
    requests, gamma, _ = logits.shape
    parent_tokens = anchors.long()[:, None]  # [R, P]
    reach = torch.zeros(requests, 1, device=logits.device)  # [R, P] log-probability of reaching each parent
    tokens, tables = [], []
    for depth in range(gamma):
        at_depth = None if hidden is None else hidden[:, depth, None]
        latents = head.step(parent_tokens, at_depth).latent
        chosen, log_probs = score_candidates(logits[:, depth].float(), latents, reach, head, candidates)
        if depth + 1 < gamma:
            reach = (reach.softmax(-1)[:, None] @ log_probs.exp())[:, 0].log()
        parent_tokens = chosen if vocabulary is None else vocabulary.to_target(chosen)
        tokens.append(parent_tokens)
        tables.append(log_probs)
    return _stack(tokens, tables, logits, min(candidates, logits.shape[2]))


def conditioned_reference(
    logits: torch.Tensor,  # [R, gamma, V_draft]
    head: MarkovHead,
    anchors: torch.Tensor,  # [R] int64
    *,
    hidden: torch.Tensor | None = None,  # [R, gamma, H]
    vocabulary: DraftVocabulary | None = None,
) -> TransitionTable:
    """Every token under every parent, normalised over the full vocabulary: P = C = V_draft, by draft id.

    The specification that ``conditioned`` approximates; [R, gamma, V, V], for small vocabularies only.
    """
    _check(logits, head, anchors, hidden, vocabulary)
    requests, gamma, vocab = logits.shape
    targets = torch.arange(vocab) if vocabulary is None else vocabulary.targets
    w2 = head.w2.float()
    log_probs = torch.full((requests, gamma, vocab, vocab), float("-inf"))
    for r in range(requests):
        for depth in range(gamma):
            parents = anchors[r, None].long() if depth == 0 else targets
            latents = head.step(parents, None if hidden is None else hidden[r, depth]).latent
            biased = logits[r, depth].float() + head.scale * (latents @ w2.T)
            log_probs[r, depth, : len(parents)] = torch.log_softmax(biased, -1)
    return TransitionTable(targets.expand(requests, gamma, vocab), log_probs)


def _check(
    logits: torch.Tensor,
    head: MarkovHead,
    anchors: torch.Tensor,
    hidden: torch.Tensor | None,
    vocabulary: DraftVocabulary | None,
) -> None:
    if head.kind == "rnn":
        raise ValueError(
            "head: an rnn Markov head's bias depends on the whole path, and a table knows only the parent; "
            "grow its trees with specplug.pathwise.grow_pathwise"
        )
    check_inputs(logits, head, anchors, hidden=hidden, vocabulary=vocabulary)


def check_inputs(
    logits: torch.Tensor,  # [R, gamma, V_draft]
    head: MarkovHead,
    anchors: torch.Tensor,  # [R]
    *,
    hidden: torch.Tensor | None,  # [R, gamma, H]
    vocabulary: DraftVocabulary | None,
) -> None:
    """Raise ValueError where shapes do not belong together or the head lacks the hidden states it reads."""
    if logits.dim() != 3 or logits.shape[2] != head.w2.shape[0]:
        raise ValueError(
            f"logits: expected [R, gamma, {head.w2.shape[0]}], one column a row of w2, "
            f"got {tuple(logits.shape)}; cut the padding off the wider one"
        )
    if tuple(anchors.shape) != (logits.shape[0],):
        raise ValueError(f"anchors: expected [{logits.shape[0]}] token ids, got {tuple(anchors.shape)}")
    if head.hidden_size is not None:
        hidden = head.check_hidden(hidden)
        if tuple(hidden.shape[:-1]) != tuple(logits.shape[:2]):
            raise ValueError(
                f"hidden: expected {[*logits.shape[:2], head.hidden_size]}, one row a row of logits, "
                f"got {list(hidden.shape)}"
            )
    if vocabulary is not None and vocabulary.targets.shape[0] != logits.shape[2]:
        raise ValueError(
            f"vocabulary: expected {logits.shape[2]} draft ids, one a column of logits, "
            f"got {vocabulary.targets.shape[0]}"
        )


def _stack(
    tokens: list[torch.Tensor], tables: list[torch.Tensor], logits: torch.Tensor, width: int
) -> TransitionTable:
    dead = float("-inf")
    if tables:
        tables[0] = pad(tables[0], (0, 0, 0, width - 1), value=dead)  # the anchor is the only parent
        log_probs = torch.stack(tables, 1).nan_to_num_(nan=dead, neginf=dead).clamp_max_(0.0)
        return TransitionTable(torch.stack(tokens, 1), log_probs)
    requests = logits.shape[0]
    return TransitionTable(
        torch.empty(requests, 0, width, dtype=torch.int64, device=logits.device),
        torch.empty(requests, 0, width, width, device=logits.device),
    )
