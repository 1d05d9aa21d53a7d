"""In-tree attention: what is compiled ahead of time and what is timed on a GPU."""

from collections.abc import Callable
from functools import partial

import torch
from aot import Case

from specplug_kernels.attention import INTEGERS, block_config, in_tree, in_tree_kernel, in_tree_merged

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# (dtype, head size, query heads a key head); merged over the step's rows is what the vLLM adapter launches
MERGED = [
    ("bf16", 64, 8),
    ("bf16", 80, 1),
    ("bf16", 128, 4),
    ("bf16", 256, 8),
    ("fp16", 96, 7),
    ("fp32", 128, 4),
    ("fp32", 256, 8),
]
PLAIN = [("bf16", 128, 4), ("fp32", 256, 8)]
PAGED = [("bf16", 256, 8), ("fp32", 256, 8)]


def cases_attention() -> list[Case]:
    """One binary serves every width and stride."""
    return [
        *(_case(*shape, paged=False, merged=True) for shape in MERGED),
        *(_case(*shape, paged=False, merged=False) for shape in PLAIN),
        *(_case(*shape, paged=True, merged=True) for shape in PAGED),
    ]


def _case(dtype: str, head_size: int, group: int, *, paged: bool, merged: bool) -> Case:
    pointers = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{dtype}"),
        "starts_ptr": "*i32",
        "counts_ptr": "*i32",
        "words_ptr": "*i64",
        "slots_ptr": "*i64" if paged else "constexpr",
        "prefix_out_ptr": f"*{dtype}" if merged else "constexpr",
        "prefix_lse_ptr": "*fp32" if merged else "constexpr",
        "out_ptr": f"*{dtype}" if merged else "*fp32",
        "lse_ptr": "constexpr" if merged else "*fp32",
        "scale": "fp32",
    }
    config = block_config(DTYPES[dtype], head_size)
    options = {name: value for name, value in config.items() if name.startswith("num_")}
    known = {name: value for name, value in config.items() if name not in options}
    known |= {"GROUP": group, "HEAD_SIZE": head_size, "PAGED": paged, "MERGED": merged}
    known |= {name: None for name, kind in pointers.items() if kind == "constexpr"}
    signature = {
        name: "constexpr" if name in known else pointers.get(name, "i32") for name in in_tree_kernel.arg_names
    }
    integers = [i for i, name in enumerate(in_tree_kernel.arg_names) if signature[name] == "i32"]
    assert integers == INTEGERS  # else a launch would compile binaries that are not these
    form = " ".join((*(["paged"] if paged else []), "merged" if merged else "plain"))
    return Case(
        f"attention: {form} {dtype} D={head_size} G={group}", in_tree_kernel, signature, known, options
    )


def timings(device: torch.device | str) -> list[tuple[str, Callable[[], object], int]]:
    """(name, launch, ideal bytes). Full windows of chains, the most keys a column can see; heads of an 8B
    model, a fused projection's rows.
    """
    gpu = torch.device(device).type != "cpu"
    dtype = torch.bfloat16
    shapes = [(1, 16), (1, 64), (16, 16), (64, 16), (256, 16)] if gpu else [(2, 3)]
    heads, kv_heads, size = (32, 8, 128) if gpu else (4, 2, 64)
    launches: list[tuple[str, Callable[[], object], int]] = []
    for requests, budget in shapes:
        width = budget + 1
        rows = requests * width
        fused = torch.randn(rows, heads + 2 * kv_heads, size, device=device, dtype=dtype)
        q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
        words = [(2 << j) - 1 for j in range(budget)]
        words = [word - (1 << 64) if word >> 63 else word for word in words]
        windows = {
            "starts": torch.arange(0, rows, width, dtype=torch.int32, device=device),
            "counts": torch.full((requests,), budget, dtype=torch.int32, device=device),
            "ancestors": torch.tensor(words, device=device).expand(requests, budget).contiguous(),
            "scale": size**-0.5,
        }
        out = in_tree(q, k, v, **windows)
        prefix = {"prefix_out": out.out.to(dtype), "prefix_lse": out.lse, "output": torch.empty_like(q)}
        shape = f"T={requests} W={width} H={heads}/{kv_heads} D={size} bf16"
        small = requests * (8 + 8 * budget)  # starts, counts, words
        plain = partial(in_tree, q, k, v, **windows, out=out)
        moved = fused.nbytes + out.out.nbytes + out.lse.nbytes + small
        launches.append((f"in-tree attention {shape}", plain, moved))
        merged = partial(in_tree_merged, q, k, v, **windows, **prefix)
        moved = fused.nbytes + 2 * q.numel() * dtype.itemsize + out.lse.nbytes + small
        launches.append((f"in-tree attention, merged {shape}", merged, moved))
    return launches
