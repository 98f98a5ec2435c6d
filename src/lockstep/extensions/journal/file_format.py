"""The format of the journal files, each of which holds what one rank computed in each step.

A *start* of a run is its first start or a restart. The folder holds one file for each rank and each
start, named `<start>.rank<rank>.journal`. A file is a sequence of records (`framed_records`). The
content of a record is `J` and a JSON object, or `S` and an optimizer step, or `L` and a step of
which only the losses were written. Numbers are little-endian.

The JSON objects, by their first key:

- `journal`: the version of the format, with `rank` and `ranks`, `virtual_ranks` (null: none),
  `every` (steps from one with hashes to the next) and `time`. The first record.
- `manifest`: texts that say how the rank computed, for example `{"torch": "2.13.0", ...}`.
- `begins_at`: the number of the first step of this start, with `weights`: hashes of all weights
  before that step, by name.
- `tensors`: the names of the trained parameters, then those of the buffers, with `parameters`: how
  many of them are parameters, and `weights` and `state`: for which of them this file has hashes of
  weights and of optimizer state. `table` is the number of this list, by which steps refer to it.

A step consists of *parts*: the virtual ranks that the rank computed, or the rank itself if there
are no virtual ranks. Its content is the fields of `STEP_FIELDS`, and 64-bit integers: the number of
each part, the loss of each part (the bits of a float64), for each part the hashes of its
gradients (one for each parameter, and only with virtual ranks), then the hashes of the weights and
of the optimizer state. A step without hashes ends after the losses.

A hash covers the part of a tensor that the rank has. The hash of the whole tensor is the sum over
all ranks, modulo 2**64 (see `hashing`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import CheckpointError
from lockstep.extensions.framed_records import (
    STEP_RECORD,
    Damage,
    Data,
    find_contents,
    json_content,
    map_file,
)

FORMAT_VERSION = 3
LOSS_RECORD = b"L"
"""The first byte of the content of a record that has only the losses of a step."""
JOURNAL_SUFFIX = ".journal"

STEP_FIELDS = struct.Struct("<QII")
"""The number of the step, how many parts it has, and the number of the table of tensors that its
hashes belong to: from 1, and 0 for a step without hashes."""


class _StepFields(NamedTuple):
    """The fields of `STEP_FIELDS`."""

    number: int
    num_parts: int
    table_number: int


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
    data: Data = b""
    header: dict[str, Any] = field(default_factory=dict)
    """The first record; empty if the file has no complete record."""
    manifest: dict[str, str] = field(default_factory=dict)
    begins_at: int | None = None
    """The number of the first step of this start; None if the start ended before any step."""
    weights_at_beginning: dict[str, int] = field(default_factory=dict)
    steps_by_attempt: list[dict[int, StepLocation]] = field(default_factory=lambda: [{}])
    """Where each step is in the file, by its number. A new dict, an *attempt*, begins wherever the
    run went back to an earlier step."""
    damage: Damage = field(default_factory=Damage)
    """What could not be read of the file."""
    num_steps_without_table: int = 0
    """How many steps are left out, as the record that names their tensors is damaged."""

    def read_step(self, attempt: int, number: int) -> RankStep:
        """Reads a step of an attempt."""
        location = self.steps_by_attempt[attempt][number]
        content = self.data[location.begin : location.end]
        return _parse_step(content, location.table, has_virtual_ranks=self.has_gradients)

    @property
    def has_gradients(self) -> bool:
        """True if the steps have hashes of gradients: if their parts are virtual ranks."""
        return self.header.get("virtual_ranks") is not None


def step_head(number: int, parts: Sequence[int], table_number: int) -> bytes:
    """Returns the beginning of the content of a step, to which losses and hashes are appended.

    Args:
        number: number of the step.
        parts: numbers of its parts, in the order of the losses and gradients that follow.
        table_number: number of the table of tensors that the hashes belong to.
    """
    return STEP_RECORD + _fields_and_parts(number, parts, table_number)


def _fields_and_parts(number: int, parts: Sequence[int], table_number: int) -> bytes:
    """Returns the fields of a step and the numbers of its parts."""
    count = len(parts)
    fields = STEP_FIELDS.pack(number, count, table_number)
    return fields + struct.pack(f"<{count}q", *parts)


def loss_content(number: int, parts: Sequence[int], losses: Sequence[float]) -> bytes:
    """Returns the content of a step without hashes.

    Args:
        number: number of the step.
        parts: numbers of its parts.
        losses: loss of each part; empty if the caller appends the losses itself.
    """
    head = LOSS_RECORD + _fields_and_parts(number, parts, table_number=0)
    return head + struct.pack(f"<{len(losses)}d", *losses)


def read_file(path: Path) -> RankFile:
    """Reads the file of one rank. What cannot be read is left out, and noted in `damage`.

    Raises:
        CheckpointError: if the file cannot be opened, or has another version of the format.
    """
    file = RankFile(path, map_file(path, "the journal"))
    tables: dict[int, TensorTable] = {}  # by their numbers
    for begin, end in find_contents(file.data, file.damage):
        letter = file.data[begin : begin + 1]
        content_begin = begin + 1
        if letter == STEP_RECORD:
            fields = _read_step_fields(file.data, content_begin)
            table = tables.get(fields.table_number)  # None if the table's record is damaged
            if table is None:
                file.num_steps_without_table += 1
            else:
                _add_step(file, StepLocation(content_begin, end, table))
        elif letter == LOSS_RECORD:  # it has no hashes, and so needs no table of tensors
            _add_step(file, StepLocation(content_begin, end, table=None))
        else:  # a JSON record
            values = json.loads(file.data[content_begin:end])
            if "tensors" in values:
                tables[values["table"]] = _read_table(values)
            else:
                _read_json_record(file, path, values)
    return file


def _read_step_fields(data: Data, begin: int) -> _StepFields:
    """Reads the fields with which the content of a step begins, after its letter."""
    return _StepFields(*STEP_FIELDS.unpack_from(data, begin))


def _read_json_record(file: RankFile, path: Path, values: dict[str, Any]) -> None:
    """Adds a JSON record to the file's contents. One of its keys says what kind of record it is.

    The kinds are `{"journal": 3, "rank": 0, ...}`, `{"manifest": {...}}`, and `{"begins_at": 0,
    "weights": {...}}`.

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


def _add_step(file: RankFile, location: StepLocation) -> None:
    """Adds a step to the last attempt in a file.

    If the run went back to an earlier step, because it has loaded a checkpoint, a new attempt
    begins: the steps 1 to 9 and then 6 to 12 are two attempts.
    """
    number = _read_step_fields(file.data, location.begin).number
    steps = file.steps_by_attempt[-1]
    latest_number = next(reversed(steps), None)  # a dict keeps the order of insertion
    went_back = latest_number is not None and number <= latest_number
    if went_back:
        steps = {}
        file.steps_by_attempt.append(steps)
    steps[number] = location


def _parse_step(content: bytes, table: TensorTable | None, *, has_virtual_ranks: bool) -> RankStep:
    """Parses the content of a step.

    A *part* of the step is a virtual rank, or this rank if there are no virtual ranks. The fields
    of `STEP_FIELDS` are followed by numbers of 8 bytes. For 2 parts, 3 parameters, and 3 hashes of
    weights:

        numbers 0 to 1      the number of each part
        numbers 2 to 3      the loss of each part
        numbers 4 to 9      2 * 3 hashes of gradients
        numbers 10 to 12    3 hashes of weights
        numbers from 13     hashes of optimizer states

    A step with only losses has just the first two rows. Without virtual ranks, the row of gradients
    is missing.

    Args:
        content: content of the record, without the letter that it begins with.
        table: tensors that the hashes belong to; None if the step has only losses.
        has_virtual_ranks: True if the run has virtual ranks.
    """
    num_parts = _read_step_fields(content, 0).num_parts
    numbers = np.frombuffer(content, "<u8", offset=STEP_FIELDS.size)

    has_hashes = table is not None
    has_gradients = has_hashes and has_virtual_ranks
    hashed = table if table is not None else NO_TENSORS
    gradients_per_part = hashed.num_parameters if has_gradients else 0

    num_gradients = num_parts * gradients_per_part
    lengths = [num_parts, num_parts, num_gradients, len(hashed.hashed_weights)]  # [2, 2, 6, 3]
    cuts = np.cumsum(lengths)  # [2, 4, 10, 13]
    parts, losses, gradients, weights, state = np.split(numbers, cuts)

    part_numbers = parts.tolist()
    gradients_of_parts: dict[int, Hashes] = {}
    if has_gradients:
        rows = gradients.reshape(num_parts, gradients_per_part)
        gradients_of_parts = dict(zip(part_numbers, rows, strict=True))

    return RankStep(
        table=table,
        losses=dict(zip(part_numbers, losses.view("<f8").tolist(), strict=True)),
        gradients=gradients_of_parts,
        weights=weights,
        state=state,
    )


def table_content(table: TensorTable, number: int) -> bytes:
    """Returns the content of a record that holds a table of tensors.

    Args:
        table: the table.
        number: the number of the table, from 1.
    """
    values: dict[str, Sequence[str] | Sequence[int] | int] = {
        "tensors": table.names,
        "parameters": table.num_parameters,
        # The indices of the tensors of which the file has hashes: of the tensor, and of its state.
        "weights": table.hashed_weights,
        "state": table.hashed_states,
        "table": number,
    }
    return json_content(values)
