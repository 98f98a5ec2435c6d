"""Reads the headers and values of safetensors files, and writes such files.

A safetensors file consists of a length (8 bytes, little endian), a *header* (as many bytes of JSON)
and the values of the tensors: https://huggingface.co/docs/safetensors/index#format. As a file may
be damaged or malicious, its header is checked before anything else is read.

Values are read with plain reads, in parts, because a file that is larger than memory cannot always
be mapped. Files are written straight from the memory of the tensors, which
`safetensors.torch.save_file` would copy first.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint import layout, storage
from lockstep.checkpoint.checksums import format_crc
from lockstep.checkpoint.encoding import DTYPE_OF_CODE
from lockstep.checkpoint.file_errors import opened, unreadable
from lockstep.checkpoint.formats.text import short
from lockstep.checkpoint.lazy_tensor import LazyTensor, Shape, non_negative_integers
from lockstep.distributed.tensor_bytes import to_bytes
from lockstep.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
LENGTH_BYTES = 8
"""Number of bytes that hold the length of the header."""
METADATA_KEY = "__metadata__"
"""The only key of the header that is not the name of a tensor."""
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
"""The codes of dtypes in the header. The format has no other dtypes."""
WRITE_CHUNK_BYTES = 1 << 23
"""How much is written, and added to the checksum, at a time."""


@dataclass(frozen=True)
class TensorInFile(LazyTensor):
    """A tensor of a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    offset: int
    """The offset of its values, in bytes from the beginning of the file."""

    def read_range(self, begin: int, end: int) -> Tensor:
        """Reads the elements from `begin` to before `end` of the flattened tensor."""
        buffer = np.empty((end - begin) * self.dtype.itemsize, np.uint8)
        if len(buffer) == 0:
            return torch.empty(0, dtype=self.dtype)

        with opened(self.file) as file:
            file.seek(self.offset + begin * self.dtype.itemsize)
            num_bytes = file.readinto(buffer.data)
        if num_bytes != len(buffer):
            raise unreadable(self.file, "it became shorter while it was read")
        return torch.frombuffer(buffer, dtype=self.dtype)


# Reading headers


def begins_like_safetensors(file: BinaryIO) -> bool:
    """Returns True if a file starts with a plausible header length followed by a JSON object.

    Files of `torch.save` never do.
    """
    file_size = os.fstat(file.fileno()).st_size
    header_length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    return header_length <= file_size - LENGTH_BYTES and file.read(1) == b"{"


def read_header(path: Path) -> dict[str, TensorInFile]:
    """Returns the tensors of a file by name, in the order of their values. Reads no values.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or its header is not sound: it is
            no JSON, a dtype is unknown, or shapes, offsets and the file's size do not agree.
    """
    with opened(path) as file:
        file_size = file.seek(0, os.SEEK_END)
        file.seek(0)
        header_length = int.from_bytes(file.read(LENGTH_BYTES), "little")

        # A damaged file may claim a header that is longer than the file, or too long to be read
        # into memory.
        exceeds_file = LENGTH_BYTES + header_length > file_size
        if exceeds_file or header_length > MAX_HEADER_BYTES:
            raise unreadable(
                path,
                f"its header should have {header_length} bytes, but the file has {file_size}",
            )
        header = file.read(header_length)

    values_begin = LENGTH_BYTES + header_length
    try:
        content = layout.parse_object(header)
        content.pop(METADATA_KEY, None)  # all other keys are names of tensors
        tensors = []
        for name, description in content.items():
            tensors.append((name, _parse_tensor(path, name, description, values_begin)))

        # Sort by offset. A tensor without values has the same offset as the next tensor, and must
        # come before it.
        tensors.sort(key=lambda item: (item[1].offset, item[1].nbytes))
        _check_offsets(tensors, values_begin, file_size)
    except ValueError as error:
        raise unreadable(path, f"its header is damaged: {error}") from error
    return dict(tensors)


def _parse_tensor(path: Path, name: str, description: Any, values_begin: int) -> TensorInFile:
    """Parses the description of a tensor in a header.

    Args:
        path: the path of the file.
        name: the name of the tensor.
        description: `{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}`.
        values_begin: number of the byte in the file from which the offsets are counted.

    Raises:
        ValueError: the description is not sound.
    """
    required_keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(description, dict) or not required_keys <= description.keys():
        raise ValueError(f"{short(name)} lacks a dtype, a shape or a place")

    code = description["dtype"]
    shape = description["shape"]
    offsets = description["data_offsets"]
    if not isinstance(code, str) or code not in DTYPE_OF_CODE:
        raise ValueError(f"{short(name)} has the dtype {short(code)}, which is not known here")

    try:
        begin, end = non_negative_integers(offsets)
        checked_shape = non_negative_integers(shape)
    except ValueError:  # also raised if there are not two offsets
        message = f"{short(name)} has the shape {short(shape)} at {short(offsets)}"
        raise ValueError(message) from None

    tensor = TensorInFile(path, DTYPE_OF_CODE[code], checked_shape, values_begin + begin)
    if end - begin != tensor.nbytes:
        raise ValueError(f"{short(name)} takes {tensor.nbytes} bytes and has {end - begin}")
    return tensor


def _check_offsets(
    tensors: Sequence[tuple[str, TensorInFile]], values_begin: int, file_size: int
) -> None:
    """Checks that every byte after the header belongs to exactly one tensor.

    Args:
        tensors: the tensors with their names, sorted by offset.
        values_begin: number of the first byte after the header.
        file_size: the size of the file in bytes.

    Raises:
        ValueError: there is a gap or an overlap, or the tensors end before or after the file.
    """
    end = values_begin  # of the tensors so far; the next tensor must begin here
    for name, tensor in tensors:
        if tensor.offset != end:
            raise ValueError(f"{short(name)} is at byte {tensor.offset}, where {end} is next")
        end += tensor.nbytes
    if end < file_size:
        raise ValueError(f"its tensors end at byte {end}, the file goes on to {file_size}")
    if end > file_size:
        raise ValueError(
            f"its tensors end at byte {end}, the file at {file_size}: it was cut short"
        )


# Writing


class WrittenFile(NamedTuple):
    """A file that has been written to disk."""

    num_bytes: int
    checksum: str
    """The checksum as a manifest has it: "crc32:1c291ca3"."""


def do_nothing() -> None:
    """The default for a callback that may raise an error to interrupt the writing."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], check: Callable[[], object] = do_nothing
) -> WrittenFile:
    """Writes a new safetensors file and flushes it to disk.

    Args:
        path: the path of the file, which must not exist yet.
        tensors: contiguous CPU tensors by name.
        check: called before each chunk is written; it may raise an error to interrupt the writing.

    Raises:
        CheckpointError: the format cannot hold a tensor's dtype.
    """
    num_bytes = 0
    crc = 0
    with storage.new_file(path) as file:
        for data in file_content(path, tensors):
            for begin in range(0, len(data), WRITE_CHUNK_BYTES):
                check()
                chunk = data[begin : begin + WRITE_CHUNK_BYTES]
                crc = zlib.crc32(chunk, crc)
                storage.write(file, chunk)
            num_bytes += len(data)
    return WrittenFile(num_bytes, format_crc(crc))


def file_content(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yields the bytes of a safetensors file: the header, then the memory of each tensor.

    Args:
        path: the path of the file, for errors.
        tensors: contiguous CPU tensors by name.

    Raises:
        CheckpointError: the format cannot hold a tensor's dtype.
    """
    # As in files of the safetensors library, tensors with the largest elements come first, so that
    # each tensor starts at a multiple of its element size. Those of one size are sorted by name.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))

    yield memoryview(_make_header(path, ordered))
    for _, tensor in ordered:
        yield to_bytes(tensor).numpy().data


def _make_header(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    """Builds the length and the header of a file with these tensors in this order.

    Raises:
        CheckpointError: the format cannot hold a tensor's dtype.
    """
    content: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        if tensor.dtype not in CODE_OF_DTYPE:
            raise dtype_error(f"writing {path.name}", name, tensor.dtype)
        end = offset + tensor.nbytes
        content[name] = {
            "dtype": CODE_OF_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end

    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    # Spaces after the JSON make the values start at a multiple of 8 bytes. The length before the
    # JSON has 8 bytes itself.
    while len(text) % 8 != 0:
        text += b" "
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def dtype_error(action: str, name: str, dtype: torch.dtype) -> CheckpointError:
    """Builds the error for a tensor whose dtype the format cannot hold."""
    # Only for complex values can a dtype be suggested: the format has just one complex dtype.
    example = ", such as torch.complex64" if dtype.is_complex else ""
    return CheckpointError(
        action,
        f"{name} has the dtype {dtype}, which the safetensors format cannot hold",
        f"convert it to another dtype{example}, or keep it in a checkpoint (world.checkpoint) or a "
        "file of torch.save",
    )
