"""Reads a journal: what a run computed in each step, over all its starts and ranks.

An *attempt* is a start of the run, or what followed when it went back to an earlier step within a
start. A later attempt may train steps again, from a checkpoint; then its records replace those of
the earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.errors import CheckpointError
from lockstep.extensions.journal.file_format import (
    JOURNAL_SUFFIX,
    RANK_INFIX,
    Hashes,
    RankFile,
    TensorTable,
    read_file,
)
from lockstep.wording import count_noun, format_ranks, group_by_key


class JournalStep(NamedTuple):
    """What a run computed in a step, on all ranks together."""

    has_hashes: bool
    """False if only the losses were written down. Then there are no tensors."""
    names: tuple[str, ...]
    """Of the tensors: first of parameters that are trained, then of buffers."""
    num_parameters: int
    losses: Mapping[int, float]
    """By virtual rank, or by rank if there are no virtual ranks."""
    gradients: Mapping[int, Hashes]
    """By virtual rank a hash for each parameter; empty if there are no virtual ranks."""
    weights: Hashes
    """A hash for each tensor, after the step."""
    state: Hashes
    """A hash of the optimizer state of each parameter, after the step."""


class _Attempt(NamedTuple):
    """Where the steps of an attempt are."""

    files: Mapping[int, RankFile]
    """By rank."""
    number_in_files: int
    """Which of the attempts within the files it is."""


@dataclass
class Journal:
    """A journal that was read."""

    folder: Path
    num_starts: int
    num_ranks: int
    """Of the last start."""
    virtual_ranks: int | None
    """Of the last start."""
    every: int
    """Steps from one whose hashes were written down to the next, in the last start."""
    manifest: dict[str, str]
    """Of the last start, for all ranks."""
    begins_at: int | None
    """The step that the first start began with."""
    weights_at_beginning: dict[str, int]
    """Hashes of all weights before it, by name."""
    notes: list[str] = field(default_factory=list)
    """What is worth knowing about its files."""
    attempt_of_step: dict[int, _Attempt] = field(default_factory=dict)
    """For each step the attempt that counts, in the order of the steps."""
    num_trained_again: int = 0
    """How many steps a later attempt trained again."""

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps, in order."""
        return list(self.attempt_of_step)

    def read_step(self, number: int) -> JournalStep:
        """Reads a step."""
        attempt = self.attempt_of_step[number]
        steps = []
        for file in attempt.files.values():
            steps.append(file.read_step(attempt.number_in_files, number))
        table = steps[0].table
        has_hashes = table is not None
        if table is None:
            table = TensorTable((), 0, (), ())
        losses: dict[int, float] = {}
        gradients: dict[int, Hashes] = {}
        # Hashes of parts of a tensor are added up to that of the tensor.
        weights = np.zeros(len(table.names), np.uint64)
        state = np.zeros(table.num_parameters, np.uint64)
        for step in steps:
            losses.update(step.losses)
            gradients.update(step.gradients)
            if step.table is not None:
                weights[list(step.table.weights)] += step.weights
                state[list(step.table.state)] += step.state
        return JournalStep(
            has_hashes, table.names, table.num_parameters, losses, gradients, weights, state
        )


def read_journal(folder: Path) -> Journal:
    """Reads the journal in a folder.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    files_of_start: dict[str, dict[int, RankFile]] = {}
    # The name of a start begins with its time, so sorted names are in the order of the starts.
    for path in sorted(folder.glob(f"*{RANK_INFIX}*{JOURNAL_SUFFIX}")):
        # Such as "01764321000000000000-3f2a81c0.rank1.journal".
        start_name, _, rank = path.name.removesuffix(JOURNAL_SUFFIX).rpartition(RANK_INFIX)
        files_of_start.setdefault(start_name, {})[int(rank)] = read_file(path)
    if not files_of_start:
        raise CheckpointError(
            f"the journal {folder}",
            "the folder holds none" if folder.is_dir() else "there is no such folder",
            "train with lockstep run --journal FOLDER, and give that folder",
        )
    notes: list[str] = []
    complete_starts: list[dict[int, RankFile]] = []
    for number, files in enumerate(files_of_start.values(), 1):
        if _has_all_ranks(folder, number, files, notes):
            complete_starts.append(files)
    if not complete_starts:
        raise CheckpointError(
            f"the journal {folder}",
            "no start of the run got as far as its first step",
            "train on, and give the folder again",
        )
    first = complete_starts[0]
    last = complete_starts[-1]
    header = last[0].header
    journal = Journal(
        folder=folder,
        num_starts=len(files_of_start),
        num_ranks=header["ranks"],
        virtual_ranks=header["virtual_ranks"],
        every=header["every"],
        manifest=_join_manifests(last),
        begins_at=first[0].begins_at,
        weights_at_beginning=_add_weights(first),
        notes=notes,
    )
    for files in complete_starts:
        _add_start(journal, files)
    return journal


def _has_all_ranks(
    folder: Path, number: int, files: Mapping[int, RankFile], notes: list[str]
) -> bool:
    """Returns True if a start has a complete beginning on each of its ranks.

    Args:
        folder: of the journal.
        number: of the start, from 1.
        files: of the start, by rank.
        notes: gets a note about each file that is cut off.

    Raises:
        CheckpointError: the file of a rank is missing.
    """
    for rank, file in sorted(files.items()):
        if file.is_cut_off:
            notes.append(
                f"start {number}, rank {rank}: the last record is incomplete and left out, as if "
                "the process was killed while it wrote"
            )
        if file.is_damaged:
            notes.append(
                f"start {number}, rank {rank}: a record is damaged; what follows it was not read"
            )
    headers = [file.header for file in files.values() if file.header]
    if not headers:
        return False
    missing = sorted(set(range(headers[0]["ranks"])) - set(files))
    if missing:
        raise CheckpointError(
            f"the journal {folder}",
            f"start {number} lacks the file of {format_ranks(missing)}",
            "copy the files of all machines into one folder",
        )
    return all(file.begins_at is not None for file in files.values())


def _join_manifests(files: Mapping[int, RankFile]) -> dict[str, str]:
    """Returns the manifest of a start. What differs between ranks is given for each of them."""
    names: dict[str, None] = {}  # in their order
    for file in files.values():
        names.update(dict.fromkeys(file.manifest))
    joined: dict[str, str] = {}
    for name in names:
        pairs = []
        for rank, file in files.items():
            if name in file.manifest:
                pairs.append((file.manifest[name], rank))
        ranks_of_value = group_by_key(pairs)
        if len(ranks_of_value) == 1:
            joined[name] = pairs[0][0]
        else:
            texts = [f"{value} ({format_ranks(ranks)})" for value, ranks in ranks_of_value.items()]
            joined[name] = "; ".join(texts)
    return joined


def _add_weights(files: Mapping[int, RankFile]) -> dict[str, int]:
    """Returns the hashes of all weights that a start began with."""
    weights: dict[str, int] = {}
    for file in files.values():
        for name, number in file.weights_at_beginning.items():
            weights[name] = (weights.get(name, 0) + number) % 2**64
    return weights


def _add_start(journal: Journal, files: Mapping[int, RankFile]) -> None:
    """Adds the steps of a start, which replace those of earlier ones."""
    num_attempts = max(len(file.steps_by_attempt) for file in files.values())
    for number in range(num_attempts):
        steps_of_ranks: list[set[int]] = []
        for file in files.values():
            if number < len(file.steps_by_attempt):
                steps_of_ranks.append(set(file.steps_by_attempt[number]))
            else:
                steps_of_ranks.append(set())
        complete_steps = sorted(set.intersection(*steps_of_ranks))
        num_incomplete = len(set.union(*steps_of_ranks)) - len(complete_steps)
        if num_incomplete:
            journal.notes.append(
                f"{count_noun(num_incomplete, 'step')} that not all ranks have written down "
                f"{'is' if num_incomplete == 1 else 'are'} left out"
            )
        begin = files[0].begins_at if number == 0 else None
        if begin is None:
            begin = complete_steps[0] if complete_steps else None
        if begin is None:
            continue
        replaced = [step for step in journal.attempt_of_step if step >= begin]
        for step in replaced:
            del journal.attempt_of_step[step]
        journal.num_trained_again += len(set(replaced) & set(complete_steps))
        attempt = _Attempt(files, number)
        for step in complete_steps:
            journal.attempt_of_step[step] = attempt
