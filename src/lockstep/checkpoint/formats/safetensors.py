"""The header of a safetensors file: checked before it is believed, and read without the values.

A file is a length (8 bytes, little endian), so many bytes of JSON, then the values:
https://huggingface.co/docs/safetensors/index#format. Values are read a part at a time with plain
reads: a file that is larger than memory cannot always be mapped into it.
"""

from __future__ import annotations

import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import layout
from lockstep.errors import CheckpointError

MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""

_TORCH_NAMES = {
    "BOOL": "bool",
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
    "C128": "complex128",
}
DTYPES: dict[str, torch.dtype] = {
    code: dtype
    for code, name in _TORCH_NAMES.items()
    if (dtype := getattr(torch, name, None)) is not None
}
"""What a header calls a dtype that the installed torch has."""


class Described:
    """A tensor of which dtype and shape are known, and values are read only where asked for."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Entry(Described):
    """One tensor of a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the file."""

    def part(self, begin: int, end: int) -> Tensor:
        """The elements from `begin` to before `end`, flat, in memory of their own."""
        size = self.dtype.itemsize
        memory = bytearray((end - begin) * size)
        if not memory:
            return torch.empty(0, dtype=self.dtype)
        with layout.plain_errors("reading weights from", self.file), self.file.open("rb") as file:
            file.seek(self.offset + begin * size)
            got = file.readinto(memory)
        if got != len(memory):
            raise _broken(self.file, "it became shorter while it was read")
        return torch.frombuffer(memory, dtype=self.dtype)

    def check(self) -> None:
        """Nothing is left to look at: headers are read in full."""


def check_plain(path: Path) -> None:
    """Looks whether it is a file: what is none, such as a pipe, may keep its reader waiting.

    Raises:
        CheckpointError: it is none, or not there.
    """
    with layout.plain_errors("reading weights from", path):
        mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise _broken(path, "it is no file, but a folder, a pipe or a device")


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file in the order of their values. Reads the header alone.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or its header is not sound: it is
            no JSON, a dtype is unknown, or shapes, places and the file's size contradict.
    """
    check_plain(path)
    with layout.plain_errors("reading weights from", path), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise _broken(path, f"its header is to have {length} bytes, the whole file has {size}")
        text = file.read(length)
    try:
        content = json.loads(text.decode(), object_pairs_hook=layout.without_duplicates)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        content.pop("__metadata__", None)
        entries = {name: _entry(path, name, says, 8 + length) for name, says in content.items()}
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
        _check_places(entries, 8 + length, size)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is damaged: {error}") from error
    return entries


def _entry(path: Path, name: str, says: Any, begin: int) -> Entry:
    if not isinstance(says, dict) or not {"dtype", "shape", "data_offsets"} <= says.keys():
        raise ValueError(f"{short(name)} lacks a dtype, a shape or a place")
    dtype, shape, places = says["dtype"], says["shape"], says["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{short(name)} has the dtype {short(dtype)}, which is not known here")
    if not _are_sizes(shape) or not _are_sizes(places) or len(places) != 2:
        raise ValueError(f"{short(name)} has the shape {short(shape)} at {short(places)}")
    entry = Entry(path, DTYPES[dtype], tuple(shape), begin + places[0])
    if places[1] - places[0] != entry.nbytes:
        raise ValueError(
            f"{short(name)} of shape {short(shape)} takes {entry.nbytes} bytes and has "
            f"{places[1] - places[0]}"
        )
    return entry


def _check_places(entries: dict[str, Entry], begin: int, size: int) -> None:
    """Every byte after the header belongs to one tensor."""
    end = begin
    for name, entry in entries.items():
        if entry.offset != end:
            raise ValueError(f"{short(name)} is at byte {entry.offset}, where {end} is next")
        end += entry.nbytes
    if end > size:
        raise ValueError(f"its tensors end at byte {end}, the file at {size}: it was cut short")
    if end < size:
        raise ValueError(f"its tensors end at byte {end}, the file goes on to {size}")


def _are_sizes(value: Any) -> bool:
    # No tensor has an extent beyond this; larger ones only take time to multiply.
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(item) is int and 0 <= item < 2**62 for item in value)
    )


def short(value: object, length: int = 80) -> str:
    """A text of a file's in a message: what would move the cursor, or fill the screen, is not."""
    text = "".join(c if c.isprintable() else "?" for c in str(value)[: length + 1])
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _broken(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"reading weights from {path}", found, "copy or download the file again, or use another one"
    )
