"""Sampling parameters on the rows of drafts: what plain decoding would do with a request at each of its rows.

A row stands for one possible past, so everything that reads the past is done per path: penalties and
min_new_tokens from a history that the worker keeps itself (the scheduler's lags under overlap, and stock
penalisers start from nothing after a retraction), grammars by SGLang's own walk over the tree. The rest needs
no past: the stock sampler draws every row at once, its batch information repeated for the rows of a request
and its noise keyed by the rows' depths.

Order of the stages, as in plain decoding under overlap: frequency and presence, repetition, grammar, bias,
custom processors. SGLang's penalties count the output only, not the prompt.
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

from specplug.processors import Ancestors, add_bias, ancestors, penalise

if TYPE_CHECKING:
    from specplug.tree import DraftTree
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


class _Asked(NamedTuple):
    """What the n penalised requests of a batch ask for."""

    places: torch.Tensor  # [n] int64, in the batch
    rows: torch.Tensor  # [n] int64, in the history
    frequency: torch.Tensor  # [n] fp32
    presence: torch.Tensor  # [n] fp32
    repetition: torch.Tensor  # [n] fp32
    minimum: torch.Tensor  # [n] int32, output tokens before a stop token is allowed
    stops: torch.Tensor  # [n, S] int64, stop tokens
    stop_counts: torch.Tensor  # [n] int32


class PathSampler:
    """One worker's sampling. Notation: R requests, B nodes, W = B + 1 rows, V vocabulary, gamma depth."""

    def __init__(self, model_runner: Any, *, max_depth: int) -> None:
        self._runner, self._max_depth = model_runner, max_depth
        self._vocabulary = model_runner.model_config.vocab_size
        self._device = torch.device(model_runner.device)
        # Grow with the pool slots that ever held a penalised request: row i belongs to the i-th such slot.
        self._row_of: dict[int, int] = {}
        self._counts = torch.zeros(0, self._vocabulary, dtype=torch.int32, device=self._device)
        self._lengths = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._asked: tuple[tuple[Any, ...], _Asked | None] = ((), None)

    @contextlib.contextmanager
    def prefilling(self, batch: Any) -> Iterator[None]:
        """Around a prefill: a request that was retracted goes on with its penalties."""
        stock = batch.sampling_info
        if any(request.output_ids and penalised(request) for request in batch.reqs):
            self._start(batch)
            batch.sampling_info = self._with_history(batch)
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
        asked = self._start(batch)
        if asked is not None:
            self._add(asked.rows, first[asked.places][:, None].long())

    def prepare(self, batch: Any, tree: DraftTree) -> Any | None:
        """Before the target's forward: the tree on its way to the host, where grammars walk it; else None."""
        if not batch.has_grammar:
            return None
        from sglang.srt.speculative.spec_utils import GrammarTree

        root = batch.spec_info.bonus_tokens.view(-1, 1).long()
        return GrammarTree.from_device(*_links(tree.parents, tree.counts), torch.cat([root, tree.tokens], 1))

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
        asked = self._wanted(batch)
        if asked is not None:
            path = ancestors(
                tree.parents[asked.places],
                tree.tokens[asked.places],
                tree.depths[asked.places],
                max_depth=self._max_depth,
            )
            rows[asked.places] = self._penalised(rows[asked.places], path, asked).to(rows.dtype)
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
        asked = self._wanted(batch)
        if asked is not None:
            self._add(asked.rows, tokens[asked.places])

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

    def _penalised(
        self,
        logits: torch.Tensor,  # [n, W, V]
        path: Ancestors,
        asked: _Asked,
    ) -> torch.Tensor:
        counts, lengths = self._counts[asked.rows], self._lengths[asked.rows]
        none, off = torch.zeros_like(counts, dtype=torch.bool), torch.zeros_like(asked.frequency)
        shared = {"output_counts": counts, "in_prompt": none}
        logits = penalise(
            logits,
            path,
            repetition=off + 1,
            frequency=asked.frequency,
            presence=asked.presence,
            **shared,
        )
        logits = penalise(logits, path, repetition=asked.repetition, frequency=off, presence=off, **shared)
        forbidden = torch.full_like(asked.stops, float("-inf"), dtype=torch.float32)
        stopless = add_bias(logits, tokens=asked.stops, values=forbidden, counts=asked.stop_counts)
        early = lengths[:, None] + path.depths < asked.minimum[:, None]
        return torch.where(early[..., None], stopless, logits)

    def _with_history(self, batch: Any) -> Any:
        """The batch's sampling information with penalties of the whole history, in the form of overlap."""
        asked = self._wanted(batch)
        assert asked is not None
        shape = (len(asked.places), 1, self._vocabulary)
        root = Ancestors(
            torch.zeros(shape[0], 1, 0, dtype=torch.int64, device=self._device),
            torch.zeros(shape[0], 1, dtype=torch.int64, device=self._device),
        )
        plain = asked._replace(repetition=torch.ones_like(asked.repetition))
        added = self._penalised(torch.zeros(shape, device=self._device), root, plain)[:, 0]
        scaling = asked._replace(
            frequency=torch.zeros_like(asked.frequency),
            presence=torch.zeros_like(asked.presence),
            minimum=torch.zeros_like(asked.minimum),
        )
        scaled = -self._penalised(-torch.ones(shape, device=self._device), root, scaling)[:, 0]
        additive = torch.zeros(len(batch.reqs), self._vocabulary, device=self._device)
        factor = torch.ones_like(additive)
        additive[asked.places], factor[asked.places] = added, scaled
        return dataclasses.replace(
            batch.sampling_info,
            penalizer_orchestrator=None,
            acc_additive_penalties=additive,
            acc_scaling_penalties=factor,
        )

    def _start(self, batch: Any) -> _Asked | None:
        """Set the history of each penalised request to what the scheduler has of it."""
        asked = self._wanted(batch)
        if asked is None:
            return None
        self._counts[asked.rows] = 0
        self._lengths[asked.rows] = 0
        outputs = [list(request.output_ids) for request in batch.reqs if penalised(request)]
        if any(outputs):
            self._add(asked.rows, _padded(outputs, fill=-1, device=self._device))
        return asked

    def _add(
        self,
        rows: torch.Tensor,  # [n] int64
        tokens: torch.Tensor,  # [n, T] int64, -1 = none
    ) -> None:
        there = (tokens >= 0).int()
        self._counts.index_put_(
            (rows[:, None].expand_as(tokens), tokens.clamp_min(0)), there, accumulate=True
        )
        self._lengths.index_add_(0, rows, there.sum(1, dtype=torch.int32))

    def _wanted(self, batch: Any) -> _Asked | None:
        """What the batch's penalised requests ask for; None without any. Made anew with the batch."""
        requests = [(place, request) for place, request in enumerate(batch.reqs) if penalised(request)]
        if not requests:
            return None
        key = tuple((place, request.rid, request.kv.req_pool_idx) for place, request in requests)
        if self._asked[0] != key or self._asked[1] is None:
            self._asked = key, self._read(requests)
        return self._asked[1]

    def _read(self, requests: list[tuple[int, Any]]) -> _Asked:
        rows = [self._row_of.setdefault(one.kv.req_pool_idx, len(self._row_of)) for _, one in requests]
        missing = len(self._row_of) - len(self._lengths)
        if missing > 0:
            more = max(missing, len(self._lengths))
            self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._vocabulary)])
            self._lengths = torch.cat([self._lengths, self._lengths.new_zeros(more)])
        params = [request.sampling_params for _, request in requests]
        stops = [_stop_tokens(request) for _, request in requests]

        def floats(name: str) -> torch.Tensor:
            return torch.tensor([getattr(one, name) for one in params], device=self._device)

        return _Asked(
            torch.tensor([place for place, _ in requests], device=self._device),
            torch.tensor(rows, device=self._device),
            floats("frequency_penalty").float(),
            floats("presence_penalty").float(),
            floats("repetition_penalty").float(),
            floats("min_new_tokens").int(),
            _padded(stops, fill=0, device=self._device),
            torch.tensor([len(one) for one in stops], dtype=torch.int32, device=self._device),
        )


def _stop_tokens(request: Any) -> list[int]:
    """What SGLang's min_new_tokens forbids."""
    tokens = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    if request.tokenizer is not None:
        tokens |= set(request.tokenizer.additional_stop_token_ids or ()) | {request.tokenizer.eos_token_id}
    return sorted(token for token in tokens if token is not None)


def _padded(rows: list[list[int]], *, fill: int, device: torch.device) -> torch.Tensor:
    width = max(1, *map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], device=device)


def _links(
    parents: torch.Tensor,  # [R, B] int32, -1 = root
    counts: torch.Tensor,  # [R] int32
) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of every row, -1 = none, both [R, B + 1] int64: SGLang's form."""
    rows = torch.arange(parents.shape[1] + 1, device=parents.device)
    above = torch.nn.functional.pad(parents.long() + 1, (1, 0), value=-1)  # [R, W] the parent's row
    above = torch.where(rows <= counts[:, None], above, -1)
    child = above[:, None, :] == rows[:, None]  # [R, W, W] row j is a child of row i
    sibling = (above[:, None, :] == above[:, :, None]) & (rows > rows[:, None]) & (above >= 0)[..., None]
    return tuple(torch.where(there.any(2), there.int().argmax(2), -1) for there in (child, sibling))


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
