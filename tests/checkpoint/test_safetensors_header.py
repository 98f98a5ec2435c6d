from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch import Tensor, nn

from lockstep.checkpoint.encoding import DTYPE_OF_CODE
from lockstep.checkpoint.formats.safetensors import read_header
from lockstep.checkpoint.weights import load_weights
from lockstep.errors import CheckpointError

pytestmark = pytest.mark.unit

W = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def file_of(path: Path, header: Any, data: int = 24, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    path.write_bytes(size + text + bytes(data))
    return path


def test_tensors_of_every_dtype_are_read_in_ranges(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for code, dtype in DTYPE_OF_CODE.items():
        bits = torch.arange(24, dtype=torch.uint8) % 2
        tensors[code] = bits.repeat(dtype.itemsize).view(dtype).reshape(4, 6)
    tensors |= {"empty": torch.zeros(3, 0), "scalar": torch.tensor(2.5)}
    stored = {}
    for name, tensor in tensors.items():  # older releases of safetensors know fewer dtypes
        try:
            save({name: tensor})
        except (KeyError, SafetensorError):
            continue
        stored[name] = tensor
    assert len(stored) >= 14
    save_file(stored, tmp_path / "w.safetensors")
    header = read_header(tmp_path / "w.safetensors")
    assert header.keys() == stored.keys()
    for name, tensor in stored.items():
        entry = header[name]
        assert (entry.dtype, entry.shape, entry.nbytes) == (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.nbytes,
        )
        parts = [
            entry.read_range(b, min(b + 5, entry.num_elements))
            for b in range(0, entry.num_elements, 5)
        ]
        whole = torch.cat([p.view(torch.uint8) for p in parts]) if parts else torch.empty(0)
        assert torch.equal(whole, tensor.reshape(-1).view(torch.uint8) if parts else whole)


HOSTILE = {
    "no JSON": (b"{'w'", "header is damaged"),
    "no object": ([], "it is no JSON object"),
    "no text": (b"\xff\xfe\xfd\xfc", "header is damaged"),
    "nested without end": (b"[" * 200_000, "header is damaged"),
    "a name twice": (
        b'{"w":%b,"w":%b}' % (json.dumps(W).encode(), json.dumps(W).encode()),
        "a name is there twice",
    ),
    "an unknown dtype": ({"w": {**W, "dtype": "F33"}}, "the dtype F33, which is not known"),
    "a dtype that is no text": ({"w": {**W, "dtype": ["F32"]}}, "which is not known"),
    "a huge shape": ({"w": {**W, "shape": [2**61, 2**61]}}, "bytes and has 24"),
    "a huge shape and place": (
        {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
        "it was cut short",
    ),
    "a shape beyond reason": ({"w": {**W, "shape": [10**100]}}, "has the shape [1000"),
    "dimensions without end": ({"w": {**W, "shape": [1] * 10_000}}, "has the shape"),
    "a negative shape": ({"w": {**W, "shape": [-2, -3]}}, "has the shape"),
    "a shape that is no number": ({"w": {**W, "shape": ["2"]}}, "has the shape"),
    "true as a size": ({"w": {**W, "shape": [6, True]}}, "has the shape"),
    "a place before the file": ({"w": {**W, "data_offsets": [-24, 0]}}, "has the shape"),
    "a place turned round": ({"w": {**W, "data_offsets": [24, 0]}}, "and has -24"),
    "one place for two": ({"a": W, "b": W}, "is next"),
    "a gap": (
        {"a": W, "b": {"dtype": "U8", "shape": [1], "data_offsets": [30, 31]}},
        "is next",
    ),
    "nothing said": ({"w": {}}, "lacks a dtype"),
    "no tensors, but values": ({}, "the file goes on"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, case: str) -> None:
    content, found = HOSTILE[case]
    path = file_of(tmp_path / "w.safetensors", content)
    tracemalloc.start()
    try:
        for read in (read_header, lambda p: load_weights(nn.Linear(3, 2), p)):
            with pytest.raises(CheckpointError, match="reading weights from") as caught:
                read(path)
            assert found in caught.value.found
            assert len(str(caught.value)) < 2000
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [25 + 60, 2**40, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = file_of(tmp_path / "w.safetensors", {"w": W}, length=length)
    with pytest.raises(CheckpointError):
        read_header(path)


def test_a_file_that_is_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path / "w.safetensors", {"w": W})
    whole = path.read_bytes()
    assert read_header(path)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_header(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="goes on"):
        read_header(path)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_flipped_bit_is_refused_or_does_no_harm(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """What our reader takes, that of safetensors takes too, and both see the same."""
    path = tmp_path_factory.mktemp("flipped") / "w.safetensors"
    whole = bytearray(save({"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.int16)}))
    bit = data.draw(st.integers(0, 8 * (len(whole) - 34) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    path.write_bytes(whole)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    loaded = load(bytes(whole))
    assert {n: (e.dtype, e.shape) for n, e in header.items()} == {
        n: (t.dtype, tuple(t.shape)) for n, t in loaded.items()
    }


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(8)}, path)
    entry = read_header(path)["w"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="became shorter"):
        entry.read_range(0, 8)
