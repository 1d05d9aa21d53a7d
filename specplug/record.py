"""Record a draft at every position of a target's answers, for `specplug simulate` and `specplug advise`.

The file holds what any draft policy would have met: the widest tree, the chain and what the target accepts,
at each position of each answer. It is made with specplug's own loop on Hugging Face Transformers.
"""

import argparse
import importlib.util
import json
import shlex
from pathlib import Path

from specplug import models
from specplug.arguments import check_device, check_new_file, check_positions
from specplug.checkpoint import check_pair, read_draft
from specplug.config import MAX_TREE_BUDGET
from specplug.draft_config import read_config
from specplug.evaluate import pair_names
from specplug.hub import checkpoint_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shipped = ", ".join(models.sets())
    parser.add_argument(
        "--target", default="deep-thin",
        help=f"folder, hub id, or a shipped set ({shipped}); default deep-thin",
    )  # fmt: skip
    parser.add_argument("--draft", help="folder or hub id; default: the shipped set's dspark draft")
    parser.add_argument("--budget", type=int, default=64, help="nodes of the widest tree; default 64")
    parser.add_argument("--candidates", type=int, default=32, help="tokens kept a depth; default 32")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="one or more; default 0")
    parser.add_argument(
        "--dataset", nargs="+", metavar="NAME[=FILE]", default=["chat", "maths", "code"],
        help="built in: chat, maths, code, library; or NAME=FILE.jsonl. Default chat maths code",
    )  # fmt: skip
    parser.add_argument("--count", type=int, help="prompts a data set, the first ones; default all")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer; default 128")
    parser.add_argument("--batch", type=int, default=16, help="prompts answered together; default 16")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and library windows; default 0")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="file to write")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE.json",
        help="also fit the draft's probabilities to what was accepted, for the engine's key calibration",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0. Raises ValueError for arguments that cannot work, before a weight is read."""
    a = arguments
    for flag, value in (("--max-tokens", a.max_tokens), ("--batch", a.batch), ("--count", a.count)):
        if value is not None and value < 1:
            raise ValueError(f"{flag}: expected at least 1, got {value}")
    if not 1 <= a.budget <= MAX_TREE_BUDGET:
        raise ValueError(f"--budget: expected 1..{MAX_TREE_BUDGET} nodes, got {a.budget}")
    for flag, file in (("--out", a.out), ("--calibration", a.calibration)):
        if file is not None:
            check_new_file(flag, file)
    if a.out == a.calibration:
        raise ValueError(f"--calibration: expected another file than --out, got {a.calibration}")
    check_device(a.device)
    bad = [t for t in a.temperature if not 0 <= t < float("inf")]
    if bad:
        raise ValueError(f"--temperature: expected 0 or more, got {bad[0]}")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("transformers is not installed; pip install 'specplug[local]'")
    target_name, draft_name = pair_names(a.target, a.draft)
    checkpoint = read_draft(draft_name)
    target_config = read_config(checkpoint_folder(target_name, files=["config.json"]))
    check_pair(checkpoint, target_config)

    import torch
    from transformers import AutoTokenizer

    from specplug.local import prompts
    from specplug.local.anchors import record
    from specplug.local.draft import layer_config
    from specplug.local.method import Method
    from specplug.local.pair import load_pair
    from specplug.outcomes import fitted
    from specplug.recording_file import write_file

    layer_config(checkpoint)  # refuses what the loop cannot compute
    method = Method("tree", a.budget, a.candidates)
    method.check()
    lines = prompts.data_sets(a.dataset, files=[], count=a.count, seed=a.seed)
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    tokens = {name: [prompts.encode(line, tokenizer) for line in rows] for name, rows in lines.items()}
    check_positions(target_config, tokens, a.max_tokens)
    device = torch.device(a.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, a.dtype)
    recording = record(
        load_pair(target_name, checkpoint, dtype=dtype, device=device),
        tokens,
        temperatures=list(dict.fromkeys(a.temperature)),
        method=method,
        max_tokens=a.max_tokens,
        batch=a.batch,
        seed=a.seed,
        target=a.target,
        draft=a.draft or "dspark",
    )
    write_file(a.out, recording)
    if a.calibration:
        fitted(recording).save(a.calibration)
    answers, rounds = len(recording.requests.dataset), len(recording.request)
    print(f"{a.out}: {rounds:,} positions of {answers} answers, {a.out.stat().st_size:,} bytes")
    print(f"use it: specplug simulate --recording {shlex.quote(str(a.out))}, or advise")
    if a.calibration:
        print(f"{a.calibration}: the calibration")
        print(f"use it: --speculative-config '{{..., \"calibration\": {json.dumps(str(a.calibration))}}}'")
    return 0
