"""Walk, moves, budget and compaction: what is compiled ahead of time and what is timed on a GPU."""

from collections.abc import Callable
from functools import partial

import torch
from aot import Case, launched

from specplug_kernels import budget, compaction, moves, walk

REQUESTS, NODES, DEPTH = 256, 64, 16  # the largest that are served
WIDTH = NODES + 1


def _of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _counts(requests: int = REQUESTS) -> torch.Tensor:
    return _of(torch.int32, requests)


def cases_commit() -> list[Case]:
    """Features and caches of 16 bits, and what is narrower, wider or strided."""
    return [*_walk_cases(), *_move_cases(), *_admit_cases(), *_copy_cases()]


def _walk_cases() -> list[Case]:
    parents, rows = _of(torch.int32, REQUESTS, NODES), REQUESTS * WIDTH
    path, counts = _of(torch.int64, REQUESTS, DEPTH + 1), _counts()
    flat = partial(
        *(walk.walk, parents, _of(torch.int32, rows), counts, _of(torch.int64, rows)),
        max_depth=DEPTH,
        blocked=_of(torch.bool, rows),
        starts=_counts(REQUESTS + 1),
    )
    tokens, sampled = _of(torch.int64, REQUESTS, NODES), _of(torch.int64, REQUESTS, WIDTH)
    rectangle = partial(walk.walk, parents, tokens, counts, sampled, max_depth=DEPTH)
    order = partial(walk.path_permutation, path, counts, WIDTH)
    return [
        launched("walk: ragged, blocked, B=64 depth 16", walk._walk_kernel, flat),
        launched("walk: rectangle, B=64 depth 16", walk._walk_kernel, rectangle),
        launched("walk: permutation", walk._permutation_kernel, order),
    ]


def _move_cases() -> list[Case]:
    rows, kv = moves._move_rows_kernel, moves._move_kv_kernel
    path = _of(torch.int64, REQUESTS, DEPTH + 1), _counts(), _of(torch.int64, REQUESTS)
    by_path = moves.PathMoves(*path)
    given = moves.RowMoves(_of(torch.int64, REQUESTS, DEPTH), _of(torch.int64, REQUESTS, DEPTH))
    slots = _of(torch.int64, REQUESTS * WIDTH)
    dense, strided = _of(torch.bfloat16, len(slots), 4096), _of(torch.float32, len(slots), 1001)
    (bytes_apart,) = moves.group_views([_of(torch.uint8, 64, 8, 128, 16).transpose(2, 3).transpose(1, 2)])
    found = [
        launched("moves: rows by path", rows, partial(moves.move_rows, dense, by_path)),
        launched("moves: rows given, strided", rows, partial(moves.move_rows, strided, given)),
    ]
    for head in (80, 256):
        (views,) = moves.group_views([_of(torch.bfloat16, 64, 16, 8, head)])
        launch = partial(moves.move_kv, views, by_path, slots)
        found.append(launched(f"moves: kv by path, head {head}", kv, launch))
    launch = partial(moves.move_kv, bytes_apart, given)
    return [*found, launched("moves: kv given, strided", kv, launch)]


def _admit_cases() -> list[Case]:
    many = 4 * REQUESTS
    indexed = partial(budget.admit, _of(torch.float32, REQUESTS, NODES), _counts(), NODES, rows=_counts())
    straight = partial(budget.admit, _of(torch.float32, many, 16), _counts(many), _counts(1))
    return [
        launched(f"budget: R={REQUESTS} B={NODES}", budget._admit_kernel, indexed),
        launched(f"budget: R={many} B=16", budget._admit_kernel, straight),
    ]


def _copy_cases() -> list[Case]:
    starts, kernel = _counts(REQUESTS + 1), compaction._copy_kernel

    def rows(features: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _of(torch.bfloat16, REQUESTS, WIDTH, features), _of(torch.bfloat16, REQUESTS * WIDTH, features)

    def compact(features: int) -> Callable[[], object]:
        return partial(compaction.compact, rows(features)[0], starts, REQUESTS * WIDTH)

    def expand(features: int) -> Callable[[], object]:
        return partial(compaction.expand, rows(features)[1], starts, WIDTH)

    return [
        launched(
            "compaction: starts",
            compaction._row_starts_kernel,
            partial(compaction.row_starts, _counts(compaction.COUNTS_A_TURN)),
        ),
        launched("compaction: compact dense", kernel, compact(4096)),
        launched("compaction: compact strided", kernel, compact(63)),
        launched("compaction: expand dense", kernel, expand(256)),
        launched("compaction: expand strided", kernel, expand(2001)),
    ]


def timings(device: torch.device | str) -> list[tuple[str, Callable[[], None], int]]:
    """(name, launch, ideal bytes). A 36 layer target's caches and features; tiny in the interpreter."""
    if torch.device(device).type == "cpu":
        return _timings(torch.device(device), requests=2, nodes=3, depth=2, layers=2, heads=1, features=16)
    found = []
    for requests in (1, 16, 256):
        found += _timings(
            torch.device(device), requests=requests, nodes=64, depth=16, layers=36, heads=8, features=4096
        )
    return found


def _timings(
    device, *, requests, nodes, depth, layers, heads, features
) -> list[tuple[str, Callable[[], None], int]]:
    """Every other node of a chain is accepted, so that all of its rows move."""
    width, steps, rows = nodes + 1, depth + 1, requests * (nodes + 1)
    shape = f"R={requests} B={nodes} depth={depth}"
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * width
    accepted = min(depth, nodes // 2)
    path = torch.arange(steps, device=device).mul(2).clamp(max=nodes).repeat(requests, 1)
    emitted = torch.full((requests,), accepted + 1, dtype=torch.int32, device=device)
    by_path = moves.PathMoves(path, emitted, starts[:-1])
    moved = requests * accepted
    indices = requests * (steps * 8 + 8)

    parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=device).repeat(requests, 1)
    counts = torch.full((requests,), nodes, dtype=torch.int32, device=device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    result = walk.walk(parents, tokens, counts, tokens, max_depth=depth, starts=starts)
    order = walk.path_permutation(path, emitted, width)

    hidden = torch.randn(rows, features, device=device).bfloat16()
    blocks = -(-rows // 16)
    caches = [torch.zeros(blocks, heads, 16, 256, dtype=torch.bfloat16, device=device) for _ in range(layers)]
    (views,) = moves.group_views([cache.transpose(1, 2) for cache in caches])
    slots = torch.randperm(blocks * 16, device=device)[:rows]

    survival = torch.rand(requests, nodes, device=device).cumprod(1)
    admitted = torch.empty_like(counts)
    some = torch.randint(0, width, (requests,), device=device)
    bounds = compaction.row_starts(some)
    total = int(some.sum())
    padded = hidden.view(requests, width, features)
    ragged = compaction.compact(padded, bounds, total)
    rectangle = torch.empty_like(padded)
    row_bytes = features * hidden.element_size()
    slot_bytes = layers * heads * 256 * 2
    return [
        (
            f"walk {shape}",
            lambda: _none(
                walk.walk(parents, tokens, counts, tokens, max_depth=depth, starts=starts, out=result)
            ),
            requests * (nodes * 20 + steps * 24 + 8),
        ),
        (
            f"permutation {shape}",
            lambda: _none(walk.path_permutation(path, emitted, width, out=order)),
            requests * (steps * 8 + width * 8 + 4),
        ),
        (
            f"move rows {shape} F={features}",
            lambda: moves.move_rows(hidden, by_path),
            2 * moved * row_bytes + indices,
        ),
        (
            f"move kv {shape} layers={layers} heads={heads} x 256",
            lambda: moves.move_kv(views, by_path, slots),
            2 * moved * slot_bytes + indices + moved * 16 + layers * 8,
        ),
        (
            f"admit {shape}",
            lambda: _none(budget.admit(survival, counts, requests * nodes // 2, out=admitted)),
            requests * (nodes * 4 + 8),
        ),
        (f"row starts {shape}", lambda: _none(compaction.row_starts(some, out=bounds)), requests * 12),
        (
            f"compact {shape} F={features}",
            lambda: _none(compaction.compact(padded, bounds, total, out=ragged)),
            2 * total * row_bytes,
        ),
        (
            f"expand {shape} F={features}",
            lambda: _none(compaction.expand(ragged, bounds, width, out=rectangle)),
            (total + rows) * row_bytes,
        ),
    ]


def _none(_: object) -> None:
    """A launch is timed for its effect."""
