"""Penalties and bad words on the rows of draft trees: a row's history is the committed tokens, then its path.

An engine's kernels take the rows above a row for its history, which on a tree are siblings. These read the
path instead and leave the rest as vLLM has it: its state by request slot, its order (repetition, frequency,
presence), its arithmetic (a positive logit is multiplied by the reciprocal), its output-only history of bad
words. So a row comes out as the row that plain decoding would have computed.

References: specplug.processors.penalise and ban.

Bytes: penalise L * V * (8 + 4) where a row is penalised, 12 bytes a row where none is; ban L * K * 4 and the
words' tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specplug_kernels.contract import MAX_GRID, check

VOCABULARY_BLOCK = 4096
WORD_BLOCK = 16  # tokens of a bad word compared at a time


@triton.jit(
    do_not_specialize=[
        "logits_stride", "path_stride", "prompt_stride", "counts_stride", "vocabulary"
    ]
)  # fmt: skip
def _penalise_kernel(
    logits_ptr,  # [L, V] fp32, in place
    slots_ptr,  # [L]
    path_ptr,  # [L, gamma] int64
    depths_ptr,  # [L] int64
    repetition_ptr,  # [S] fp32
    frequency_ptr,  # [S] fp32
    presence_ptr,  # [S] fp32
    prompt_ptr,  # [S, ceil(V / 32)] int32, bit t % 32 of word t // 32: token t is in the prompt
    counts_ptr,  # [S, V] int32
    logits_stride,
    path_stride,
    prompt_stride,
    counts_stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    repetition = tl.load(repetition_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=0.0)
    counts = tl.load(counts_ptr + slot * counts_stride + token, mask=inside, other=0)
    depth = tl.load(depths_ptr + row)
    for step in range(depth):
        counts += (token == tl.load(path_ptr + row * path_stride + step)).to(tl.int32)
    present = counts > 0
    words = tl.load(prompt_ptr + slot * prompt_stride + token // 32, mask=inside, other=0)
    prompted = ((words >> (token % 32)) & 1) != 0
    scale = tl.where(present | prompted, repetition, 1.0)
    logits *= tl.where(logits > 0, 1.0 / scale, scale)
    logits -= frequency * counts
    logits -= presence * present
    tl.store(logits_ptr + row * logits_stride + token, logits, mask=inside)


def penalise(
    logits: torch.Tensor,  # [L, V] fp32, changed in place
    slots: torch.Tensor,  # [L] int32 or int64, request slot of each row
    path: torch.Tensor,  # [L, gamma] int64, tokens below the root in order, the row's own last
    depths: torch.Tensor,  # [L] int64, how many of them count
    *,
    repetition: torch.Tensor,  # [S] fp32 > 0, 1 = off
    frequency: torch.Tensor,  # [S] fp32, 0 = off
    presence: torch.Tensor,  # [S] fp32, 0 = off
    prompt_words: torch.Tensor,  # [S, >= ceil(V / 32)] int32, one bit a token of the prompt
    output_counts: torch.Tensor,  # [S, >= V] int32, how often each token was committed after the prompt
) -> None:
    """Repetition, frequency and presence penalties of every row.

    Raises ValueError for what it cannot read.
    """
    check("logits", logits, torch.float32, (None, None), dense_from=1)
    check("repetition", repetition, torch.float32, (None,), like=logits)
    (rows, vocabulary), count = logits.shape, repetition.shape[0]
    _check_rows(slots, path, depths, logits)
    for name, tensor in (("frequency", frequency), ("presence", presence)):
        check(name, tensor, torch.float32, (count,), like=logits, dense_from=0)
    check("prompt_words", prompt_words, torch.int32, (count, None), like=logits, dense_from=1)
    check("output_counts", output_counts, torch.int32, (count, None), like=logits, dense_from=1)
    if prompt_words.shape[1] * 32 < vocabulary or output_counts.shape[1] < vocabulary:
        raise ValueError(
            f"prompt_words, output_counts: expected at least {-(-vocabulary // 32)} and {vocabulary} "
            f"columns, got {prompt_words.shape[1]} and {output_counts.shape[1]}; allocate them for the "
            "logits' vocabulary"
        )
    if not logits.numel():
        return
    _penalise_kernel[(rows, triton.cdiv(vocabulary, VOCABULARY_BLOCK))](
        logits,
        slots,
        path,
        depths,
        repetition,
        frequency,
        presence,
        prompt_words,
        output_counts,
        logits.stride(0),
        path.stride(0),
        prompt_words.stride(0),
        output_counts.stride(0),
        vocabulary,
        BLOCK=VOCABULARY_BLOCK,
    )


@triton.jit(
    do_not_specialize=["logits_stride", "path_stride", "words_stride", "offsets_stride", "all_stride"]
)
def _ban_kernel(
    logits_ptr,  # [L, V], in place
    slots_ptr,  # [L]
    path_ptr,  # [L, gamma] int64
    depths_ptr,  # [L] int64
    words_ptr,  # [S, T] int32, the words' tokens one after the other
    offsets_ptr,  # [S, K + 1] int32, first token of each word
    num_words_ptr,  # [S] int32
    all_ptr,  # [S, M] int32, committed tokens, prompt first
    prompt_lens_ptr,  # [S] int32
    total_lens_ptr,  # [S] int32
    logits_stride,
    path_stride,
    words_stride,
    offsets_stride,
    all_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    word = tl.program_id(1)
    if word >= tl.load(num_words_ptr + slot):
        return
    start = tl.load(offsets_ptr + slot * offsets_stride + word)
    prefix = tl.load(offsets_ptr + slot * offsets_stride + word + 1) - start - 1
    prompt_len = tl.load(prompt_lens_ptr + slot)
    output_len = tl.load(total_lens_ptr + slot) - prompt_len
    first = output_len + tl.load(depths_ptr + row).to(tl.int32) - prefix  # of the history, that must match
    if first < 0:
        return
    differing = 0
    for base in range(0, prefix, BLOCK):
        step = base + tl.arange(0, BLOCK)
        compared = step < prefix
        place = first + step
        drafted = place >= output_len
        wanted = tl.load(words_ptr + slot * words_stride + start + step, mask=compared, other=0)
        below = tl.load(
            path_ptr + row * path_stride + (place - output_len), mask=compared & drafted, other=0
        ).to(tl.int32)
        committed = tl.load(
            all_ptr + slot * all_stride + prompt_len + place, mask=compared & (place < output_len), other=0
        )
        actual = tl.where(drafted, below, committed)
        differing += tl.sum((compared & (wanted != actual)).to(tl.int32))
    if differing == 0:
        last = tl.load(words_ptr + slot * words_stride + start + prefix)
        tl.store(logits_ptr + row * logits_stride + last, float("-inf"))


def ban(
    logits: torch.Tensor,  # [L, V] fp32, changed in place
    slots: torch.Tensor,  # [L] int32 or int64, request slot of each row
    path: torch.Tensor,  # [L, gamma] int64, tokens below the root in order, the row's own last
    depths: torch.Tensor,  # [L] int64, how many of them count
    *,
    words: torch.Tensor,  # [S, T] int32, tokens of a slot's words one after the other
    offsets: torch.Tensor,  # [S, > K] int32, first token of each word, and the end of the last
    num_words: torch.Tensor,  # [S] int32
    most_words: int,  # K, at least the largest of num_words: a host value
    all_tokens: torch.Tensor,  # [S, M] int32, committed tokens of a slot, prompt first
    prompt_lens: torch.Tensor,  # [S] int32
    total_lens: torch.Tensor,  # [S] int32, prompt and output
) -> None:
    """-inf for the last token of every bad word whose other tokens end a row's history, the output alone.

    Raises ValueError for what it cannot read.
    """
    check("logits", logits, torch.float32, (None, None), dense_from=1)
    check("num_words", num_words, torch.int32, (None,), like=logits)
    rows, count = logits.shape[0], num_words.shape[0]
    _check_rows(slots, path, depths, logits)
    for name, tensor in (("words", words), ("offsets", offsets), ("all_tokens", all_tokens)):
        check(name, tensor, torch.int32, (count, None), like=logits, dense_from=1)
    for name, tensor in (("prompt_lens", prompt_lens), ("total_lens", total_lens)):
        check(name, tensor, torch.int32, (count,), like=logits, dense_from=0)
    limit = min(MAX_GRID, offsets.shape[1] - 1)
    if not 0 <= most_words <= limit:
        raise ValueError(
            f"most_words: expected 0 to {limit} words a request, got {most_words}; widen offsets"
        )
    if not rows or not most_words:
        return
    _ban_kernel[(rows, most_words)](
        logits,
        slots,
        path,
        depths,
        words,
        offsets,
        num_words,
        all_tokens,
        prompt_lens,
        total_lens,
        logits.stride(0),
        path.stride(0),
        words.stride(0),
        offsets.stride(0),
        all_tokens.stride(0),
        BLOCK=WORD_BLOCK,
    )


def _check_rows(slots: torch.Tensor, path: torch.Tensor, depths: torch.Tensor, logits: torch.Tensor) -> None:
    rows = logits.shape[0]
    check("slots", slots, (torch.int32, torch.int64), (rows,), like=logits, dense_from=0)
    check("path", path, torch.int64, (rows, None), like=logits, dense_from=1)
    check("depths", depths, torch.int64, (rows,), like=logits, dense_from=0)
