"""One tensor that `torch.save` wrote into a part of a file: where its values are; nothing is run.

Such a part is a zip archive without compression: `data.pkl` says what the tensor is, `data/0` holds
the values: https://docs.pytorch.org/docs/stable/notes/serialization.html. The values can then be
read a part at a time.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.encoding import STORABLE
from lockstep.checkpoint.header import Entry
from lockstep.checkpoint.inert import Made, Name, NotInert, Outside, read_inert

MAX_OVERHEAD = 2**16
"""Bytes of an archive besides the values."""

_KINDS = {
    f"{kind}Storage": dtype
    for dtype, kind in {
        torch.float64: "Double",
        torch.float32: "Float",
        torch.float16: "Half",
        torch.bfloat16: "BFloat16",
        torch.int64: "Long",
        torch.int32: "Int",
        torch.int16: "Short",
        torch.int8: "Char",
        torch.uint8: "Byte",
        torch.bool: "Bool",
        torch.complex64: "ComplexFloat",
        torch.complex128: "ComplexDouble",
    }.items()
}
_UNTYPED = "torch.storage.UntypedStorage"
_REBUILD = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
"""What makes the tensor, and how many arguments it has; the seventh is the dtype."""
DTYPES: dict[str, torch.dtype] = {str(dtype): dtype for dtype in STORABLE}
"""What a pickle calls them."""
_NAMES = frozenset(
    {f"torch.{kind}" for kind in _KINDS}
    | {_UNTYPED, "collections.OrderedDict"}
    | _REBUILD.keys()
    | DTYPES.keys()
)


@dataclass(frozen=True)
class Block:
    """A tensor whose values are somewhere in a file."""

    memory: Entry
    """All of its memory."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""

    def part(self, begin: int, end: int) -> Tensor:
        """The elements from `begin` to before `end`, flat, in memory of their own."""
        if self.stride == _contiguous(self.shape):
            return self.memory.part(begin, end)
        memory = self.memory.part(0, self.memory.count)
        return memory.as_strided(self.shape, self.stride).reshape(-1)[begin:end]


def block_at(
    file: Path, offset: int, length: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Block:
    """Finds the values of a tensor of which dtype and shape are known.

    Args:
        file: holds the archive, among others.
        offset: of its first byte.
        length: its bytes.
        dtype: of the tensor.
        shape: of the tensor.

    Raises:
        ValueError: it is no such archive, or holds another tensor.
        OSError: the file cannot be read.
    """
    with file.open("rb") as whole:
        window = _Window(whole, offset, length)
        try:
            with zipfile.ZipFile(window) as archive:
                pickled, order = _member(archive, "data.pkl"), _member(archive, "byteorder")
                content, written = archive.read(pickled), archive.read(order).decode()
                values = _member(archive, "data/0")
                begin = _begin(window, values)
        except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
            raise ValueError(f"no archive of torch.save: {error}") from error
    if written != sys.byteorder:
        raise ValueError(f"its bytes are in the order {written[:10]!r}, this machine's are not")
    found, stride = _described(read_inert(content, _NAMES), shape)
    memory = Entry(file, dtype, (values.file_size // dtype.itemsize,), offset + begin)
    if found is not dtype or memory.nbytes != values.file_size:
        raise ValueError(f"its values are {found}, and are to be {dtype}")
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) != memory.count or (memory.count and reach + 1 != memory.count):
        raise ValueError(f"a shape of {list(shape)} and {memory.count} values do not go together")
    if begin + values.file_size > length:
        raise ValueError("its values go on beyond its end")
    return Block(memory, shape, stride)


class _Window(io.RawIOBase):
    """A part of a file as if it were a file."""

    def __init__(self, whole: Any, offset: int, length: int) -> None:
        self._whole, self._offset, self._length = whole, offset, length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._whole.seek(self._offset + self._at)
        content: bytes = self._whole.read(left if size < 0 else min(size, left))
        self._at += len(content)
        return content


def _member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    found = [m for m in archive.infolist() if m.filename.partition("/")[2] == name]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"no archive of torch.save: {name} is there {len(found)} times, or packed")
    if name != "data/0" and found[0].file_size > MAX_OVERHEAD:
        raise ValueError(f"no archive of torch.save: {name} has {found[0].file_size} bytes")
    return found[0]


def _begin(window: _Window, member: zipfile.ZipInfo) -> int:
    """Where in the window a member's values begin: behind its own header."""
    window.seek(member.header_offset)
    head = window.read(30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise ValueError("no archive of torch.save: a member has no header")
    name, extra = struct.unpack("<HH", head[26:30])
    return member.header_offset + 30 + int(name) + int(extra)


def _described(tensor: Any, shape: tuple[int, ...]) -> tuple[torch.dtype | None, tuple[int, ...]]:
    """Dtype and stride that a pickle gives for a tensor of this shape, the only one in its file."""
    if not isinstance(tensor, Made) or len(tensor.args) != _REBUILD.get(tensor.name):
        raise NotInert("it is no plain tensor")
    storage, offset, size, stride = tensor.args[:4]
    if not isinstance(storage, Outside) or type(storage.name) is not tuple:
        raise NotInert("its values are not beside it")
    what, kind, key, _, _ = storage.name
    if what != "storage" or key != "0" or offset != 0 or type(kind) is not Name:
        raise NotInert("its values are not those of the file")
    if size != shape or type(stride) is not tuple or len(stride) != len(shape):
        raise ValueError(f"its shape is not {list(shape)}")
    if not all(type(step) is int and 0 <= step < 2**62 for step in stride):
        raise NotInert("its strides are no numbers")
    if kind == _UNTYPED and len(tensor.args) == 7:
        return DTYPES.get(str(tensor.args[6])), stride
    return _KINDS.get(kind.removeprefix("torch.")), stride


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))
