"""Sampling parameters on the rows of drafts: what plain decoding would do with a request at each of its rows.

A row stands for one possible past, so everything that reads the past is done per path: penalties and
min_new_tokens from a history of our own (`specplug.penalties`: the scheduler's lags under overlap, and stock
penalisers start from nothing after a retraction), grammars by SGLang's own walk over the tree. The rest needs
no past: the stock sampler draws every row at once, its batch information repeated for the rows of a request
and its noise keyed by the rows' depths.

Order of the stages, as in plain decoding under overlap: penalties, grammar, bias, custom processors.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specplug.penalties import Asked, Penalties, PenaltyHistory
from specplug.processors import ancestors
from specplug.tree import DraftTree, sibling_links

if TYPE_CHECKING:
    from specplug.verify import Walk

logger = logging.getLogger(__name__)

counted: Counter[str] = Counter()  # requests refused or served without drafts, by reason


def count(reason: str) -> None:
    """Count a request, and say so in the log once a reason."""
    counted[reason] += 1
    if counted[reason] == 1:
        logger.warning("specplug: %s; further requests are counted in /server_info only.", reason)


def penalised(request: Any) -> bool:
    """Whether a request's next token depends on which tokens it has put out."""
    params = request.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def root_only(batch: Any) -> torch.Tensor | None:
    """Requests that verify no node, [R] bool; None where all may.

    A custom processor reads what it likes of a request, so it is right where plain decoding would call it.
    """
    alone = [request.custom_logit_processor is not None for request in batch.reqs]
    return torch.tensor(alone, device=batch.seq_lens.device) if any(alone) else None


def temperatures(info: Any) -> torch.Tensor:
    """Of a batch's requests, [R] fp32. SGLang writes a greedy request as top-k of 1."""
    return info.temperatures.view(-1).masked_fill(info.top_ks.view(-1) <= 1, 0.0).float()


class _Penalised(NamedTuple):
    """The n penalised requests of a batch."""

    key: tuple[Any, ...]  # what they were read from
    places: torch.Tensor  # [n] int64, in the batch
    asked: Penalties


class PathSampler:
    """One worker's sampling. Notation: R requests, B nodes, W = B + 1 rows, V vocabulary, gamma depth."""

    def __init__(self, model_runner: Any, *, max_depth: int) -> None:
        self._runner, self._max_depth = model_runner, max_depth
        self._device = torch.device(model_runner.device)
        self._history = PenaltyHistory(model_runner.model_config.vocab_size, self._device)
        self._last: _Penalised | None = None

    @contextlib.contextmanager
    def prefilling(self, batch: Any) -> Iterator[None]:
        """Around a prefill: a request that was retracted goes on with its penalties."""
        stock = batch.sampling_info
        if any(request.output_ids and penalised(request) for request in batch.reqs):
            asking = self._begin(batch)
            assert asking is not None
            added, scaled = self._history.standing(asking.asked)
            additive = torch.zeros(len(batch.reqs), added.shape[1], device=self._device)
            batch.sampling_info = dataclasses.replace(
                stock,
                penalizer_orchestrator=None,
                acc_additive_penalties=additive.index_copy(0, asking.places, added),
                acc_scaling_penalties=(additive + 1).index_copy(0, asking.places, scaled),
            )
        try:
            yield
        finally:
            batch.sampling_info = stock

    def prefilled(
        self,
        batch: Any,
        first: torch.Tensor,  # [R] int64, the tokens drawn
    ) -> None:
        """After a prefill: the history of each penalised request begins with what it has."""
        asking = self._begin(batch)
        if asking is not None:
            self._history.add(asking.asked, first[asking.places][:, None].long())

    def prepare(self, batch: Any, tree: DraftTree) -> Any | None:
        """Before the target's forward: the tree on its way to the host, where grammars walk it; else None."""
        if not batch.has_grammar:
            return None
        from sglang.srt.speculative.spec_utils import GrammarTree

        root = batch.spec_info.bonus_tokens.view(-1, 1).long()
        links = sibling_links(tree.parents, tree.counts)
        return GrammarTree.from_device(*links, torch.cat([root, tree.tokens], 1))

    def draw(
        self,
        batch: Any,
        logits_output: Any,
        tree: DraftTree,
        positions: torch.Tensor,  # [R, W] int64, of the rows
        prepared: Any | None,
        grammar_barrier: Any,
    ) -> torch.Tensor:
        """The target's own token at every row, [R, W] int64.

        ``logits_output.next_token_logits`` [R * W, V] become what plain decoding would take log-probabilities
        of.
        """
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.speculative.spec_utils import build_grammar_vocab_mask

        logits, mask = logits_output.next_token_logits, None
        if prepared is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=prepared,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=grammar_barrier,
            )
        self.adjust(batch, logits, tree, grammar_mask=mask)
        drawn = self._runner.sampler(
            LogitsProcessorOutput(next_token_logits=logits.clone()),  # it divides by the temperature in place
            _repeated(batch.sampling_info, positions.shape[1]),
            False,
            [],
            [],
            positions.reshape(-1),
        )
        return drawn.view(positions.shape).long()

    def adjust(
        self,
        batch: Any,
        logits: torch.Tensor,  # [R * W, V], changed in place
        tree: DraftTree,
        *,
        grammar_mask: Any | None = None,
    ) -> None:
        """Everything that changes logits before the temperature, each row by its own path."""
        from sglang.srt.layers.sampler import apply_custom_logit_processor

        info, rows = batch.sampling_info, logits.view(len(batch.reqs), -1, logits.shape[-1])
        asking = self._asking(batch)
        if asking is not None:
            at = asking.places
            path = ancestors(tree.parents[at], tree.tokens[at], tree.depths[at], max_depth=self._max_depth)
            rows[at] = self._history.apply(rows[at], path, asking.asked).to(rows.dtype)
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        if info.logit_bias is not None:
            rows += info.logit_bias[:, None].to(rows.dtype)
        if info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, info, num_tokens_in_batch=rows.shape[1])

    def committed(
        self,
        batch: Any,
        tokens: torch.Tensor,  # [R, gamma + 1] int64, emitted; -1 past the last
    ) -> None:
        """After acceptance: the emitted tokens are history."""
        asking = self._asking(batch)
        if asking is not None:
            self._history.add(asking.asked, tokens[asking.places])

    def logprobs(
        self,
        batch: Any,
        logits_output: Any,
        draws: torch.Tensor,  # [R, W] int64
        walk: Walk,
    ) -> None:
        """Log-probabilities of the emitted tokens, written where SGLang reads them."""
        from sglang.srt.layers.logprob_processor import compute_spec_logprobs

        requests, width = draws.shape
        first = torch.arange(requests, device=draws.device)[:, None] * width
        compute_spec_logprobs(batch, logits_output, draws.reshape(-1), accept_index=first + walk.path)

    def _begin(self, batch: Any) -> _Penalised | None:
        """Set the history of each penalised request to what the scheduler has of it."""
        asking = self._asking(batch)
        if asking is not None:
            outputs = [list(request.output_ids) for request in batch.reqs if penalised(request)]
            self._history.begin(asking.asked, outputs)
        return asking

    def _asking(self, batch: Any) -> _Penalised | None:
        """The batch's penalised requests; None without any. Read anew with the batch."""
        requests = [(place, request) for place, request in enumerate(batch.reqs) if penalised(request)]
        if not requests:
            return None
        key = tuple((place, request.rid, request.kv.req_pool_idx) for place, request in requests)
        if self._last is None or self._last.key != key:
            places = torch.tensor([place for place, _ in requests], device=self._device)
            self._last = _Penalised(key, places, self._history.read([_asked(one) for _, one in requests]))
        return self._last


def _asked(request: Any) -> Asked:
    params, tokenizer = request.sampling_params, request.tokenizer
    stops = {*(params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    if tokenizer is not None:
        stops |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id} - {None}
    return Asked(
        request.kv.req_pool_idx,
        params.frequency_penalty,
        params.presence_penalty,
        params.repetition_penalty,
        params.min_new_tokens,
        sorted(stops),
    )


def _repeated(info: Any, width: int) -> Any:
    """Batch information for ``width`` rows of each request, of which every adjustment is already made."""
    repeated = copy.copy(info)
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
        value = getattr(info, name)
        setattr(repeated, name, None if value is None else value.repeat_interleave(width, 0))
    for name in ("penalizer_orchestrator", "acc_additive_penalties", "acc_scaling_penalties", "logit_bias"):
        setattr(repeated, name, None)
    repeated.grammar_mask = repeated.sampling_mask_batch_indices = None
    repeated.has_custom_logit_processor = False
    return repeated
