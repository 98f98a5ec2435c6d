"""The format of a journal's files: what one rank computed in each step, in one start of the run.

A *start* is the first start of a run or a restart. A folder holds one file for each rank and each
start, named `<start>.rank<rank>.journal`. A file is a sequence of *records*, which are only ever
appended, in the frames of the sample ledger: 4 bytes length and 4 bytes CRC-32 of the content, then
the content. The content is `J` and a JSON object, or `S` and an optimizer step, or `L` and a step
of which only the losses were written down. Numbers are little-endian.

The JSON objects, by their first key:

- `journal`: the version of the format, with `rank` and `ranks`, `virtual_ranks` (null: none),
  `every` (steps from one with hashes to the next) and `time`. The first record.
- `manifest`: texts that say how the rank computed, such as `{"torch": "2.13.0", ...}`.
- `begins_at`: the number of the step that this start begins with, and `weights`: hashes of all
  weights before it, by name.
- `tensors`: the names of parameters that are trained, then those of buffers; `parameters`: how many
  are parameters; `weights` and `state`: of which of them this file has hashes of weights, and of
  optimizer state. It holds for the steps that follow.

A step is its number, the number of its *parts*, and 64-bit integers: the number of each part, the
loss of each part (the bits of a float64), for each part the hashes of its gradients, one for each
parameter, and then the hashes of weights and of optimizer state. With virtual ranks the parts are
those that the rank has computed; without, the rank is the only part, and there are no gradients.
A step without hashes ends after the losses.

A hash covers what the rank has of a tensor. That of the whole tensor is the sum over all ranks,
modulo 2**64 (see `hashing`).
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
"""How the content of a record begins that has only the losses of a step."""
RANK_INFIX = ".rank"
JOURNAL_SUFFIX = ".journal"

STEP_FIELDS = struct.Struct("<QI")
"""Number of the step, and number of its parts."""

Hashes = npt.NDArray[np.uint64]


class TensorTable(NamedTuple):
    """Which tensors the hashes of a file belong to."""

    names: tuple[str, ...]
    """First of the parameters that are trained, then of the buffers."""
    num_parameters: int
    weights: tuple[int, ...]
    """The tensors whose weights the file has hashes of."""
    state: tuple[int, ...]
    """The parameters whose optimizer state the file has hashes of."""


class RankStep(NamedTuple):
    """What the file of a rank says about a step."""

    table: TensorTable | None
    """None: the file has only the losses of the step."""
    losses: dict[int, float]
    """By the number of the part."""
    gradients: dict[int, Hashes]
    """By the number of the part; a hash for each parameter."""
    weights: Hashes
    state: Hashes


@dataclass
class RankFile:
    """What was read from one rank's file of one start of the run."""

    path: Path
    data: bytes | mmap.mmap = b""
    header: dict[str, Any] = field(default_factory=dict)
    """The first record; empty if the file ends before it."""
    manifest: dict[str, str] = field(default_factory=dict)
    begins_at: int | None = None
    """The number of the first step of this start; None: there was none."""
    weights_at_beginning: dict[str, int] = field(default_factory=dict)
    steps_by_attempt: list[dict[int, tuple[int, int, TensorTable | None]]] = field(
        default_factory=lambda: [{}]
    )
    """Where the content of each step begins and ends, and which tensors its hashes belong to. A new
    dict begins where the run went back to an earlier step."""
    is_cut_off: bool = False
    """True if the last record is incomplete."""
    is_damaged: bool = False
    """True if a record before the last is damaged; what follows it was not read."""

    def read_step(self, attempt: int, number: int) -> RankStep:
        """Reads a step of an attempt."""
        begin, end, table = self.steps_by_attempt[attempt][number]
        return _parse_step(self.data[begin:end], table, self.has_gradients)

    @property
    def has_gradients(self) -> bool:
        """True if the parts of its steps are virtual ranks."""
        return self.header.get("virtual_ranks") is not None


def step_head(number: int, parts: Sequence[int]) -> bytes:
    """Returns how the content of a step begins. Losses and hashes follow, as 64-bit integers.

    Args:
        number: of the step.
        parts: the numbers of its parts.
    """
    count = len(parts)
    return STEP_RECORD + STEP_FIELDS.pack(number, count) + struct.pack(f"<{count}q", *parts)


def loss_content(number: int, parts: Sequence[int], losses: Sequence[float]) -> bytes:
    """Returns the content of a step without hashes.

    Args:
        number: of the step.
        parts: the numbers of its parts.
        losses: of the parts; empty if they are still to be added.
    """
    head = LOSS_RECORD + step_head(number, parts)[len(STEP_RECORD) :]
    return head + struct.pack(f"<{len(losses)}d", *losses)


def read_file(path: Path) -> RankFile:
    """Reads one rank's file.

    Raises:
        CheckpointError: it cannot be opened, or is of a later version of the format.
    """
    try:
        file = RankFile(path)
        with path.open("rb") as opened:
            if path.stat().st_size:  # an empty file cannot be mapped
                file.data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(
            f"the journal {path.parent}",
            f"{path.name} cannot be read: {error}",
            "make it readable, or copy the folder",
        ) from error
    table = TensorTable((), 0, (), ())
    for begin, end in _find_records(file):
        kind = file.data[begin : begin + 1]
        if kind in (STEP_RECORD, LOSS_RECORD):
            number, _ = STEP_FIELDS.unpack_from(file.data, begin + 1)
            steps = file.steps_by_attempt[-1]
            if steps and number <= next(reversed(steps)):  # the run went back to an earlier step
                steps = {}
                file.steps_by_attempt.append(steps)
            steps[number] = (begin + 1, end, table if kind == STEP_RECORD else None)
            continue
        values = json.loads(file.data[begin + 1 : end])
        if "journal" in values:
            file.header = values
            if values["journal"] != FORMAT_VERSION:
                raise CheckpointError(
                    f"the journal {path.parent}",
                    f"{path.name} is of version {values['journal']}, and {FORMAT_VERSION} is read "
                    "here",
                    "read it with the Lockstep that wrote it",
                )
        elif "manifest" in values:
            file.manifest = values["manifest"]
        elif "begins_at" in values:
            file.begins_at = values["begins_at"]
            file.weights_at_beginning = values["weights"]
        else:
            table = TensorTable(
                tuple(values["tensors"]),
                values["parameters"],
                tuple(values["weights"]),
                tuple(values["state"]),
            )
    return file


def _find_records(file: RankFile) -> Iterator[tuple[int, int]]:
    """Yields where the content of each record begins and ends, up to one that is not complete."""
    place = 0
    while place < len(file.data):
        begin = place + FRAME.size
        if begin >= len(file.data):
            file.is_cut_off = True
            return
        length, checksum = FRAME.unpack_from(file.data, place)
        end = begin + length
        if end > len(file.data):
            file.is_cut_off = True
            return
        is_known = file.data[begin : begin + 1] in (JSON_RECORD, STEP_RECORD, LOSS_RECORD)
        if not is_known or zlib.crc32(memoryview(file.data)[begin:end]) != checksum:
            file.is_damaged = True
            return
        yield begin, end
        place = end


def _parse_step(content: bytes, table: TensorTable | None, has_gradients: bool) -> RankStep:
    """Returns what the content of a step says, without the letter that it begins with."""
    _, num_parts = STEP_FIELDS.unpack_from(content)
    numbers = np.frombuffer(content, "<u8", offset=STEP_FIELDS.size)
    if table is None:
        has_gradients = False
    num_gradients = table.num_parameters if has_gradients and table is not None else 0
    num_weights = len(table.weights) if table is not None else 0
    lengths = [num_parts, num_parts, num_parts * num_gradients, num_weights]
    parts, losses, gradients, weights, state = np.split(numbers, np.cumsum(lengths))
    rows = gradients.reshape(num_parts, num_gradients)
    part_numbers = parts.tolist()
    return RankStep(
        table=table,
        losses=dict(zip(part_numbers, losses.view("<f8").tolist(), strict=True)),
        gradients=dict(zip(part_numbers, rows, strict=True)) if has_gradients else {},
        weights=weights,
        state=state,
    )


def json_record(values: dict[str, Any]) -> bytes:
    """Returns the content of a record that holds a JSON object."""
    return JSON_RECORD + json.dumps(values).encode()


def table_record(table: TensorTable) -> bytes:
    """Returns the content of the record of a table of tensors."""
    values: dict[str, Sequence[str] | Sequence[int] | int] = {
        "tensors": table.names,
        "parameters": table.num_parameters,
        "weights": table.weights,
        "state": table.state,
    }
    return json_record(values)
