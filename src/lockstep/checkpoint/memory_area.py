"""Manages an area of memory that holds a rank's state of one step, and survives the rank.

The launcher holds two such areas for each rank, and the rank uses them in turn (`kept_steps`). An
area is a file in memory (memfd_create(2)) that ranks map. It starts with a *seal*, which says what
the area holds. The seal is broken before anything is written, and set when everything is there: if
a rank is killed while it writes, the area has no seal.

    seal      a page; attempt, serial number and step, and where the rest is, with its checksums
    header    JSON: what the values are
    values    the values of the tensors, each at a multiple of 64 bytes

A processor makes the writes of a process visible in their order, even if the process is killed. So
a broken seal is enough to recognise an interrupted write. The checksums find writes that nobody
intended: a crashing library may write anywhere in the memory of its process. The checksum of the
values is the sum of their 64-bit words: it is computed at 35 GB a second, and CRC-32 takes five
times as long.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.machine.topology import SEALED_FLAG_AT

# The first page of an area, by byte:
#
#     0       8             16        80         ...   4088
#     MAGIC   is sealed     `Seal`    checksum         attempt in which its rank has given up
#     (the prefix: 0-16)
#
# The header begins with the second page.
MAGIC = b"lockstep"
PAGE_BYTES = 4096
ALIGNMENT = 64
"""Each tensor begins at a multiple of this many bytes, so that any dtype can be mapped."""
_PREFIX = struct.Struct("<8sQ")
"""`MAGIC`, and 1 if the area is sealed, 0 if not."""
_FLAG = struct.Struct("<Q")
"""The second of these alone."""
_SEAL = struct.Struct("<8Q")
"""The fields of `Seal`."""
_CRC = struct.Struct("<I")
"""The checksum of the fields of the seal."""
_CRC_AT = _PREFIX.size + _SEAL.size
_GIVEN_UP_AT = PAGE_BYTES - 8
"""The offset of the attempt whose rank writes nothing any more."""
_HEADER_AT = PAGE_BYTES


class Seal(NamedTuple):
    """What a sealed area holds, and where."""

    attempt: int
    """A random number, the same on all ranks that were started together."""
    serial: int
    """How many times these ranks have kept something, this time included: of two sets of parts of
    one attempt, the one with the higher number is newer."""
    step: int
    """The number of optimizer steps that were done."""
    header_bytes: int
    header_crc: int
    values_at: int
    """The offset of the values in the area."""
    values_bytes: int
    values_sum: int
    """The sum of the values, as 64-bit words, modulo 2**64."""

    @property
    def end(self) -> int:
        """How many bytes of the area are in use."""
        return self.values_at + self.values_bytes


class Area:
    """An area, mapped into the memory of this process.

    Args:
        path: of the file, which the launcher keeps open.

    Raises:
        OSError: the file cannot be opened: the launcher is gone, or in another container.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._size = 0
        self._bytes: Tensor
        """The whole area, as numbers of 8 bits."""
        self._view: memoryview
        """The same memory."""
        self.values_at = PAGE_BYTES
        """The offset at which this process writes values."""
        self._values_bytes = 0
        self._map(max(PAGE_BYTES, os.stat(path).st_size))

    def _map(self, size: int) -> None:
        """Maps the area anew, and makes it larger if it is smaller than `size` bytes."""
        # torch keeps no descriptor of the file, as Python's mmap would.
        self._bytes = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        self._view = self._bytes.numpy().data
        self._size = size

    @property
    def file_bytes(self) -> int:
        """How much memory the area takes."""
        return os.stat(self.path).st_size

    # Reading

    @property
    def seal(self) -> Seal | None:
        """The seal of the area; None if it has none, or a damaged one. Reads nothing else."""
        return read_seal(self._view)

    def read_header(self, seal: Seal) -> bytes | None:
        """Returns the header of the area, or None if it is damaged.

        Args:
            seal: the seal of the area, which was just read.
        """
        self._map_whole_file()
        header_end = _HEADER_AT + seal.header_bytes
        if header_end > self._size:
            return None
        header = bytes(self._view[_HEADER_AT:header_end])
        return header if zlib.crc32(header) == seal.header_crc else None

    def is_sound(self, seal: Seal) -> bool:
        """Returns True if the values agree with their checksum. Reads all of them."""
        self._map_whole_file()
        if seal.values_at + seal.values_bytes > self._size:
            return False
        return self._sum(seal.values_at, seal.values_bytes) == seal.values_sum

    def view(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Returns a part of the area as a tensor that shares its memory.

        Args:
            offset: where the tensor starts, in bytes from the beginning of the area.
            dtype: the dtype of the tensor.
            shape: the shape of the tensor.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._bytes[offset : offset + num_bytes].view(dtype).view(tuple(shape))

    def _map_whole_file(self) -> None:
        """Maps the file again if another process has made it larger."""
        size = os.stat(self.path).st_size
        if size > self._size:
            self._map(size)

    def _sum(self, begin: int, num_bytes: int) -> int:
        """Returns the sum of the 64-bit words of a part of the area, modulo 2**64."""
        words = np.frombuffer(self._view[begin : begin + num_bytes], np.uint64)
        return int(words.sum(dtype=np.uint64))

    @property
    def given_up_in(self) -> int:
        """The attempt in which the rank of this area has given up: it writes nothing any more."""
        return int.from_bytes(self._view[_GIVEN_UP_AT : _GIVEN_UP_AT + 8], "little")

    # Copying an area to another machine

    def first_page(self) -> Tensor:
        """Returns a copy of the page with the seal."""
        return self._bytes[:PAGE_BYTES].clone()

    def whole(self, num_bytes: int) -> Tensor:
        """Returns the first bytes of the area, with the seal.

        Args:
            num_bytes: how many; those behind `Seal.end` mean nothing.
        """
        self._map_whole_file()
        return self._bytes[:num_bytes]

    def content(self, seal: Seal) -> Tensor:
        """Returns everything behind the first page: the header and the values.

        Args:
            seal: of the area, as it was just read.
        """
        self._map_whole_file()
        return self._bytes[PAGE_BYTES : seal.end]

    def begin_copy(self, seal: Seal) -> Tensor:
        """Breaks the seal, and makes room for a copy of another area.

        Args:
            seal: the seal of the other area.

        Returns:
            The memory for the `content` of the other area. Call `finish_copy` when it is written.
        """
        self.break_seal()
        size = round_up(seal.end, PAGE_BYTES)
        if size != self.file_bytes:
            os.truncate(self.path, size)
        self._map(size)
        return self._bytes[PAGE_BYTES : seal.end]

    def finish_copy(self, first_page: Tensor) -> None:
        """Gives the area the same seal as the area from which it was copied.

        Args:
            first_page: the first page of the other area, which has the seal.
        """
        page = first_page.numpy().data
        self._view[_PREFIX.size : PAGE_BYTES] = page[_PREFIX.size :]
        # The part with the flag that says "sealed" is written last.
        self._view[: _PREFIX.size] = page[: _PREFIX.size]

    # Writing

    def give_up(self, attempt: int) -> None:
        """Tells the other ranks that nothing more is written into this area in this attempt."""
        self._view[_GIVEN_UP_AT : _GIVEN_UP_AT + 8] = attempt.to_bytes(8, "little")

    def break_seal(self) -> None:
        """Marks the area as one that holds nothing."""
        _FLAG.pack_into(self._view, SEALED_FLAG_AT, 0)

    def begin_writing(self, header_bytes: int, values_bytes: int) -> bool:
        """Breaks the seal, and makes room for a header and values.

        Args:
            header_bytes: the maximum length of the header.
            values_bytes: the size of the values; a multiple of 8.

        Returns:
            True if the memory of the area has moved, so that views of it must be made again.
        """
        self.break_seal()

        # The usual case: the values have the same size as before, so everything keeps its place. If
        # they have become smaller, everything is moved too, so that memory is returned.
        header_fits = _HEADER_AT + header_bytes <= self.values_at
        values_fit = self.values_at + values_bytes <= self._size
        has_same_size = values_bytes == self._values_bytes
        if header_fits and values_fit and has_same_size:
            return False

        self.values_at = _place_of_values(header_bytes)
        self._values_bytes = values_bytes
        size = size_of_area(header_bytes, values_bytes)
        os.truncate(self.path, size)
        self._map(size)
        return True

    def set_seal(self, attempt: int, serial: int, step: int, header: bytes) -> None:
        """Writes the header and seals the area. All values must have been written.

        Args:
            attempt: see `Seal`.
            serial: see `Seal`.
            step: see `Seal`.
            header: the header. It must not be longer than the `header_bytes` for which
                `begin_writing` has made room.
        """
        self._view[_HEADER_AT : _HEADER_AT + len(header)] = header

        seal = Seal(
            attempt=attempt,
            serial=serial,
            step=step,
            header_bytes=len(header),
            header_crc=zlib.crc32(header),
            values_at=self.values_at,
            values_bytes=self._values_bytes,
            values_sum=self._sum(self.values_at, self._values_bytes),
        )

        # The first page: MAGIC | is sealed | the fields of the seal | their checksum
        self._view[: len(MAGIC)] = MAGIC
        _SEAL.pack_into(self._view, _PREFIX.size, *seal)
        crc_of_fields = zlib.crc32(self._view[_PREFIX.size : _CRC_AT])
        _CRC.pack_into(self._view, _CRC_AT, crc_of_fields)

        # The flag is written last: if the process ends before that, the area has no seal.
        _FLAG.pack_into(self._view, SEALED_FLAG_AT, 1)

    def free(self) -> None:
        """Returns the memory of the area to the system. The area holds nothing from now on."""
        self.break_seal()
        os.truncate(self.path, PAGE_BYTES)
        self._values_bytes = 0
        self._map(PAGE_BYTES)


def size_of_area(header_bytes: int, values_bytes: int) -> int:
    """Returns how many bytes an area takes that is made for a header and values of these sizes."""
    return round_up(_place_of_values(header_bytes) + values_bytes, PAGE_BYTES)


def _place_of_values(header_bytes: int) -> int:
    """Returns the offset at which the values of an area begin.

    The values get a place from which they need not be moved again, as long as their size stays the
    same and the header grows by no more than a half.

    Args:
        header_bytes: the present length of the header.
    """
    header_end = _HEADER_AT + header_bytes + header_bytes // 2
    return round_up(header_end, PAGE_BYTES)


def read_seal(first_page: memoryview) -> Seal | None:
    """Returns the seal of an area, or None if it has no seal or a damaged one.

    Args:
        first_page: the first page of the area.
    """
    magic, is_sealed = _PREFIX.unpack_from(first_page)
    if magic != MAGIC or is_sealed != 1:
        return None

    seal = Seal(*_SEAL.unpack_from(first_page, _PREFIX.size))
    (crc,) = _CRC.unpack_from(first_page, _CRC_AT)
    if crc != zlib.crc32(first_page[_PREFIX.size : _CRC_AT]):
        return None
    return seal


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
