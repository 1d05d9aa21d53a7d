"""DSpark's confidence head: how likely the target is to accept the token drafted at a position.

    c = sigmoid(w [h; W1[prev]] + b)        or sigmoid(w h + b) without the Markov input

h is the position's hidden state and ``prev`` the token before it: c speaks of the distribution that the
position is drafted from, not of one drafted token, and is trained on 1 - TV(p, q) at temperature 1. W1[prev]
is the plain embedding also where the Markov head is gated or rnn. The head has no notion of depth: the shape
follows the positions asked for, whatever block the checkpoint was trained on. Survival at depth d is the
product of c down to d; other temperatures need specplug.calibration.

Sources: DeepSpec, qwen3/modeling.py predict_confidence_step; SGLang, models/dspark.py DSparkConfidenceHead;
vLLM 0.32, qwen3_dspark.py compute_confidence. All take the product in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ConfidenceHead:
    """``confidence_head.proj`` of a checkpoint, with the embedding it reads."""

    weight: torch.Tensor  # [1, H] or, with w1, [1, H + r]
    bias: torch.Tensor  # [1]
    w1: torch.Tensor | None = None  # [V, r] the Markov head's, target vocabulary; None = no Markov input

    def __post_init__(self) -> None:
        rank = 0 if self.w1 is None else self.w1.shape[-1]
        got = (tuple(self.weight.shape), tuple(self.bias.shape))
        if len(got[0]) != 2 or got[0][0] != 1 or got[0][1] <= rank or got[1] != (1,):
            raise ValueError(
                f"ConfidenceHead: expected weight [1, H{f' + {rank}' if rank else ''}] and bias [1], "
                f"got {got[0]} and {got[1]}"
            )

    @property
    def hidden_size(self) -> int:
        """H of the hidden states it reads."""
        return self.weight.shape[1] - (0 if self.w1 is None else self.w1.shape[1])

    def logits(
        self,
        hidden: torch.Tensor,  # [..., H]
        previous: torch.Tensor | None = None,  # [...] int64, token before, target vocabulary
    ) -> torch.Tensor:
        """Raw scores, fp32, in the broadcast shape of hidden's rows and ``previous``.

        A chain: hidden [R, gamma, H], previous [R, gamma]. A table, one score a parent: hidden
        [R, gamma, 1, H], previous [R, gamma, P]. Raises ValueError where ``previous`` is missing or H is off.
        """
        if hidden.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden: expected [..., {self.hidden_size}], got {list(hidden.shape)}")
        size = self.hidden_size
        weight = self.weight[0].float()
        raw = hidden.float() @ weight[:size] + self.bias.float()
        if self.w1 is None:
            return raw
        if previous is None:
            raise ValueError("previous: this confidence head reads the token before each position, got none")
        return raw + self.w1[previous].float() @ weight[size:]

    def confidence(self, hidden: torch.Tensor, previous: torch.Tensor | None = None) -> torch.Tensor:
        """sigmoid of ``logits``: the head's own acceptance probability at temperature 1, uncalibrated."""
        return self.logits(hidden, previous).sigmoid()
