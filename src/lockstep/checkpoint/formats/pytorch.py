"""What `torch.save` and torch's distributed checkpoint (DCP) wrote; nothing of it can run.

Of `torch.save`: a file of its own, or a part of another.
https://docs.pytorch.org/docs/stable/notes/serialization.html. Only `trust` lets a pickled model be
unpickled, and then DistributedDataParallel is left out: unpickled, it would join a process group.

Of DCP (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html):

    runs/digits/
      .metadata               a pickle: names, shapes, dtypes, and where each shard of a tensor is
      __0_0.distcp, ...       each rank's shards, one `torch.save` archive behind the other

Its own reader unpickles the metadata with Python's `pickle`, which runs what the file says. Here a
restricted unpickler allows only `NAMES`, private to torch in part, and makes plain records of them;
a test tells when torch writes others. Written for torch 2.11 to 2.13, with names of older folders.
"""

from __future__ import annotations

import errno
import io
import math
import mmap
import os
import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import STORABLE
from lockstep.checkpoint.formats.safetensors import misplaced, short
from lockstep.checkpoint.sharding import (
    LazyTensor,
    Shape,
    Shard,
    ShardedEntry,
    as_shape,
    sharded_entry,
)
from lockstep.errors import CheckpointError
from lockstep.wording import group_by_key

METADATA = ".metadata"
"""In each folder of DCP's."""

_MAX_METADATA = 200_000_000  # bytes
_MAX_OPERATIONS = 20_000_000  # of its pickle; each takes some 100 bytes of memory at most
_MAX_TUPLE = 500  # values in it, and in those that it holds
_MAX_OBJECT = 100_000_000  # bytes
_MAX_OVERHEAD = 2**16  # bytes of an archive besides the values
_AT = "torch.distributed.checkpoint."
_OLDER = "torch.distributed._shard.sharded_tensor.metadata."
DTYPES = {str(dtype): dtype for dtype in STORABLE}
"""What a pickle calls them."""
_KINDS = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
NAMES = frozenset(
    {
        *DTYPES,
        *(f"{_AT}metadata.{kind}" for kind in (*_KINDS, "MetadataIndex", "TensorProperties")),
        f"{_AT}filesystem._StorageInfo",
        f"{_OLDER}TensorProperties",
        "torch.Size",
        # These are read and not used.
        f"{_AT}metadata.StorageMeta",
        f"{_AT}metadata._MEM_FORMAT_ENCODING",
        f"{_OLDER}MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
        *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local")
          for kind in ("Posix", "Windows", "PurePosix", "PureWindows")),
    }
)  # fmt: skip
"""All that the metadata of such a folder may name."""


class UnpickledDDP(nn.Module):
    """What was a DistributedDataParallel: a plain module around the model."""

    wraps_module: ClassVar[bool] = True


class _Unpickler(pickle.Unpickler):
    """Python's own, but for DistributedDataParallel."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.nn.parallel.distributed", "DistributedDataParallel"):
            return UnpickledDDP
        return super().find_class(module, name)


_PICKLE_MODULE = SimpleNamespace(
    __name__="pickle",
    Unpickler=_Unpickler,
    load=lambda file, **options: _Unpickler(file, **options).load(),
)
"""For `torch.load(..., pickle_module=...)`."""


def read_torch(path: Path, trust: bool) -> Any:
    """What `torch.save` wrote; tensors are mapped where the file's format allows it.

    Raises:
        CheckpointError: it cannot be read, or holds pickled objects and is not trusted.
    """
    with layout.opened(path) as file:
        archive = file.read(4) == b"PK\x03\x04"  # of the newer format
        if archive:
            check_archive(path, file)
    options: dict[str, Any] = {"map_location": "cpu", "mmap": archive}
    try:
        return _load_tensors(path, options)
    except pickle.UnpicklingError as error:
        if not trust:
            raise _not_trusted(path, error) from error
    except Exception as error:
        raise _unreadable(path, error) from error
    try:
        return torch.load(path, weights_only=False, pickle_module=_PICKLE_MODULE, **options)
    except Exception as error:  # unpickling runs the file's code, which may raise anything
        raise _unreadable(path, error) from error


def read_torch_index(path: Path, places: Mapping[str, str], trust: bool) -> dict[str, Any]:
    """The tensors of an index over files of `torch.save`.

    Raises:
        CheckpointError: a file cannot be read, or does not hold what the index says.
    """
    state: dict[str, Any] = {}
    for file, names in group_by_key((file, name) for name, file in places.items()).items():
        content = read_torch(path.parent / file, trust)
        held = content if isinstance(content, Mapping) else {}
        for name in names:
            if not isinstance(held.get(name), Tensor):
                raise misplaced(path, name, file)
            state[name] = held[name]
    return {name: state[name] for name in places}


class FilePart(io.RawIOBase):
    """A part of a file as if it were a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def seekable(self) -> bool:
        """As of any file."""
        return True

    def readable(self) -> bool:
        """As of any file."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file; places count from the beginning of the part."""
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As of any file."""
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        content = self._file.read(min(len(buffer), left))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _load_tensors(path: Path, options: dict[str, Any]) -> Any:
    try:
        return torch.load(path, weights_only=True, **options)
    except RuntimeError as error:
        if not options["mmap"] or os.strerror(errno.ENOMEM) not in str(error):
            raise
    # A private mapping, torch's default, may not be larger than memory. A shared one may; nothing
    # here writes to it, but the file has to be writable.
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, weights_only=True, **options)


def check_archive(path: Path, file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """The members of an archive, none of which is packed: torch would unpack any amount.

    Raises:
        CheckpointError: it is no archive as `torch.save` writes it.
    """
    size = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise layout.unreadable(
            path,
            f"torch.load cannot read it, it is no archive of torch.save: {short(error, 300)}",
            "check that the file is whole, and that it was written by torch.save",
        ) from error
    packed = [m.filename for m in members if m.compress_type != zipfile.ZIP_STORED]
    if packed or sum(m.file_size for m in members) > size:
        raise layout.unreadable(
            path,
            f"it is an archive with packed contents ({short(', '.join(packed[:3]))}), as "
            "torch.save never writes it; a TorchScript file may be one",
            "save the state_dict of the model with torch.save or lockstep.save_weights",
        )
    file.seek(0)
    return members


def _not_trusted(path: Path, error: Exception) -> CheckpointError:
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a file of the older format, or a broken one
        asked = []
    if not asked and "nsupported" not in str(error):
        return _unreadable(path, error)
    names = short(", ".join(asked[:5]), 300) or "names of code"
    return layout.unreadable(
        path,
        f"it is a pickle with more than tensors in it ({names}); reading such a file runs whatever "
        "code its author put there",
        "pass trust=True if you trust where it comes from, and keep it by lockstep.save_weights",
    )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = next((line for line in str(error).splitlines() if line.strip()), "")
    return layout.unreadable(
        path,
        f"torch.load cannot read it: {type(error).__name__}: {short(reason, 300)}",
        "check that the file is whole, that it was written by torch.save, and that the classes of "
        "a pickled model can be imported",
    )


class _Record:
    """Stands for an object of one of `NAMES`: what it was to be made of, and nothing that acts."""

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _RestrictedUnpickler(pickle.Unpickler):
    """Of all names a pickle may use only `NAMES`, and gets records for them."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in NAMES:
            raise ValueError(f"it names {full[:120]}, which is not expected there")
        return DTYPES.get(full) or type(name, (_Record,), {"name": name})


def _check_operations(content: bytes) -> None:
    """Looks whether unpickling would take more time or memory than any metadata does.

    `pickle` allots its memo by the largest index that stands in the file. And what is a key is
    hashed with all that it holds: of tuples that hold each other that may be without end.
    """
    stack: list[int] = []  # how much each value holds, as far as it is a tuple
    marks: list[int] = []
    memo: dict[int, int] = {}
    for number, (operation, value, _) in enumerate(pickletools.genops(content)):
        name, taken = operation.name, operation.stack_before
        if number > _MAX_OPERATIONS or (name == "LONG_BINPUT" and int(value or 0) > number):
            raise ValueError("it would take more memory than any metadata does")
        below = taken.index(pickletools.markobject) if pickletools.markobject in taken else None
        begin = len(stack) - len(taken) if below is None else marks.pop()
        held = sum(stack[begin:])
        del stack[begin - (below or 0) :]
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(value or 0)])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(value or 0)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = held
            stack.append(held)
        elif name == "DUP":
            stack += [held, held]
        else:
            size = held + 1 if name.startswith("TUPLE") else 1
            stack += [size] * len(operation.stack_after)
            if size > _MAX_TUPLE:
                raise ValueError("it has a tuple that is larger than any of metadata")


@dataclass(frozen=True)
class _Archive:
    """An archive of `torch.save` in a part of a file."""

    file: Path
    offset: int
    length: int

    def load(self, device: str = "cpu") -> tuple[Any, list[int]]:
        """What is in it: tensors, numbers, text and containers of them; and its values' sizes.

        Raises:
            CheckpointError: it cannot be read, or holds anything else.
        """
        with layout.opened(self.file) as file:
            part: Any = FilePart(file, self.offset, self.length)
            members = check_archive(self.file, part)
            try:
                found = torch.load(part, weights_only=True, map_location=device)
            except Exception as error:
                raise _unreadable(self.file, error) from error
        return found, [member.file_size for member in members if "/data/" in member.filename]


@dataclass(frozen=True)
class _ArchivedShard(LazyTensor):
    """The values of a shard. They can only be read all at once: of a folder the last stay."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    archive: _Archive
    last: dict[_Archive, Tensor] = field(compare=False)

    def part(self, begin: int, end: int) -> Tensor:
        if self.archive not in self.last:
            self.check()
            self.last.clear()
            self.last[self.archive] = self.archive.load()[0].reshape(-1)
        return self.last[self.archive][begin:end]

    def check(self) -> None:
        found, sizes = self.archive.load("meta")
        problem = ""
        if type(found) is not Tensor or (found.dtype, found.shape) != (self.dtype, self.shape):
            problem = f"it is not the one tensor of {self.dtype} and shape {list(self.shape)}"
        # torch.load would read beyond the values that are there.
        elif sizes != [found.untyped_storage().nbytes()]:
            problem = f"its values are to have {found.untyped_storage().nbytes()} bytes"
        if problem:
            raise _unreadable(self.file, ValueError(problem))


@dataclass(frozen=True)
class Objects:
    """What is no tensor; read only if it is asked for."""

    name: str
    archive: _Archive

    def read(self) -> Any:
        """The object.

        Raises:
            CheckpointError: it cannot be read, or is more than numbers, text and tensors.
        """
        if self.archive.length > _MAX_OBJECT:
            raise layout.unreadable(
                self.archive.file, f"{short(self.name)} has {self.archive.length} bytes"
            )
        return self.archive.load()[0]


def read_dcp(folder: Path) -> dict[str, Any]:
    """What a folder holds, in the pytree that was saved; reads no values.

    Returns:
        Dictionaries of dictionaries, with `ShardedEntry` and `Objects` at their ends. A list is a
        dictionary with its places as keys.

    Raises:
        CheckpointError: it cannot be read, names files outside of the folder, or is not sound:
            shards that overlap, leave gaps, or are not in the files.
    """
    path = folder / METADATA
    with layout.opened(path) as file:
        content = file.read(_MAX_METADATA + 1)
    try:
        if len(content) > _MAX_METADATA:
            raise ValueError(f"it has more than {_MAX_METADATA} bytes")
        _check_operations(content)
        found = _RestrictedUnpickler(io.BytesIO(content)).load()
        metadata = _state(found, "Metadata")
        ends = dict(_entries(folder, metadata))
        return _nested(ends, metadata.get("planner_data"))
    except Exception as error:  # whatever a damaged pickle leads to
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        why = short(f"{kind}{error}", 300)
        raise layout.unreadable(
            folder,
            f"its {METADATA} is refused: {why}",
            "use a folder that torch.distributed.checkpoint.save has written; nothing was run",
        ) from error


def tensors_in(tree: Mapping[Any, Any], front: str = "") -> Iterator[tuple[str, ShardedEntry]]:
    """The tensors of what `read_dcp` gave, each with its keys joined by dots."""
    for key, value in tree.items():
        if isinstance(value, ShardedEntry):
            yield f"{front}{key}", value
        elif isinstance(value, dict):
            yield from tensors_in(value, f"{front}{key}.")


def _entries(
    folder: Path, metadata: Mapping[str, Any]
) -> Iterator[tuple[str, ShardedEntry | Objects]]:
    archives = _archives(folder, metadata["storage_data"])
    last: dict[_Archive, Tensor] = {}
    for name, entry in metadata["state_dict_metadata"].items():
        if entry.name == "BytesStorageMetadata":
            yield name, Objects(name, archives[name, None])
        else:
            yield name, _tensor(name, _state(entry, "TensorStorageMetadata"), archives, last)


def _archives(folder: Path, storage: Mapping[Any, Any]) -> dict[tuple[str, Shape | None], _Archive]:
    """Where each shard is, by the tensor's name and the shard's offsets."""
    sizes: dict[str, int] = {}
    archives = {}
    for key, value in storage.items():
        index, place = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
        name = place["relative_path"]
        offset, length = as_shape((place["offset"], place["length"]))
        if place.get("transform_descriptors"):
            raise ValueError(f"{name} was transformed while it was written")
        if name not in sizes:
            if not layout.is_plain(name):
                raise ValueError(f"it names the file {short(name)!r}, which is not one beside it")
            sizes[name] = layout.size_of(folder / name)
        if offset + length > sizes[name]:
            raise ValueError(f"{name} is to have {offset + length} bytes, and has {sizes[name]}")
        begin = index.get("offset")
        archives[index["fqn"], None if begin is None else _shape(begin)] = _Archive(
            folder / name, offset, length
        )
    return archives


def _tensor(
    name: str,
    state: Mapping[str, Any],
    archives: Mapping[tuple[str, Shape | None], _Archive],
    last: dict[_Archive, Tensor],
) -> ShardedEntry:
    dtype = _dtype(name, state["properties"])
    shards = []
    for chunk in state["chunks"]:
        of_chunk = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _shape(of_chunk["offsets"]), _shape(of_chunk["sizes"])
        if 0 in sizes:
            continue
        if (name, offsets) not in archives:
            raise ValueError(f"{name}: the shard at {list(offsets)} is in none of its files")
        archive = archives[name, offsets]
        spare = archive.length - math.prod(sizes) * dtype.itemsize
        if not 0 <= spare <= _MAX_OVERHEAD:
            raise ValueError(f"{name}: {archive.length} bytes for a shard of shape {list(sizes)}")
        shards.append(Shard(offsets, _ArchivedShard(archive.file, dtype, sizes, archive, last)))
    return sharded_entry(name, dtype, _shape(state["size"]), shards)


def _dtype(name: str, properties: Any) -> torch.dtype:
    if not isinstance(properties, _Record) or properties.name != "TensorProperties":
        raise ValueError(f"{name} has no properties")
    state = properties.state
    dtype = state.get("dtype") if isinstance(state, dict) else state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has a dtype that is not known here")
    return dtype


def _nested(ends: Mapping[str, Any], paths: Any) -> dict[str, Any]:
    """Puts entries where `paths` says they were; without it they are one dictionary."""
    tree: dict[Any, Any] = {}
    for name, entry in ends.items():
        path = (name,) if paths is None else paths[name]
        sound = type(path) is tuple and 0 < len(path) <= 64
        if not sound or not all(type(key) in (str, int) for key in path):
            raise ValueError(f"{name} has no place by names and numbers in what was saved")
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if type(inner) is not dict:
                raise ValueError(f"{name} is to be below another entry")
        if path[-1] in inner:
            raise ValueError(f"{name} is to be where another entry is")
        inner[path[-1]] = entry
    return tree


def _state(record: Any, name: str) -> dict[str, Any]:
    """What was to be put into an object of this name."""
    if not isinstance(record, _Record) or record.name != name or type(record.state) is not dict:
        raise ValueError(f"something else where {name} is needed")
    return record.state


def _shape(size: Any) -> Shape:
    if not isinstance(size, _Record) or size.name != "Size" or len(size.args) != 1:
        raise ValueError("something else where a size is needed")
    shape = as_shape(size.args[0])
    if math.prod(max(item, 1) for item in shape) >= 2**62:
        raise ValueError("a size that no tensor has")
    return shape
