"""From one block of SGLang's draft model to the trees of a batch.

The forward is the stock proposer's; candidates, scores and growth are the core's. Notation: R requests, B
nodes, gamma depth, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer

from specplug.calibration import Coefficients, read_calibration
from specplug.cost_curves import Shape
from specplug.draft_heads import build_heads
from specplug.drafting import Drafted, draft_shape
from specplug.served_draft import ServedDraft
from specplug.tree import DraftTree
from specplug_sglang.sampling import temperatures


class TreeDrafter:
    """One a worker."""

    def __init__(self, worker: Any, settings: ServedDraft) -> None:
        """``worker``: a DSPARK worker whose draft is loaded. Raises ValueError for a head that is split over
        ranks: trees rank the whole vocabulary."""
        self._worker, self._settings = worker, settings
        self._head = self._calibration = None
        if settings.checkpoint.markov_head is not None:
            if worker.draft_model.markov_head.vocab_shard is not None:
                raise ValueError(
                    "DDTREE refuses: trees rank the whole vocabulary, and "
                    "SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD keeps a slice of it on each rank; set it to 0."
                )
            tensors = dict(worker.draft_model.named_parameters())
            self._head = build_heads(replace(settings.checkpoint, confidence_head=False), tensors).markov
        if settings.options.calibration is not None:
            fitted = read_calibration(settings.options.calibration)
            self._calibration = Coefficients.of(fitted, worker.device)

    def draft(self, batch: Any, slots: Any, shape: Shape) -> Drafted:
        """The trees of a batch, fields [R, B]; "plain": nothing is drafted, "chain": one path a request.

        ``slots``: the verify windows' cache slots, of which the block takes the first.
        """
        if shape == "plain":
            empty = DraftTree.empty(len(batch.seq_lens), self._settings.budget, batch.seq_lens.device)
            return Drafted(empty, empty.scores)
        logits, anchors, hidden = self._block(batch, slots)
        return draft_shape(
            shape,
            logits,
            self._settings.budget,
            head=self._head,
            anchors=anchors,
            hidden=hidden,
            candidates=self._settings.options.candidates,
            calibration=self._calibration,
            temperatures=temperatures(batch.sampling_info),
        )

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
