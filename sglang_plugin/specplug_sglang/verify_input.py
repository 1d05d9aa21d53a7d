"""SGLang's verify input for trees: what its Triton backend does not know of ragged windows is put right.

That backend lays out every verify as whole windows. Its kernel reads where a request's rows and mask bits
begin from two pointer arrays, and nothing else changes with the lengths, so these are replaced after it has
made them.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout


class TreeVerifyInput(DFlashVerifyInput):
    """Rows of a batch of trees, with their mask."""

    def prepare_for_verify(self, batch: Any, target_worker: Any, **kwargs: Any) -> tuple[Any, bool]:
        """The forward batch, and whether a captured graph runs it."""
        forward_batch, graph = super().prepare_for_verify(batch, target_worker, **kwargs)
        backend = target_worker.model_runner.attn_backend
        if self.ragged_verify_layout is not None and type(backend).__name__ == "TritonAttnBackend":
            assert not graph, "ragged trees are refused where graphs are captured"
            point_at_rows(backend.forward_metadata, self.ragged_verify_layout, forward_batch.seq_lens)
        return forward_batch, graph


def point_at_rows(
    metadata: Any,  # the Triton backend's, of whole windows; changed in place
    layout: RaggedVerifyLayout,
    prefix: torch.Tensor,  # [R] int, committed tokens
) -> None:
    """Where each request's query rows and mask bits begin, both [R + 1]."""
    rows = layout.verify_lens.long()
    ends = (rows * (prefix.long() + rows)).cumsum(0)
    metadata.qo_indptr = layout.qo_indptr_device.to(torch.int32)
    metadata.mask_indptr = torch.nn.functional.pad(ends, (1, 0))
