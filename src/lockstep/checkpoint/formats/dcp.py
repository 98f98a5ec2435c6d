"""Folders that torch's distributed checkpoint (DCP) has written; nothing of them can run.

    runs/digits/
      .metadata               a pickle: names, shapes, dtypes, and where each piece of a tensor is
      __0_0.distcp, ...       each rank's pieces, one `torch.save` archive behind the other

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html. The pickle is read by `inert`,
which runs nothing, and allows only the names below; they are private to torch in part, and a test
tells when they change. Written for torch 2.11 to 2.13, with the names
of older folders.

One tensor that `torch.save` wrote into a part of a file: where its values are; nothing is run.

Such a part is a zip archive without compression: `data.pkl` says what the tensor is, `data/0` holds
the values: https://docs.pytorch.org/docs/stable/notes/serialization.html. The values can then be
read a part at a time.
"""

from __future__ import annotations

import io
import math
import stat
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import STORABLE
from lockstep.checkpoint.formats.pickles import Made, Name, NotInert, Outside, read_inert
from lockstep.checkpoint.formats.safetensors import Described, Entry, short
from lockstep.errors import CheckpointError

METADATA = ".metadata"

_MAX_METADATA = 200_000_000  # bytes
_MAX_OBJECT = 100_000_000  # bytes
_MAX_COMPARED = 5_000_000  # pairs of pieces
_AT = "torch.distributed.checkpoint."
_OLDER = "torch.distributed._shard.sharded_tensor.metadata."
_METADATA = f"{_AT}metadata.Metadata"
_TENSOR = f"{_AT}metadata.TensorStorageMetadata"
_OBJECT = f"{_AT}metadata.BytesStorageMetadata"
_CHUNK = f"{_AT}metadata.ChunkStorageMetadata"
_INDEX = f"{_AT}metadata.MetadataIndex"
_PLACE = f"{_AT}filesystem._StorageInfo"
_SIZE = "torch.Size"
_PROPERTIES = frozenset({f"{_AT}metadata.TensorProperties", f"{_OLDER}TensorProperties"})
_IGNORED = frozenset(
    {
        f"{_AT}metadata.StorageMeta",
        f"{_AT}metadata._MEM_FORMAT_ENCODING",
        f"{_OLDER}MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
        *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local")
          for kind in ("Posix", "Windows", "PurePosix", "PureWindows")),
    }
)  # fmt: skip
DTYPES: dict[str, torch.dtype] = {str(dtype): dtype for dtype in STORABLE}
"""What a pickle calls them."""
NAMES = frozenset(
    {_METADATA, _TENSOR, _OBJECT, _CHUNK, _INDEX, _PLACE, _SIZE, *_PROPERTIES, *_IGNORED, *DTYPES}
)
"""All that the metadata of such a folder may name."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Place:
    """Where an entry of the folder is."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor, and where in the tensor it begins."""

    offsets: Shape
    sizes: Shape
    place: _Place

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Spread(Described):
    """A tensor in pieces."""

    name: str
    dtype: torch.dtype
    shape: Shape
    pieces: tuple[_Piece, ...]
    """Those with values, in the order of their places; together they are the tensor, once."""

    def part(self, begin: int, end: int) -> Tensor:
        """The elements from `begin` to before `end`, flat and on the CPU.

        Raises:
            CheckpointError: a piece cannot be read.
        """
        if begin >= end:
            return torch.empty(0, dtype=self.dtype)
        if len(self.pieces) == 1:
            return self._read(self.pieces[0], begin, end)
        row = math.prod(self.shape[1:])  # elements
        low, high = begin // row, -(-end // row)
        rows = torch.empty((high - low, *self.shape[1:]), dtype=self.dtype)
        for piece in self.pieces:
            top, inner = piece.offsets[0], math.prod(piece.sizes[1:])
            first, last = max(low, top), min(high, top + piece.sizes[0])
            if first < last:
                values = self._read(piece, (first - top) * inner, (last - top) * inner)
                across = tuple(map(_slice, piece.offsets[1:], piece.sizes[1:]))
                region = rows[(slice(first - low, last - low), *across)]
                region.copy_(values.reshape(region.shape))
        return rows.reshape(-1)[begin - low * row : end - low * row]

    def whole(self) -> Tensor:
        """All of it.

        Raises:
            CheckpointError: a piece cannot be read.
        """
        return self.part(0, self.count).reshape(self.shape)

    def check(self) -> None:
        """Looks at every piece, without its values.

        Raises:
            CheckpointError: one is not what the metadata says.
        """
        for piece in self.pieces:
            self._block(piece)

    def _read(self, piece: _Piece, begin: int, end: int) -> Tensor:
        return self._block(piece).part(begin, end)

    def _block(self, piece: _Piece) -> Block:
        file, offset, length = piece.place.file, piece.place.offset, piece.place.length
        with layout.plain_errors("reading weights from", file):
            try:
                return block_at(file, offset, length, self.dtype, piece.sizes)
            except ValueError as error:
                raise _broken(file, f"{short(self.name)}: {short(error, 300)}") from error


@dataclass(frozen=True)
class Objects:
    """What is no tensor; read only if it is asked for."""

    name: str
    place: _Place

    def read(self) -> Any:
        """The object.

        Raises:
            CheckpointError: it cannot be read, or is more than numbers, text and tensors.
        """
        from lockstep.checkpoint.formats.reading import (
            load_tensors,  # which reads these folders too
        )

        if self.place.length > _MAX_OBJECT:
            raise _broken(self.place.file, f"{self.name} has {self.place.length} bytes")
        path = self.place.file
        with layout.plain_errors("reading weights from", path), path.open("rb") as file:
            file.seek(self.place.offset)
            content = io.BytesIO(file.read(self.place.length))
        return load_tensors(path, content)


def is_dcp(folder: Path) -> bool:
    """Whether a folder is one of DCP's."""
    return (folder / METADATA).is_file()


def read_dcp(folder: Path) -> dict[str, Any]:
    """What a folder holds, in the nest that was saved; reads no values.

    Returns:
        Dictionaries of dictionaries, with `Spread` and `Objects` at their ends. A list is a
        dictionary with its places as keys.

    Raises:
        CheckpointError: it cannot be read, names files outside of the folder, or is not sound:
            pieces that overlap, leave gaps, or are not in the files.
    """
    path = folder / METADATA
    with layout.plain_errors("reading weights from", path), path.open("rb") as file:
        content = file.read(_MAX_METADATA + 1)
    try:
        if len(content) > _MAX_METADATA:
            raise ValueError(f"it has more than {_MAX_METADATA} bytes")
        metadata = _state(read_inert(content, NAMES), _METADATA)
        ends = dict(_entries(folder, metadata))
        return _nested(ends, metadata.get("planner_data"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        why = short(f"{kind}{error}", 300)
        raise CheckpointError(
            f"reading weights from {folder}",
            f"its {METADATA} is refused: {why}",
            "use a folder that torch.distributed.checkpoint.save has written; nothing of this one "
            "was run",
        ) from error


def tensors_in(nest: Mapping[Any, Any], front: str = "") -> Iterator[tuple[str, Spread]]:
    """The tensors of a nest, each with its keys joined by dots."""
    for key, value in nest.items():
        if isinstance(value, Spread):
            yield f"{front}{key}", value
        elif isinstance(value, dict):
            yield from tensors_in(value, f"{front}{key}.")


def _entries(folder: Path, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Spread | Objects]]:
    places = _places(folder, metadata["storage_data"])
    for name, entry in metadata["state_dict_metadata"].items():
        if entry.name == _OBJECT:
            yield name, Objects(name, places[name, None])
        else:
            yield name, _spread(name, _state(entry, _TENSOR), places)


def _places(folder: Path, storage: Mapping[Any, Any]) -> dict[tuple[str, Shape | None], _Place]:
    """Where each piece is, by the tensor's name and the piece's offsets."""
    sizes: dict[str, int] = {}
    places = {}
    for key, value in storage.items():
        index, place = _state(key, _INDEX), _state(value, _PLACE)
        name, offset, length = (place[part] for part in ("relative_path", "offset", "length"))
        if place.get("transform_descriptors"):
            raise ValueError(
                f"{name} was transformed while it was written, which is not known here"
            )
        if name not in sizes:
            sizes[name] = _size_of(folder, name)
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise ValueError(f"a place that is no number, in {name}")
        if offset + length > sizes[name]:
            raise ValueError(f"{name} is to have {offset + length} bytes, and has {sizes[name]}")
        begin = index.get("offset")
        places[index["fqn"], None if begin is None else _shape(begin)] = _Place(
            folder / name, offset, length
        )
    return places


def _size_of(folder: Path, name: Any) -> int:
    if not isinstance(name, str) or set(name) & set("/\\:\0") or name in ("", ".", ".."):
        raise ValueError(f"it names the file {str(name)[:80]!r}, which is not one beside it")
    try:
        found = (folder / name).lstat()
    except OSError as error:
        raise ValueError(f"it names the file {name!r}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{name} is no plain file, but a link, a folder or a device")
    return found.st_size


def _spread(
    name: str, state: Mapping[str, Any], places: Mapping[tuple[str, Shape | None], _Place]
) -> Spread:
    dtype = _dtype(name, state["properties"])
    shape = _shape(state["size"])
    pieces = []
    for chunk in state["chunks"]:
        of_chunk = _state(chunk, _CHUNK)
        offsets, sizes = _shape(of_chunk["offsets"]), _shape(of_chunk["sizes"])
        if not len(offsets) == len(sizes) == len(shape) or any(
            begin + size > most for begin, size, most in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"{name}: a piece is outside of its shape {list(shape)}")
        if 0 in sizes:
            continue
        if (name, offsets) not in places:
            raise ValueError(f"{name}: the piece at {list(offsets)} is in none of its files")
        piece = _Piece(offsets, sizes, places[name, offsets])
        spare = piece.place.length - piece.count * dtype.itemsize
        if not 0 <= spare <= MAX_OVERHEAD:
            raise ValueError(
                f"{name}: the piece at {list(offsets)} of shape {list(sizes)} is to be in "
                f"{piece.place.length} bytes"
            )
        pieces.append(piece)
    pieces.sort(key=lambda piece: piece.offsets)
    if sum(piece.count for piece in pieces) != math.prod(shape) or _overlap(pieces):
        raise ValueError(f"{name}: its pieces overlap, or leave gaps")
    return Spread(name, dtype, shape, tuple(pieces))


def _dtype(name: str, properties: Any) -> torch.dtype:
    if not isinstance(properties, Made) or properties.name not in _PROPERTIES:
        raise ValueError(f"{name} has no properties")
    state = properties.state
    dtype = state.get("dtype") if isinstance(state, dict) else state[0]
    known = DTYPES.get(dtype) if isinstance(dtype, Name) else None
    if known is None:
        raise ValueError(f"{name} has a dtype that is not known here")
    return known


def _overlap(pieces: list[_Piece]) -> bool:
    """Whether any two share elements; they are in the order of their offsets, and no scalars."""
    compared = 0
    for i, one in enumerate(pieces):
        for other in pieces[i + 1 :]:
            if other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break
            compared += 1
            if compared > _MAX_COMPARED:
                raise ValueError(f"a tensor in {len(pieces)} pieces that cross each other")
            if all(
                a < b + size_b and b < a + size_a
                for a, size_a, b, size_b in zip(
                    one.offsets, one.sizes, other.offsets, other.sizes, strict=True
                )
            ):
                return True
    return False


def _nested(ends: Mapping[str, Any], paths: Any) -> dict[str, Any]:
    """Puts entries where `paths` says they were; without it they are one dictionary."""
    nest: dict[Any, Any] = {}
    for name, entry in ends.items():
        path = (name,) if paths is None else paths[name]
        if type(path) is not tuple or not path or len(path) > 64:
            raise ValueError(f"{name} has no place in what was saved")
        if not all(type(key) in (str, int) for key in path):
            raise ValueError(f"{name} is to be under a key that is no text")
        inner = nest
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if type(inner) is not dict:
                raise ValueError(f"{name} is to be below another entry")
        if path[-1] in inner:
            raise ValueError(f"{name} is to be where another entry is")
        inner[path[-1]] = entry
    return nest


def _state(made: Any, name: str) -> dict[str, Any]:
    """What was to be put into a record."""
    if not isinstance(made, Made) or made.name != name or type(made.state) is not dict:
        raise NotInert(f"something else where {name.rpartition('.')[2]} is needed")
    return made.state


def _shape(size: Any) -> Shape:
    if not isinstance(size, Made) or size.name != _SIZE or len(size.args) != 1:
        raise NotInert("something else where a size is needed")
    sizes = size.args[0]
    if type(sizes) is not tuple or len(sizes) > 64:
        raise NotInert("a size that is none")
    if not all(type(item) is int and item >= 0 for item in sizes):
        raise NotInert("a size that is none")
    if math.prod(max(item, 1) for item in sizes) >= 2**62:
        raise NotInert("a size that no tensor has")
    return sizes


def _slice(begin: int, size: int) -> slice:
    return slice(begin, begin + size)


def _broken(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"reading weights from {path}", found, "copy the folder again, or use another one"
    )


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
