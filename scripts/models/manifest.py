"""Write specplug/models/manifest.json: sizes, SHA-256 and counts of every shipped file of every set.

Run it after copying an exported set (export.py) to specplug/models/{name}.
"""

import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from safetensors import safe_open

MODELS = Path(__file__).resolve().parents[2] / "specplug" / "models"
PARTS = ("target", "dflash", "dspark")
STREAMS = ("library_train", "library_val", "chat_train", "chat_val")


def set_facts(folder: Path) -> dict[str, Any]:
    """The manifest entry of one set."""
    tensors: dict[str, int] = {}
    parameters: dict[str, int] = {}
    for part in PARTS:
        with safe_open(folder / part / "model.safetensors", "np") as file:
            names = list(file.keys())
            tensors[part] = len(names)
            parameters[part] = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    files = {
        file.relative_to(folder).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    return {"tensors": tensors, "parameters": parameters, "files": files}


def corpus_facts(corpus: dict[str, Any]) -> dict[str, Any]:
    """What identifies a corpus: from corpus.json of corpus.py."""
    facts = {key: corpus[key] for key in ("python", "seed", "vocabulary")}
    facts["documents"] = corpus["chat_train"]["documents"]
    return facts | {name: corpus[name]["sha256"] for name in STREAMS}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=MODELS, help="folder that holds the sets")
    parser.add_argument(
        "--corpus", type=Path, help="corpus.json of a new deep-thin set; else its entry is kept"
    )
    a = parser.parse_args()
    out = a.models / "manifest.json"
    if a.corpus:
        corpus = corpus_facts(json.loads(a.corpus.read_text()))
    else:
        corpus = json.loads(out.read_text())["corpus"]
    names = sorted(folder.name for folder in a.models.iterdir() if (folder / "target").is_dir())
    facts = {"sets": {name: set_facts(a.models / name) for name in names}, "corpus": corpus}
    out.write_text(json.dumps(facts, indent=1) + "\n")
    total = sum(file["bytes"] for entry in facts["sets"].values() for file in entry["files"].values())
    print(f"{', '.join(names)}: {total} bytes in {out}")


if __name__ == "__main__":
    main()
