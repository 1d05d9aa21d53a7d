"""One call from a draft's block logits to its trees, whatever heads the draft has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specplug.calibration import Coefficients, calibrated
from specplug.candidates import factorised
from specplug.cost_curves import Shape
from specplug.ddtree import greedy_chain, grow
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


class Drafted(NamedTuple):
    """The drafts of a batch."""

    tree: DraftTree  # scores are estimates of acceptance, nodes in their order
    log_probs: torch.Tensor  # [R, budget] fp32, the draft's own of the same nodes


def draft_shape(
    shape: Shape,
    logits: torch.Tensor,  # [R, gamma, V] any float dtype, without a Markov bias
    budget: int,
    *,
    head: MarkovHead | None = None,
    anchors: torch.Tensor,  # [R] int64, last committed token
    hidden: torch.Tensor | None = None,  # [R, gamma, H]
    candidates: int = 32,
    calibration: Coefficients | None = None,
    temperatures: torch.Tensor | None = None,  # [R] fp32, 0 = greedy; a calibration needs it
) -> Drafted:
    """`draft_tree`, or as "chain" the greedy path alone; fields [R, budget] either way."""
    if shape == "chain":
        if head is None:
            chain = greedy_chain(factorised(logits, 1))
        elif head.kind == "rnn":  # the one path that a single candidate a depth leaves
            depth = logits.shape[1]
            chain = grow_pathwise(logits, head, anchors, depth, candidates=1, hidden=hidden)
        else:
            chain = greedy_chain(conditioned(logits, head, anchors, candidates, hidden=hidden))
        everybody = torch.ones_like(anchors, dtype=torch.bool)
        tree = chain.select(everybody, DraftTree.empty(len(anchors), budget, anchors.device))
    else:
        tree = draft_tree(logits, budget, head=head, anchors=anchors, hidden=hidden, candidates=candidates)
    if calibration is None or temperatures is None:
        return Drafted(tree, tree.scores)
    ordered = calibrated(tree, calibration, temperatures, max_depth=logits.shape[1])
    return Drafted(ordered.tree, tree.scores.gather(1, ordered.order))
