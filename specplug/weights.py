"""Names, types and shapes of the tensors in a checkpoint folder, without reading a weight.

A safetensors file begins with its header's length (8 bytes, little endian) and the header, a JSON object
``{name: {"dtype", "shape", "data_offsets"}}``; the data follows without holes (format:
huggingface/safetensors, README, "Format"). Only the header is read and every number in it is checked against
the file's size, so a truncated or hostile file is a ValueError, never a crash, a hang or a large allocation.
Pickle files are never opened.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

MAX_HEADER_BYTES = 100_000_000
"""Longest header (and shard index) read. Origin: the limit of the safetensors reference implementation."""

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint, as its header describes it."""

    dtype: str  # the safetensors name, such as "BF16"
    shape: tuple[int, ...]
    file: str  # name of the safetensors file in the folder


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One tensor's entry in a safetensors header; offsets are bytes into the data part."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _ShardIndex(msgspec.Struct):
    """model.safetensors.index.json; its other keys (``metadata``) are free-form."""

    weight_map: dict[str, str]


_T = TypeVar("_T")


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint folder by name.

    Takes the shards of ``model.safetensors.index.json`` where there is one, else ``model.safetensors``, else
    every ``*.safetensors`` file. Raises ValueError when there are no weights, when a file is damaged, or when
    index and shards disagree.
    """
    if (folder / INDEX_FILE).is_file():
        return _sharded(folder)
    single = folder / SINGLE_FILE
    files = [single] if single.is_file() else sorted(f for f in folder.glob("*.safetensors") if f.is_file())
    if not files:
        other = next(
            (f.name for ext in ("bin", "pt", "pth", "gguf") for f in sorted(folder.glob(f"*.{ext}"))), None
        )
        found = f"only {other}, and pickle and GGUF files are never read" if other else "none"
        raise ValueError(
            f"missing weights in {folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found {found}"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in tensors:
                raise ValueError(f"{folder}: tensor {name!r} is in {tensors[name].file} and in {file.name}")
            tensors[name] = info
    return tensors


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises ValueError when its header does not fit the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise ValueError(
                f"{file}: not a safetensors file: {size} bytes, the header's length alone takes 8"
            )
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{file}: header of {header_bytes} bytes announced, but the file has {size - 8} after the "
                f"length and at most {MAX_HEADER_BYTES} are read: truncated, or not a safetensors file"
            )
        header = stream.read(header_bytes)
    entries = decode_json(header, dict[str, msgspec.Raw], where=f"{file}: header")
    entries.pop("__metadata__", None)  # free-form strings
    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, raw in entries.items():
        entry = decode_json(raw, _Entry, where=f"{file}: header entry {name!r}")
        _check_entry(entry, where=f"{file}: tensor {name!r}")
        tensors[name] = TensorInfo(entry.dtype, tuple(entry.shape), file.name)
        spans.append((*entry.data_offsets, name))
    _check_cover(spans, data_bytes=size - 8 - header_bytes, file=file)
    return tensors


def decode_json(data: bytes | msgspec.Raw, kind: type[_T], *, where: str) -> _T:
    """`data` as JSON of type `kind`; whatever is wrong with it is a ValueError that begins with `where`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None


def _sharded(folder: Path) -> dict[str, TensorInfo]:
    index_file = folder / INDEX_FILE
    if index_file.stat().st_size > MAX_HEADER_BYTES:
        raise ValueError(
            f"{index_file}: {index_file.stat().st_size} bytes, at most {MAX_HEADER_BYTES} are read"
        )
    weight_map = decode_json(index_file.read_bytes(), _ShardIndex, where=str(index_file)).weight_map
    shards: dict[str, dict[str, TensorInfo]] = {}
    for shard in sorted(set(weight_map.values())):
        if os.path.basename(shard) != shard or "\\" in shard or shard in ("", ".", ".."):
            raise ValueError(f"{index_file}: shard {shard!r} is not a file name in this folder")
        if not (folder / shard).is_file():
            raise ValueError(f"missing file {folder / shard}, named in {INDEX_FILE}")
        shards[shard] = read_header(folder / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ValueError(f"{index_file}: tensor {name!r} is not in {shard}")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _check_entry(entry: _Entry, *, where: str) -> None:
    if entry.dtype not in DTYPE_BITS:
        raise ValueError(f"{where}: unknown dtype {entry.dtype!r}")
    if any(extent < 0 for extent in entry.shape):
        raise ValueError(f"{where}: negative shape {entry.shape}")
    begin, end = entry.data_offsets
    expected_bits = math.prod(entry.shape) * DTYPE_BITS[entry.dtype]
    if begin < 0 or end < begin or (end - begin) * 8 != expected_bits:
        raise ValueError(
            f"{where}: data_offsets {begin}..{end} do not hold {entry.dtype} {entry.shape}, "
            f"{expected_bits} bits"
        )


def _check_cover(spans: list[tuple[int, int, str]], *, data_bytes: int, file: Path) -> None:
    """The tensors must tile the data part: no hole, no overlap, nothing after the last one."""
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise ValueError(
                f"{file}: tensor {name!r} starts at byte {begin} of the data, expected {position}"
            )
        position = end
    if position != data_bytes:
        raise ValueError(
            f"{file}: the header describes {position} bytes of data, the file has {data_bytes}: truncated"
        )
