"""A DFlash draft behind the interface of SGLang's DSPARK drafts: no Markov head, no confidence head.

SGLang's own DFLASH worker casts the draft's input to bfloat16, whatever the model's dtype, and has no ragged
layout; DSPARK's draft path has neither fault, and a block drafter without a head fits it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.dspark import Qwen3DSparkModel
from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode
from torch import nn

STOCK, ADAPTED = "DFlashDraftModel", "SpecplugDFlashModel"


class NoMarkovHead(nn.Module):
    """What the DSPARK worker asks of a head, answered by a draft that has none."""

    vocab_shard = None  # base logits are gathered whole


class SpecplugDFlashModel(Qwen3DSparkModel):
    """A DFlash checkpoint, drafted with as DSPARK's fill-in layout."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config=config, quant_config=quant_config, prefix=prefix)
        self.markov_head = NoMarkovHead()
        # SGLang's planner insists on a confidence head outside static mode; trees replace that planner.
        static = read_ragged_verify_mode() is RaggedVerifyMode.STATIC
        self.confidence_head = None if static else nn.Identity()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """A DFlash checkpoint's tensors, as SGLang's own DFlash model reads them."""
        return DFlashDraftModel.load_weights(self, weights)


def adapt(config: Any) -> Any:
    """A DFlash draft's config, changed in memory to name the class above; any other is returned as it is."""
    if list(getattr(config, "architectures", None) or ()) == [STOCK]:
        config.architectures = [ADAPTED]
        config.sample_from_anchor = False  # the block's row 0 predicts nothing
        config.markov_rank, config.markov_head_type = 1, "vanilla"  # only parsed: the head is replaced
        config.enable_confidence_head = False
    return config


def register_model() -> None:
    """Make SGLang's model registry know the class, in the process that loads it."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models[ADAPTED] = SpecplugDFlashModel
