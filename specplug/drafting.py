"""One call from a draft's block logits to its trees, whatever heads the draft has."""

from __future__ import annotations

import torch

from specplug.candidates import factorised
from specplug.ddtree import grow
from specplug.heads import MarkovHead
from specplug.markov import conditioned
from specplug.pathwise import grow_pathwise
from specplug.tree import DraftTree
from specplug.vocabulary import DraftVocabulary


def draft_tree(
    logits: torch.Tensor,  # [R, gamma, V_draft] any float dtype, without a Markov bias
    budget: int,
    *,
    head: MarkovHead | None = None,  # None: depths are independent (DFlash)
    anchors: torch.Tensor | None = None,  # [R] int64, last committed token, target ids; a head needs it
    hidden: torch.Tensor
    | None = None,  # [R, gamma, H], what the logits were made from; gated and rnn need it
    vocabulary: DraftVocabulary | None = None,  # where V_draft is a reduced vocabulary
    candidates: int = 32,  # tokens kept a depth under a head; without one min(budget, V_draft) is lossless
) -> DraftTree:
    """The best ``budget`` prefixes of each request, tokens in the target's vocabulary; fields [R, budget].

    Without a head the factorised DDTree, under a vanilla or gated head the parent-conditioned one, under an
    rnn head the path-conditioned one. Raises ValueError for shapes that do not belong together.
    """
    if head is None:
        table = factorised(logits, budget)
        return grow(table if vocabulary is None else vocabulary.map_table(table), budget)
    if anchors is None:
        raise ValueError(
            "anchors: a Markov head starts from the last committed token of each request, got none"
        )
    if head.kind == "rnn":
        return grow_pathwise(
            logits, head, anchors, budget, candidates=candidates, hidden=hidden, vocabulary=vocabulary
        )
    table = conditioned(logits, head, anchors, candidates, hidden=hidden, vocabulary=vocabulary)
    return grow(table, budget)
