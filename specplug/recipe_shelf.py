"""Where recipes are: ``recipes/`` of a clone, its copy inside a wheel, and folders of one's own."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specplug.recipe import FILE, Recipe, read_recipe


class Shelved(NamedTuple):
    """A recipe and the folder its paths start from."""

    folder: Path
    recipe: Recipe


def clone() -> Path | None:
    """Root of the clone this specplug runs from; None where it was installed from a wheel."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() and (root / "ci" / "env").is_file() else None


def shipped() -> Path:
    """The folder of this specplug's own recipes."""
    root = clone()
    return root / "recipes" if root is not None else Path(__file__).resolve().parent / "_recipes"


def folders(extra: Sequence[Path] = ()) -> list[Path]:
    """Every recipe's folder once, our own first. Raises ValueError for an extra folder that holds none."""
    found: dict[Path, Path] = {}
    for shelf in (shipped(), *extra):
        here = sorted(file.parent for file in shelf.glob(f"*/{FILE}"))
        if (shelf / FILE).is_file():
            here.insert(0, shelf)
        if not here and shelf in extra:
            raise ValueError(f"--dir {shelf}: expected a folder of recipes, NAME/{FILE}, found none")
        for folder in here:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def doubles(every: Sequence[Path]) -> list[str]:
    """A sentence for each name that two of these folders have."""
    by_name: dict[str, list[Path]] = {}
    for folder in every:
        by_name.setdefault(folder.resolve().name, []).append(folder)
    return [
        f"recipe: expected one recipe {name}, got {' and '.join(map(str, those))}; name it by its path"
        for name, those in by_name.items()
        if len(those) > 1
    ]


def find(name: str, extra: Sequence[Path] = ()) -> Shelved:
    """A recipe by its name or path. Raises ValueError, naming the nearest name."""
    path = Path(name)
    if path.is_dir() and (path / FILE).exists():
        return _read(path, path)
    if path.exists() and not path.is_dir():
        return _read(path.parent, path)
    known: dict[str, list[Path]] = {}
    for folder in folders(extra):
        known.setdefault(folder.resolve().name, []).append(folder)
    if name in known:
        for sentence in doubles(known[name]):
            raise ValueError(sentence)
        return _read(known[name][0], known[name][0])
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "see specplug recipe list"
    missing = f", with no {FILE} in it" if path.is_dir() else ""
    raise ValueError(f"recipe: expected a known name or a path that exists, got {name!r}{missing}; {hint}")


def _read(folder: Path, path: Path) -> Shelved:
    recipe = read_recipe(path)
    if recipe.name != folder.resolve().name:
        raise ValueError(
            f"{path}: name: expected that of the folder, {folder.resolve().name!r}, got {recipe.name!r}"
        )
    return Shelved(folder.resolve(), recipe)
