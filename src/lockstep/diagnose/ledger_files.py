"""Reads the files of a sample ledger; `lockstep.data.ledger` says what is in them.

What was cut off at the end of a file, because its process was killed, is no damage; a record in the
middle that its checksum does not fit is.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import CheckpointError

FORMAT = 1
_FRAME = struct.Struct("<II")
_NAME = ".rank"
_SUFFIX = ".ledger"

Samples = npt.NDArray[np.int64]


class Row(NamedTuple):
    """What one rank trained of one global batch."""

    step: int
    loader: int
    epoch: int
    position: int
    total: int
    """Samples of the global batch on all ranks."""
    samples: Samples


@dataclass
class RankFile:
    """One rank's file of one attempt."""

    name: str
    header: dict[str, Any] = field(default_factory=dict)
    loaders: dict[int, dict[str, Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    cut: bool = False
    """The last record is not whole."""
    damaged: list[int] = field(default_factory=list)
    """Bytes at which records begin that are not what was written."""


@dataclass
class Attempt:
    """One start of the run, or what followed when it went back to an earlier step."""

    name: str
    started_ns: int
    ranks: int = 0
    files: dict[int, RankFile] = field(default_factory=dict)

    @property
    def steps(self) -> set[int]:
        """The numbers of the steps that some rank has written down."""
        return {row.step for file in self.files.values() for row in file.rows}


def read_folder(folder: Path) -> list[Attempt]:
    """The attempts in a folder, in the order in which they were started.

    Raises:
        CheckpointError: there is no ledger, or one of a later version.
    """
    paths = sorted(folder.glob(f"*{_NAME}*{_SUFFIX}")) if folder.is_dir() else []
    if not paths:
        raise CheckpointError(
            f"the ledger {folder}",
            "the folder holds none" if folder.is_dir() else "there is no such folder",
            "train with lockstep run --ledger FOLDER, and give that folder",
        )
    attempts: dict[str, Attempt] = {}
    for path in paths:
        name, _, rank = path.name.removesuffix(_SUFFIX).rpartition(_NAME)
        if not rank.isdigit():
            continue
        file = read_file(path)
        # The name alone tells as much of a file that was cut off at its very beginning.
        begun = name.partition("-")[0]
        attempt = attempts.setdefault(name, Attempt(name, int(begun) if begun.isdigit() else 0))
        attempt.ranks = max(attempt.ranks, file.header.get("ranks", 0))
        attempt.files[int(rank)] = file
    ordered = sorted(attempts.values(), key=lambda attempt: (attempt.started_ns, attempt.name))
    return [part for attempt in ordered for part in _forward(attempt)]


def _forward(attempt: Attempt) -> Iterator[Attempt]:
    """The attempt in parts in which the steps go forward: a script may resume in mid-run."""
    rows = {rank: file.rows for rank, file in attempt.files.items()}
    while True:
        for rank, left in rows.items():
            backward = (i for i in range(1, len(left)) if left[i].step < left[i - 1].step)
            cut = next(backward, len(left))
            attempt.files[rank].rows, rows[rank] = left[:cut], left[cut:]
        yield attempt
        if not any(rows.values()):
            return
        files = {rank: RankFile(file.name) for rank, file in attempt.files.items()}
        attempt = Attempt(attempt.name, attempt.started_ns, attempt.ranks, files)


def read_file(path: Path) -> RankFile:
    """One rank's file.

    Raises:
        CheckpointError: it is of a later version, or cannot be opened.
    """
    file = RankFile(path.name)
    try:
        with path.open("rb") as opened:
            size = path.stat().st_size
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise CheckpointError(
            f"the ledger {path.parent}",
            f"{path.name} cannot be read: {error}",
            "make it readable, or copy the folder",
        ) from error
    numbers = struct.Struct("<QHIQI")
    for begin, end in _records(data, file):
        if data[begin : begin + 1] == b"J":
            values = json.loads(bytes(data[begin + 1 : end]))
            if "loader" in values:
                file.loaders[values["loader"]] = values
            else:
                file.header = _checked(values, path)
                numbers = struct.Struct(values["step"])
            continue
        after = begin + 1 + numbers.size
        step, loader, epoch, position, count = numbers.unpack_from(data, begin + 1)
        samples = np.frombuffer(data, "<i8", (end - after) // 8, after)
        if loader == file.header.get("no_loader"):
            loader = -1
        file.rows.append(Row(step, loader, epoch, position, count, samples))
    return file


def _records(data: bytes | mmap.mmap, file: RankFile) -> Iterator[tuple[int, int]]:
    """Where each whole record begins and ends."""
    at = 0
    while at < len(data):
        if at + _FRAME.size > len(data):
            file.cut = True
            return
        length, checksum = _FRAME.unpack_from(data, at)
        begin = at + _FRAME.size
        end = begin + length
        if end > len(data) or not length:
            file.cut = True
            return
        if zlib.crc32(memoryview(data)[begin:end]) == checksum:
            yield begin, end
        elif end == len(data):
            file.cut = True
        else:
            file.damaged.append(at)
        at = end


def _checked(header: dict[str, Any], path: Path) -> dict[str, Any]:
    version = header.get("ledger")
    if version != FORMAT:
        raise CheckpointError(
            f"the ledger {path.parent}",
            f"{path.name} is of version {version}, this Lockstep reads version {FORMAT}",
            "read it with the Lockstep that wrote it",
        )
    return header
