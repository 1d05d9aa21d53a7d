"""Transition tables of drafts with a Markov head: the bias of the candidates only, normaliser corrected.

Formulas and notation of ``specplug.markov``. A depth is the library's product ``mean @ W2^T``, the two
launches of ``specplug_kernels.candidates`` that choose the C best of ``base + scale * bias``, and one launch
here, a program a request: it gathers the C rows of W2 and the latents of the P parents, multiplies them, and
writes

    scores[p, c]  = base[c] + scale * u_p . W2[c]
    outside       = log Z_mix + log(1 - sum_c exp(mixed[c] - log Z_mix))     one more logit beside the scores
    log_probs[p]  = log_softmax(scores[p], outside)
    reach'[c]     = log sum_p softmax(reach)[p] exp(log_probs[p, c])
    mean'         = softmax(reach') @ W1[candidates]                         the next depth's, vanilla heads

Latents are rows of a table, so a gated head's are passed as a table of their own, row r * P + p. Products of
two bf16 or two fp16 tables are exact and summed in fp32; other pairs are multiplied as fp32.

Bytes: (P + C) * rank * table bytes + 4 C^2 + 4 C * rank + 40 C a request and depth beside the candidates'.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from specplug_kernels.candidates import Candidates, check_limits, check_rows, natural_log, select


@triton.jit
def score_kernel(
    base_ptr,  # [R, V] any float, logits without the bias
    chosen_ptr,  # [R, C] int64 draft ids
    mixed_ptr,  # [R, C] fp32, log-probabilities under the mixture
    log_z_ptr,  # [R] fp32, of the mixture
    reach_ptr,  # [R, P] fp32, log-probability of reaching each parent
    rows_ptr,  # [R, P] int64, the parents' rows of the table
    table_ptr,  # [., rank] any float, latents
    w2_ptr,  # [V, rank] any float
    targets_ptr,  # [V] int64, target id of each draft id, or None: the same
    tokens_ptr,  # [R, C] int64 out, target ids
    log_probs_ptr,  # [R, C, C] fp32 out, rows from P on -inf
    next_reach_ptr,  # [R, C] fp32 out
    mean_ptr,  # [R, rank] any float out, mean latent of the next depth, or None: not wanted
    parents,
    candidates,
    others,  # tokens that are no candidate
    rank,
    scale,
    base_request,  # strides in elements, as all below
    rows_request,
    table_row,
    w2_row,
    tokens_request,
    log_probs_request,
    SAME: tl.constexpr,  # both tables are of one 16 bit type
    BLOCK: tl.constexpr,  # >= candidates and 16, which a product takes at least
    BLOCK_RANK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)  # a parent or a candidate
    is_parent, is_candidate = lane < parents, lane < candidates
    row = tl.load(rows_ptr + request * rows_request + lane, mask=is_parent, other=0)
    draft_id = tl.load(chosen_ptr + request * candidates + lane, mask=is_candidate, other=0)
    target_id = draft_id
    if targets_ptr is not None:
        target_id = tl.load(targets_ptr + draft_id, mask=is_candidate, other=0)
    tl.store(tokens_ptr + request * tokens_request + lane, target_id, mask=is_candidate)

    products = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, rank, BLOCK_RANK):
        column = start + tl.arange(0, BLOCK_RANK)
        inside = (column < rank)[None, :]
        latents = tl.load(
            table_ptr + row[:, None] * table_row + column[None, :],
            mask=is_parent[:, None] & inside,
            other=0.0,
        )
        outputs = tl.load(
            w2_ptr + draft_id[:, None] * w2_row + column[None, :],
            mask=is_candidate[:, None] & inside,
            other=0.0,
        )
        if not SAME:
            latents, outputs = latents.to(tl.float32), outputs.to(tl.float32)
        products = tl.dot(latents, tl.trans(outputs), products, input_precision="ieee")

    dead = float("-inf")
    base = tl.load(base_ptr + request * base_request + draft_id, mask=is_candidate, other=dead).to(tl.float32)
    scores = tl.where(is_candidate[None, :], base[None, :] + scale * products, dead)
    mixed = tl.load(mixed_ptr + request * candidates + lane, mask=is_candidate, other=dead)
    log_z = tl.load(log_z_ptr + request)
    missing = 1.0 - tl.sum(tl.exp(mixed), 0)
    missing = tl.where((missing > 0.0) & (others > 0), missing, 0.0)  # without others it is rounding alone
    outside = log_z + natural_log(missing)
    alive = tl.abs(log_z) < float("inf")  # false for NaN
    top = tl.maximum(tl.max(scores, 1), outside)
    total = tl.sum(tl.exp(scores - top[:, None]), 1) + tl.exp(outside - top)
    log_probs = tl.where(alive, scores - (top + tl.log(total))[:, None], float("nan"))

    written = tl.where(is_parent[:, None] & (log_probs == log_probs), tl.minimum(log_probs, 0.0), dead)
    place = lane[:, None] * candidates + lane[None, :]
    held = is_candidate[:, None] & is_candidate[None, :]
    tl.store(log_probs_ptr + request * log_probs_request + place, written, mask=held)

    reach = tl.load(reach_ptr + request * parents + lane, mask=is_parent, other=dead)
    shares = tl.exp(reach - tl.max(reach, 0))
    shares = shares / tl.sum(shares, 0)
    reached = tl.sum(shares[:, None] * tl.exp(log_probs), 0)
    next_reach = natural_log(reached)
    tl.store(next_reach_ptr + request * candidates + lane, next_reach, mask=is_candidate)
    if mean_ptr is not None:
        reached = tl.where(is_candidate, reached, 0.0)
        weights = reached / tl.sum(reached, 0)
        for start in range(0, rank, BLOCK_RANK):
            column = start + tl.arange(0, BLOCK_RANK)
            latents = tl.load(
                table_ptr + target_id[:, None] * table_row + column[None, :],
                mask=is_candidate[:, None] & (column < rank)[None, :],
                other=0.0,
            )
            mean = tl.sum(weights[:, None] * latents.to(tl.float32), 0)
            tl.store(
                mean_ptr + request * rank + column, mean.to(mean_ptr.dtype.element_ty), mask=column < rank
            )


def score(
    base: torch.Tensor,  # [R, V] fp32, fp16 or bf16, one depth's logits without the bias
    best: Candidates,  # [R, 1, C], the candidates under the mixture
    reach: torch.Tensor,  # [R, P] fp32, log-probability of reaching each parent; -inf = not a parent
    rows: torch.Tensor,  # [R, P] int64, the parents' rows of the table
    table: torch.Tensor,  # [., rank], latents
    w2: torch.Tensor,  # [V, rank]
    scale: float,
    *,
    targets: torch.Tensor | None,  # [V] int64, target id of each draft id
    tokens: torch.Tensor,  # [R, C] int64 out, target ids
    log_probs: torch.Tensor,  # [R, C, C] fp32 out
    mean: torch.Tensor | None,  # [R, rank] out: the mean of the table's rows ``tokens`` under the new reach
) -> torch.Tensor:
    """Score one depth's candidates under each parent; returns the next depth's reach, [R, C] fp32.

    Reference: ``specplug.markov.score_candidates``. P is 1 or C; the buffers belong to ``conditioned``, which
    checks what comes from outside.
    """
    requests, parents = reach.shape
    count = tokens.shape[1]
    assert parents in (1, count), "parents are the anchor or the candidates of the depth above"
    assert log_probs.stride()[1:] == (count, 1), "the kernel writes [C, C] as one piece"
    next_reach = torch.empty(requests, count, device=base.device)
    same = table.dtype == w2.dtype and w2.dtype != torch.float32
    block = max(16, triton.next_power_of_2(count))
    score_kernel[(requests,)](
        *(base, best.tokens, best.log_probs, best.log_z, reach, rows, table, w2, targets),
        *(tokens, log_probs, next_reach, mean, parents, count, base.shape[1] - count),
        *(w2.shape[1], scale, base.stride(0), rows.stride(0), table.stride(0), w2.stride(0)),
        *(tokens.stride(0), log_probs.stride(0)),
        SAME=same,
        BLOCK=block,
        BLOCK_RANK=32 if same else 16,
        num_warps=8 if block > 32 else 4,
        enable_fp_fusion=True,
    )
    return next_reach


def conditioned(
    logits: torch.Tensor,  # [R, gamma, V_draft] fp32, fp16 or bf16, without the bias
    w1: torch.Tensor,  # [V, rank] embedding of the parent token, target vocabulary
    w2: torch.Tensor,  # [V_draft, rank]
    scale: float,
    anchors: torch.Tensor,  # [R] integers, last committed token, target vocabulary
    candidates: int,
    *,
    latents: Callable[[torch.Tensor, int], torch.Tensor] | None = None,  # None: W1[token], a vanilla head
    targets: torch.Tensor | None = None,  # [V_draft] int64, target id of each draft id; None: the same
    out: tuple[torch.Tensor, torch.Tensor] | None = None,  # contiguous, as returned
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [R, gamma, C] int64 (target ids) and log-probabilities [R, gamma, C, C] fp32, row = parent.

    Reference: ``specplug.markov.conditioned``, C = min(candidates, V_draft). A gated head passes ``latents``,
    which maps tokens [R, P] and the depth to u, [R, P, rank], without reading the device; w1 is then unused.
    Four launches a depth of a vanilla head, none of them waits for the host. Raises ValueError for shapes
    that do not belong together, other dtypes or layouts, and the limits of ``candidates.select``.
    """
    _check(logits, w1, w2, anchors, candidates, targets)
    requests, gamma, vocab = logits.shape
    count, rank = min(candidates, vocab), w2.shape[1]
    tokens, log_probs = _outputs(logits, count) if out is None else _checked(out, logits, count)
    if not requests:
        return tokens, log_probs
    parents = anchors.long()[:, None]  # [R, P] target ids
    reach = torch.zeros(requests, 1, device=logits.device)
    mean = w1[parents[:, 0]].to(w2.dtype)  # [R, rank]
    for depth in range(gamma):
        table, rows, next_mean = w1, parents, None
        if latents is not None:
            own = latents(parents, depth)
            table = own.reshape(-1, rank)
            rows = torch.arange(len(table), device=logits.device).view(requests, -1)
            mean = (reach.softmax(-1)[:, None] @ own.float())[:, 0].to(w2.dtype)
        elif depth + 1 < gamma:
            next_mean = torch.empty_like(mean)
        base = logits[:, depth]
        best = select(base[:, None], candidates, bias=(mean @ w2.T)[:, None], scale=scale)
        reach = score(
            *(base, best, reach, rows, table, w2, scale),
            targets=targets,
            tokens=tokens[:, depth],
            log_probs=log_probs[:, depth],
            mean=next_mean,
        )
        parents = tokens[:, depth]
        mean = mean if next_mean is None else next_mean
    return tokens, log_probs


def _outputs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    requests, gamma, _ = logits.shape
    tokens = torch.empty(requests, gamma, count, dtype=torch.int64, device=logits.device)
    return tokens, torch.empty(requests, gamma, count, count, device=logits.device)


def _checked(
    out: tuple[torch.Tensor, torch.Tensor], logits: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, log_probs = out
    requests, gamma, _ = logits.shape
    for name, x, dtype, shape in (
        ("tokens", tokens, torch.int64, (requests, gamma, count)),
        ("log_probs", log_probs, torch.float32, (requests, gamma, count, count)),
    ):
        if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or x.device != logits.device:
            raise ValueError(
                f"out {name}: expected contiguous {dtype} {list(shape)} on {logits.device}, "
                f"got {x.dtype} {list(x.shape)} on {x.device}; leave out away or make it so"
            )
    return out


def _check(
    logits: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    anchors: torch.Tensor,
    candidates: int,
    targets: torch.Tensor | None,
) -> None:
    check_rows("logits", logits)
    requests, _, vocab = logits.shape
    check_limits(vocab, candidates)
    for name, x in (("w1", w1), ("w2", w2)):
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.dim() != 2 or x.stride(1) != 1:
            raise ValueError(
                f"{name}: expected [tokens, rank] float32, float16 or bfloat16 with contiguous rows, "
                f"got {x.dtype} {list(x.shape)}, strides {x.stride()}; cast it or call .contiguous()"
            )
    if w2.shape[0] != vocab or w1.shape[1] != w2.shape[1]:
        raise ValueError(
            f"w1, w2: expected [V, rank] and [{vocab}, rank], one row of w2 a column of logits, "
            f"got {list(w1.shape)} and {list(w2.shape)}; cut the padding off the wider one"
        )
    if tuple(anchors.shape) != (requests,) or anchors.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"anchors: expected [{requests}] token ids, int32 or int64, got {anchors.dtype} "
            f"{list(anchors.shape)}; give one a request"
        )
    if targets is not None and (
        tuple(targets.shape) != (vocab,) or targets.dtype != torch.int64 or not targets.is_contiguous()
    ):
        raise ValueError(
            f"targets: expected contiguous [{vocab}] int64, one a draft id, "
            f"got {targets.dtype} {list(targets.shape)}; cast it or make it as long as logits are wide"
        )
    for name, x in (("w1", w1), ("w2", w2), ("anchors", anchors), ("targets", targets)):
        if x is not None and x.device != logits.device:
            raise ValueError(f"{name}: expected a tensor on {logits.device}, got one on {x.device}; move it")
