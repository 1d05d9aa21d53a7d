"""Walk, moves, budget and compaction: what is compiled ahead of time and what is timed on a GPU."""

from collections.abc import Callable

import torch
import triton.language as tl
from aot import Case

from specplug_kernels import budget, compaction, moves, walk

WALK = {
    "parents_ptr": "*i32",
    "tokens_ptr": "*i64",
    "sampled_ptr": "*i64",
    "blocked_ptr": "*u8",
    "counts_ptr": "*i32",
    "starts_ptr": "*i32",
    "emitted_ptr": "*i64",
    "num_emitted_ptr": "*i32",
    "path_ptr": "*i64",
    "budget": "i32",
    "max_depth": "i32",
    "parents_stride": "i32",
    "tokens_stride": "i32",
    "sampled_stride": "i32",
    "blocked_stride": "i32",
    "BLOCK_B": "constexpr",
    "BLOCK_D": "constexpr",
}
ORDER = {
    "path_ptr": "*i64",
    "num_emitted_ptr": "*i32",
    "order_ptr": "*i64",
    "steps": "i32",
    "width": "i32",
    "path_stride": "i32",
    "BLOCK_W": "constexpr",
    "BLOCK_D": "constexpr",
}
MOVES = {
    "first_ptr": "*i64",
    "second_ptr": "*i32",
    "starts_ptr": "*i64",
    "steps": "i32",
    "stride": "i32",
    "starts_stride": "i32",
}
MOVE_ROWS = (
    {"rows_ptr": "*i16"}
    | MOVES
    | {
        "row_stride": "i32",
        "width": "i32",
        "UNIT": "constexpr",
        "BLOCK_K": "constexpr",
        "BLOCK_F": "constexpr",
    }
)
MOVE_KV = {"addresses_ptr": "*i64", "slots_ptr": "*i64"} | MOVES | {
    "block_size": "i32",
    "block_stride": "i32",
    "slot_stride": "i32",
    "head_stride": "i32",
    "element_stride": "i32",
    "width": "i32",
    "WORD": "constexpr",
    "UNIT": "constexpr",
    "HEAD_SIZE": "constexpr",
    "BLOCK_K": "constexpr",
    "BLOCK_F": "constexpr",
}  # fmt: skip
GIVEN = {"second_ptr": "*i64", "starts_ptr": "constexpr"}
ADMIT = {
    "survival_ptr": "*fp32",
    "rows_ptr": "*i32",
    "capacities_ptr": "*i32",
    "nodes": "i32",
    "admitted_ptr": "*i32",
    "requests": "i32",
    "budget": "i32",
    "survival_stride": "i32",
    "NODES_ON_DEVICE": "constexpr",
    "BLOCK_R": "constexpr",
    "BLOCK_B": "constexpr",
}
STARTS = {"counts_ptr": "*i32", "starts_ptr": "*i32", "requests": "i32", "BLOCK": "constexpr"}
COPY = {
    "padded_ptr": "*i16",
    "ragged_ptr": "*i16",
    "starts_ptr": "*i32",
    "num_rows": "i32",
    "window": "i32",
    "width": "i32",
    "padded_request_stride": "i32",
    "padded_row_stride": "i32",
    "ragged_stride": "i32",
    "EXPAND": "constexpr",
    "UNIT": "constexpr",
    "BLOCK_W": "constexpr",
    "BLOCK_F": "constexpr",
}


def cases_commit() -> list[Case]:
    """Budget 64, depth 16 and 256 requests, the largest that are served; features and caches of 16 bits."""
    return [*_walk_cases(), *_move_cases(), *_admit_cases(), *_copy_cases()]


def _walk_cases() -> list[Case]:
    one = {"num_warps": 1}
    blocks = {"BLOCK_B": 64, "BLOCK_D": 32}
    rectangle = {"blocked_ptr": "constexpr", "starts_ptr": "constexpr"}
    return [
        Case(
            "walk: ragged, blocked, B=64 depth 16",
            walk._walk_kernel,
            WALK | {"tokens_ptr": "*i32"},
            blocks,
            one,
        ),
        Case(
            "walk: rectangle, B=64 depth 16",
            walk._walk_kernel,
            WALK | rectangle,
            blocks | dict.fromkeys(rectangle),
            one,
        ),
        Case("walk: permutation", walk._permutation_kernel, ORDER, {"BLOCK_W": 32, "BLOCK_D": 32}, one),
    ]


def _move_cases() -> list[Case]:
    four = {"num_warps": 4}
    dense = {"UNIT": 16, "BLOCK_K": 16, "BLOCK_F": 1024}
    strided = {"UNIT": 1, "BLOCK_K": 16, "BLOCK_F": 128, "starts_ptr": None}
    rows, kv = moves._move_rows_kernel, moves._move_kv_kernel
    words = MOVE_ROWS | GIVEN | {"rows_ptr": "*i32"}
    slots = MOVE_KV | GIVEN | {"slots_ptr": "constexpr"}
    one_byte = {"WORD": tl.uint8, "HEAD_SIZE": 128, "slots_ptr": None}
    return [
        Case("moves: rows by path", rows, MOVE_ROWS, dense, four),
        Case("moves: rows given, strided", rows, words, strided, four),
        *(
            Case(
                f"moves: kv by path, head {head}",
                kv,
                MOVE_KV,
                dense | {"WORD": tl.int16, "HEAD_SIZE": head},
                four,
            )
            for head in (80, 256)
        ),
        Case("moves: kv given, strided", kv, slots, strided | one_byte, four),
    ]


def _admit_cases() -> list[Case]:
    indexed = {"NODES_ON_DEVICE": False}
    straight = {"NODES_ON_DEVICE": True, "rows_ptr": None}
    on_device = ADMIT | {"nodes": "*i32", "rows_ptr": "constexpr"}
    found = []
    for requests, nodes, signature, given in (
        (256, 64, ADMIT, indexed),
        (1024, 16, on_device, straight),
    ):
        blocks = given | {"BLOCK_R": requests, "BLOCK_B": nodes}
        warps = {"num_warps": max(1, requests * nodes // 2048)}
        found.append(Case(f"budget: R={requests} B={nodes}", budget._admit_kernel, signature, blocks, warps))
    return found


def _copy_cases() -> list[Case]:
    four = {"num_warps": 4}
    found = [Case("compaction: starts", compaction._row_starts_kernel, STARTS, {"BLOCK": 1024}, four)]
    for expand, unit, block_w, block_f in (
        (False, 16, 1, 4096),
        (False, 1, 32, 64),
        (True, 16, 16, 256),
        (True, 1, 1, 2048),
    ):
        blocks = {"EXPAND": expand, "UNIT": unit, "BLOCK_W": block_w, "BLOCK_F": block_f}
        name = f"compaction: {'expand' if expand else 'compact'} {'dense' if unit > 1 else 'strided'}"
        found.append(Case(name, compaction._copy_kernel, COPY, blocks, four))
    return found


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
