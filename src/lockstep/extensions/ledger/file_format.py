"""The format of a ledger file: which samples one rank trained, in one start of the run.

A *start* is the first start of a run or a restart. A folder holds one file for each rank and each
start, named `<start>.rank<rank>.ledger`. A file is a sequence of *records*, which are only ever
appended: a frame (4 bytes length and 4 bytes CRC-32 of the content), then the content. The content
is `J` and a JSON object, or `S` and an optimizer step: the fields of `STEP_FIELDS`, and the indices
of this rank's samples as 64-bit integers. All numbers are little-endian. The first record has the
version of the format and the number of ranks.

If a process is killed, the last record of its file may be incomplete. That shows by its length and
is no damage. A record in the middle whose checksum is wrong is damage.
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
RANK_INFIX = ".rank"
LEDGER_SUFFIX = ".ledger"

FRAME = struct.Struct("<II")
"""Length and CRC-32 of the content of a record."""
JSON_RECORD = b"J"
STEP_RECORD = b"S"
STEP_FIELDS = struct.Struct("<QHIQI")
"""Number of the step, number of the loader, epoch, position of the global batch in the epoch, and
samples of the global batch on all ranks."""
NO_LOADER = 0xFFFF
"""The number of the loader in a step that trained no batch of a prepared loader."""

# How the content of a record begins: b'S' of a step, or b'J{' of a JSON object.
_BEGINNING_OF_CONTENT = re.compile(rb"S|J\{")


class TrainedBatch(NamedTuple):
    """What was trained of one global batch: by one rank, or by all ranks."""

    step: int
    loader: int
    """The number of the loader."""
    epoch: int
    position: int
    """The position of the global batch in the epoch."""
    global_samples: int
    """Samples of the global batch on all ranks."""
    samples: tuple[Indices, ...]
    """The indices of the samples, one array for each rank."""

    @property
    def num_recorded(self) -> int:
        """How many samples were recorded."""
        return sum(len(samples) for samples in self.samples)


@dataclass
class RankFile:
    """What was read from one rank's file of one start of the run."""

    name: str
    num_ranks: int = 0
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """What was recorded about each loader."""
    beginnings: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """Digests of the first samples of a stream, by its number and the epoch."""
    batches_by_attempt: list[list[TrainedBatch]] = field(default_factory=lambda: [[]])
    """What was trained. A new list begins where the run went back to an earlier step."""
    is_cut_off: bool = False
    """True if the last record is incomplete."""
    damaged_at: list[int] = field(default_factory=list)
    """The byte at which each damaged record begins."""


def record_bytes(content: bytes) -> bytes:
    """Returns a record with this content."""
    return FRAME.pack(len(content), zlib.crc32(content)) + content


def json_content(values: dict[str, Any]) -> bytes:
    """Returns the content of a record that holds a JSON object."""
    return JSON_RECORD + json.dumps(values).encode()


def step_content(
    step: int, loader: int, epoch: int, position: int, global_samples: int, samples: Indices | None
) -> bytes:
    """Returns the content of a record of an optimizer step.

    Args:
        step: the number of the step.
        loader: the number of the loader, or `NO_LOADER`.
        epoch: the epoch of the loader.
        position: the position of the global batch in the epoch.
        global_samples: samples of the global batch on all ranks.
        samples: the indices of this rank's samples; None: no loader gave them.
    """
    fields = STEP_FIELDS.pack(step, loader, epoch, position, global_samples)
    indices = b"" if samples is None else samples.astype("<i8", copy=False).tobytes()
    return STEP_RECORD + fields + indices


def read_file(path: Path) -> RankFile:
    """Reads one rank's file.

    Raises:
        CheckpointError: the file has a later version of the format, or cannot be opened.
    """
    file = RankFile(path.name)
    data = _map_file(path)
    for begin, end in _find_records(data, file):
        kind = data[begin : begin + 1]  # the first byte; what follows it depends on it
        if kind == STEP_RECORD:
            _add_step(file, data, begin + 1, end)
            continue
        values = json.loads(data[begin + 1 : end])
        if "loader" in values:  # the description of a loader, which also has the key "stream"
            file.loaders.append(values)
        elif "stream" in values:  # the first samples of a stream in an epoch
            file.beginnings[values["stream"], values["epoch"]] = values["beginning"]
        elif values["ledger"] == FORMAT_VERSION:  # the first record of the file
            file.num_ranks = values["ranks"]
        else:
            raise CheckpointError(
                f"the ledger {path.parent}",
                f"{path.name} is of version {values['ledger']}, and {FORMAT_VERSION} is read here",
                "read it with the Lockstep that wrote it",
            )
    return file


def _map_file(path: Path) -> bytes | mmap.mmap:
    """Maps a file into memory."""
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
    """Adds an optimizer step to what was read from a file.

    Args:
        file: the step is added to the last list of `batches_by_attempt`, or to a new list.
        data: the bytes of the file.
        begin: the byte at which the fields of the step begin.
        end: the byte behind its last sample.
    """
    step, loader, epoch, position, global_samples = STEP_FIELDS.unpack_from(data, begin)
    # Behind the fields are the indices of the samples, as little-endian 64-bit integers.
    samples_begin = begin + STEP_FIELDS.size
    num_samples = (end - samples_begin) // 8
    samples = np.frombuffer(data, "<i8", num_samples, samples_begin)
    batch = TrainedBatch(step, loader, epoch, position, global_samples, (samples,))
    latest_attempt = file.batches_by_attempt[-1]
    if latest_attempt and step < latest_attempt[-1].step:  # the run went back to an earlier step
        latest_attempt = []
        file.batches_by_attempt.append(latest_attempt)
    latest_attempt.append(batch)


def _find_records(data: bytes | mmap.mmap, file: RankFile) -> Iterator[tuple[int, int]]:
    """Yields where the content of each complete record begins and ends.

    After a damaged record it goes on with the next complete one.

    Args:
        data: the bytes of the file.
        file: what is wrong with the file is noted in its `damaged_at` and `is_cut_off`.
    """
    place = 0  # the byte at which a record begins: its frame, then its content
    while place < len(data):
        content_begin = place + FRAME.size
        end = _end_of_record(data, place)
        if end is not None:
            yield content_begin, end
            place = end
            continue
        # Either the record is damaged, or it is the last one and the process was killed while
        # writing it. It is damaged if something follows it: a complete record, or, by the length
        # in its frame, at least some bytes.
        next_place = _next_complete_record(data, content_begin + 1)
        length = 0
        frame_is_complete = content_begin <= len(data)
        if frame_is_complete:
            length, _ = FRAME.unpack(data[place:content_begin])
        bytes_follow = length > 0 and content_begin + length < len(data)
        if next_place is not None or bytes_follow:
            file.damaged_at.append(place)
        if next_place is None:
            file.is_cut_off = True
            return
        place = next_place


def _next_complete_record(data: bytes | mmap.mmap, first_content: int) -> int | None:
    """Searches for the next complete record, after a damaged one.

    The length in a damaged record cannot be trusted, so every place is tried at which a content
    might begin.

    Args:
        data: the bytes of the file.
        first_content: the first byte at which the content of the record may begin.

    Returns:
        The byte at which its frame begins; None: there is none.
    """
    for match in _BEGINNING_OF_CONTENT.finditer(data, first_content):
        place = match.start() - FRAME.size
        if _end_of_record(data, place) is not None:
            return place
    return None


def _end_of_record(data: bytes | mmap.mmap, place: int) -> int | None:
    """Returns where the record that begins at `place` ends; None: no complete one begins there."""
    content_begin = place + FRAME.size
    if _BEGINNING_OF_CONTENT.match(data, content_begin) is None:
        return None
    length, checksum = FRAME.unpack(data[place:content_begin])
    end = int(content_begin + length)
    if length == 0 or end > len(data):  # no record is empty
        return None
    if zlib.crc32(memoryview(data)[content_begin:end]) != checksum:
        return None
    return end
