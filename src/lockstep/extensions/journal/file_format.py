"""The format of the journal files, each of which holds what one rank computed in each step.

A *start* of a run is its first start or a restart. The folder holds one file for each rank and each
start, named `<start>.rank<rank>.journal`. A file is a sequence of *records* that are only ever
appended, framed as in the sample ledger: 4 bytes with the length of the content, 4 bytes with its
CRC-32, then the content. The content is `J` and a JSON object, or `S` and an optimizer step, or `L`
and a step of which only the losses were written. Numbers are little-endian.

The JSON objects, by their first key:

- `journal`: the version of the format, with `rank` and `ranks`, `virtual_ranks` (null: none),
  `every` (steps from one with hashes to the next) and `time`. The first record.
- `manifest`: texts that say how the rank computed, for example `{"torch": "2.13.0", ...}`.
- `begins_at`: the number of the first step of this start, with `weights`: hashes of all weights
  before that step, by name.
- `tensors`: the names of the trained parameters, then those of the buffers, with `parameters`: how
  many of them are parameters, and `weights` and `state`: for which of them this file has hashes of
  weights and of optimizer state. This applies to the steps that follow.

A step consists of *parts*: the virtual ranks that the rank computed, or the rank itself if there
are no virtual ranks. Its content is its number, the number of its parts, and 64-bit integers: the
number of each part, the loss of each part (the bits of a float64), for each part the hashes of its
gradients (one for each parameter, and only with virtual ranks), then the hashes of the weights and
of the optimizer state. A step without hashes ends after the losses.

A hash covers the part of a tensor that the rank has. The hash of the whole tensor is the sum over
all ranks, modulo 2**64 (see `hashing`).
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import CheckpointError
from lockstep.extensions.ledger.file_format import FRAME, JSON_RECORD, STEP_RECORD

FORMAT_VERSION = 2
LOSS_RECORD = b"L"
"""The first byte of the content of a record that has only the losses of a step."""
JOURNAL_SUFFIX = ".journal"

STEP_FIELDS = struct.Struct("<QI")
"""The number of the step, and how many parts it has."""

Hashes = npt.NDArray[np.uint64]


class TensorTable(NamedTuple):
    """Says which tensors the hashes in a file belong to."""

    names: tuple[str, ...]
    """The names of the trained parameters, then those of the buffers."""
    num_parameters: int
    hashed_weights: tuple[int, ...]
    """Indices in `names` of the tensors that this rank has hashed."""
    hashed_states: tuple[int, ...]
    """Indices in `names` of the parameters whose optimizer state this rank has hashed."""


NO_TENSORS = TensorTable(names=(), num_parameters=0, hashed_weights=(), hashed_states=())
"""A table without any tensors."""


class RankStep(NamedTuple):
    """A step as it is recorded in the file of one rank."""

    table: TensorTable | None
    """None if the file has only the losses of the step."""
    losses: dict[int, float]
    """The loss of each part, by the number of the part."""
    gradients: dict[int, Hashes]
    """One hash for each parameter, by the number of the part."""
    weights: Hashes
    """One hash for each element of `table.hashed_weights`."""
    state: Hashes
    """One hash for each element of `table.hashed_states`."""


class StepLocation(NamedTuple):
    """The place of a step's content in a file."""

    begin: int
    """The byte after the letter that the content begins with."""
    end: int
    table: TensorTable | None
    """The tensors that its hashes belong to; None if it has only losses."""


@dataclass
class RankFile:
    """The file of one rank for one start of the run, as it was read."""

    path: Path
    data: bytes | mmap.mmap = b""
    header: dict[str, Any] = field(default_factory=dict)
    """The first record; empty if the file has no complete record."""
    manifest: dict[str, str] = field(default_factory=dict)
    begins_at: int | None = None
    """The number of the first step of this start; None if the start ended before any step."""
    weights_at_beginning: dict[str, int] = field(default_factory=dict)
    steps_by_attempt: list[dict[int, StepLocation]] = field(default_factory=lambda: [{}])
    """Where each step is in the file, by its number. A new dict, an *attempt*, begins wherever the
    run went back to an earlier step."""
    is_cut_off: bool = False
    """True if the last record is incomplete."""
    is_damaged: bool = False
    """True if a record is damaged. The records after it were not read."""

    def read_step(self, attempt: int, number: int) -> RankStep:
        """Reads a step of an attempt."""
        location = self.steps_by_attempt[attempt][number]
        content = self.data[location.begin : location.end]
        return _parse_step(content, location.table, self.has_gradients)

    @property
    def has_gradients(self) -> bool:
        """True if the steps have hashes of gradients: if their parts are virtual ranks."""
        return self.header.get("virtual_ranks") is not None


def step_head(number: int, parts: Sequence[int]) -> bytes:
    """Returns the beginning of the content of a step, to which losses and hashes are appended.

    Args:
        number: number of the step.
        parts: numbers of its parts, in the order of the losses and gradients that follow.
    """
    count = len(parts)
    return STEP_RECORD + STEP_FIELDS.pack(number, count) + struct.pack(f"<{count}q", *parts)


def loss_content(number: int, parts: Sequence[int], losses: Sequence[float]) -> bytes:
    """Returns the content of a step without hashes.

    Args:
        number: number of the step.
        parts: numbers of its parts.
        losses: loss of each part; empty if the caller appends the losses itself.
    """
    head = LOSS_RECORD + step_head(number, parts)[len(STEP_RECORD) :]
    return head + struct.pack(f"<{len(losses)}d", *losses)


def read_file(path: Path) -> RankFile:
    """Reads the file of one rank, up to the first record that is incomplete or damaged.

    Raises:
        CheckpointError: if the file cannot be opened, or has another version of the format.
    """
    file = _open_file(path)
    table = NO_TENSORS  # the tensors to which the hashes of the next steps belong
    for begin, end in _find_records(file):
        letter = file.data[begin : begin + 1]
        content_begin = begin + 1
        if letter == STEP_RECORD:
            _add_step(file, StepLocation(content_begin, end, table))
        elif letter == LOSS_RECORD:  # it has no hashes, and so needs no table of tensors
            _add_step(file, StepLocation(content_begin, end, table=None))
        else:
            values = json.loads(file.data[content_begin:end])
            if "tensors" in values:
                table = _read_table(values)
            else:
                _read_json_record(file, path, values)
    return file


def _read_json_record(file: RankFile, path: Path, values: dict[str, Any]) -> None:
    """Adds what a JSON record says, which is known by its first key, to the file's contents.

    Raises:
        CheckpointError: if the file has another version of the format.
    """
    if "journal" in values:
        file.header = values
        if values["journal"] != FORMAT_VERSION:
            raise CheckpointError(
                f"the journal {path.parent}",
                f"{path.name} is of version {values['journal']}, and {FORMAT_VERSION} is read here",
                "read it with the Lockstep that wrote it",
            )
    elif "manifest" in values:
        file.manifest = values["manifest"]
    else:  # "begins_at"
        file.begins_at = values["begins_at"]
        file.weights_at_beginning = values["weights"]


def _read_table(values: dict[str, Any]) -> TensorTable:
    """Returns the tensors to which the hashes of the following steps belong."""
    return TensorTable(
        names=tuple(values["tensors"]),
        num_parameters=values["parameters"],
        hashed_weights=tuple(values["weights"]),
        hashed_states=tuple(values["state"]),
    )


def _open_file(path: Path) -> RankFile:
    """Maps a file into memory, without reading its records."""
    try:
        file = RankFile(path)
        with path.open("rb") as opened:
            if path.stat().st_size:  # an empty file cannot be mapped, and its data stay b""
                file.data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(
            f"the journal {path.parent}",
            f"{path.name} cannot be read: {error}",
            "make it readable, or copy the folder",
        ) from error
    return file


def _find_records(file: RankFile) -> Iterator[tuple[int, int]]:
    """Yields the begin and the end of the content of each record.

    Stops at a record that is incomplete or damaged, and notes in `file` which of the two it is.
    """
    frame_begin = 0
    while frame_begin < len(file.data):
        # The frame (length and checksum) is followed by the content, which is never empty.
        begin = frame_begin + FRAME.size
        has_frame_and_content = begin < len(file.data)
        if not has_frame_and_content:
            file.is_cut_off = True
            return

        length, checksum = FRAME.unpack_from(file.data, frame_begin)
        end = begin + length
        content_is_whole = end <= len(file.data)
        if not content_is_whole:
            file.is_cut_off = True
            return

        is_known = file.data[begin : begin + 1] in (JSON_RECORD, STEP_RECORD, LOSS_RECORD)
        if not is_known or zlib.crc32(memoryview(file.data)[begin:end]) != checksum:
            file.is_damaged = True
            return

        yield begin, end
        frame_begin = end


def _add_step(file: RankFile, location: StepLocation) -> None:
    """Adds a step to the last attempt in a file.

    If the run went back to an earlier step, because it has loaded a checkpoint, a new attempt
    begins: the steps 1 to 9 and then 6 to 12 are two attempts.
    """
    number, _ = STEP_FIELDS.unpack_from(file.data, location.begin)
    steps = file.steps_by_attempt[-1]
    latest_number = next(reversed(steps), None)  # a dict keeps the order of insertion
    went_back = latest_number is not None and number <= latest_number
    if went_back:
        steps = {}
        file.steps_by_attempt.append(steps)
    steps[number] = location


def _parse_step(content: bytes, table: TensorTable | None, has_gradients: bool) -> RankStep:
    """Parses the content of a step.

    A *part* of the step is a virtual rank, or this rank if there are no virtual ranks. The fields
    of `STEP_FIELDS` are followed by numbers of 8 bytes. For 2 parts and 3 parameters: the numbers
    of the 2 parts, 2 losses, 2 * 3 hashes of gradients, then hashes of weights and of states.

    Args:
        content: content of the record, without the letter that it begins with.
        table: tensors that the hashes belong to; None if the step has only losses.
        has_gradients: True if the run has virtual ranks. Then each step with hashes also has hashes
            of gradients.
    """
    _, num_parts = STEP_FIELDS.unpack_from(content)
    numbers = np.frombuffer(content, "<u8", offset=STEP_FIELDS.size)

    step_has_gradients = has_gradients and table is not None
    gradients_per_part = table.num_parameters if table and step_has_gradients else 0
    num_weights = len(table.hashed_weights) if table else 0

    # With 2 parts, 3 parameters and 3 hashes of weights, the lengths are 2, 2, 6 and 3, so the
    # numbers are cut at 2, 4, 10 and 13. The hashes of states are what remains.
    lengths = [num_parts, num_parts, num_parts * gradients_per_part, num_weights]
    cuts = np.cumsum(lengths)
    parts, losses, gradients, weights, state = np.split(numbers, cuts)

    part_numbers = parts.tolist()
    gradients_of_parts: dict[int, Hashes] = {}
    if step_has_gradients:
        rows = gradients.reshape(num_parts, gradients_per_part)
        gradients_of_parts = dict(zip(part_numbers, rows, strict=True))

    return RankStep(
        table=table,
        losses=dict(zip(part_numbers, losses.view("<f8").tolist(), strict=True)),
        gradients=gradients_of_parts,
        weights=weights,
        state=state,
    )


def json_record(values: dict[str, Any]) -> bytes:
    """Returns the content of a record that holds a JSON object."""
    return JSON_RECORD + json.dumps(values).encode()


def table_record(table: TensorTable) -> bytes:
    """Returns the content of a record that holds a table of tensors.

    `weights` and `state` hold the indices of the tensors of which the file has hashes.
    """
    values: dict[str, Sequence[str] | Sequence[int] | int] = {
        "tensors": table.names,
        "parameters": table.num_parameters,
        "weights": table.hashed_weights,
        "state": table.hashed_states,
    }
    return json_record(values)
