"""Make a model set from nothing: all steps in order, in one process, each with its own command line printed
first.

    python scripts/models/run.py --preset quick --work build/models

The exported set is {work}/set; copy it to specplug/models/{name} and run manifest.py and prompts.py to ship
it.
"""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

import corpus
import export
import generate
import train_drafts
import train_target
from presets import PRESETS

Step = tuple[Callable[[list[str]], None], list[str]]


def steps(preset: str, work: Path, threads: int, seed: int) -> list[Step]:
    """The main function of each step and its arguments."""
    texts, target, generated, drafts = (
        str(work / name) for name in ("corpus", "target", "generated", "drafts")
    )
    shared = ["--preset", preset]
    trained = [*shared, "--threads", str(threads), "--target", target]
    found: list[Step] = [
        (corpus.main, [*shared, "--out", texts, "--seed", str(seed + 7)]),
        (
            train_target.main,
            [*shared, "--threads", str(threads), "--corpus", texts, "--out", target, "--seed", str(seed)],
        ),
    ]
    for split, split_seed in (("train", seed + 1), ("val", seed + 2)):
        arguments = ["--corpus", texts, "--split", split, "--out", generated, "--seed", str(split_seed)]
        found.append((generate.main, [*trained, *arguments]))
    for kind in ("dflash", "dspark"):
        arguments = ["--kind", kind, "--generated", generated, "--out", drafts, "--seed", str(seed + 1)]
        found.append((train_drafts.main, [*trained, *arguments]))
    exported = ["--corpus", texts, "--target", target, "--drafts", drafts, "--out", str(work / "set")]
    found.append((export.main, [*shared, *exported]))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is made")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; one is fastest for models this small"
    )
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    for step, arguments in steps(a.preset, a.work, a.threads, a.seed):
        print(f"+ {step.__module__}.py {shlex.join(arguments)}", flush=True)
        step(arguments)


if __name__ == "__main__":
    main()
