"""Writes the text of `lockstep journal show`: the manifest of a run, and a line for each step.

A journal holds one hash for each tensor. To fit a step on a line, the hashes of all tensors of a
kind (gradients, weights, optimizer state) are joined into one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.extensions.journal.comparison import describe_journal
from lockstep.extensions.journal.file_format import Hashes
from lockstep.extensions.journal.reading import JournalStep, read_journal


def summary_lines(folder: Path, num_steps: int) -> list[str]:
    """Returns the lines that `lockstep journal show` prints for the journal in a folder.

    Args:
        folder: folder of the journal.
        num_steps: number of steps to list, from the end of the run.

    Raises:
        CheckpointError: if there is no journal, or it cannot be read.
    """
    journal = read_journal(folder)
    lines = [describe_journal(journal)]
    lines += [f"  note: {note}" for note in journal.notes]
    for name, value in journal.manifest.items():
        lines.append(f"  {name}: {value}")

    first_listed = max(0, len(journal.steps) - num_steps)
    for number in journal.steps[first_listed:]:
        lines.append(_step_line(number, journal.read_step(number)))
    return lines


def _joined_gradient_hash(step: JournalStep) -> int:
    """Returns one hash of the gradients of all virtual ranks.

    It also changes if two virtual ranks are swapped, since the names begin with the virtual rank.
    """
    total = 0
    for virtual_rank, hashes in step.gradients.items():
        names = [f"{virtual_rank} {name}" for name in step.parameter_names]
        total += _joined_hash(names, hashes)
    return total % 2**64


def _step_line(number: int, step: JournalStep) -> str:
    """Returns the line of a step: "step 7: losses 3f2a..., weights 81c0..., ..."."""
    text = f"step {number}: losses {_joined_loss_hash(step):016x}"
    if not step.has_hashes:
        return text

    if step.gradients:
        text += f", gradients {_joined_gradient_hash(step):016x}"
    text += f", weights {_joined_hash(step.names, step.weights):016x}"
    text += f", optimizer state {_joined_hash(step.parameter_names, step.state):016x}"
    return text


def _joined_loss_hash(step: JournalStep) -> int:
    """Returns one hash of the losses of all virtual ranks, or of all ranks if there are none.

    A loss is a single number, so its 64 bits serve as its hash.
    """
    names = [f"loss {rank}" for rank in step.losses]
    hashes_of_losses = np.array(list(step.losses.values()), "<f8").view("<u8")
    return _joined_hash(names, hashes_of_losses)


def _joined_hash(names: Sequence[str], hashes: Hashes) -> int:
    """Joins the hashes of several tensors into one 64-bit hash.

    Each hash is multiplied by a factor that depends on the name of its tensor, so the result also
    changes if two tensors are swapped.
    """
    joined = 0
    for name, number in zip(names, hashes.tolist(), strict=True):
        factor = zlib.crc32(name.encode()) * 2 + 1
        joined += factor * (number ^ (number >> 32))
    return joined % 2**64
