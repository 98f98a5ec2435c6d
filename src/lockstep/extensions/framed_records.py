"""Files of records that are only ever appended: those of the sample ledger and of the journal.

A record is a *frame* and a content, which is never empty. The frame has 12 bytes: a mark with which
every record begins, the length of the content, and the CRC-32 of this length and the content.
Numbers are little-endian. The content begins with a letter that says what it is: `J` for a JSON
object, and other letters for what the ledger and the journal write most, in a form of their own.

What a reader finds in a file, beside complete records:

- The file is *cut off*: it ends within a record, as the process was killed while it wrote, or its
  disk was full. This is no damage.
- Other bytes are *damaged*. Reading goes on at the next complete record, which its mark and its
  checksum show.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.wording import count_noun

MARK = b"\xa9rec"
"""The first bytes of every record. The first of them is in no ASCII text."""
FRAME = struct.Struct("<4sII")
"""`MARK`, the length of the content, and the checksum of the length and the content."""
_LENGTH = struct.Struct("<I")
JSON_RECORD = b"J"
STEP_RECORD = b"S"

Data = bytes | mmap.mmap


@dataclass
class Damage:
    """What could not be read of a file."""

    is_cut_off: bool = False
    """True if the file ends within a record. It is False if the last bytes are damaged."""
    damaged_at: list[int] = field(default_factory=list)
    """The offset at which each stretch of damaged bytes begins."""

    def describe(self, number: int, rank: int, file_name: str) -> str:
        """Says how many stretches of a file are damaged, and where the first one begins.

        Args:
            number: number of the start of the run that the file is of, from 1.
            rank: the rank that has written the file.
            file_name: name of the file.
        """
        damaged_places = count_noun(len(self.damaged_at), "place")
        first = self.damaged_at[0]
        return (
            f"start {number}, rank {rank}: {damaged_places} in {file_name} cannot be read, "
            f"the first at byte {first}"
        )


def framed(content: bytes) -> bytes:
    """Returns a record: the frame and the content."""
    return FRAME.pack(MARK, len(content), _checksum(content)) + content


def _checksum(content: bytes | memoryview) -> int:
    """Returns the CRC-32 of the length of a content, and the content."""
    return zlib.crc32(content, zlib.crc32(_LENGTH.pack(len(content))))


def json_content(values: dict[str, Any]) -> bytes:
    """Returns the content of a record that holds a JSON object."""
    return JSON_RECORD + json.dumps(values).encode()


def map_file(path: Path, owner: str) -> Data:
    """Maps a file of records into memory.

    Args:
        path: the path of the file.
        owner: what the file belongs to, for the error: "the ledger".

    Raises:
        CheckpointError: the file cannot be opened.
    """
    try:
        with path.open("rb") as opened:
            if path.stat().st_size == 0:  # an empty file cannot be mapped
                return b""
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(
            f"{owner} {path.parent}",
            f"{path.name} cannot be read: {error}",
            "make it readable, or copy the folder",
        ) from error


def find_contents(data: Data, damage: Damage) -> Iterator[tuple[int, int]]:
    """Yields the begin and the end of the content of each complete record.

    Args:
        data: the bytes of the file.
        damage: what cannot be read is noted here.
    """
    begin = 0
    while begin < len(data):
        end = _end_of_record(data, begin)
        if end is not None:
            yield begin + FRAME.size, end
            begin = end
            continue

        # The last bytes may be a record that was not written completely, which is no damage.
        next_begin = _find_complete_record(data, begin + 1)
        if next_begin is None and _is_beginning_of_record(data[begin:]):
            damage.is_cut_off = True
            return

        # The bytes up to the next complete record, or to the end of the file, are damaged.
        damage.damaged_at.append(begin)
        if next_begin is None:
            return
        begin = next_begin


def _end_of_record(data: Data, begin: int) -> int | None:
    """Returns the end of the record that begins at an offset; None if no complete one does."""
    content_begin = begin + FRAME.size
    if content_begin >= len(data):  # no content is empty
        return None
    mark, length, checksum = FRAME.unpack(data[begin:content_begin])
    end: int = content_begin + length
    if mark != MARK or length == 0 or end > len(data):
        return None
    if _checksum(memoryview(data)[content_begin:end]) != checksum:
        return None
    return end


def _find_complete_record(data: Data, begin: int) -> int | None:
    """Returns where the next complete record begins at an offset or later; None if there is none.

    The length in a damaged record cannot be trusted, so every mark is looked at.
    """
    while True:
        begin = data.find(MARK, begin)
        if begin < 0:
            return None
        if _end_of_record(data, begin) is not None:
            return begin
        begin += 1


def _is_beginning_of_record(tail: bytes) -> bool:
    """Returns True if the last bytes of a file may be a record of which the end was not written.

    Usually the file ends within the record. After a loss of power, the disk may have the length of
    the file, and not yet all of its bytes, which are then read as zeros. So the record may also
    have its full length, up to the end of the file, with zeros in it.

    Args:
        tail: the bytes after the last complete record.
    """
    is_never_written = not tail.strip(b"\0")
    if is_never_written:
        return True
    if len(tail) < FRAME.size:
        return MARK.startswith(tail[: len(MARK)])

    mark, length, _ = FRAME.unpack_from(tail)
    reaches_end_of_file = FRAME.size + length >= len(tail)
    return bool(mark == MARK and reaches_end_of_file)
