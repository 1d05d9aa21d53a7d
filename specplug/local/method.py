"""From a block proposal to a draft tree: the methods that an evaluation compares.

plain              no draft
chain              the greedy path of the draft, each token biased by the one before (a DSpark chain)
tree               best-first over path products; with a Markov head under each parent's own bias
tree-greedy-path   a head applied along the greedy path alone: its depths' marginals, then DDTree. What a host
                   does that has only the chain's logits
tree-without-head  DDTree on the base logits, the head unused

Without a head the last three are one tree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specplug.config import MAX_CANDIDATES, MAX_TREE_BUDGET
from specplug.drafting import draft_tree
from specplug.heads import Chain, draft_chain
from specplug.local.draft import Draft, Proposal
from specplug.tree import DraftTree

TREES = ("tree", "tree-greedy-path", "tree-without-head")
METHODS = ("plain", "chain", *TREES)


class Method(NamedTuple):
    """One column of an evaluation."""

    name: str  # of METHODS
    budget: int = 0  # nodes of a tree; 0 for plain and chain
    candidates: int = 32  # C a depth; used by "tree" with a Markov head alone

    @property
    def label(self) -> str:
        return f"{self.name} {self.budget}" if self.name in TREES else self.name

    def check(self) -> None:
        """Raise ValueError where a field is out of range."""
        if self.name not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.name!r}")
        if self.name in TREES and not 1 <= self.budget <= MAX_TREE_BUDGET:
            raise ValueError(f"budget: expected 1..{MAX_TREE_BUDGET} nodes, got {self.budget}")
        if self.name not in TREES and self.budget:
            raise ValueError(f"budget: expected 0 for {self.name}, which is no tree, got {self.budget}")
        if not 1 <= self.candidates <= MAX_CANDIDATES:
            raise ValueError(f"candidates: expected 1..{MAX_CANDIDATES} a depth, got {self.candidates}")

    def build(self, draft: Draft, proposal: Proposal) -> DraftTree:
        """The tree of a proposal, in target token ids. "plain" has none: a ValueError."""
        if self.name == "plain":
            raise ValueError("method plain: builds no tree")
        (anchors, hidden, logits), vocabulary = proposal, draft.vocabulary
        if self.name == "tree":
            return draft_tree(
                logits,
                self.budget,
                head=draft.head,
                anchors=anchors,
                hidden=hidden,
                vocabulary=vocabulary,
                candidates=self.candidates,
            )
        if self.name == "tree-without-head":
            return draft_tree(logits, self.budget, vocabulary=vocabulary)
        path = greedy_path(draft, proposal)
        if self.name == "tree-greedy-path":
            return draft_tree(path.logits, self.budget, vocabulary=vocabulary)
        return chain(path)


def greedy_path(draft: Draft, proposal: Proposal) -> Chain:
    """The best token of every depth, biased by the one above where the draft has a head."""
    (anchors, hidden, logits), vocabulary = proposal, draft.vocabulary
    if draft.head is not None:
        return draft_chain(logits, draft.head, anchors, hidden=hidden, vocabulary=vocabulary)
    best = logits.argmax(-1)
    return Chain(best if vocabulary is None else vocabulary.to_target(best), logits.float())


def chain(path: Chain) -> DraftTree:
    """A tree without a branch."""
    requests, gamma = path.tokens.shape
    node = torch.arange(gamma, dtype=torch.int32, device=path.tokens.device).expand(requests, -1)
    return DraftTree(
        tokens=path.tokens,
        parents=node - 1,
        depths=node + 1,
        scores=(path.logits.amax(-1) - path.logits.logsumexp(-1)).cumsum(1),
        counts=torch.full((requests,), gamma, dtype=torch.int32, device=path.tokens.device),
    )
