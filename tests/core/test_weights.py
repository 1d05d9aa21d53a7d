"""specplug.weights: a safetensors header is read only as far as it is true; damage is a ValueError."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from specplug.weights import DTYPE_BITS, INDEX_FILE, read_header, read_tensors


def raw_file(folder: Path, header: object, data_bytes: int, announced: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(
        (len(text) if announced is None else announced).to_bytes(8, "little") + text + bytes(data_bytes)
    )
    return file


def entry(shape: Any = (2, 3), dtype: Any = "BF16", offsets: Any = (0, 12), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_reads_what_the_reference_implementation_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7), "c.d": torch.zeros(2, 2,
        dtype=torch.int64), "scalar": torch.zeros(()), "empty": torch.zeros(0, 4), "flags": torch.zeros(9,
    dtype=torch.bool), }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_tensors(tmp_path)
    assert {name: info.shape for name, info in found.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    assert {name: DTYPE_BITS[info.dtype] // 8 for name, info in found.items()} == {
        name: tensor.element_size() for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"a": entry()}, 11, "describes 12 bytes of data, the file has 11: truncated"),
        ({"a": entry()}, 13, "describes 12 bytes of data, the file has 13"),
        ({"a": entry(offsets=(0, 10))}, 10, "do not hold BF16"),
        ({"a": entry(offsets=(12, 0))}, 12, "do not hold BF16"),
        ({"a": entry(offsets=(-12, 0))}, 12, "do not hold BF16"),
        ({"a": entry(offsets=(4, 16))}, 16, "starts at byte 4 of the data, expected 0"),
        ({"a": entry(), "b": entry()}, 12, "starts at byte 0 of the data, expected 12"),
        ({"a": entry(), "b": entry(offsets=(13, 25))}, 25, "starts at byte 13 of the data, expected 12"),
        ({"a": entry(shape=(-2, -3))}, 12, "negative shape"),
        ({"a": entry(shape=(2**62, 2**62))}, 12, "do not hold BF16"),
        ({"a": entry(shape=(2, "3"))}, 12, "Expected `int`, got `str`"),
        ({"a": entry(dtype="Q9")}, 12, "unknown dtype 'Q9'"),
        ({"a": entry(offsets=(0, 6, 12))}, 12, "header entry 'a'"),
        ({"a": entry(pickle="x")}, 12, "unknown field `pickle`"),
        ({"a": {"dtype": "BF16"}}, 0, "missing required field"),
        ({"a": 1}, 0, "header entry 'a'"),
        ([], 0, "header: Expected `object`"),
        (b"", 0, "header: "),
        (b"{" * 50_000, 0, "header: "),
        (b"[" * 200_000 + b"]" * 200_000, 0, "header: "),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 0, "header: "),
        (b'{"\xff": 1}', 0, "header"),
    ],
)
def test_damaged_header(tmp_path: Path, header: object, data_bytes: int, message: str) -> None:
    file = raw_file(tmp_path, header, data_bytes)
    with pytest.raises(ValueError, match=message):
        read_header(file)


@pytest.mark.parametrize("size", range(8))
def test_file_shorter_than_its_length_field(tmp_path: Path, size: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_header(file)


@pytest.mark.parametrize("announced", [3, 100_000_001, 2**40, 2**63, 2**64 - 1])
def test_announced_length_past_the_file(tmp_path: Path, announced: int) -> None:
    with pytest.raises(ValueError, match=f"header of {announced} bytes announced"):
        read_header(raw_file(tmp_path, b"{}", 0, announced=announced))


def test_header_length_limit_holds_in_a_file_that_is_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:  # sparse: takes no disk
        stream.write((100_000_001).to_bytes(8, "little"))
        stream.truncate(200_000_000)
    with pytest.raises(ValueError, match="at most 100000000 are read"):
        read_header(file)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_corruption_is_a_value_error_or_harmless(data: st.DataObject) -> None:
    text = json.dumps({"a": entry(), "b": entry((4,), "F32", (12, 28))}).encode()
    blob = bytearray(len(text).to_bytes(8, "little") + text + bytes(28))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(blob)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(blob[:cut])
        try:
            found = read_header(file)
        except ValueError:
            return
    used = sum(_bits(info.dtype, info.shape) for info in found.values())
    assert used == 8 * (cut - 8 - int.from_bytes(blob[:8], "little"))  # only a file that adds up is believed


def _bits(dtype: str, shape: tuple[int, ...]) -> int:
    bits = DTYPE_BITS[dtype]
    for extent in shape:
        bits *= extent
    return bits


def test_shards(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "x-2.safetensors")
    index = {"metadata": {"total_size": 20}, "weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    assert set(read_tensors(tmp_path)) == {"a", "b"}  # without an index: every safetensors file
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    found = read_tensors(tmp_path)
    assert {name: (info.shape, info.file) for name, info in found.items()} == {
        "a": ((2,), "x-1.safetensors"),
        "b": ((3,), "x-2.safetensors"),
    }


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../model.safetensors"}, "is not a file name in this folder"),
        ({"a": "/etc/hostname"}, "is not a file name in this folder"),
        ({"a": ""}, "is not a file name in this folder"),
        ({"a": ".."}, "is not a file name in this folder"),
        ({"a": "y.safetensors"}, r"missing file .*y.safetensors, named in"),
        ({"b": "x.safetensors"}, "tensor 'b' is not in x.safetensors"),
        ({"a": 1}, "Expected `str`, got `int`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_bad_index(tmp_path: Path, weight_map: object, message: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=message):
        read_tensors(tmp_path)


def test_the_same_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'a' is in x\.safetensors and in y\.safetensors"):
        read_tensors(tmp_path)
