"""Step 6: measure an exported set with `specplug evaluate`: both drafts, chain and trees, fp32, one thread.

    python scripts/models/evaluate.py --set build/models/set --out build/models/evaluation

Texts: "chat" the held-out questions shipped with specplug, up to 128 tokens; "library" windows of held-out
standard library source, 48 tokens. Prints a Markdown table for each draft and text; {out}/{draft}-{text} has
its report.json and an interrupted run goes on with what it has there. Needs specplug[local] on the path. Any
other option of `specplug evaluate` can follow the known ones.
"""

import argparse
from pathlib import Path

import torch

from specplug import evaluate

TEXTS = {  # data sets and tokens generated a prompt
    "chat": (["chat", "maths", "code"], 128),
    "library": (["library"], 48),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", type=Path, required=True, help="folder with target/, dflash/ and dspark/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the reports")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    a, others = parser.parse_known_args()
    torch.set_num_threads(1)
    options = argparse.ArgumentParser()
    evaluate.add_arguments(options)
    failed = 0
    for text in a.texts:
        names, limit = TEXTS[text]
        for kind in ("dflash", "dspark"):
            pair = ["--target", str(a.set / "target"), "--draft", str(a.set / kind)]
            where = ["--out", str(a.out / f"{kind}-{text}"), "--resume"]
            asked = ["--temperature", "0", "0.8", "--max-tokens", str(limit), "--dataset", *names]
            print(f"\n{kind}, {text}\n")
            failed |= evaluate.run(options.parse_args([*pair, *where, *asked, *others]))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
