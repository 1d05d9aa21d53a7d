"""The Qwen3 target and the two block drafts in plain PyTorch, small enough to read.

Parameter names are those of the public checkpoints (Hugging Face Qwen3ForCausalLM; DFlash and DSpark drafts),
so a state dict is exported without renaming. Shapes: b sequences, t tokens, h hidden size, H heads, D
head_dim, V vocabulary.
"""

import torch
import torch.nn.functional as F
from presets import DEPTH, MASK, VOCABULARY, Preset, Shape
from torch import nn

KeyValue = tuple[torch.Tensor, torch.Tensor]  # [b, kv heads, t, D] each


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention with norms on query and key, as Qwen3 has it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(self.dim, shape.rms_norm_eps)

    def queries(self, x: torch.Tensor, rope: KeyValue) -> torch.Tensor:
        """[b, t, h] -> [b, H, t, D], rotated."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))), rope).transpose(1, 2)

    def keys_values(self, x: torch.Tensor, rope: KeyValue) -> KeyValue:
        """[b, t, h] -> keys (rotated) and values, [b, kv heads, t, D] each."""
        keys = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1))), rope)
        return keys.transpose(1, 2), self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)

    def mix(
        self, q: torch.Tensor, kv: KeyValue, mask: torch.Tensor | None, *, causal: bool = False
    ) -> torch.Tensor:
        """Attend and project: -> [b, t, h]. `mask` is boolean, true = visible, as [b, H, t, keys]."""
        k, v = kv
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One pre-norm decoder layer. The callers run it, as target and drafts feed attention differently."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def residual_mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


def rotate(x: torch.Tensor, rope: KeyValue) -> torch.Tensor:
    """Rotary embedding of x [b, t, heads, D] by (cos, sin) [t or b x t, D]."""
    cos, sin = (table.unsqueeze(-2) for table in rope)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def rope_at(positions: torch.Tensor, shape: Shape) -> KeyValue:
    """(cos, sin) [..., D] at the given positions [...]."""
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angle = positions[..., None].float() * frequency
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def initialise(module: nn.Module) -> None:
    """Variance-preserving normal weights, smaller where a layer writes to the residual stream."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2 and "markov" not in name and "confidence" not in name:
            gain = 0.4 if "o_proj" in name or "down_proj" in name else 1.0
            nn.init.normal_(parameter, std=0.02 if "embed" in name else gain * parameter.shape[1] ** -0.5)


class Target(nn.Module):
    """Qwen3ForCausalLM with tied embeddings."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.shape = Shape()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, self.shape.hidden_size)
        self.model.layers = nn.ModuleList(Layer(self.shape) for _ in range(layers))
        self.model.norm = RMSNorm(self.shape.hidden_size, self.shape.rms_norm_eps)
        initialise(self)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., h] -> [..., V]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(
        self,
        ids: torch.Tensor,  # [b, t] int64
        *,
        positions: torch.Tensor | None = None,  # [t] int64; None = 0..t-1
        cache: list[KeyValue]
        | None = None,  # per layer, changed in place: `ids` are appended; empty at first
        mask: torch.Tensor | None = None,  # [t, past + t] bool, true = visible; None = causal
        taps: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Final hidden states [b, t, h] and the outputs of the layers `taps`, [b, t, taps * h]."""
        x = self.model.embed_tokens(ids)
        rope = rope_at(torch.arange(ids.shape[1]) if positions is None else positions, self.shape)
        past = cache[0][0].shape[2] if cache else 0
        if mask is None and past:
            mask = torch.ones(ids.shape[1], past + ids.shape[1], dtype=torch.bool).tril(past)
        features: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self.model.layers):
            normed = layer.input_layernorm(x)
            kv = layer.self_attn.keys_values(normed, rope)
            if cache is not None:
                kv = append(cache, i, kv)
            q = layer.self_attn.queries(normed, rope)
            x = layer.residual_mlp(x + layer.self_attn.mix(q, kv, mask, causal=mask is None))
            if i in taps:
                features[i] = x
        return self.model.norm(x), torch.cat([features[i] for i in taps], -1) if taps else None


def append(cache: list[KeyValue], layer: int, kv: KeyValue) -> KeyValue:
    """Append keys and values to the cache of one layer; returns all of them."""
    if len(cache) == layer:
        cache.append(kv)
    else:
        cache[layer] = (torch.cat([cache[layer][0], kv[0]], 2), torch.cat([cache[layer][1], kv[1]], 2))
    return cache[layer]


class MarkovHead(nn.Module):
    """bias(prev) = W2 W1[prev], added to the logits of the next slot (DSpark's vanilla head)."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(VOCABULARY, rank)
        self.markov_w2 = nn.Linear(rank, VOCABULARY, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.3)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """Logit of the probability that the target accepts a slot, from its hidden state and W1[prev]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)
        nn.init.zeros_(self.proj.weight)


class Draft(nn.Module):
    """Block drafter: the block [anchor, mask, mask, ...] attends to the target's features of every token
    before the anchor and, in both directions, to itself.

    DFlash (block of DEPTH + 1): slots 1.. predict their own position.
    DSpark (block of DEPTH): every slot predicts the position after its own; a Markov head adds the dependence
    on the token before, a confidence head estimates acceptance.
    Embedding and output matrix are the target's and are passed in.
    """

    def __init__(self, kind: str, preset: Preset) -> None:
        super().__init__()
        self.kind, self.taps, self.shape = kind, preset.taps, Shape()
        self.block = DEPTH + 1 if kind == "dflash" else DEPTH
        hidden, eps = self.shape.hidden_size, self.shape.rms_norm_eps
        self.layers = nn.ModuleList(Layer(self.shape) for _ in range(preset.draft_layers))
        self.norm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.fc = nn.Linear(len(preset.taps) * hidden, hidden, bias=False)
        if kind == "dspark":
            self.markov_head = MarkovHead(preset.markov_rank)
            self.confidence_head = ConfidenceHead(hidden + preset.markov_rank)
        initialise(self)

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Target features [b, t, taps * h] as the layers' context [b, t, h]."""
        return self.hidden_norm(self.fc(features))

    def extend(self, features: torch.Tensor, positions: torch.Tensor, cache: list[KeyValue]) -> None:
        """Append the context of committed tokens: features [b, t, taps * h], positions [t]."""
        context, rope = self.context(features), rope_at(positions, self.shape)
        for i, layer in enumerate(self.layers):
            append(cache, i, layer.self_attn.keys_values(context, rope))

    def propose(
        self, embedding: torch.Tensor, anchor: int, position: int, cache: list[KeyValue]
    ) -> torch.Tensor:
        """Logits [DEPTH, V] of one block whose anchor sits at `position`, without the Markov bias."""
        ids = torch.full((1, self.block), MASK)
        ids[0, 0] = anchor
        rope = rope_at(torch.arange(position, position + self.block), self.shape)
        hidden = self._run(F.embedding(ids, embedding), rope, cache, None)[0]
        return F.linear(hidden[self.block - DEPTH :], embedding)

    def train_blocks(
        self,
        embedding: torch.Tensor,  # [V, h]
        ids: torch.Tensor,  # [b, t] int64
        features: torch.Tensor,  # [b, t, taps * h]
        anchors: torch.Tensor,  # [b, n] int64, positions
    ) -> torch.Tensor:
        """Hidden states [b, n, DEPTH, h] of n blocks a sequence at once; no block sees another."""
        (b, t), n = ids.shape, anchors.shape[1]
        blocks = torch.full((b, n, self.block), MASK)
        blocks[:, :, 0] = ids.gather(1, anchors)
        positions = (anchors[..., None] + torch.arange(self.block)).flatten(1)
        context, rope = self.context(features), rope_at(torch.arange(t), self.shape)
        sees_context = torch.arange(t) < anchors.repeat_interleave(self.block, 1)[..., None]
        owner = torch.arange(n * self.block) // self.block
        sees_block = (owner[:, None] == owner).expand(b, -1, -1)
        mask = torch.cat([sees_context, sees_block], -1)[:, None]
        cache = [layer.self_attn.keys_values(context, rope) for layer in self.layers]
        x = F.embedding(blocks.flatten(1), embedding)
        hidden = self._run(x, rope_at(positions, self.shape), cache, mask).unflatten(1, (n, self.block))
        return hidden[:, :, self.block - DEPTH :]

    def _run(
        self, x: torch.Tensor, rope: KeyValue, context: list[KeyValue], mask: torch.Tensor | None
    ) -> torch.Tensor:
        for layer, (context_k, context_v) in zip(self.layers, context, strict=True):
            normed = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_values(normed, rope)
            kv = (torch.cat([context_k, k], 2), torch.cat([context_v, v], 2))
            x = layer.residual_mlp(x + layer.self_attn.mix(layer.self_attn.queries(normed, rope), kv, mask))
        return self.norm(x)
