"""Markov heads of DSpark drafts: the bias that the token before adds to a draft position's logits.

    e = W1[prev]                                                        [r]; h is the position's hidden state
    vanilla   u = e
    gated     u = sigmoid(G [h; e] + g) * e
    rnn       (z, c, o) = J [s; e; h] + j in three equal parts, u = tanh(o),
              s' = sigmoid(z) * s + (1 - sigmoid(z)) * tanh(c), s = 0 before the first position
    bias      scale * W2 u                                              [V_draft]

h is the hidden state whose logits are biased, and ``prev`` the token drafted one position before (the anchor
at the first). The state s makes an rnn bias depend on the whole path, the others depend on ``prev`` alone.

Sources: vanilla, DSpark (DeepSpec) and vLLM 0.32, models/qwen3_dspark.py, which has no other head and
multiplies the bias by its logit scale. gated and rnn: SGLang, srt/models/dspark.py (GatedMarkovHead.compute_
step_bias, RNNHead._rnn_step), which loads DeepSpec's tensors by name. Everything here is fp32; the engines
compute in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from specplug.vocabulary import DraftVocabulary


class Projection(NamedTuple):
    """A linear layer; its input columns are named by the head that holds it."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor  # [out]


class HeadStep(NamedTuple):
    """What a head makes of one token before."""

    latent: torch.Tensor  # [..., r] fp32, u: bias = scale * W2 u
    state: torch.Tensor | None  # [..., r] fp32, state after this token; None where the head has none


@dataclass(frozen=True)
class MarkovHead:
    """Low-rank bias of the next token's logits by the token before (tensors ``markov_head.*``)."""

    w1: torch.Tensor  # [V, r] embedding of the parent token, target vocabulary
    w2: torch.Tensor  # [V_draft, r] output rows, exactly as many as the draft's logits have columns
    scale: float = 1.0  # what the host multiplies its logits by
    gate: Projection | None = None  # gated: weight [r, H + r] on [h; e]
    joint: Projection | None = None  # rnn: weight [3 r, 2 r + H] on [s; e; h]

    def __post_init__(self) -> None:
        if self.w1.dim() != 2 or self.w2.dim() != 2 or self.w1.shape[1] != self.w2.shape[1]:
            raise ValueError(
                "MarkovHead: expected w1 [V, r] and w2 [V_draft, r] of one rank, "
                f"got {tuple(self.w1.shape)} and {tuple(self.w2.shape)}"
            )
        if self.w2.shape[0] > self.w1.shape[0]:
            raise ValueError(
                f"MarkovHead: w2 has {self.w2.shape[0]} rows but w1 knows only {self.w1.shape[0]} tokens; "
                "cut the padding rows off w2"
            )
        if self.gate is not None and self.joint is not None:
            raise ValueError("MarkovHead: expected gate (gated) or joint (rnn) or neither, got both")
        for name, rows, embeddings in (("gate", 1, 1), ("joint", 3, 2)):
            layer: Projection | None = getattr(self, name)
            if layer is None:
                continue
            got = (tuple(layer.weight.shape), tuple(layer.bias.shape))
            out, columns = rows * self.rank, embeddings * self.rank
            if len(got[0]) != 2 or got[0][0] != out or got[0][1] <= columns or got[1] != (out,):
                raise ValueError(
                    f"MarkovHead.{name}: expected weight [{out}, {columns} + H] and bias [{out}], "
                    f"got {got[0]} and {got[1]}"
                )

    @property
    def rank(self) -> int:
        """r, the length of a token's embedding and of the state."""
        return self.w1.shape[1]

    @property
    def kind(self) -> Literal["vanilla", "gated", "rnn"]:
        """The ``markov_head_type`` of the checkpoint."""
        return "rnn" if self.joint is not None else "gated" if self.gate is not None else "vanilla"

    @property
    def hidden_size(self) -> int | None:
        """H of the hidden states that the head reads; None where it reads none."""
        if self.gate is not None:
            return self.gate.weight.shape[1] - self.rank
        return None if self.joint is None else self.joint.weight.shape[1] - 2 * self.rank

    def step(
        self,
        tokens: torch.Tensor,  # [...] int64, token before, target vocabulary
        hidden: torch.Tensor | None = None,  # [..., H], broadcasts against tokens; gated and rnn need it
        state: torch.Tensor | None = None,  # [..., r] fp32, rnn only; None = before the first position
    ) -> HeadStep:
        """Latent vector u of one position, and the state after it. Raises ValueError without ``hidden``."""
        embedded = self.w1[tokens].float()
        if self.kind == "vanilla":
            return HeadStep(embedded, None)
        hidden = self.check_hidden(hidden)
        if self.gate is not None:
            # [h; e] in two products: one row of h serves every token beside it.
            at_hidden, at_token = self.gate.weight.float().split([hidden.shape[-1], self.rank], 1)
            raw = hidden.float() @ at_hidden.T + embedded @ at_token.T + self.gate.bias.float()
            return HeadStep(raw.sigmoid() * embedded, None)
        assert self.joint is not None
        at_state, at_token, at_hidden = self.joint.weight.float().split(
            [self.rank, self.rank, hidden.shape[-1]], 1
        )
        raw = embedded @ at_token.T + hidden.float() @ at_hidden.T + self.joint.bias.float()
        before = torch.zeros_like(embedded) if state is None else state
        keep, candidate, out = (raw + before @ at_state.T).chunk(3, -1)
        keep = keep.sigmoid()
        return HeadStep(out.tanh(), keep * before + (1 - keep) * candidate.tanh())

    def project(self, latent: torch.Tensor) -> torch.Tensor:
        """Bias [..., V_draft] fp32 of latent vectors [..., r]; the product is taken in w2's dtype."""
        return self.scaled((latent.to(self.w2.dtype) @ self.w2.T).float())

    def scaled(self, bias: torch.Tensor) -> torch.Tensor:
        """``scale * bias``, without a pass over the vocabulary where the scale is 1."""
        return bias if self.scale == 1.0 else self.scale * bias

    def check_hidden(self, hidden: torch.Tensor | None) -> torch.Tensor:
        """``hidden`` if it has the H that this gated or rnn head reads. Raises ValueError otherwise."""
        if hidden is None or hidden.shape[-1] != self.hidden_size:
            got = "none" if hidden is None else list(hidden.shape)
            raise ValueError(
                f"hidden: expected [..., {self.hidden_size}], the draft's hidden states, for a {self.kind} "
                f"Markov head, got {got}"
            )
        return hidden


def step_bias(
    head: MarkovHead,
    tokens: torch.Tensor,  # [R] int64, token before, target vocabulary
    hidden: torch.Tensor | None = None,  # [R, H]
    state: torch.Tensor | None = None,  # [R, r] fp32
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Step form: bias [R, V_draft] fp32 of one position, and the state to pass to the next."""
    latent, state = head.step(tokens, hidden, state)
    return head.project(latent), state


def block_bias(
    head: MarkovHead,
    tokens: torch.Tensor,  # [R, gamma] int64, teacher-forced: column k is the token before position k
    hidden: torch.Tensor | None = None,  # [R, gamma, H]
) -> torch.Tensor:
    """Block form: biases [R, gamma, V_draft] fp32 of a known prefix (column 0 is the anchor).

    gamma is that of ``tokens``, whatever block the checkpoint was trained on. One product for the whole block
    unless the head carries a state.
    """
    if head.kind != "rnn" or not tokens.shape[1]:
        return head.project(head.step(tokens, hidden).latent)
    hidden = head.check_hidden(hidden)
    state: torch.Tensor | None = None
    latents = []
    for position in range(tokens.shape[1]):
        latent, state = head.step(tokens[:, position], hidden[:, position], state)
        latents.append(latent)
    return head.project(torch.stack(latents, 1))


class Chain(NamedTuple):
    """A drafted chain and the biased logits each token was picked from."""

    tokens: torch.Tensor  # [R, gamma] int64, target vocabulary
    logits: torch.Tensor  # [R, gamma, V_draft] fp32


def draft_chain(
    logits: torch.Tensor,  # [R, gamma, V_draft] any float dtype, without the bias
    head: MarkovHead,
    anchors: torch.Tensor,  # [R] int64, last committed token, target vocabulary
    *,
    hidden: torch.Tensor | None = None,  # [R, gamma, H]
    vocabulary: DraftVocabulary | None = None,  # where V_draft is a reduced vocabulary
    pick: Callable[[torch.Tensor], torch.Tensor] | None = None,  # [R, V_draft] -> [R] draft ids; None: best
) -> Chain:
    """Draft token by token, as the engines' chains do; the loop is over depth."""
    before, state = anchors.long(), None
    tokens, biased = [], []
    for position in range(logits.shape[1]):
        bias, state = step_bias(head, before, None if hidden is None else hidden[:, position], state)
        row = logits[:, position].float() + bias
        drafted = row.argmax(-1) if pick is None else pick(row)
        before = drafted if vocabulary is None else vocabulary.to_target(drafted)
        tokens.append(before)
        biased.append(row)
    if not tokens:
        return Chain(anchors.new_empty(anchors.shape[0], 0).long(), logits.float())
    return Chain(torch.stack(tokens, 1), torch.stack(biased, 1))
