"""Greedy decoding with penalties, written once more over Transformers: plain SGLang cannot be the reference,
as under overlap it applies penalties a token late."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import local_models
import torch

PENALTIES = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7},
    {"presence_penalty": 0.9},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"repetition_penalty": 1.2, "logit_bias": {"15": 2.5, "274": -5.0}},
]


@torch.inference_mode()
def greedy(
    prompt: Sequence[int],
    tokens: int,
    *,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    min_new_tokens: int = 0,
    stop_token_ids: Collection[int] = (),
    logit_bias: dict[str, float] | None = None,
) -> list[int]:
    """The tokens of one request, the stop token that ended it included. Penalties count the output alone."""
    model = local_models.target().model
    output: list[int] = []
    cache, given = None, torch.tensor([list(prompt)])
    while len(output) < tokens:
        answer = model(given, past_key_values=cache, use_cache=True)
        cache, logits = answer.past_key_values, answer.logits[0, -1].clone()
        for token in set(output):
            logits[token] -= frequency_penalty * output.count(token) + presence_penalty
            factor = repetition_penalty if logits[token] < 0 else 1 / repetition_penalty
            logits[token] *= factor
        for token, value in (logit_bias or {}).items():
            logits[int(token)] += value
        if len(output) < min_new_tokens:
            logits[list(stop_token_ids)] = float("-inf")
        output.append(int(logits.argmax()))
        if output[-1] in stop_token_ids:
            break
        given = torch.tensor([output[-1:]])
    return output
