"""Source of the running interpreter's standard library: the hard text of the shipped models.

Their targets were trained on 19 of every 20 of these files (scripts/models/corpus.py); the others are held
out. Which files those are depends on the Python version: the shipped sets saw 3.11.7's.
"""

import sysconfig
from pathlib import Path
from random import Random

SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "idlelib", "lib2to3",
    "turtledemo", "__pycache__", "ensurepip",
}  # fmt: skip
FILE_CHARACTERS = (500, 400_000)
WINDOW_CHARACTERS = (200, 800)  # about 64 to 256 tokens of the shipped vocabulary


def library_files(limit: int | None = None) -> list[tuple[str, str]]:
    """(path inside the standard library, source) of the files used, sorted by path; at most ``limit``."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[tuple[str, str]] = []
    for file in sorted(root.rglob("*.py")):
        inside = file.relative_to(root)
        if SKIPPED_FOLDERS & set(inside.parts) or file.name.startswith("_sysconfigdata"):
            continue
        text = file.read_text("utf-8", "ignore")
        if FILE_CHARACTERS[0] <= len(text) <= FILE_CHARACTERS[1]:
            files.append((inside.as_posix(), text))
        if len(files) == limit:
            break
    return files


def held_out(number: int) -> bool:
    """Whether the file of this number in ``library_files`` was kept from training."""
    return number % 20 == 7


def windows(count: int, seed: int) -> list[str]:
    """``count`` seeded pieces of held-out files, each beginning at a line."""
    texts = [text for number, (_, text) in enumerate(library_files()) if held_out(number)]
    random = Random(seed)
    pieces = []
    for _ in range(count):
        text = random.choices(texts, weights=[len(text) for text in texts])[0]
        length = random.randint(*WINDOW_CHARACTERS)
        begin = text.rfind("\n", 0, random.randint(1, max(1, len(text) - length))) + 1
        pieces.append(text[begin : begin + length])
    return pieces
