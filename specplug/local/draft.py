"""The block forward of DFlash and DSpark drafts in plain torch, over a preallocated cache of context.

Every layer is a Qwen3 layer (q/k norm, RoPE, SwiGLU). Its keys and values are those of the context, the
target's tapped features of every committed token before the anchor through ``fc`` and ``hidden_norm``,
followed by those of the block [anchor, mask, mask, ...], which sees itself in both directions. Only context
stays in the cache; a block's rows are overwritten. fill_in blocks predict at rows 1.., anchor_first blocks
one position ahead at rows 0.. (specplug.checkpoint).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specplug.checkpoint import DraftCheckpoint
from specplug.draft_config import read_config
from specplug.draft_heads import build_heads
from specplug.tree import DraftTree
from specplug.weights import read_tensors

HEAD_NORM = "layers.0.self_attn.q_norm.weight"  # [head size]
ACTIVATION = "silu"  # of every published Qwen3 draft; another is refused


class Proposal(NamedTuple):
    """One block a request."""

    anchors: torch.Tensor  # [R] int64
    hidden: torch.Tensor  # [R, gamma, h], normed
    logits: torch.Tensor  # [R, gamma, V_draft], without the Markov bias


@dataclass(frozen=True)
class ContextCache:
    """Context keys and values, slot = position; one [R, S, Hkv, D] pair a layer, allocated once."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class Draft:
    """A draft's weights, with the target's embedding and output matrix where it has none of its own."""

    def __init__(
        self,
        checkpoint: DraftCheckpoint,
        *,
        embedding: torch.Tensor,  # [V, h], the target's
        lm_head: torch.Tensor,  # [V, h], the target's
        dtype: torch.dtype,
        depth: int | None = None,
    ) -> None:
        """``depth``: tokens to draft, at most the checkpoint's, which is the default.

        Raises ValueError for a depth out of range and for a layer that this forward does not compute.
        """
        self.checkpoint, self.depth = checkpoint, checkpoint.depth if depth is None else depth
        if not 1 <= self.depth <= checkpoint.depth:
            raise ValueError(f"depth: expected 1..{checkpoint.depth}, the draft's own, got {depth}")
        self.config = layer_config(checkpoint)
        device = embedding.device
        self.weights = {
            name: weight.to(device, dtype if weight.is_floating_point() else None)
            for name, weight in _tensors(checkpoint).items()
        }
        self.embedding = self.weights.get("embed_tokens.weight", embedding)
        self.lm_head = self.weights.get("lm_head.weight", lm_head)
        self.rotary = Qwen3RotaryEmbedding(self.config).to(device)
        self.head, self.confidence_head, self.vocabulary = build_heads(checkpoint, self.weights)
        self.block = self.depth + (checkpoint.layout == "fill_in")

    def cache(self, requests: int, slots: int) -> ContextCache:
        heads = self.weights["layers.0.self_attn.k_proj.weight"].shape[0] // self.config.head_dim
        shape = (requests, slots, heads, self.config.head_dim)
        pairs = [
            [self.embedding.new_zeros(shape, dtype=self._dtype) for _ in range(self.checkpoint.num_layers)]
            for _ in range(2)
        ]
        return ContextCache(*pairs)

    def extend(
        self,
        cache: ContextCache,
        features: torch.Tensor,  # [R, K, taps * h], of the target
        starts: torch.Tensor,  # [R] int64, slot and position of row 0
    ) -> None:
        """Add context rows. Rows past a request's own are overwritten before they are seen."""
        context = self._norm(self._linear(features, "fc"), "hidden_norm")
        positions = starts[:, None] + torch.arange(features.shape[1], device=starts.device)
        rope = self.rotary(context, positions)
        for i in range(self.checkpoint.num_layers):
            self._write(cache, i, context, rope, positions)

    def propose(
        self,
        cache: ContextCache,
        anchors: torch.Tensor,  # [R] int64, the last committed tokens
        roots: torch.Tensor,  # [R] int64, their positions; context is in the slots below
        live: int,  # host value, at least max(roots) + block
    ) -> Proposal:
        """Draft one block a request."""
        mask_token = self.checkpoint.mask_token_id
        ids = F.pad(anchors[:, None], (0, self.block - 1), value=mask_token)
        positions = roots[:, None] + torch.arange(self.block, device=roots.device)
        slot = torch.arange(live, device=roots.device)
        seen = (slot < roots[:, None] + self.block)[:, None, None]  # [R, 1, 1, live]
        x = F.embedding(ids, self.embedding).to(self._dtype)
        rope = self.rotary(x, positions)
        for i in range(self.checkpoint.num_layers):
            x = self._layer(i, x, rope, positions, seen, cache)
        hidden = self._norm(x, "norm")[:, self.block - self.depth :]
        return Proposal(anchors, hidden, F.linear(hidden, self.lm_head))

    def survivals(self, proposal: Proposal, tree: DraftTree) -> torch.Tensor | None:
        """The confidence head's survival of every node's path, [R, B] fp32; None without such a head.

        The product, over the path, of the head's confidence in each slot under the token before it.
        """
        if self.confidence_head is None:
            return None
        parents = tree.parents.long() + 1
        window = torch.cat((proposal.anchors[:, None], tree.tokens), 1)
        slot = (tree.depths.long() - 1).clamp_min(0)[..., None].expand(-1, -1, proposal.hidden.shape[-1])
        survival = self.confidence_head.confidence(proposal.hidden.gather(1, slot), window.gather(1, parents))
        own, above = F.pad(survival, (1, 0), value=1.0), F.pad(parents, (1, 0))
        # Pointer doubling: after k steps a row holds the product of its 2^k nearest.
        for _ in range(self.depth.bit_length()):
            own, above = own * own.gather(1, above), above.gather(1, above)
        return own[:, 1:]

    @property
    def _dtype(self) -> torch.dtype:
        return self.weights["fc.weight"].dtype

    def _layer(
        self,
        i: int,
        x: torch.Tensor,  # [R, n, h]
        rope: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,  # [R, n] int64
        seen: torch.Tensor,  # [R, 1, 1, live] bool
        cache: ContextCache,
    ) -> torch.Tensor:
        name, live = f"layers.{i}", seen.shape[-1]
        normed = self._norm(x, f"{name}.input_layernorm")
        self._write(cache, i, normed, rope, positions)
        q = self._heads(normed, f"{name}.self_attn.q_proj", f"{name}.self_attn.q_norm", rope)
        keys, values = (t[i][:, :live].transpose(1, 2) for t in (cache.keys, cache.values))
        mask = seen.expand(-1, -1, x.shape[1], -1)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self._linear(out.transpose(1, 2).flatten(2), f"{name}.self_attn.o_proj")
        normed = self._norm(x, f"{name}.post_attention_layernorm")
        gate = F.silu(self._linear(normed, f"{name}.mlp.gate_proj"))
        return x + self._linear(gate * self._linear(normed, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")

    def _write(
        self,
        cache: ContextCache,
        i: int,
        x: torch.Tensor,  # [R, n, h]
        rope: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,  # [R, n] int64
    ) -> None:
        """Keys and values of layer i from its input, to the slots at these positions."""
        attention = f"layers.{i}.self_attn"
        keys = self._heads(x, f"{attention}.k_proj", f"{attention}.k_norm", rope)
        values = self._linear(x, f"{attention}.v_proj").unflatten(-1, (-1, self.config.head_dim))
        requests, slots = cache.keys[i].shape[:2]
        rows = (torch.arange(requests, device=x.device)[:, None] * slots + positions).flatten()
        for kept, states in ((cache.keys[i], keys), (cache.values[i], values)):
            kept.flatten(0, 1).index_copy_(0, rows, states.flatten(0, 1))

    def _heads(
        self, x: torch.Tensor, projection: str, norm: str, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[R, n, h] projected, normed by head and rotated: [R, n, H, D]."""
        heads = self._linear(x, projection).unflatten(-1, (-1, self.config.head_dim))
        heads = self._norm(heads, norm)
        cos, sin = (table[:, :, None] for table in rope)
        half = heads.shape[-1] // 2
        return heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), -1) * sin

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.rms_norm_eps)


def layer_config(checkpoint: DraftCheckpoint) -> Qwen3Config:
    """The draft's own layer sizes and RoPE. Raises ValueError for what this forward does not compute."""
    raw = read_config(checkpoint.path)
    nested: Any = raw.get("transformer_layer_config") if checkpoint.wrapper == "speculators" else raw
    config = Qwen3Config.from_dict(nested)
    config.head_dim = read_tensors(checkpoint.path)[HEAD_NORM].shape[0]  # a config may leave it out
    kinds = set(nested.get("layer_types") or ["full_attention"])
    special = raw.get("dflash_config") or {}
    faults = {
        "layer_types": kinds != {"full_attention"} and sorted(kinds),
        "use_sliding_window": nested.get("use_sliding_window"),
        "dflash_config.causal": special.get("causal"),
        "hidden_act": config.hidden_act != ACTIVATION and config.hidden_act,
    }
    for key, got in faults.items():
        if got:
            raise ValueError(f"{checkpoint.path}: {key}: the local loop does not compute {got!r}")
    return config


def _tensors(checkpoint: DraftCheckpoint) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, on the host."""
    tensors: dict[str, torch.Tensor] = {}
    infos = read_tensors(checkpoint.path)
    for file in sorted({info.file for info in infos.values()}):
        with safe_open(checkpoint.path / file, framework="pt") as opened:
            names = [name for name, info in infos.items() if info.file == file]
            tensors |= {name: opened.get_tensor(name) for name in names}
    return tensors
