"""The format of the ledger files, each of which lists the samples that one rank trained.

A *start* of a run is its first start or a restart. The folder holds one file for each rank and each
start, named `<start>.rank<rank>.ledger`. A file is a sequence of records (`framed_records`). The
content of a record is `J` and a JSON object, or `S` and an optimizer step. A step consists of the
fields of `STEP_FIELDS` and the indices of this rank's samples as 64-bit integers. All numbers are
little-endian. The first record has the version of the format and the number of ranks.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.batch.indices import Indices
from lockstep.errors import CheckpointError
from lockstep.extensions.framed_records import (
    STEP_RECORD,
    Damage,
    Data,
    find_contents,
    map_file,
)

FORMAT_VERSION = 2
LEDGER_SUFFIX = ".ledger"

STEP_FIELDS = struct.Struct("<QHIQI")
"""The number of the step, the number of the loader, the epoch, the position of the global batch in
the epoch, and its number of samples on all ranks."""
NO_LOADER = 0xFFFF
"""The number of the loader in a step that trained no batch of a prepared loader."""


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
    damage: Damage = field(default_factory=Damage)
    """What could not be read of the file."""


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
    data = map_file(path, "the ledger")
    for begin, end in find_contents(data, file.damage):
        kind = data[begin : begin + 1]
        if kind == STEP_RECORD:
            _add_step(file, data, begin + 1, end)
            continue

        # The keys tell what a JSON record is:
        #
        #     {"ledger": 2, "ranks": 4}                                 the first record of the file
        #     {"loader": 0, "stream": null, "length": 60000, ...}       describes a loader
        #     {"stream": 0, "epoch": 1, "beginning": ["5f1c...", ...]}  first samples of a stream
        values = json.loads(data[begin + 1 : end])
        if "ledger" in values:
            _check_version(path, values["ledger"])
            file.num_ranks = values["ranks"]
        elif "loader" in values:
            file.loaders.append(values)
        else:
            file.beginnings[values["stream"], values["epoch"]] = values["beginning"]
    return file


def _check_version(path: Path, version: Any) -> None:
    """Raises CheckpointError if a file has another version of the format than this module."""
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"the ledger {path.parent}",
            f"{path.name} is of version {version}, and {FORMAT_VERSION} is read here",
            "read it with the Lockstep that wrote it",
        )


def _add_step(file: RankFile, data: Data, begin: int, end: int) -> None:
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

    # A step may have several batches, of different loaders, so an equal number is no step back.
    batches_of_latest_attempt = file.batches_by_attempt[-1]
    went_back = bool(batches_of_latest_attempt) and step < batches_of_latest_attempt[-1].step
    if went_back:
        file.batches_by_attempt.append([batch])
    else:
        batches_of_latest_attempt.append(batch)
