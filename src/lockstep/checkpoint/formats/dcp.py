"""Reads folders of torch's distributed checkpoint (DCP).

    runs/digits/
      .metadata               a pickle: names, shapes, dtypes, and where each shard of a tensor is
      __0_0.distcp, ...       the shards of each rank, one `torch.save` archive after the other

See https://docs.pytorch.org/docs/stable/distributed.checkpoint.html. An *archive* is the result of
one call of `torch.save`, somewhere in a file. Tensors become `TensorInShards`, whose values are
read later; any other value becomes a `StoredObject`.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lockstep.checkpoint import layout
from lockstep.checkpoint.file_errors import opened, unreadable
from lockstep.checkpoint.formats.dcp_metadata import (
    dtype_of_properties,
    shape_of_record,
    state_of_record,
    unpickle,
)
from lockstep.checkpoint.formats.text import short
from lockstep.checkpoint.formats.torch_save import check_archive, load_error
from lockstep.checkpoint.lazy_tensor import LazyTensor, Shape, non_negative_integers
from lockstep.checkpoint.shards import Shard, TensorInShards, join_shards

METADATA = ".metadata"
"""The name of the file with the metadata."""
MAX_METADATA_BYTES = 200_000_000
MAX_OBJECT_BYTES = 100_000_000
MAX_OVERHEAD_BYTES = 2**16
"""An archive may be this much larger than the values in it."""
MAX_DEPTH = 64
"""How many dictionaries may be inside each other."""

PlaceOfArchive = tuple[str, Shape | None]
"""The name of a tensor with the offsets of a shard; or that of another object with `NO_OFFSETS`."""
NO_OFFSETS = None


class FilePart(io.RawIOBase):
    """A part of a file, with the methods of a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        """The number of bytes before the part in the file."""
        self._length = length
        """The number of bytes of the part."""
        self._position = 0
        """Counts from the beginning of the part."""

    def seekable(self) -> bool:
        """Returns True, as the method of a file does."""
        return True

    def readable(self) -> bool:
        """Returns True, as the method of a file does."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Sets and returns the position, in bytes from the beginning of the part."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads into a buffer, at most to the end of the part; returns the number of bytes."""
        num_remaining = max(0, self._length - self._position)
        self._file.seek(self._offset + self._position)
        content = self._file.read(min(len(buffer), num_remaining))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


@dataclass(frozen=True)
class Archive:
    """The result of one call of `torch.save`, as a part of a file."""

    file: Path
    offset: int
    length: int

    def load(self, device: str = "cpu") -> tuple[Any, list[int]]:
        """Loads the content: tensors, numbers, text and containers of them.

        Args:
            device: the device of the loaded tensors. With "meta" their values are not read.

        Returns:
            The content, and a list with the number of bytes of each tensor storage in the file.

        Raises:
            CheckpointError: the archive cannot be read, or holds objects of other types.
        """
        with opened(self.file) as file:
            part: Any = FilePart(file, self.offset, self.length)
            zip_members = check_archive(self.file, part)
            try:
                content = torch.load(part, weights_only=True, map_location=device)
            except Exception as error:
                raise load_error(self.file, error) from error

        # The member "archive/data/0" has the values of the first storage, etc.
        storage_sizes = [member.file_size for member in zip_members if "/data/" in member.filename]
        return content, storage_sizes


class CacheOfOneShard:
    """Holds the values of one shard at most: an archive can only be read completely.

    All tensors of a folder share one cache.
    """

    def __init__(self) -> None:
        self._archive: Archive | None = None
        self._values: Tensor | None = None

    def get(self, archive: Archive) -> Tensor | None:
        """Returns the values of the shard in an archive, flattened, if it was read last."""
        return self._values if archive == self._archive else None

    def clear(self) -> None:
        """Frees the memory."""
        self._archive = None
        self._values = None

    def put(self, archive: Archive, values: Tensor) -> None:
        """Puts the values of the shard in an archive, flattened, in the place of the others."""
        self._archive = archive
        self._values = values


@dataclass(frozen=True)
class ShardInArchive(LazyTensor):
    """The values of a shard of a tensor, which are the only content of an archive."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    archive: Archive
    cache: CacheOfOneShard = field(compare=False)

    def read_range(self, begin: int, end: int) -> Tensor:
        """Returns the elements from `begin` to before `end` of the flattened shard."""
        values = self.cache.get(self.archive)
        if values is None:
            self.check()
            self.cache.clear()  # first, so that two shards are never in memory
            tensor, _ = self.archive.load()
            values = tensor.reshape(-1)
            self.cache.put(self.archive, values)
        return values[begin:end]

    def check(self) -> None:
        """Checks that the archive holds one tensor of this dtype and shape. Reads no values.

        Raises:
            CheckpointError: it holds something else.
        """
        # On the meta device, a tensor has a dtype and a shape, but no values.
        tensor, storage_sizes = self.archive.load("meta")
        is_as_expected = (
            type(tensor) is Tensor and tensor.dtype == self.dtype and tensor.shape == self.shape
        )
        if not is_as_expected:
            problem = f"it is not exactly one tensor of {self.dtype} and shape {list(self.shape)}"
            raise load_error(self.file, ValueError(problem))

        # A damaged archive may have fewer values than its tensor needs. Then torch.load would take
        # whatever comes after them in the file.
        needed_size = tensor.untyped_storage().nbytes()
        has_one_storage_of_this_size = storage_sizes == [needed_size]
        if not has_one_storage_of_this_size:
            problem = f"its tensor needs {needed_size} bytes, and it has {storage_sizes}"
            raise load_error(self.file, ValueError(problem))


@dataclass(frozen=True)
class StoredObject:
    """A value that is not a tensor. It is read only if it is asked for."""

    name: str
    archive: Archive

    def read(self) -> Any:
        """Reads the object.

        Raises:
            CheckpointError: it cannot be read, or is more than numbers, text and tensors.
        """
        if self.archive.length > MAX_OBJECT_BYTES:
            raise unreadable(
                self.archive.file, f"{short(self.name)} has {self.archive.length} bytes"
            )
        content, _ = self.archive.load()
        return content


def read_dcp(folder: Path) -> dict[str, Any]:
    """Returns the structure of a folder, nested as it was saved. The values are read later.

    Returns:
        Nested dictionaries of `TensorInShards` and `StoredObject`. A list that was saved becomes a
        dictionary by index.

    Raises:
        CheckpointError: the folder cannot be read, names files outside of it, or is not sound:
            shards overlap, leave gaps, or are not in the files.
    """
    with opened(folder / METADATA) as file:
        content = file.read(MAX_METADATA_BYTES + 1)
    try:
        if len(content) > MAX_METADATA_BYTES:
            raise ValueError(f"it has more than {MAX_METADATA_BYTES} bytes")
        metadata = state_of_record(unpickle(content), "Metadata")
        entries = _read_entries(folder, metadata)
        # DCP flattens the state that it saves. "planner_data" has the keys that lead to each entry.
        keys_of_entries = metadata.get("planner_data")
        return _nest(entries, keys_of_entries)
    except Exception as error:  # a damaged pickle may raise any exception
        # The text of a ValueError says enough: most are raised above with a full sentence. Other
        # errors need their type, since the text of a KeyError is only the key.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise unreadable(
            folder,
            f"its {METADATA} is refused: {short(f'{kind}{error}', 300)}",
            "use a folder that torch.distributed.checkpoint.save has written; no code of this one "
            "was run",
        ) from error


def tensors_in(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, TensorInShards]]:
    """Yields the names and tensors in the result of `read_dcp`.

    The name consists of the keys that lead to the tensor: "model.fc.weight".

    Args:
        tree: the result of `read_dcp`, or a dictionary inside it.
        prefix: the keys that lead to that dictionary: "model.".
    """
    for key, value in tree.items():
        if isinstance(value, TensorInShards):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from tensors_in(value, f"{prefix}{key}.")


def _read_entries(
    folder: Path, metadata: Mapping[str, Any]
) -> dict[str, TensorInShards | StoredObject]:
    """Returns the entries of a folder by name. Reads no values.

    Args:
        folder: the folder with the files.
        metadata: the attributes of DCP's `Metadata` object.

    Raises:
        ValueError, KeyError: the metadata is not sound.
    """
    # The keys of `archives` are ("fc.weight", offsets of the shard) for a shard of a tensor, and
    # ("step", NO_OFFSETS) for an object that is not a tensor.
    archives = _find_archives(folder, metadata["storage_data"])
    cache = CacheOfOneShard()  # shared by all tensors
    entries: dict[str, TensorInShards | StoredObject] = {}
    for name, record in metadata["state_dict_metadata"].items():
        is_tensor = record.class_name != "BytesStorageMetadata"
        if is_tensor:
            description = state_of_record(record, "TensorStorageMetadata")
            entries[name] = _read_tensor(name, description, archives, cache)
        else:
            entries[name] = StoredObject(name, archives[name, NO_OFFSETS])
    return entries


def _find_archives(folder: Path, storage_data: Mapping[Any, Any]) -> dict[PlaceOfArchive, Archive]:
    """Finds the archive of each shard and of each other object.

    Args:
        folder: the folder with the files.
        storage_data: the records of the metadata that say where everything is stored.

    Raises:
        ValueError: a record is not sound, or names a file in another folder.
    """
    file_sizes: dict[str, int] = {}
    archives = {}
    for key, value in storage_data.items():
        # The key says what is stored: {"fqn": "fc.weight", "offset": torch.Size([0, 0]), ...}
        index = state_of_record(key, "MetadataIndex")

        # The value says where: {"relative_path": "__0_0.distcp", "offset": 0, "length": 1632, ...}
        place = state_of_record(value, "_StorageInfo")
        file_name = place["relative_path"]

        offset_in_file, length = non_negative_integers((place["offset"], place["length"]))
        if place.get("transform_descriptors"):  # for example compression
            raise ValueError(f"{file_name} was transformed while it was written")

        if file_name not in file_sizes:
            file_sizes[file_name] = _checked_size_of_file(folder, file_name)
        if offset_in_file + length > file_sizes[file_name]:
            raise ValueError(
                f"{file_name} should have {offset_in_file + length} bytes, and has "
                f"{file_sizes[file_name]}"
            )

        is_shard = index.get("offset") is not None
        offsets_in_tensor = shape_of_record(index["offset"]) if is_shard else NO_OFFSETS
        archives[index["fqn"], offsets_in_tensor] = Archive(
            folder / file_name, offset_in_file, length
        )
    return archives


def _checked_size_of_file(folder: Path, file_name: Any) -> int:
    """Returns the size in bytes of a file that the metadata names.

    Raises:
        ValueError: the name leads out of the folder, or is not that of a plain file.
        OSError: there is no such file.
    """
    if not layout.is_plain_name(file_name):
        raise ValueError(
            f"it names the file {short(file_name)!r}, which is not a name within its folder"
        )
    return layout.size_of_file(folder / file_name)


def _read_tensor(
    name: str,
    description: Mapping[str, Any],
    archives: Mapping[PlaceOfArchive, Archive],
    cache: CacheOfOneShard,
) -> TensorInShards:
    """Returns a tensor with all its shards. Reads no values.

    Args:
        name: the name of the tensor.
        description: its record in the metadata: properties, size and chunks (the shards).
        archives: all archives of the folder. Each holds the values of one shard.
        cache: the cache that all tensors of the folder share.

    Raises:
        ValueError: the description is not sound, or a shard is missing.
    """
    dtype = dtype_of_properties(name, description["properties"])
    shards = []
    for record in description["chunks"]:
        chunk = state_of_record(record, "ChunkStorageMetadata")
        offsets = shape_of_record(chunk["offsets"])
        sizes = shape_of_record(chunk["sizes"])
        if 0 in sizes:
            continue  # a shard without values is not stored

        if (name, offsets) not in archives:
            raise ValueError(f"{name}: the shard at {list(offsets)} is in none of its files")
        archive = archives[name, offsets]

        # An archive is a little longer than the values in it. This is checked before anything is
        # read, because a damaged size could claim far too much memory.
        num_value_bytes = math.prod(sizes) * dtype.itemsize
        overhead = archive.length - num_value_bytes
        has_plausible_size = 0 <= overhead <= MAX_OVERHEAD_BYTES
        if not has_plausible_size:
            raise ValueError(f"{name}: {archive.length} bytes for a shard of shape {list(sizes)}")

        values = ShardInArchive(archive.file, dtype, sizes, archive, cache)
        shards.append(Shard(offsets, values))
    return join_shards(name, dtype, shape_of_record(description["size"]), shards)


def _nest(entries: Mapping[str, Any], keys_of_entries: Any) -> dict[str, Any]:
    """Puts entries into nested dictionaries, as they were when they were saved.

    An entry with the keys `("model", "fc.weight")` becomes `tree["model"]["fc.weight"]`. The keys
    of an entry must be a tuple of 1 to `MAX_DEPTH` names or numbers.

    Args:
        entries: the entries by name.
        keys_of_entries: the keys that lead to each entry, by its name. None: nothing is nested.

    Raises:
        ValueError: the keys are not sound.
    """
    tree: dict[Any, Any] = {}
    for name, entry in entries.items():
        keys = (name,) if keys_of_entries is None else keys_of_entries[name]

        # As the metadata may come from anywhere, the types and the depth are checked.
        has_valid_length = type(keys) is tuple and 0 < len(keys) <= MAX_DEPTH
        if not has_valid_length or not all(type(key) in (str, int) for key in keys):
            raise ValueError(
                f"the keys of {name} are no tuple of 1 to {MAX_DEPTH} texts or numbers"
            )

        *outer_keys, last_key = keys
        inner = _make_inner(tree, outer_keys, name)
        if last_key in inner:
            raise ValueError(f"{name} is to be where another entry is")
        inner[last_key] = entry
    return tree


def _make_inner(tree: dict[Any, Any], outer_keys: Sequence[str | int], name: str) -> dict[Any, Any]:
    """Returns the inner dictionary of a tree to which some keys lead, and creates what is missing.

    Args:
        tree: the outermost dictionary.
        outer_keys: the keys: `["model", "fc"]` lead to `tree["model"]["fc"]`.
        name: the name of the entry that belongs there, for errors.

    Raises:
        ValueError: an entry stands on the way.
    """
    inner = tree
    for key in outer_keys:
        inner = inner.setdefault(key, {})
        is_an_entry = type(inner) is not dict
        if is_an_entry:
            raise ValueError(f"{name} is to be below another entry")
    return inner
