"""Reading a JSON file into a msgspec struct, with errors that name the file, the key and its nearest."""

from __future__ import annotations

import difflib
import re
import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

MAX_BYTES = 1 << 24  # 16 MiB: tables of ours have a few kB; anything larger is not one of them

Struct = TypeVar("Struct", bound=msgspec.Struct)


def read_struct(path: Path | str, kind: type[Struct], *, what: str = "", fix: str = "") -> Struct:
    """Decode a file; errors say ``what`` it should be and, where the struct itself does not, the ``fix``.

    Raises ValueError for a folder or a pipe, a file above 16 MiB, text that is not JSON, an unknown key, a
    missing key, a wrong type, or what the struct itself refuses; OSError if it cannot be read.
    """
    what = what or f"a {kind.__name__} file"
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode):  # a pipe would be waited for
        got = "a folder" if stat.S_ISDIR(mode) else "something else"
        raise ValueError(f"{path}: expected a file, {what}, got {got}")
    with Path(path).open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path}: expected {what} of at most 16 MiB, got a larger one{_then(fix)}")
    try:
        return msgspec.json.decode(data, type=kind, strict=True)
    except msgspec.ValidationError as error:
        hint = _hint(str(error), kind)
        own = ": expected " in str(error)  # the struct's sentence, with its own fix
        if not hint and not own:
            raise ValueError(f"{path}: not {what}: {error}{_then(fix)}") from None
        raise ValueError(f"{path}: {error}{hint}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{path}: expected {what} in JSON, got other text: {error}{_then(fix)}") from None


def _then(fix: str) -> str:
    return f"; {fix}" if fix else ""


def _hint(message: str, kind: type[msgspec.Struct]) -> str:
    unknown = re.search(r"unknown field `(.*?)`(?: - at `\$(.*)`)?", message, re.DOTALL)
    if unknown is None:
        return ""
    structs = [kind]
    for key in re.findall(r"\.(\w+)", unknown[2] or ""):
        fields = [field for one in structs for field in msgspec.structs.fields(one)]
        structs = [one for field in fields if field.encode_name == key for one in _structs(field.type)]
    known = sorted({field.encode_name for one in structs for field in msgspec.structs.fields(one)})
    nearest = difflib.get_close_matches(unknown[1], known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; known keys: {', '.join(known)}"


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    """The struct that a type is, or those in its lists, mappings and alternatives."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [one for part in getattr(kind, "__args__", ()) for one in _structs(part)]
