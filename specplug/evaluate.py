"""Measure a draft on a target with Hugging Face Transformers: accepted length, wall clock, exactness.

Every method answers the same prompts: plain decoding, the draft's chain, and trees of each budget. Sampling
noise is keyed by seed and position, so all of them should give the same tokens; the report says how many
answers do. The loop is specplug's own (specplug.local), not an engine's: accepted lengths carry over to an
engine, times do not.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specplug import models
from specplug.arguments import check_device, check_positions
from specplug.checkpoint import check_pair, read_draft
from specplug.draft_config import read_config
from specplug.hub import checkpoint_folder

METHODS = ("plain", "chain", "tree", "tree-greedy-path", "tree-without-head")  # of specplug.local.method
NEAR_TIE = 1e-3
"""Gap of two scores below which fp32 may choose either. Origin: the one divergence seen on the shipped models
(of 1,792 answers) had a gap of 1e-6, and rows of forwards of 1 and 65 rows agree to 1e-4 in the tests."""
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shipped = ", ".join(models.sets())
    parser.add_argument(
        "--target",
        default="deep-thin",
        help=f"folder, hub id, or a shipped set ({shipped}); default deep-thin",
    )
    parser.add_argument("--draft", help="folder or hub id; default: the shipped set's dspark draft")
    parser.add_argument(
        "--method", nargs="+", choices=METHODS, default=["plain", "chain", "tree"],
        help="what to compare; default plain chain tree. tree-greedy-path applies a Markov head along the "
        "greedy path alone, tree-without-head not at all",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=int, nargs="+", default=[16, 32, 64], help="nodes of the trees; default 16 32 64"
    )
    parser.add_argument("--candidates", type=int, default=32, help="tokens kept a depth; default 32")
    parser.add_argument("--depth", type=int, help="tokens drafted ahead; default: the draft's own")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="one or more; default 0")
    parser.add_argument(
        "--dataset", nargs="+", metavar="NAME[=FILE]",
        help="built in: chat, maths, code, library; or NAME=FILE.jsonl. Default chat maths code",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE",
        help='JSONL, a line {"prompt": ...}, {"question": ...} or {"messages": ...}; "kind" is its set',
    )  # fmt: skip
    parser.add_argument("--count", type=int, help="prompts a data set, the first ones; default all")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer; default 128")
    parser.add_argument("--batch", type=int, default=1, help="prompts at a time; default 1")
    parser.add_argument(
        "--seed", type=int, default=0, help="of sampling and of the library windows; default 0"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="times each answer is timed, the median counts; default 1"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default float32")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--out", type=Path, help="folder for records, report.json and plot")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument(
        "--record", action="store_true", help="also write every round's tree and outcome to OUT/rounds.jsonl"
    )
    parser.add_argument("--plot", action="store_true", help="write OUT/plot.png (needs matplotlib)")
    parser.add_argument("--steps", action="store_true", help="also print where a round's time goes")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 0 when all was measured, 1 when an fp32 answer on a CPU is not plain decoding's.

    Raises ValueError for arguments that cannot work, before a weight is read.
    """
    _check(arguments)
    target_name, draft_name = pair_names(arguments.target, arguments.draft)
    checkpoint = read_draft(draft_name)
    folder = checkpoint_folder(target_name, files=["config.json"])
    target_config = read_config(folder)
    check_pair(checkpoint, target_config)
    if arguments.depth is not None and not 1 <= arguments.depth <= checkpoint.depth:
        raise ValueError(f"--depth: expected 1..{checkpoint.depth}, the draft's own, got {arguments.depth}")

    import torch
    from transformers import AutoTokenizer

    from specplug.local import evaluation, figures, method, prompts, records, report
    from specplug.local.draft import layer_config
    from specplug.local.pair import load_pair

    layer_config(checkpoint)  # refuses what the loop cannot compute
    budgets = dict.fromkeys(arguments.budget)
    methods = [
        method.Method(name, budget, arguments.candidates)
        for name in dict.fromkeys(arguments.method)
        for budget in (budgets if name in method.TREES else [0])
    ]
    for one in methods:
        one.check()
    names = arguments.dataset or ([] if arguments.prompts else prompts.CHAT_SETS)
    lines = prompts.data_sets(names, files=arguments.prompts, count=arguments.count, seed=arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    tokens = {name: [prompts.encode(line, tokenizer) for line in rows] for name, rows in lines.items()}
    check_positions(target_config, tokens, arguments.max_tokens)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, arguments.dtype)
    pair = load_pair(target_name, checkpoint, dtype=dtype, device=device, depth=arguments.depth)
    settings = records.Settings(
        target=arguments.target,
        draft=draft_name,
        methods=[one.label for one in methods],
        temperatures=list(dict.fromkeys(arguments.temperature)),
        datasets={name: evaluation.digest(rows) for name, rows in tokens.items()},
        max_tokens=arguments.max_tokens,
        batch=arguments.batch,
        candidates=arguments.candidates,
        depth=pair.draft.depth,
        seed=arguments.seed,
        repeats=arguments.repeats,
        dtype=arguments.dtype,
        device=device.type,
        record=arguments.record,
    )
    done = evaluation.evaluate(
        pair,
        tokens,
        methods,
        settings,
        folder=arguments.out,
        resume=arguments.resume,
    )
    rows = figures.rows(done)
    result = report.as_json(rows, settings)
    if arguments.out:
        (arguments.out / "report.json").write_text(json.dumps(result, indent=1) + "\n")
        if arguments.plot:
            report.plot(rows, arguments.out / "plot.png")
    print(json.dumps(result, indent=2) if arguments.json else report.table(rows))
    if arguments.steps and not arguments.json:
        print(f"\nMilliseconds a round (prefill: a batch)\n{report.step_table(rows)}")
    return _verdict(rows, exact=arguments.dtype == "float32" and device.type == "cpu")


def _verdict(rows: Sequence[Any], *, exact: bool) -> int:
    """Exit code: 1 when an fp32 answer leaves plain decoding's where that is no near tie."""
    gaps = [row.largest_gap for row in rows if row.identical is not None and row.identical != row.prompts]
    if not gaps:
        return 0
    print(
        f"specplug evaluate: {len(gaps)} rows have answers that are not plain decoding's; where they part, "
        f"the target preferred plain's token by at most {max(gaps):.1e}",
        file=sys.stderr,
    )
    return 1 if exact and max(gaps) > NEAR_TIE else 0


def _check(a: argparse.Namespace) -> None:
    """Refuse what cannot work, before anything is read."""
    for flag, value in (("--max-tokens", a.max_tokens), ("--batch", a.batch), ("--repeats", a.repeats)):
        if value < 1:
            raise ValueError(f"{flag}: expected at least 1, got {value}")
    if a.count is not None and a.count < 1:
        raise ValueError(f"--count: expected at least 1 prompt, got {a.count}")
    bad = [t for t in a.temperature if not 0 <= t < float("inf")]
    if bad:
        raise ValueError(f"--temperature: expected 0 or more, got {bad[0]}")
    for flag, given in (("--resume", a.resume), ("--record", a.record), ("--plot", a.plot)):
        if given and a.out is None:
            raise ValueError(f"{flag}: needs a folder; name one with --out")
    check_device(a.device)
    needed: dict[str, Any] = {"transformers": "local"} | ({"matplotlib": "plot"} if a.plot else {})
    for module, extra in needed.items():
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"{module} is not installed; pip install 'specplug[{extra}]'")


def pair_names(target: str, draft: str | None) -> tuple[str, str]:
    """Target and draft as folder or hub id; a shipped set's name stands for its folders.

    Raises ValueError for a target that is no shipped set's, without a draft.
    """
    if target in models.sets():
        return str(models.path(target, "target")), draft or str(models.path(target, "dspark"))
    if draft is None:
        raise ValueError(f"--draft: expected a folder or hub id for target {target}, got nothing")
    return target, draft
