"""Reading a JSON file into a msgspec struct, with errors that name the file, the key and its nearest."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TypeVar

import msgspec

MAX_BYTES = 1 << 24  # 16 MiB: tables of ours have a few kB; anything larger is not one of them

Struct = TypeVar("Struct", bound=msgspec.Struct)


def read_struct(path: Path | str, kind: type[Struct]) -> Struct:
    """Decode a file.

    Raises ValueError for a file above 16 MiB, for text that is not JSON, for an unknown key, a missing key, a
    wrong type, or what the struct itself refuses; OSError if it cannot be read.
    """
    with Path(path).open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path}: expected a {kind.__name__} file of at most 16 MiB, got a larger one")
    try:
        return msgspec.json.decode(data, type=kind, strict=True)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise ValueError(f"{path}: {error}{_hint(str(error), kind)}") from None


def _hint(message: str, kind: type[msgspec.Struct]) -> str:
    unknown = re.search(r"unknown field `(.*?)`", message)
    if unknown is None:
        return ""
    known = sorted(_names(kind))
    nearest = difflib.get_close_matches(unknown[1], known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; known keys: {', '.join(known)}"


def _names(kind: type[msgspec.Struct]) -> set[str]:
    """Keys of a struct and of the structs in its lists."""
    names: set[str] = set()
    for field in msgspec.structs.fields(kind):
        names.add(field.encode_name)
        for inner in (field.type, *getattr(field.type, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                names |= _names(inner)
    return names
