"""Who does a round's device work: torch (the core's own functions) or the Triton kernels.

`Ops` holds one function for each piece of work, with the core's signatures; an adapter calls these and never
asks which it has. `choose` decides once, at start, from host values. What is not here is the core's torch
under either choice: the engine's kernels and torch's do it as well.

The Triton functions write trees, words and budgets into buffers made once for the most requests and hand out
views, valid until the next call of the same function. Tables and walks are new memory each time: a table is
large and short-lived, and an engine copies a walk's tokens to the host on another stream while the next round
may already walk.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from specplug.attention import merge, partial_attention
from specplug.candidates import TransitionTable, factorised
from specplug.ddtree import greedy_chain, grow
from specplug.heads import MarkovHead
from specplug.markov import conditioned
from specplug.ragged import admit
from specplug.tree import DraftTree, ancestor_mask
from specplug.verify import Walk, walk
from specplug.vocabulary import DraftVocabulary
from specplug.window import Commit, Windows

Kind = Literal["triton", "torch"]

# Of the kernels, repeated here because choosing must not import Triton.
MAX_BUDGET = 64
MAX_CANDIDATES = 64
MAX_DEPTH = 16
MAX_HEAD_SIZE = 256
MAX_VOCAB = 1 << 18
HEAD_SIZE_UNIT = 8

# attend(query [N, H, D], key [N, Hkv, D], value [N, Hkv, D], prefix_out [T, W, H, D], prefix_lse [T, W, H],
# output [N, H, D], scale): the windows' rows attend to their ancestors and themselves, merged with the prefix
# pass and written into `output`, whose other rows stay.
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], None
]
# move(commit, slots [N] int64): a commit's moves in paged caches. slots: where each row of the step is kept.
CacheMover = Callable[[Commit, torch.Tensor], None]


@dataclass(frozen=True)
class Ops:
    """The device functions of a round; signatures, shapes and errors are those of the core's."""

    kind: Kind
    factorised: Callable[[torch.Tensor, int], TransitionTable]  # specplug.candidates
    conditioned: Callable[..., TransitionTable]  # specplug.markov
    grow: Callable[[TransitionTable, int], DraftTree]  # specplug.ddtree
    greedy_chain: Callable[[TransitionTable], DraftTree]  # specplug.ddtree
    visibility: Callable[..., torch.Tensor]  # specplug.tree.ancestor_mask, for lay_out_windows
    attention: Callable[[Windows], Attend]  # of one step's windows: specplug.attention
    walk: Callable[..., Walk]  # specplug.verify
    admit: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # specplug.ragged
    move_rows: Callable[[Commit, torch.Tensor], None]  # specplug.window.Commit.move
    # The same in views [blocks, block, heads, D] of paged caches, at any strides; called once for the caches.
    cache_mover: Callable[[Sequence[torch.Tensor]], CacheMover]


class Choice(NamedTuple):
    """Which kind runs; and why not Triton, where "auto" settles for torch on a GPU."""

    kind: Kind
    reason: str = ""


def choose(
    wanted: Literal["auto", "triton", "torch"],
    *,
    on_gpu: bool,
    budget: int,
    candidates: int,
    depth: int,
    head_size: int,
    vocab: int,
) -> Choice:
    """Decide. Raises ValueError, in one sentence, where "triton" is asked for and cannot run here."""
    if wanted == "torch" or (wanted == "auto" and not on_gpu):
        return Choice("torch")
    limits = {
        "tree_budget": (budget, MAX_BUDGET),
        "candidates": (candidates, MAX_CANDIDATES),
        "num_speculative_tokens": (depth, MAX_DEPTH),
        "head size": (head_size, MAX_HEAD_SIZE),
        "vocabulary": (vocab, MAX_VOCAB),
    }
    reason = ""
    if importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed"
    elif not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        reason = "on a CPU they run in Triton's interpreter alone, under TRITON_INTERPRET=1"
    elif head_size % HEAD_SIZE_UNIT:
        reason = f"they take head sizes that are multiples of {HEAD_SIZE_UNIT}, and it is {head_size}"
    else:
        for name, (value, limit) in limits.items():
            if value > limit:
                reason = f"they take a {name} of at most {limit}, and it is {value}"
                break
    if not reason:
        return Choice("triton")
    if wanted == "triton":
        raise ValueError(
            f'kernels: expected what the Triton kernels serve, got "triton", but {reason}; use "torch".'
        )
    return Choice("torch", reason)


def make_ops(kind: Kind, device: torch.device, *, requests: int, depth: int, budget: int) -> Ops:
    """The functions of a worker: at most ``requests`` requests, trees of ``budget`` nodes, ``depth`` deep."""
    if kind == "torch":
        return torch_ops()
    return triton_ops(device, requests=requests, depth=depth, budget=budget)


def torch_ops() -> Ops:
    """The core's own functions."""
    return Ops(
        kind="torch",
        factorised=factorised,
        conditioned=conditioned,
        grow=grow,
        greedy_chain=greedy_chain,
        visibility=ancestor_mask,
        attention=lambda windows: functools.partial(_attend, windows),
        walk=walk,
        admit=admit,
        move_rows=lambda commit, rows: commit.move(rows),
        cache_mover=lambda caches: functools.partial(_move_slots, caches),
    )


def _attend(
    windows: Windows,
    query: torch.Tensor,  # [N, H, D]
    key: torch.Tensor,  # [N, Hkv, D]
    value: torch.Tensor,  # [N, Hkv, D]
    prefix_out: torch.Tensor,  # [T, W, H, D]
    prefix_lse: torch.Tensor,  # [T, W, H]
    output: torch.Tensor,  # [N or more, H, D]
    scale: float,
) -> None:
    rows = windows.rows
    in_tree = partial_attention(query[rows], key[rows], value[rows], windows.mask, scale)
    covered = output[: windows.column_of_row.shape[0]]
    covered.copy_(windows.scatter(merge(prefix_out, prefix_lse, *in_tree), covered))


def _move_slots(
    caches: Sequence[torch.Tensor],  # [blocks, block, heads, D] each
    commit: Commit,
    slots: torch.Tensor,  # [N] int64
) -> None:
    source, destination = slots[commit.source], slots[commit.destination]
    for cache in caches:
        block = cache.shape[1]
        cache[destination // block, destination % block] = cache[source // block, source % block]


def triton_ops(device: torch.device, *, requests: int, depth: int, budget: int) -> Ops:
    """The kernels, over buffers for ``requests`` requests; without Triton an ImportError.

    A batch too large for the budget kernel (``specplug_kernels.budget.MAX_CELLS``) keeps torch's admit.
    """
    from specplug_kernels import attention, candidates, growth, markov, moves
    from specplug_kernels import budget as budgets
    from specplug_kernels.walk import walk as triton_walk

    def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def trees(width: int) -> growth.Grown:
        return growth.Grown(
            tokens=integers(requests, width, dtype=torch.int64),
            parents=integers(requests, width),
            depths=integers(requests, width),
            scores=integers(requests, width, dtype=torch.float32),
            counts=integers(requests),
            ancestors=integers(requests, width, dtype=torch.int64),
        )

    tree_out, chain_out = trees(budget), trees(depth)
    words = integers(requests * budget, dtype=torch.int64)
    window_words = integers(requests, budget, dtype=torch.int64)
    starts, counts, admitted = integers(requests), integers(requests), integers(requests)
    cells = 1 << (requests - 1).bit_length() + (budget - 1).bit_length()

    def views(out: growth.Grown, table: TransitionTable) -> growth.Grown:
        return growth.Grown(*(field[: table.tokens.shape[0]] for field in out))

    def drafted(grown: growth.Grown) -> DraftTree:
        return DraftTree(*grown[: len(DraftTree.__dataclass_fields__)])

    def conditioned_table(
        logits: torch.Tensor,
        head: MarkovHead,
        anchors: torch.Tensor,
        count: int,
        *,
        hidden: torch.Tensor | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> TransitionTable:
        def latents(tokens: torch.Tensor, at: int) -> torch.Tensor:
            return head.step(tokens, None if hidden is None else hidden[:, at, None]).latent

        return TransitionTable(
            *markov.conditioned(
                *(logits, head.w1, head.w2, head.scale, anchors, count),
                latents=None if head.kind == "vanilla" else latents,
                targets=None if vocabulary is None else vocabulary.targets,
            )
        )

    def words_of(parents: torch.Tensor, live: torch.Tensor, *, max_depth: int) -> torch.Tensor:
        out = words[: parents.numel()].view(parents.shape)
        return growth.ancestor_words(parents.contiguous(), live, out=out)

    def attention_of(windows: Windows) -> Attend:
        of, width = windows.rows.shape
        starts[:of].copy_(windows.rows[:, 0])
        torch.sum(windows.inside, 1, dtype=torch.int32, out=counts[:of]).sub_(1)  # -1: no window
        window_words[:of, : width - 1].copy_(windows.mask)

        def attend(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            prefix_out: torch.Tensor,
            prefix_lse: torch.Tensor,
            output: torch.Tensor,
            scale: float,
        ) -> None:
            attention.in_tree_merged(
                *(query, key, value),
                starts=starts[:of],
                counts=counts[:of],
                ancestors=window_words[:of],
                scale=scale,
                prefix_out=prefix_out,
                prefix_lse=prefix_lse,
                output=output,
            )

        return attend

    def admit_nodes(survival: torch.Tensor, capacities: torch.Tensor, nodes: int) -> torch.Tensor:
        return budgets.admit(survival, capacities, nodes, out=admitted[: capacities.shape[0]])

    def row_moves(commit: Commit) -> moves.RowMoves:
        return moves.RowMoves(commit.source.view(-1, depth), commit.destination.view(-1, depth))

    def cache_mover(caches: Sequence[torch.Tensor]) -> CacheMover:
        groups = moves.group_views(caches)

        def move(commit: Commit, slots: torch.Tensor) -> None:
            for group in groups:
                moves.move_kv(group, row_moves(commit), slots)

        return move

    return Ops(
        kind="triton",
        factorised=lambda logits, count: TransitionTable(*candidates.factorised(logits, count)),
        conditioned=conditioned_table,
        grow=lambda table, nodes: drafted(growth.grow(*table, nodes, out=views(tree_out, table))),
        greedy_chain=lambda table: drafted(growth.greedy_chain(*table, out=views(chain_out, table))),
        visibility=words_of,
        attention=attention_of,
        walk=triton_walk,
        admit=admit_nodes if cells <= budgets.MAX_CELLS else admit,
        move_rows=lambda commit, rows: moves.move_rows(rows, row_moves(commit)),
        cache_mover=cache_mover,
    )
