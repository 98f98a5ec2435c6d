"""The format of the ledger files, each of which lists the samples that one rank trained.

A *start* of a run is its first start or a restart. The folder holds one file for each rank and each
start, named `<start>.rank<rank>.ledger`. A file is a sequence of *records* that are only ever
appended. A record is a *frame* (4 bytes with the length of the content, 4 bytes with its CRC-32)
and its content: `J` and a JSON object, or `S` and an optimizer step. A step consists of the fields
of `STEP_FIELDS` and the indices of this rank's samples as 64-bit integers. All numbers are
little-endian. The first record has the version of the format and the number of ranks.

If a process is killed, the last record of its file may be incomplete. This can be seen from its
length, and is not damage. A record with a wrong checksum in the middle of a file is damage.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.batch.indices import Indices
from lockstep.errors import CheckpointError

FORMAT_VERSION = 1
LEDGER_SUFFIX = ".ledger"

FRAME = struct.Struct("<II")
"""The length and the CRC-32 of the content of a record."""
JSON_RECORD = b"J"
STEP_RECORD = b"S"
STEP_FIELDS = struct.Struct("<QHIQI")
"""The number of the step, the number of the loader, the epoch, the position of the global batch in
the epoch, and its number of samples on all ranks."""
NO_LOADER = 0xFFFF
"""The number of the loader in a step that trained no batch of a prepared loader."""

# The content of a record begins with b"S" if it is a step, and with b"J{" if it is a JSON object.
_BEGINNING_OF_CONTENT = re.compile(rb"S|J\{")


class TrainedBatch(NamedTuple):
    """The samples of a global batch that were trained, by one rank or by all ranks."""

    step: int
    loader: int
    """The number of the loader."""
    epoch: int
    position: int
    """The position of the global batch in the epoch."""
    global_samples: int
    """The number of samples of the global batch on all ranks."""
    samples: tuple[Indices, ...]
    """The indices of the samples, one array for each rank."""

    @property
    def num_recorded(self) -> int:
        """The number of samples that were recorded."""
        return sum(len(samples) for samples in self.samples)


@dataclass
class RankFile:
    """The file of one rank for one start of the run, as it was read."""

    name: str
    num_ranks: int = 0
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """The recorded description of each loader."""
    beginnings: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """Digests of the first samples of a stream, by the number of its loader and the epoch."""
    batches_by_attempt: list[list[TrainedBatch]] = field(default_factory=lambda: [[]])
    """The trained batches in order. A new list, an *attempt*, begins wherever the run went back to
    an earlier step."""
    is_cut_off: bool = False
    """True if the last record is incomplete."""
    damaged_at: list[int] = field(default_factory=list)
    """The byte at which each damaged record begins."""


def record_bytes(content: bytes) -> bytes:
    """Puts a frame before the content of a record."""
    return FRAME.pack(len(content), zlib.crc32(content)) + content


def json_content(values: dict[str, Any]) -> bytes:
    """Returns the content of a record that holds a JSON object."""
    return JSON_RECORD + json.dumps(values).encode()


def step_content(
    step: int, loader: int, epoch: int, position: int, global_samples: int, samples: Indices | None
) -> bytes:
    """Returns the content of a record that holds an optimizer step.

    Args:
        step: number of the step.
        loader: number of the loader, or `NO_LOADER`.
        epoch: epoch of the loader.
        position: position of the global batch in the epoch.
        global_samples: number of samples of the global batch on all ranks.
        samples: indices of this rank's samples; None if they came from no prepared loader.
    """
    fields = STEP_FIELDS.pack(step, loader, epoch, position, global_samples)
    indices = b"" if samples is None else samples.astype("<i8", copy=False).tobytes()
    return STEP_RECORD + fields + indices


def read_file(path: Path) -> RankFile:
    """Reads the file of one rank.

    Raises:
        CheckpointError: if the file has another version of the format, or cannot be opened.
    """
    file = RankFile(path.name)
    data = _map_file(path)
    for begin, end in _find_records(data, file):
        kind = data[begin : begin + 1]
        if kind == STEP_RECORD:
            _add_step(file, data, begin + 1, end)
            continue

        # The keys tell what a JSON record is. A loader also has the key "stream".
        values = json.loads(data[begin + 1 : end])
        is_loader = "loader" in values
        is_beginning_of_stream = "stream" in values and not is_loader
        if is_loader:
            file.loaders.append(values)
        elif is_beginning_of_stream:
            file.beginnings[values["stream"], values["epoch"]] = values["beginning"]
        elif values["ledger"] == FORMAT_VERSION:  # the first record of the file, with the version
            file.num_ranks = values["ranks"]
        else:
            raise CheckpointError(
                f"the ledger {path.parent}",
                f"{path.name} is of version {values['ledger']}, and {FORMAT_VERSION} is read here",
                "read it with the Lockstep that wrote it",
            )
    return file


def _map_file(path: Path) -> bytes | mmap.mmap:
    """Maps a file into memory.

    Raises:
        CheckpointError: if the file cannot be opened.
    """
    try:
        with path.open("rb") as opened:
            if path.stat().st_size == 0:  # an empty file cannot be mapped
                return b""
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(
            f"the ledger {path.parent}",
            f"{path.name} cannot be read: {error}",
            "make it readable, or copy the folder",
        ) from error


def _add_step(file: RankFile, data: bytes | mmap.mmap, begin: int, end: int) -> None:
    """Adds an optimizer step to the last attempt in a file, or to a new one if the run went back.

    Args:
        file: file to which the step is added.
        data: bytes of the file.
        begin: offset of the fields of the step.
        end: offset of the byte after the last sample.
    """
    step, loader, epoch, position, global_samples = STEP_FIELDS.unpack_from(data, begin)
    samples_begin = begin + STEP_FIELDS.size
    num_samples = (end - samples_begin) // 8  # their indices have 8 bytes each
    samples = np.frombuffer(data, "<i8", num_samples, samples_begin)
    batch = TrainedBatch(step, loader, epoch, position, global_samples, (samples,))

    batches_of_latest_attempt = file.batches_by_attempt[-1]
    went_back = bool(batches_of_latest_attempt) and step < batches_of_latest_attempt[-1].step
    if went_back:
        file.batches_by_attempt.append([batch])
    else:
        batches_of_latest_attempt.append(batch)


def _find_records(data: bytes | mmap.mmap, file: RankFile) -> Iterator[tuple[int, int]]:
    """Yields the begin and the end of the content of each complete record.

    A record that cannot be read is noted in `file`, which is changed. There are three cases:

    - A complete record follows somewhere: the bytes before it are damaged. Reading goes on there.
    - No complete record follows, and the file ends within the record that cannot be read: the
      process was killed while it wrote this record. The file is cut off.
    - No complete record follows, but the file has bytes after that record: the record is damaged,
      and so are these bytes. The file counts as cut off as well.

    Args:
        data: bytes of the file.
        file: file in which the damage is noted, in `damaged_at` and `is_cut_off`.
    """
    record_begin = 0  # a record is its frame, then its content
    while record_begin < len(data):
        content_begin = record_begin + FRAME.size
        content_end = _end_of_record(data, record_begin)
        if content_end is not None:
            yield content_begin, content_end
            record_begin = content_end
            continue

        # The first case.
        next_record = _next_complete_record(data, content_begin + 1)
        if next_record is not None:
            file.damaged_at.append(record_begin)
            record_begin = next_record
            continue

        # The second case or, with bytes after the record, the third.
        if _has_bytes_after_record(data, record_begin):
            file.damaged_at.append(record_begin)
        file.is_cut_off = True
        return


def _has_bytes_after_record(data: bytes | mmap.mmap, record_begin: int) -> bool:
    """Returns True if the file has bytes after the record that begins at an offset.

    The end of the record is computed from the length in its frame. If that length is not known,
    nothing can be said of later bytes, and the result is False.
    """
    content_begin = record_begin + FRAME.size
    frame_is_complete = content_begin <= len(data)
    if not frame_is_complete:
        return False

    length: int
    length, _ = FRAME.unpack(data[record_begin:content_begin])
    if length == 0:  # no record is empty, so the length is not known
        return False

    record_end = content_begin + length
    return record_end < len(data)


def _next_complete_record(data: bytes | mmap.mmap, first_content: int) -> int | None:
    """Searches for the next complete record after a damaged one.

    The length in a damaged record cannot be trusted. So this tries every byte that may be the first
    of a content.

    Args:
        data: bytes of the file.
        first_content: offset from which on the content of the next record may begin.

    Returns:
        The offset of the record's frame, or None if there is no further complete record.
    """
    for match in _BEGINNING_OF_CONTENT.finditer(data, first_content):
        record_begin = match.start() - FRAME.size
        if _end_of_record(data, record_begin) is not None:
            return record_begin
    return None


def _end_of_record(data: bytes | mmap.mmap, record_begin: int) -> int | None:
    """Returns the end of the record that begins at an offset.

    Returns:
        None if there is no record, or it is incomplete or damaged.
    """
    # The content begins with "S" (a step) or "J{" (a JSON object). If it does, the frame before it
    # is complete.
    content_begin = record_begin + FRAME.size
    if _BEGINNING_OF_CONTENT.match(data, content_begin) is None:
        return None

    length, checksum = FRAME.unpack(data[record_begin:content_begin])
    end = int(content_begin + length)
    if length == 0 or end > len(data):  # no record is empty
        return None
    if zlib.crc32(memoryview(data)[content_begin:end]) != checksum:
        return None
    return end
