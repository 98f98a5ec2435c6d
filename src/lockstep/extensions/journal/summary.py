"""The text of `lockstep journal show`: the manifest of a run, and one hash for each step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.extensions.journal.comparison import describe_journal
from lockstep.extensions.journal.file_format import Hashes
from lockstep.extensions.journal.reading import read_journal


def summary_lines(folder: Path, num_steps: int) -> list[str]:
    """Returns lines about a journal.

    Args:
        folder: of the journal.
        num_steps: how many of the last steps are listed.

    Raises:
        CheckpointError: there is no journal, or it cannot be read.
    """
    journal = read_journal(folder)
    lines = [describe_journal(journal)]
    lines += [f"  note: {note}" for note in journal.notes]
    for name, value in journal.manifest.items():
        lines.append(f"  {name}: {value}")
    first_listed = max(0, len(journal.steps) - num_steps)
    for number in journal.steps[first_listed:]:
        step = journal.read_step(number)
        parameters = step.names[: step.num_parameters]
        parts = [f"loss {part}" for part in step.losses]
        losses = np.array(list(step.losses.values()), "<f8").view("<u8")
        text = f"step {number}: losses {_joined_hash(parts, losses):016x}"
        if not step.has_hashes:
            lines.append(text)
            continue
        if step.gradients:
            gradients = 0
            for virtual_rank, hashes in step.gradients.items():
                names = [f"{virtual_rank} {name}" for name in parameters]
                gradients += _joined_hash(names, hashes)
            text += f", gradients {gradients % 2**64:016x}"
        text += f", weights {_joined_hash(step.names, step.weights):016x}"
        text += f", optimizer state {_joined_hash(parameters, step.state):016x}"
        lines.append(text)
    return lines


def _joined_hash(names: Sequence[str], hashes: Hashes) -> int:
    """Returns one 64-bit hash of several tensors, in which each counts by its name."""
    joined = 0
    for name, number in zip(names, hashes.tolist(), strict=True):
        factor = zlib.crc32(name.encode()) * 2 + 1
        joined += factor * (number ^ (number >> 32))
    return joined % 2**64
