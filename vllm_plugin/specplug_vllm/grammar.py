"""Structured output on trees: every node's mask comes from the grammar advanced along the node's own path.

The scheduler owns the grammars and the worker the trees, so the worker sends the parents along with the
draft tokens. Nothing is pruned: a node the grammar forbids is masked at its parent's row: no draw enters it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from vllm import __version__ as vllm_version
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from specplug_vllm.config import SCHEDULER
from specplug_vllm.store import TreeStore

NO_NODE = -2
# From 0.33 on a request owns as many rows of the mask as it may draft, whatever it did draft.
FIXED_ROWS = Version(vllm_version).release >= (0, 33)


def served(vllm_config: Any) -> bool:
    """Whether grammars follow trees: not beside a reasoning parser, which looks for their start among rows in
    line, and not under a scheduler that is not ours.
    """
    ours = vllm_config.scheduler_config.scheduler_cls == SCHEDULER
    return ours and not vllm_config.structured_outputs_config.reasoning_parser


@dataclass
class TreeTokenIds(DraftTokenIds):
    """Draft tokens of a batch on their way to the scheduler."""

    parents: list[list[int]] = field(default_factory=list)  # a node each: -1 = root, NO_NODE = none there


class TreeTokensHandler(DraftTokensHandler):
    """In place of the runner's: the parents go the way of the tokens."""

    def __init__(self, device: torch.device, store: TreeStore) -> None:
        super().__init__(device)
        self._store = store
        self._parents: np.ndarray | None = None

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        super().set_draft_tokens(input_batch, draft_tokens)
        if self.draft_tokens_np is None:
            return
        slots = input_batch.idx_mapping
        node = torch.arange(self._store.budget, device=draft_tokens.device)
        exists = node < self._store.counts[slots][:, None]
        parents = torch.where(exists, self._store.parents[slots], NO_NODE)
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copy_stream):
            self._parents = async_copy_to_np(parents)
            parents.record_stream(self.copy_stream)
            self.copy_event.record()

    def get_draft_tokens(self) -> DraftTokenIds | None:
        drafted = super().get_draft_tokens()
        if drafted is None or self.draft_tokens_np is None:
            return drafted
        assert self._parents is not None
        return TreeTokenIds(drafted.req_ids, drafted.draft_token_ids, self._parents.tolist())


class TreeStructuredOutput(StructuredOutputManager):
    """The engine's manager, with one mask a node instead of one a row in line."""

    parents_of: dict[str, list[int]]  # by request, set with the class

    @classmethod
    def take_over(cls, manager: StructuredOutputManager) -> TreeStructuredOutput:
        """Turn the engine's manager, which others hold too, into one of this class."""
        manager.__class__ = cls
        manager.parents_of = {}
        return manager

    def drafted(self, tokens: DraftTokenIds, requests: dict[str, Any]) -> None:
        """Keep the parents that came with the tokens, of requests that still run."""
        if isinstance(tokens, TreeTokenIds):
            kept = {name: parents for name, parents in self.parents_of.items() if name in requests}
            self.parents_of = kept | dict(zip(tokens.req_ids, tokens.parents, strict=True))

    def validate_tokens(self, request: Any, spec_tokens: list[int]) -> list[int]:
        """All of them: the masks rule out what the grammar forbids, and the rows keep their places."""
        return spec_tokens

    def grammar_bitmask(
        self,
        requests: dict[str, Any],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> np.ndarray | None:
        if not structured_output_request_ids:
            return None
        most_rows = 1 + self.vllm_config.num_speculative_tokens
        if self._grammar_bitmask is None:
            assert self.backend is not None
            most = self.vllm_config.scheduler_config.max_num_seqs
            self._grammar_bitmask = self.backend.allocate_token_bitmask(most * most_rows)
        first = 0
        for name in structured_output_request_ids:
            tokens = scheduled_spec_decode_tokens.get(name, [])
            grammar = requests[name].structured_output_request.grammar
            # Rows that no path reaches are never walked into: any mask will do.
            self._grammar_bitmask[first : first + 1 + len(tokens)].fill_(self._full_mask)
            self._fill_tree(grammar, name, tokens, first)
            first += most_rows if FIXED_ROWS else 1 + len(tokens)
        return self._grammar_bitmask[:first].numpy()

    def _fill_tree(self, grammar: Any, name: str, tokens: list[int], first: int) -> None:
        """The masks of one request's rows, depth first; the grammar ends where it began."""
        children = defaultdict(list)
        for node, parent in zip(range(len(tokens)), self.parents_of.get(name, []), strict=False):
            if parent != NO_NODE and tokens[node] >= 0:
                children[parent].append(node)
        # (node, how far the grammar is when its turn comes); a parent is entered before its children.
        waiting, entered = [(-1, 0)], 0
        while waiting:
            node, above = waiting.pop()
            if entered > above:
                grammar.rollback(entered - above)
                entered = above
            if node >= 0:
                if not grammar.validate_tokens([tokens[node]]) or not grammar.accept_tokens(
                    name, [tokens[node]]
                ):
                    continue
                entered += 1
            if grammar.is_terminated():
                continue
            grammar.fill_bitmask(self._grammar_bitmask, first + 1 + node)
            waiting += [(child, entered) for child in reversed(children[node])]
        if entered:
            grammar.rollback(entered)
