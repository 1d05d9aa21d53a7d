"""Candidates of rows of logits: the C best tokens and log Z, reading the vocabulary once.

The first kernel cuts the vocabulary into chunks of contiguous tokens and writes each chunk's largest value,
and one log-sum-exp for every block of chunks. The second takes, a row at a time, the C best chunks by
(maximum descending, chunk ascending), which hold the C best tokens because each better chunk holds a better
token (``specplug.candidates``), reads those chunks again and takes the C best tokens. "The C best" is a
search for the C-th largest value, bit by bit over the ordered integer image of the floats, ties to the
smaller id: exact and without a sort. Only the C winners are sorted, by counting who is better.

The value of a token is ``logit + scale * bias`` in fp32, rounded as torch rounds it (no fused multiply-add),
so ids, order and ties are those of ``specplug.candidates.top_tokens``. NaN counts as -inf; a row that holds a
NaN, +inf or only -inf has no normaliser, and all its log-probabilities are -inf.

Bytes: V * (logit bytes + bias bytes) + 12 C + 4 a row. Beyond it go 8 bytes a chunk and the C best chunks,
read again; ``_chunk_tokens`` weighs one against the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_CANDIDATES = 64  # one program sorts them by comparing all pairs
MAX_VOCAB = 1 << 18  # 4096 chunks of 64 tokens: what one program holds
BLOCK = 2048  # tokens a program of the first kernel; 75 programs for a row of 151,936 tokens


class Candidates(NamedTuple):
    """The C best tokens of each row, best first; of equals the smaller id."""

    tokens: torch.Tensor  # [R, gamma, C] int64
    log_probs: torch.Tensor  # [R, gamma, C] fp32, value - log Z; -inf = not live
    log_z: torch.Tensor  # [R, gamma] fp32, log-sum-exp over the vocabulary; NaN or +-inf = dead row


@triton.jit
def ordered_image(values):  # [...] fp32 without NaN
    """uint32 that sort like the values; -0.0 as 0.0, and 0 is below every value."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    flip = (bits >> 31) & 0x7FFFFFFF
    return (bits ^ flip).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def best_lanes(image, count):  # image [N] uint32, 0 = no entry; count <= entries
    """Mask [N] of the ``count`` best lanes by (image descending, lane ascending)."""
    least = tl.full((), 0, tl.uint32)  # grows to the count-th largest image
    bit = tl.full((), 1 << 31, tl.uint32)
    for _ in range(32):
        raised = least | bit
        enough = tl.sum((image >= raised).to(tl.int32), 0) >= count
        least = tl.where(enough, raised, least)
        bit = bit >> 1
    above = image > least
    equal = image == least
    missing = count - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))


@triton.jit
def biased(logits_ptr, bias_ptr, scale, offsets, mask):
    """fp32 value of the tokens at ``offsets``; -inf where masked."""
    values = tl.load(logits_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    if bias_ptr is not None:
        values += scale * tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def scan_kernel(
    logits_ptr,  # [R, gamma, V] any float
    bias_ptr,  # [R, gamma, V] any float, or None
    maxima_ptr,  # [rows, chunks] fp32 out; NaN counts as -inf
    sums_ptr,  # [rows, blocks] fp32 out, log-sum-exp of the block
    gamma,
    vocab,
    chunks,
    scale,
    logits_request,  # strides in elements, as all below
    logits_depth,
    bias_request,
    bias_depth,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # chunks a program
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request, depth = row // gamma, row % gamma
    chunk = block * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    if bias_ptr is not None:
        bias_ptr += request * bias_request + depth * bias_depth
    logits_ptr += request * logits_request + depth * logits_depth
    values = biased(logits_ptr, bias_ptr, scale, token, token < vocab)
    best = tl.max(tl.where(values == values, values, float("-inf")), 1)
    tl.store(maxima_ptr + row * chunks + chunk, best, mask=chunk < chunks)
    top = tl.max(best, 0)
    shift = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    total = tl.sum(tl.sum(tl.exp(values - shift), 1), 0)
    tl.store(sums_ptr + row * tl.num_programs(1) + block, natural_log(total) + shift)


@triton.jit
def select_kernel(
    logits_ptr,  # [R, gamma, V] any float
    bias_ptr,  # [R, gamma, V] any float, or None
    maxima_ptr,  # [rows, chunks] fp32
    sums_ptr,  # [rows, blocks] fp32
    tokens_ptr,  # [rows, C] int64 out
    log_probs_ptr,  # [rows, C] fp32 out
    log_z_ptr,  # [rows] fp32 out
    gamma,
    vocab,
    chunks,
    blocks,
    candidates,
    scale,
    logits_request,
    logits_depth,
    bias_request,
    bias_depth,
    CHUNK: tl.constexpr,
    N_CHUNKS: tl.constexpr,  # >= chunks
    N_BLOCKS: tl.constexpr,  # >= blocks
    N_BEST: tl.constexpr,  # >= candidates
):
    row = tl.program_id(0).to(tl.int64)
    request, depth = row // gamma, row % gamma
    if bias_ptr is not None:
        bias_ptr += request * bias_request + depth * bias_depth
    logits_ptr += request * logits_request + depth * logits_depth
    tokens_ptr += row * candidates
    log_probs_ptr += row * candidates

    block = tl.arange(0, N_BLOCKS)
    sums = tl.load(sums_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
    top = tl.max(sums, 0)
    shift = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    log_z = natural_log(tl.sum(tl.exp(sums - shift), 0)) + shift
    tl.store(log_z_ptr + row, log_z)

    # The output row is where lanes hand each other what they chose.
    chunk = tl.arange(0, N_CHUNKS)
    maxima = tl.load(maxima_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    image = tl.where(chunk < chunks, ordered_image(maxima), 0)
    taken = best_lanes(image, tl.minimum(candidates, chunks))
    tl.store(tokens_ptr + tl.cumsum(taken.to(tl.int32), 0) - 1, chunk.to(tl.int64), mask=taken)
    tl.debug_barrier()

    best = tl.arange(0, N_BEST)
    chunk = tl.load(tokens_ptr + best, mask=best < tl.minimum(candidates, chunks), other=chunks)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    token = tl.reshape(token, (N_BEST * CHUNK,))  # in order, so that lanes stand by token id
    held = token < vocab
    values = biased(logits_ptr, bias_ptr, scale, token, held)
    values = tl.where(values == values, values, float("-inf"))
    taken = best_lanes(tl.where(held, ordered_image(values), 0), candidates)
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(tokens_ptr + place, token, mask=taken)
    tl.store(log_probs_ptr + place, values, mask=taken)
    tl.debug_barrier()

    # The winners stand by token id: one is before another if it is greater, or equal and further left.
    live = best < candidates
    token = tl.load(tokens_ptr + best, mask=live, other=0)
    values = tl.load(log_probs_ptr + best, mask=live, other=float("-inf"))
    image = tl.where(live, ordered_image(values), 0)
    better = image[None, :] > image[:, None]
    earlier = (image[None, :] == image[:, None]) & (best[None, :] < best[:, None])
    rank = tl.sum((better | earlier).to(tl.int32), 1)
    log_probs = values - log_z
    log_probs = tl.where(log_probs == log_probs, log_probs, float("-inf"))
    tl.debug_barrier()
    tl.store(tokens_ptr + rank, token, mask=live)
    tl.store(log_probs_ptr + rank, log_probs, mask=live)


@triton.jit
def natural_log(x):
    """Natural logarithm, -inf of 0; NaN stays."""
    return tl.where(x == 0.0, float("-inf"), tl.log(tl.where(x == 0.0, 1.0, x)))


def select(
    logits: torch.Tensor,  # [R, gamma, V] fp32, fp16 or bf16, last dimension contiguous
    candidates: int,
    *,
    bias: torch.Tensor | None = None,  # [R, gamma, V] fp32, fp16 or bf16, last dimension contiguous
    scale: float = 1.0,
    out: Candidates | None = None,  # contiguous
) -> Candidates:
    """The C = min(candidates, V) best tokens of each row of ``logits + scale * bias``, and log Z.

    Reference: ``specplug.candidates.top_tokens`` and ``torch.logsumexp``. Two launches, none without rows.
    Raises ValueError for more than 64 candidates, fewer than 1, more than 262,144 tokens, other dtypes,
    layouts or shapes.
    """
    check_rows("logits", logits)
    requests, gamma, vocab = logits.shape
    check_limits(vocab, candidates)
    if bias is not None:
        check_rows("bias", bias)
        if bias.shape != logits.shape or bias.device != logits.device:
            raise ValueError(
                f"bias: expected {list(logits.shape)} on {logits.device}, one value a logit, "
                f"got {list(bias.shape)} on {bias.device}"
            )
    count = min(candidates, vocab)
    out = _outputs(logits, count) if out is None else _checked_outputs(out, logits, count)
    rows = requests * gamma
    if not rows:
        return out
    chunk = _chunk_tokens(vocab, count)
    chunks, blocks = triton.cdiv(vocab, chunk), triton.cdiv(vocab, BLOCK)
    maxima = torch.empty(rows, chunks, device=logits.device)
    sums = torch.empty(rows, blocks, device=logits.device)
    strides = (*logits.stride()[:2], *((0, 0) if bias is None else bias.stride()[:2]))
    scan_kernel[(rows, blocks)](
        *(logits, bias, maxima, sums, gamma, vocab, chunks, scale, *strides),
        CHUNK=chunk,
        CHUNKS=BLOCK // chunk,
        num_warps=4,
        enable_fp_fusion=False,
    )
    n_chunks, n_best = triton.next_power_of_2(chunks), triton.next_power_of_2(count)
    select_kernel[(rows,)](
        *(logits, bias, maxima, sums, *out, gamma, vocab, chunks, blocks, count, scale, *strides),
        CHUNK=chunk,
        N_CHUNKS=n_chunks,
        N_BLOCKS=triton.next_power_of_2(blocks),
        N_BEST=n_best,
        num_warps=8 if max(n_chunks, n_best * chunk) > 1024 else 4,
        enable_fp_fusion=False,
    )
    return out


def factorised(
    logits: torch.Tensor,  # [R, gamma, V] fp32, fp16 or bf16, last dimension contiguous
    candidates: int,
    *,
    out: Candidates | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [R, gamma, C] int64, log-probabilities [R, gamma, 1, C] fp32 of a draft without a Markov head.

    Reference: ``specplug.candidates.factorised``. Limits and errors of ``select``.
    """
    best = select(logits, candidates, out=out)
    return best.tokens, best.log_probs[:, :, None]


def _chunk_tokens(vocab: int, count: int) -> int:
    """Tokens a chunk: c maxima of 4 bytes written and read against C chunks read again.

    8 V / c + 2 C c bytes with 2-byte logits are least at c = 2 sqrt(V / C). The power of two below it costs a
    tenth of the row for C = 64 of 100,000 tokens and less for longer rows or fewer candidates; at most 4096
    tokens then stand in one program.
    """
    ideal = int(2 * (vocab / triton.next_power_of_2(count)) ** 0.5)
    return min(max(1 << ideal.bit_length() - 1, 16), 4096 // triton.next_power_of_2(count), 256)


def _outputs(logits: torch.Tensor, count: int) -> Candidates:
    shape, device = (*logits.shape[:2], count), logits.device
    return Candidates(
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, device=device),
        torch.empty(shape[:2], device=device),
    )


def check_limits(vocab: int, candidates: int) -> None:
    """Raise ValueError for what the kernels do not hold: 1..262,144 tokens a row, 1..64 candidates."""
    for name, limit, got in (
        ("candidates", MAX_CANDIDATES, candidates),
        ("tokens a row of logits", MAX_VOCAB, vocab),
    ):
        if not 1 <= got <= limit:
            raise ValueError(
                f"{name}: expected 1..{limit}, got {got}; wider ones are for specplug.candidates"
            )


def check_rows(name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless ``x`` is [R, gamma, V] of a 16 or 32 bit float, tokens contiguous."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.dim() != 3:
        raise ValueError(
            f"{name}: expected [R, gamma, V] float32, float16 or bfloat16, got {x.dtype} {list(x.shape)}; "
            "cast or reshape it"
        )
    if x.shape[2] > 1 and x.stride(2) != 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension, got strides {x.stride()}; call .contiguous()"
        )


def _checked_outputs(out: Candidates, logits: torch.Tensor, count: int) -> Candidates:
    shape = (*logits.shape[:2], count)
    wanted = (torch.int64, shape), (torch.float32, shape), (torch.float32, shape[:2])
    for name, x, (dtype, expected) in zip(out._fields, out, wanted, strict=True):
        if x.dtype != dtype or x.shape != expected or not x.is_contiguous() or x.device != logits.device:
            raise ValueError(
                f"out.{name}: expected contiguous {dtype} {list(expected)} on {logits.device}, "
                f"got {x.dtype} {list(x.shape)} on {x.device}; leave out away or make it so"
            )
    return out
