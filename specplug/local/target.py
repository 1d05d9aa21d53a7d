"""A Hugging Face causal language model that computes windows of rows over a preallocated KV cache.

Row w of request r is written to slot ``start[r] + w`` of its cache and sees the slots below ``start[r]`` and
the rows of its own window that the window's mask allows. Prefill is one window with a causal mask. Nothing is
ever erased: a slot at or past the committed length is written before it is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from specplug.window import Commit


class Rows(NamedTuple):
    """What one forward gives."""

    logits: torch.Tensor  # [R, W, V], or [R, 1, V] of the last row
    features: torch.Tensor | None  # [R, W, taps * h]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [R, S, Hkv, D], views of the cache's store."""

    def __init__(self, cache: SlotCache, number: int) -> None:
        super().__init__()
        self.cache, self.number = cache, number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take this layer's part of the store for states of [R, Hkv, W, D]."""
        self.keys, self.values = self.cache.allocate(key_states, value_states)[self.number]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [R, Hkv, W, D] to the window's slots; returns the live slots, [R, Hkv, live, D] each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            kept.flatten(0, 1).index_copy_(0, self.cache.written, states.transpose(1, 2).flatten(0, 1))
        live = self.cache.live
        return self.keys[:, :live].transpose(1, 2), self.values[:, :live].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.live, 0

    def get_seq_length(self) -> int:
        return self.cache.live

    def get_max_length(self) -> int:
        return self.cache.slots


class SlotCache(Cache):
    """KV cache of R requests with S slots each, allocated once for all layers."""

    def __init__(self, layers: int, *, requests: int, slots: int) -> None:
        super().__init__(layers=[SlotLayer(self, number) for number in range(layers)])
        self.requests, self.slots = requests, slots
        self.live = 0  # host value: slots that this forward can see
        self.written = torch.empty(0, dtype=torch.int64)  # [R * W] flat slots of the window's rows
        self.store = torch.empty(0)  # [layers, 2, R, S, Hkv, D]

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The store, made for the first layer's [R, Hkv, W, D]. Raises ValueError where shapes differ."""
        if not self.store.numel():
            self.store = keys.new_zeros(
                len(self.layers), 2, self.requests, self.slots, keys.shape[1], keys.shape[3]
            )
        expected = (self.store.shape[4], self.store.shape[5])
        for states in (keys, values):
            if (states.shape[1], states.shape[3]) != expected:
                raise ValueError(
                    f"target: expected keys and values of {expected} (heads, size) in every layer, "
                    f"got {(states.shape[1], states.shape[3])}; the local loop knows standard attention only"
                )
        return self.store

    def place(self, starts: torch.Tensor, width: int, live: int) -> None:
        """Aim at a window: row w of request r goes to slot starts[r] + w. ``starts``: [R] int64."""
        row = torch.arange(self.requests, device=starts.device)[:, None] * self.slots
        column = torch.arange(width, device=starts.device)
        self.written = (row + starts[:, None] + column).flatten()
        self.live = live

    def commit(self, moves: Commit) -> None:
        """Move rows of the last window as the accepted path says; ``moves`` counts rows of that window."""
        rows = self.store.flatten(2, 3)
        moved = rows.index_select(2, self.written[moves.source])
        rows.index_copy_(2, self.written[moves.destination], moved)


class Target:
    """The model, and hooks that keep the outputs of the layers a draft reads."""

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...]) -> None:
        """``taps``: rising layer numbers, i = output of layer i, -1 = the embedding (input of layer 0)."""
        self.model, self.taps = model.eval().requires_grad_(False), taps
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        if kinds != {"full_attention"} or window:
            raise ValueError(
                f"target {model.config.name_or_path}: expected full attention in every layer, got "
                f"{', '.join(sorted(kinds))}{' with a sliding window' if window else ''}; the local loop has "
                "no other mask: evaluate this pair in its engine"
            )
        self.num_layers: int = config.num_hidden_layers
        self.vocabulary: int = config.vocab_size
        self._kept: dict[int, torch.Tensor] = {}
        layers = _layers(model, self.num_layers)
        for tap in taps:
            if tap < 0:
                layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                layers[tap].register_forward_hook(self._keeper(tap))

    @classmethod
    def load(
        cls, folder: str | Path, *, taps: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Target:
        """Load from a folder or hub id. Raises ValueError for a target without full attention."""
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="sdpa")
        moved: Any = model.to(device)  # type: ignore[arg-type] # wrapped by transformers without its types
        return cls(moved, taps)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end an answer, as the checkpoint's generation config says."""
        ids = self.model.generation_config.eos_token_id
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

    def cache(self, requests: int, slots: int) -> SlotCache:
        return SlotCache(self.num_layers, requests=requests, slots=slots)

    def forward(
        self,
        tokens: torch.Tensor,  # [R, W] int64
        *,
        starts: torch.Tensor,  # [R] int64, slot and position of row 0
        depths: torch.Tensor,  # [R, W] int64, rows sit at position start + depth
        mask: torch.Tensor,  # [R, W, W] bool, who sees whom inside the window
        cache: SlotCache,
        live: int,  # host value, at least max(starts) + W
        last_only: bool = False,
    ) -> Rows:
        """Compute one window a request; its keys and values go to the cache."""
        width = tokens.shape[1]
        cache.place(starts, width, live)
        output = self.model(
            input_ids=tokens,
            position_ids=starts[:, None] + depths,
            attention_mask=_additive(mask, starts, live, self.model.dtype),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        features = torch.cat([self._kept[tap] for tap in self.taps], -1) if self.taps else None
        self._kept.clear()
        return Rows(output.logits, features)

    def _keeper(self, tap: int) -> Any:
        def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._kept[tap] = output[0] if isinstance(output, tuple) else output

        return keep

    def _keep_input(self, module: torch.nn.Module, inputs: Any, keywords: Any) -> None:
        self._kept[-1] = inputs[0] if inputs else keywords["hidden_states"]


def _layers(model: PreTrainedModel, count: int) -> torch.nn.ModuleList:
    """The decoder layers, found by their number. Raises ValueError where that is not one list."""
    found = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    outer = [m for m in found if not any(m is inner for o in found if o is not m for inner in o.modules())]
    if len(outer) != 1:
        raise ValueError(
            f"target {model.config.name_or_path}: expected one list of {count} decoder layers, found "
            f"{len(outer)}; the local loop cannot tell which outputs the draft reads"
        )
    return outer[0]


def _additive(
    mask: torch.Tensor,  # [R, W, W] bool
    starts: torch.Tensor,  # [R] int64
    live: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The committed slots and the window's mask as an additive mask [R, 1, W, live]."""
    width = mask.shape[1]
    column = torch.arange(live, device=mask.device) - starts[:, None]  # of the window, [R, live]
    inside = ((column >= 0) & (column < width))[:, None]
    index = column.clamp(0, width - 1)[:, None].expand(-1, width, -1)
    seen = (mask.gather(2, index) & inside) | (column < 0)[:, None]
    blocked = torch.zeros(seen.shape, dtype=dtype, device=mask.device)
    return blocked.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
