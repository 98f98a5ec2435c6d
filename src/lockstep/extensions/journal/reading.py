"""Reads a journal: what a run computed in each step, over all its starts and ranks.

Each *start* of a run (its first start, or a restart) has one file for each rank. Within a start,
the run may go back to an earlier step; each time, a new *attempt* begins. A later attempt or start
may train steps again from a checkpoint; its records then replace those of the earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.distributed.rank_files import find_rank_files
from lockstep.errors import CheckpointError
from lockstep.extensions.journal.file_format import (
    JOURNAL_SUFFIX,
    NO_TENSORS,
    Hashes,
    RankFile,
    read_file,
)
from lockstep.wording import conjugate, count_noun, format_ranks, group_by_key


class JournalStep(NamedTuple):
    """What a run computed in a step, on all ranks together."""

    has_hashes: bool
    """False if only the losses were written. The names and the hashes are then empty."""
    names: tuple[str, ...]
    """The names of the trained parameters, then those of the buffers."""
    num_parameters: int
    losses: Mapping[int, float]
    """By virtual rank, or by rank if there are no virtual ranks."""
    gradients: Mapping[int, Hashes]
    """One hash for each parameter, by virtual rank; empty if there are no virtual ranks."""
    weights: Hashes
    """One hash for each of `names`, after the step."""
    state: Hashes
    """One hash for the optimizer state of each parameter, after the step."""

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the trained parameters."""
        return self.names[: self.num_parameters]


class _Attempt(NamedTuple):
    """An attempt, with the files that hold its steps."""

    files: Mapping[int, RankFile]
    """By rank."""
    number_in_files: int
    """The number of the attempt within its start, from 0."""


@dataclass
class Journal:
    """The journal of a run, read from its folder."""

    folder: Path
    num_starts: int
    num_ranks: int
    """The number of ranks in the last start."""
    virtual_ranks: int | None
    """The number of virtual ranks in the last start."""
    every: int
    """Hashes were written every this many steps, in the last start."""
    manifest: dict[str, str]
    """The manifest of the last start, for all ranks."""
    begins_at: int | None
    """The number of the first step of the first start."""
    weights_at_beginning: dict[str, int]
    """Hashes of all weights before that step, by name."""
    notes: list[str] = field(default_factory=list)
    """Remarks on the files, for the user."""
    attempt_of_step: dict[int, _Attempt] = field(default_factory=dict)
    """For each step, the last attempt that trained it. The steps are in ascending order."""
    num_trained_again: int = 0
    """How many steps a later attempt trained again."""

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps, in ascending order."""
        return list(self.attempt_of_step)

    def read_step(self, number: int) -> JournalStep:
        """Reads a step from the files of all ranks."""
        attempt = self.attempt_of_step[number]
        steps_of_ranks = [
            file.read_step(attempt.number_in_files, number) for file in attempt.files.values()
        ]

        # The table lists the tensors that hashes belong to; all ranks have the same. A step without
        # hashes has no table, and is read as one without tensors.
        first_table = steps_of_ranks[0].table
        has_hashes = first_table is not None
        table = NO_TENSORS if first_table is None else first_table

        # A virtual rank was computed by one rank, so no loss and no gradient is in two files.
        losses: dict[int, float] = {}
        gradients: dict[int, Hashes] = {}
        for step in steps_of_ranks:
            losses.update(step.losses)
            gradients.update(step.gradients)

        # Each hash of a weight comes from one rank, or is the sum of what several ranks have: a
        # tensor that all ranks have was hashed by one of them, and of a sharded tensor each rank
        # has hashed its shard. Example: rank 0 has hashes of the tensors 0 and 2, rank 1 of the
        # tensors 1 and 2. Tensor 2 is sharded, and its hash is the sum of both (modulo 2**64, in
        # uint64).
        weight_hashes = np.zeros(len(table.names), np.uint64)
        state_hashes = np.zeros(table.num_parameters, np.uint64)
        for step in steps_of_ranks:
            if step.table is not None:
                weight_hashes[list(step.table.hashed_weights)] += step.weights
                state_hashes[list(step.table.hashed_states)] += step.state

        return JournalStep(
            has_hashes=has_hashes,
            names=table.names,
            num_parameters=table.num_parameters,
            losses=losses,
            gradients=gradients,
            weights=weight_hashes,
            state=state_hashes,
        )


def read_journal(folder: Path) -> Journal:
    """Reads the journal in a folder.

    Raises:
        CheckpointError: if the folder has no journal, or the journal cannot be read.
    """
    files_of_start = _read_files(folder)
    notes: list[str] = []
    complete_starts: list[dict[int, RankFile]] = []
    for number, files in enumerate(files_of_start.values(), 1):
        notes += _notes_on_files(number, files)
        if _all_ranks_have_first_step(folder, number, files):
            complete_starts.append(files)
        else:
            notes += _notes_on_incomplete_start(number, files)
    if not complete_starts:
        raise _no_start_error(folder, files_of_start, notes)

    # The run as a whole began with the weights of its first start. How it is run now is what rank 0
    # wrote at its last start: it may have been started again with another number of ranks.
    first_start = complete_starts[0]
    last_start = complete_starts[-1]
    first_file_of_rank_0 = first_start[0]
    header = last_start[0].header
    journal = Journal(
        folder=folder,
        num_starts=len(files_of_start),
        num_ranks=header["ranks"],
        virtual_ranks=header["virtual_ranks"],
        every=header["every"],
        manifest=_join_manifests(last_start),
        begins_at=first_file_of_rank_0.begins_at,
        weights_at_beginning=_sum_weight_hashes(first_start),
        notes=notes,
    )
    for files in complete_starts:
        _add_start(journal, files)
    return journal


def _notes_on_incomplete_start(number: int, files: Mapping[int, RankFile]) -> list[str]:
    """Returns a note if a start without a first step is damaged, and none if it ended before that.

    Args:
        number: the number of the start, from 1.
        files: its files, by rank.
    """
    damaged_ranks = _ranks_with_damaged_beginning(files)
    if not damaged_ranks:
        return []
    ranks = format_ranks(damaged_ranks)
    return [f"start {number} is left out: its beginning on {ranks} is damaged"]


def _ranks_with_damaged_beginning(files: Mapping[int, RankFile]) -> list[int]:
    """Returns the ranks whose damaged files lack their header or their first step.

    Args:
        files: files of a start, by rank.
    """
    ranks = []
    for rank, file in sorted(files.items()):
        has_beginning = bool(file.header) and file.begins_at is not None
        if file.damage.damaged_at and not has_beginning:
            ranks.append(rank)
    return ranks


def _no_start_error(
    folder: Path, files_of_start: Mapping[str, Mapping[int, RankFile]], notes: Sequence[str]
) -> CheckpointError:
    """Returns the error for a journal of which no start can be read from its beginning.

    Args:
        folder: folder of the journal.
        files_of_start: files of each start, by rank.
        notes: what could not be read of the files.
    """
    if any(_ranks_with_damaged_beginning(files) for files in files_of_start.values()):
        return CheckpointError(
            f"the journal {folder}",
            f"no start of the run can be read: {'; '.join(notes)}",
            "copy its files again from the machines that wrote them",
        )
    return CheckpointError(
        f"the journal {folder}",
        "no start of the run got as far as its first step",
        "train on, and give the folder again",
    )


def _read_files(folder: Path) -> dict[str, dict[int, RankFile]]:
    """Reads the files of a journal, by the name of their start, and within a start by rank.

    The starts are in the order in which they took place.

    Raises:
        CheckpointError: if the folder has no journal, or a file cannot be read.
    """
    files_of_start: dict[str, dict[int, RankFile]] = {}
    for start_name, path_of_rank in find_rank_files(folder, JOURNAL_SUFFIX).items():
        files_of_start[start_name] = {rank: read_file(path) for rank, path in path_of_rank.items()}

    if not files_of_start:
        raise CheckpointError(
            f"the journal {folder}",
            "the folder holds none" if folder.is_dir() else "there is no such folder",
            "train with lockstep run --journal FOLDER, and give that folder",
        )
    return files_of_start


def _notes_on_files(number: int, files: Mapping[int, RankFile]) -> list[str]:
    """Returns a note for each file of a start that is cut off or damaged.

    Args:
        number: number of the start, from 1.
        files: files of the start, by rank.
    """
    notes: list[str] = []
    for rank, file in sorted(files.items()):
        if file.damage.is_cut_off:
            notes.append(
                f"start {number}, rank {rank}: the last record is incomplete and left out, as if "
                "the process was killed while it wrote"
            )
        if file.damage.damaged_at:
            notes.append(file.damage.describe(number, rank, file.path.name))
        if file.num_steps_without_table:
            steps = count_noun(file.num_steps_without_table, "step")
            notes.append(
                f"start {number}, rank {rank}: the record that names the tensors of {steps} cannot "
                "be read, so these are left out"
            )
    return notes


def _all_ranks_have_first_step(folder: Path, number: int, files: Mapping[int, RankFile]) -> bool:
    """Returns True if every rank of a start got as far as its first step.

    It is False if no file even has a header.

    Args:
        folder: folder of the journal.
        number: number of the start, from 1.
        files: files of the start, by rank.

    Raises:
        CheckpointError: if the file of a rank is missing.
    """
    headers = [file.header for file in files.values() if file.header]
    if not headers:
        return False
    num_ranks = headers[0]["ranks"]  # the same in every header
    missing = sorted(set(range(num_ranks)) - set(files))
    if missing:
        raise CheckpointError(
            f"the journal {folder}",
            f"start {number} lacks the file of {format_ranks(missing)}",
            "copy the files of all machines into one folder",
        )

    # `begins_at` is written when the first step begins. A header may be damaged.
    return all(file.header and file.begins_at is not None for file in files.values())


def _join_manifests(files: Mapping[int, RankFile]) -> dict[str, str]:
    """Returns the manifest of a start for all its ranks.

    A value that differs between ranks becomes, for example, "8 (rank 0); 4 (ranks 1, 2)".
    """
    names: dict[str, None] = {}  # an ordered set
    for file in files.values():
        names.update(dict.fromkeys(file.manifest))

    joined: dict[str, str] = {}
    for name in names:
        values_and_ranks = [
            (file.manifest[name], rank) for rank, file in files.items() if name in file.manifest
        ]
        ranks_of_value = group_by_key(values_and_ranks)  # such as {"8": [0], "4": [1, 2]}
        if len(ranks_of_value) == 1:
            only_value = next(iter(ranks_of_value))
            joined[name] = only_value
        else:
            texts = [f"{value} ({format_ranks(ranks)})" for value, ranks in ranks_of_value.items()]
            joined[name] = "; ".join(texts)
    return joined


def _sum_weight_hashes(files: Mapping[int, RankFile]) -> dict[str, int]:
    """Returns the hashes of the weights that a start began with, summed over its ranks.

    Each rank has hashed some of the weights, or its shards of them.
    """
    hash_of_weight: dict[str, int] = {}
    for file in files.values():
        for name, partial_hash in file.weights_at_beginning.items():
            hash_of_weight[name] = (hash_of_weight.get(name, 0) + partial_hash) % 2**64
    return hash_of_weight


def _add_start(journal: Journal, files: Mapping[int, RankFile]) -> None:
    """Adds the steps of a start to a journal, and removes the earlier steps that they replace.

    A start has several attempts if Lockstep has restarted its ranks after a failure.

    Example: the journal has the steps 1 to 9 of the first start. The second start began with a
    checkpoint of step 6, and wrote the steps 6 and 7 in its only attempt. Then the journal has the
    steps 1 to 5 of the first start, and 6 and 7 of the second one. The first start's steps 8 and 9
    are removed, too: the run has not gone on from them.

    Args:
        journal: the journal, with the steps of all earlier starts.
        files: files of the start, by rank.
    """
    num_attempts = max(len(file.steps_by_attempt) for file in files.values())
    for attempt_number in range(num_attempts):
        complete_steps = _complete_steps_of_attempt(files, attempt_number, journal.notes)

        # Step 6 in the example; None if the attempt has no complete step, and it is not known
        # where it began.
        first_step = _first_step_of_attempt(files, attempt_number, complete_steps)
        if first_step is None:
            continue

        # In the example, remove the steps 6 to 9. Only 6 and 7 of them were trained again.
        removed = [step for step in journal.attempt_of_step if step >= first_step]
        for step in removed:
            del journal.attempt_of_step[step]
        journal.num_trained_again += len(set(removed) & set(complete_steps))

        attempt = _Attempt(files, attempt_number)
        for step in complete_steps:
            journal.attempt_of_step[step] = attempt


def _complete_steps_of_attempt(
    files: Mapping[int, RankFile], number: int, notes: list[str]
) -> list[int]:
    """Returns the numbers of the steps that all ranks have written in an attempt, in order.

    If the run was killed, its last step may be missing in some files. A note tells how many steps
    are left out for that reason.

    Args:
        files: files of the start, by rank.
        number: number of the attempt within the start, from 0.
        notes: the notes of the journal, to which the note is added.
    """
    steps_of_ranks: list[set[int]] = []
    for file in files.values():
        has_attempt = number < len(file.steps_by_attempt)
        steps_of_ranks.append(set(file.steps_by_attempt[number]) if has_attempt else set())

    complete_steps = sorted(set.intersection(*steps_of_ranks))
    num_incomplete = len(set.union(*steps_of_ranks)) - len(complete_steps)
    if num_incomplete:
        verb = conjugate("is", num_incomplete)
        notes.append(
            f"{count_noun(num_incomplete, 'step')} that not all ranks have written down "
            f"{verb} left out"
        )

    return complete_steps


def _first_step_of_attempt(
    files: Mapping[int, RankFile], number: int, complete_steps: Sequence[int]
) -> int | None:
    """Returns the step that an attempt began with; None if it is not known.

    Args:
        files: files of the start, by rank.
        number: number of the attempt within the start, from 0.
        complete_steps: steps of the attempt that all ranks have written, in ascending order.
    """
    if number == 0 and files[0].begins_at is not None:
        return files[0].begins_at
    return complete_steps[0] if complete_steps else None
