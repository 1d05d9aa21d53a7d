"""The model sets this pipeline makes, as one table of facts; every script reads its sizes here."""

from dataclasses import dataclass

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
END_OF_TEXT, TURN_START, TURN_END, MASK = range(4)  # their token ids

VOCABULARY = 1024  # enough that "assistant" is one token, which corpus.py checks
DEPTH = (
    7  # tokens both drafts propose; DFlash's block is one longer (fill-in), DSpark's as long (anchor-first)
)


@dataclass(frozen=True)
class Shape:
    """Sizes of the target's decoder; a draft has the same with fewer layers. All sets share these."""

    hidden_size: int = 128
    intermediate_size: int = 320
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 64  # vLLM's CPU attention takes 32, 64, 80, ...; 64 is also a safe size on a GPU
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True)
class Preset:
    """One set: its target's depth, the drafts' taps, and how long each step of the pipeline runs."""

    layers: tuple[int, ...]  # of the target in each training stage; the last is the exported depth
    taps: tuple[int, ...]  # target layers whose outputs the drafts read, 0-based
    documents: int  # training conversations
    library_files: int | None  # of the standard library; None = all
    target_steps: tuple[int, ...]  # optimiser steps of each stage
    target_rows: int  # windows a step
    window: int  # tokens a window
    generated_batches: int  # of text that the target writes for the drafts
    generated_rows: int  # a batch
    generated_length: int  # tokens a row
    draft_steps: int
    draft_rows: int  # rows a step
    anchors: int  # blocks a row
    draft_layers: int = 2
    markov_rank: int = 64


PRESETS = {
    "deep-thin": Preset(
        layers=(4, 16), taps=(1, 4, 8, 11, 14), documents=45_000, library_files=None,
        target_steps=(4000, 2000), target_rows=16, window=256,
        generated_batches=32, generated_rows=128, generated_length=256, draft_steps=10_000, draft_rows=4,
    anchors=48, ),
    "quick": Preset(
        layers=(4,), taps=(0, 1, 2), documents=45_000, library_files=None,
        target_steps=(4000,), target_rows=16, window=256,
        generated_batches=8, generated_rows=128, generated_length=256, draft_steps=4000, draft_rows=4,
    anchors=48, ),
    "smoke": Preset(  # a minute: shows that the pipeline runs, not that it learns
        layers=(2, 4), taps=(0, 2), documents=200, library_files=24,
        target_steps=(6, 3), target_rows=4, window=64,
        generated_batches=1, generated_rows=6, generated_length=64, draft_steps=4, draft_rows=2, anchors=4,
    ),
}  # fmt: skip
