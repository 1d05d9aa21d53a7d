"""From one block of SGLang's draft model to the trees of a batch.

The forward is the stock proposer's; candidates, scores and growth are the core's. Notation: R requests, B
nodes, gamma depth, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer

from specplug.calibration import Coefficients, calibrated, read_calibration
from specplug.candidates import factorised
from specplug.cost import Shape
from specplug.ddtree import greedy_chain
from specplug.draft_heads import build_heads
from specplug.drafting import draft_tree
from specplug.markov import conditioned
from specplug.tree import DraftTree
from specplug_sglang.config import Settings


class TreeDrafter:
    """One a worker."""

    def __init__(self, worker: Any, settings: Settings) -> None:
        """``worker``: a DSPARK worker whose draft is loaded. Raises ValueError for a head that is split over
        ranks: trees rank the whole vocabulary."""
        self._worker, self._settings = worker, settings
        self._head = None
        if settings.checkpoint.markov_head is not None:
            if worker.draft_model.markov_head.vocab_shard is not None:
                raise ValueError(
                    "DDTREE refuses: trees rank the whole vocabulary, and "
                    "SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD keeps a slice of it on each rank; set it to 0."
                )
            tensors = dict(worker.draft_model.named_parameters())
            self._head = build_heads(replace(settings.checkpoint, confidence_head=False), tensors).markov
        self._coefficients = None
        if settings.options.calibration is not None:
            fitted = read_calibration(settings.options.calibration)
            self._coefficients = Coefficients.of(fitted, worker.device)

    def draft(self, batch: Any, slots: Any, shape: Shape) -> DraftTree:
        """The trees of a batch, fields [R, B]; "plain": nothing is drafted, "chain": one path a request.

        ``slots``: the verify windows' cache slots, of which the block takes the first.
        """
        if shape == "plain":
            return DraftTree.empty(len(batch.seq_lens), self._settings.budget, batch.seq_lens.device)
        logits, anchors, hidden = self._block(batch, slots)
        tree = self._chain(logits, anchors, hidden) if shape == "chain" else None
        if tree is None:
            tree = draft_tree(
                logits,
                self._settings.budget,
                head=self._head,
                anchors=anchors,
                hidden=hidden,
                candidates=self._settings.options.candidates,
            )
        return tree if self._coefficients is None else self._calibrated(tree, batch.sampling_info)

    def _block(self, batch: Any, slots: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Base logits [R, gamma, V], the tokens they follow [R], and their hidden states [R, gamma, H]."""
        worker, requests = self._worker, len(batch.seq_lens)
        embedding = worker.target_worker.model_runner.model.get_input_embeddings()
        with worker._draft_context():
            drafted = worker._proposer._run_forward(
                batch=batch,
                draft_input=batch.spec_info,
                verify_window=slots,
                bs=requests,
                device=worker.device,
                embed_module=unwrap_lora_layer(embedding),
            )
            with worker._proposer._base_logits_context():
                logits, _ = worker.draft_model.compute_base_logits(drafted.raw_hidden)
        logits = logits.view(requests, self._settings.depth, -1)
        return logits, drafted.draft_block_ids[:, 0], drafted.draft_hidden_3d

    def _chain(
        self,
        logits: torch.Tensor,  # [R, gamma, V]
        anchors: torch.Tensor,  # [R] int64
        hidden: torch.Tensor,  # [R, gamma, H]
    ) -> DraftTree | None:
        """The greedy chains, padded to B nodes; None under a head whose bias depends on the whole path."""
        if self._head is None:
            table = factorised(logits, 1)
        elif self._head.kind == "rnn":
            return None
        else:
            candidates = self._settings.options.candidates
            table = conditioned(logits, self._head, anchors, candidates, hidden=hidden)
        everybody = torch.ones_like(anchors, dtype=torch.bool)
        empty = DraftTree.empty(len(anchors), self._settings.budget, anchors.device)
        return greedy_chain(table).select(everybody, empty)

    def _calibrated(self, tree: DraftTree, info: Any) -> DraftTree:
        """The tree in the order of calibrated scores. SGLang writes a greedy request as top-k of 1."""
        temperatures = info.temperatures.view(-1).masked_fill(info.top_ks.view(-1) <= 1, 0.0)
        depth = self._settings.depth
        return calibrated(tree, self._coefficients, temperatures.float(), max_depth=depth).tree
