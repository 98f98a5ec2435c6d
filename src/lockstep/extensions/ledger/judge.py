"""Judges a sample ledger: was every sample of every epoch trained once, over all restarts?

A ledger is a folder of files in which each rank wrote what it trained. A *start* is the first start
of a run, or a restart. An *attempt* is a start, or what followed when the run went back to an
earlier step (texts for the user call both a start). A later attempt may train some steps again,
from a checkpoint: then its records replace the earlier ones. Each step counts as its *final
attempt* trained it.

What is judged are the steps that led to the last state of the run. A replaced record does not
belong to them, because the checkpoint from which the run went on knew nothing of that step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.batch.digest_matching import first_differing_sample
from lockstep.batch.fingerprint import Difference, Fingerprint, compare
from lockstep.batch.indices import Indices, ceil_div
from lockstep.distributed.rank_files import find_rank_files
from lockstep.errors import CheckpointError
from lockstep.extensions.ledger.file_format import (
    LEDGER_SUFFIX,
    NO_LOADER,
    RankFile,
    TrainedBatch,
    read_file,
)
from lockstep.extensions.ledger.report import LedgerFinding, LedgerReport
from lockstep.wording import count_noun, format_ranges, format_ranks, join_first

# Codes of findings, which name entries of the catalogue of `lockstep explain`.
TRAINED_TWICE = "LS101"
LEFT_OUT = "LS102"
OTHER_DATA = "LS104"
OTHER_BATCHES = "LS109"
"""Ranks or starts have divided the data into other global batches."""
INCOMPLETE_RECORDS = "LS405"

MAX_ITEMS_IN_TEXT = 5
SAMPLES_COMPARED_AT_ONCE = 2**24
MAX_SAMPLES_KEPT = 2**16
"""How many of the samples with the same fault are kept; all of them are counted."""

FinalAttempts = Mapping[int, int]
"""For each step that led to the last state, the index of the attempt that counts."""
LoaderAndEpoch = tuple[int, int]


class Attempt(NamedTuple):
    """One start of the run, or what followed when it went back to an earlier step."""

    start_name: str
    num_ranks: int
    files: Mapping[int, RankFile]
    """The file of each rank; empty for what followed when the run went back."""
    batches_of_rank: Mapping[int, list[TrainedBatch]]
    """What each rank that has a file has trained."""


def judge(folder: str | Path) -> LedgerReport:
    """Reads and judges the ledger of a run.

    Raises:
        CheckpointError: there is no ledger, or it cannot be read.
    """
    attempts = read_folder(Path(folder))

    # Each of the following functions adds what it finds to this report.
    report = LedgerReport(str(folder))
    for number, attempt in enumerate(attempts, 1):
        _check_files(attempt, number, report)
    final_attempts = _find_final_attempts(attempts, report)
    loaders = _collect_loaders(attempts, report)
    _report_kinds_of_loaders(loaders, attempts, report)

    # The global batches that were trained: a list for each pair (loader, epoch).
    batches_of_epoch = _join_ranks(attempts, final_attempts, report)
    _check_beginnings(attempts, batches_of_epoch, final_attempts, report)
    _check_steps(final_attempts, report)
    for loader, epoch in sorted(batches_of_epoch):
        if loader not in loaders:  # the record that describes it is damaged, which was reported
            report.notes.append(f"epoch {epoch} of loader {loader} cannot be judged")
            continue

        batches = sorted(batches_of_epoch[loader, epoch], key=lambda batch: batch.step)
        next_batch = _first_batch_of_next_epoch(batches_of_epoch, loader, epoch)
        _check_epoch(loaders[loader], batches, next_batch, final_attempts, report)
    return report


def _first_batch_of_next_epoch(
    epochs: Mapping[LoaderAndEpoch, Sequence[TrainedBatch]], loader: int, epoch: int
) -> TrainedBatch | None:
    """Returns the first global batch of the next epoch of a loader, after the given one.

    Args:
        epochs: the global batches of all epochs, by loader and epoch.
        loader: the number of the loader.
        epoch: the number of the epoch before.

    Returns:
        None if the ledger has no later epoch of this loader.
    """
    later_epochs: list[int] = []
    for other_loader, other_epoch in epochs:
        if other_loader == loader and other_epoch > epoch:
            later_epochs.append(other_epoch)
    if not later_epochs:
        return None

    batches = epochs[loader, min(later_epochs)]
    return min(batches, key=lambda batch: batch.step)


def read_folder(folder: Path) -> list[Attempt]:
    """Reads the attempts in a folder, in the order in which they were started.

    Each start of the run has written a file for each rank, and consists of one or several attempts.

    Raises:
        CheckpointError: there is no ledger, or one of another version.
    """
    # Start and rank are taken from the name of a file, and not from its content, because the file
    # may have been cut off within its first record.
    files_of_start: dict[str, dict[int, RankFile]] = {}
    for start_name, path_of_rank in find_rank_files(folder, LEDGER_SUFFIX).items():
        files_of_start[start_name] = {rank: read_file(path) for rank, path in path_of_rank.items()}

    if not files_of_start:
        raise CheckpointError(
            f"the ledger {folder}",
            "the folder holds none" if folder.is_dir() else "there is no such folder",
            "train with lockstep run --ledger FOLDER, and give that folder",
        )

    # A start is split where the run went back to an earlier step.
    attempts: list[Attempt] = []
    for start_name, files in files_of_start.items():
        attempts += _split_start(start_name, files)
    return attempts


def _split_start(start_name: str, files: Mapping[int, RankFile]) -> list[Attempt]:
    """Returns the attempts of one start of the run, in their order.

    There is one attempt, and one more for each time that the run went back to an earlier step.

    Args:
        start_name: the beginning of the names of its files.
        files: the files by rank. Each has a list of the batches of every attempt.
    """
    # The number of ranks is in the first record of each file. If that is damaged, `num_ranks` is 0.
    num_ranks = max(file.num_ranks for file in files.values())
    num_attempts = max(len(file.batches_by_attempt) for file in files.values())
    attempts: list[Attempt] = []
    for number in range(num_attempts):
        batches_of_rank: dict[int, list[TrainedBatch]] = {}
        for rank, file in files.items():
            # A rank that was killed early may have recorded fewer attempts than another.
            has_attempt = number < len(file.batches_by_attempt)
            batches_of_rank[rank] = file.batches_by_attempt[number] if has_attempt else []

        # The files, which all attempts of a start have in common, are checked once: as those of the
        # first attempt.
        files_to_check = files if number == 0 else {}
        attempts.append(Attempt(start_name, num_ranks, files_to_check, batches_of_rank))
    return attempts


def _check_files(attempt: Attempt, number: int, report: LedgerReport) -> None:
    """Adds files of an attempt that are missing, cut off or damaged to the report.

    Args:
        attempt: the attempt, which the report calls a start.
        number: the number of the attempt, from 1.
        report: findings and notes are added to it.
    """
    ranks_with_file = attempt.batches_of_rank.keys()
    for rank in range(attempt.num_ranks):
        if rank not in ranks_with_file:
            report.add_finding(LEFT_OUT, f"start {number}: the file of rank {rank} is missing")

    # `files` is empty for later attempts of the same start, so no file is reported twice.
    for rank, file in sorted(attempt.files.items()):
        if file.damage.is_cut_off:
            report.notes.append(f"start {number}, rank {rank}: the last record is cut off")
        if file.damage.damaged_at:
            report.add_finding(INCOMPLETE_RECORDS, file.damage.describe(number, rank, file.name))


def _find_final_attempts(attempts: Sequence[Attempt], report: LedgerReport) -> FinalAttempts:
    """Finds the steps that led to the last state, and which attempt counts for each.

    An attempt replaces all earlier records from its first step on. For example, the first attempt
    trained the steps 0 to 5, and the second one went on from a checkpoint with 4 to 9: the first
    attempt counts for the steps 0 to 3, and the second one for 4 to 9.

    A description of each attempt is added to the report. So are the number of steps that were
    trained again, here 2 (`report.again`), and that of the steps that count, here 10
    (`report.steps`).
    """
    final_attempts: dict[int, int] = {}  # the index of the attempt, by the step
    for index, attempt in enumerate(attempts):
        steps: set[int] = set()
        for batches in attempt.batches_of_rank.values():
            steps.update(batch.step for batch in batches)

        # Remove the earlier records that this attempt replaces.
        first_step = min(steps, default=None)  # None: the attempt ended before its first step
        retrained_steps: list[int] = []
        if first_step is not None:
            retrained_steps = [step for step in final_attempts if step >= first_step]
        for step in retrained_steps:
            del final_attempts[step]

        for step in steps:
            final_attempts[step] = index

        report.again += len(retrained_steps)
        report.attempts.append(
            {
                "name": attempt.start_name,
                # A name such as "01764321000000000000-3f2a81c0" begins with the time of the start.
                "started_ns": int(attempt.start_name.partition("-")[0]),
                "ranks": attempt.num_ranks,
                "first": first_step,
                "last": max(steps, default=None),
                "again": len(retrained_steps),
            }
        )
    report.steps = len(final_attempts)
    return final_attempts


def _collect_loaders(
    attempts: Sequence[Attempt], report: LedgerReport
) -> dict[int, dict[str, Any]]:
    """Returns the description of each loader by its number, as the first file has it.

    A setting that differs in another file is added to the report, once for each loader.
    """
    loaders: dict[int, dict[str, Any]] = {}
    reported_settings: set[tuple[int, str]] = set()  # a loader, and a setting of it that differs
    loaders_with_other_data: set[int] = set()
    for start_number, rank, description in _descriptions_of_loaders(attempts):
        loader = description["loader"]
        if loader not in loaders:
            loaders[loader] = description
        first_description = loaders[loader]

        for name in _changed_settings(first_description, description):
            if (loader, name) not in reported_settings:
                reported_settings.add((loader, name))
                where = f"rank {rank} of start {start_number}"
                _report_changed_setting(first_description, description, name, where, report)

        if loader not in loaders_with_other_data:
            difference = _difference_of_data(first_description, description)
            if difference is not None:
                loaders_with_other_data.add(loader)
                _report_other_data(loader, start_number, difference, report)
    return loaders


def _descriptions_of_loaders(
    attempts: Sequence[Attempt],
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields each description of a loader: the number of its start, its rank, the description."""
    for number, attempt in enumerate(attempts, 1):
        for rank, file in sorted(attempt.files.items()):
            for description in file.loaders:
                yield number, rank, description


def _changed_settings(
    first_description: Mapping[str, Any], description: Mapping[str, Any]
) -> list[str]:
    """Returns the settings in which two descriptions of a loader differ."""
    names = ("length", "batch_size", "drop_last")
    return [name for name in names if description[name] != first_description[name]]


def _report_changed_setting(
    first: Mapping[str, Any],
    description: Mapping[str, Any],
    name: str,
    where: str,
    report: LedgerReport,
) -> None:
    """Adds to the report that a setting of a loader has changed.

    Args:
        first: the description of the loader in the first file.
        description: its description in another file.
        name: the name of the setting.
        where: the file that has it, such as "rank 1 of start 2".
        report: the report, which is added to.
    """
    data_have_changed = name == "length"
    code = OTHER_DATA if data_have_changed else OTHER_BATCHES
    loader = first["loader"]
    report.add_finding(
        code,
        f"loader {loader}: {name} is {description[name]} on {where}, and was {first[name]}",
        loader=loader,
    )


def _report_kinds_of_loaders(
    loaders: Mapping[int, Mapping[str, Any]], attempts: Sequence[Attempt], report: LedgerReport
) -> None:
    """Adds each loader that was trained to one of three lists of the report.

    They say what was recorded: the samples themselves (`by_sample`), only their positions in a
    stream (`by_position`), or only the global batches of the script's own sampler (`by_batch`).

    Args:
        loaders: the descriptions, by number.
        attempts: all attempts of the run.
        report: numbers of loaders are appended to its lists.
    """
    trained_loaders: set[int] = set()
    for attempt in attempts:
        for batches in attempt.batches_of_rank.values():
            trained_loaders.update(batch.loader for batch in batches)
    for loader in sorted(loaders.keys() & trained_loaders):
        is_stream = loaders[loader]["stream"] is not None
        if is_stream:
            report.by_position.append(loader)
        elif loaders[loader]["own_order"]:
            report.by_batch.append(loader)
        else:
            report.by_sample.append(loader)


def _difference_of_data(
    description_at_first: Mapping[str, Any], description_now: Mapping[str, Any]
) -> Difference | None:
    """Compares the dataset of a loader with that of the first start.

    Args:
        description_at_first: the description of the loader in the first start.
        description_now: its description in a later start.

    Returns:
        None if the data are the same, or if one of the descriptions has no fingerprint of them:
        that of a stream has none, nor has any in a ledger of an older version.
    """
    data_at_first = description_at_first.get("data")
    data_now = description_now.get("data")
    if data_at_first is None or data_now is None:
        return None
    return compare(Fingerprint.from_text(data_at_first), Fingerprint.from_text(data_now))


def _report_other_data(
    loader: int, start_number: int, difference: Difference, report: LedgerReport
) -> None:
    """Adds to the report how the data of a loader differ from those of the first start.

    Args:
        loader: the number of the loader.
        start_number: the number of the start with other data.
        difference: what differs.
        report: the report, which is added to.
    """
    if difference.other_samples:
        report.add_finding(
            OTHER_DATA,
            f"loader {loader}: the data of start {start_number} are not those of the first start: "
            f"{difference.found}",
            loader=loader,
        )
    else:  # a part of each sample differs: images are cropped in another way, for example
        report.notes.append(
            f"loader {loader}: start {start_number} read the samples in another way, "
            f"{difference.found}; other parts of them, such as the labels, are the same"
        )


def _join_ranks(
    attempts: Sequence[Attempt], final_attempts: FinalAttempts, report: LedgerReport
) -> dict[LoaderAndEpoch, list[TrainedBatch]]:
    """Returns the global batches that count, by loader and epoch, each with the parts of all ranks.

    What is wrong with them is added to the report: one finding for all steps of an attempt that
    have the same fault.
    """
    epochs: dict[LoaderAndEpoch, list[TrainedBatch]] = defaultdict(list)

    # By the index of the attempt and the code of the fault.
    findings_by_fault: dict[tuple[int, str], list[LedgerFinding]] = defaultdict(list)
    last_step = max(final_attempts, default=None)
    for index, attempt in enumerate(attempts):
        parts_by_batch = _parts_by_batch(attempt, index, final_attempts)
        for (step, loader), parts in parts_by_batch.items():
            first = next(iter(parts.values()))  # all ranks should have the same epoch and position
            ranks_without_step = sorted(attempt.batches_of_rank.keys() - parts.keys())

            # A run that is killed in its last step may leave it on some ranks only: no fault.
            if ranks_without_step and step == last_step:
                report.notes.append(
                    f"start {index + 1} ended in step {step}, before "
                    f"{format_ranks(ranks_without_step)} had written it down; that step is left out"
                )
                continue

            fault = _find_fault(parts, ranks_without_step, attempt.num_ranks)
            if fault is not None:
                finding = LedgerFinding(
                    fault.code,
                    f"step {step}: {fault.what}",
                    step=step,
                    loader=loader,
                    epoch=first.epoch,
                )
                findings_by_fault[index, fault.code].append(finding)
                if fault.code == OTHER_BATCHES:  # the parts belong to different global batches
                    continue

            samples: list[Indices] = []  # an array of each rank
            for part in parts.values():
                samples += part.samples
            epochs[loader, first.epoch].append(first._replace(samples=tuple(samples)))

    for findings in findings_by_fault.values():
        report.findings.append(_one_for_all(findings))
    return epochs


def _one_for_all(findings: Sequence[LedgerFinding]) -> LedgerFinding:
    """Returns the first of several findings of one fault. It says in how many steps the fault is.

    Args:
        findings: the findings, ordered by step.
    """
    what = findings[0].what
    if len(findings) > 1:
        what += f"; so in {len(findings)} steps, the last {findings[-1].step}"
    return replace(findings[0], what=what)


def _parts_by_batch(
    attempt: Attempt, index: int, final_attempts: FinalAttempts
) -> dict[tuple[int, int], dict[int, TrainedBatch]]:
    """Returns the parts of each global batch that the ranks have trained in an attempt.

    Args:
        attempt: the attempt.
        index: the index of the attempt. Only steps are returned for which this attempt counts.
        final_attempts: for each step, the index of the attempt that counts.

    Returns:
        For each pair (step, loader), which stands for one global batch, the part of each rank. A
        step on samples of no prepared loader is left out.
    """
    parts_by_batch: dict[tuple[int, int], dict[int, TrainedBatch]] = defaultdict(dict)
    for rank, batches in sorted(attempt.batches_of_rank.items()):
        for batch in batches:
            is_final = final_attempts.get(batch.step) == index
            if is_final and batch.loader != NO_LOADER:
                parts_by_batch[batch.step, batch.loader][rank] = batch
    return parts_by_batch


class _Fault(NamedTuple):
    """Why what the ranks trained in a step is not one global batch."""

    code: str
    """Such as `OTHER_BATCHES`."""
    what: str
    """A text for the user."""


def _find_fault(
    parts: Mapping[int, TrainedBatch], ranks_without_step: Sequence[int], num_ranks: int
) -> _Fault | None:
    """Compares what the ranks trained in a step; returns a fault if it is not one global batch.

    Args:
        parts: the part of a global batch that each rank has recorded, by rank. Each part says which
            global batch it is of, and how many samples that has on all ranks; these should agree.
        ranks_without_step: the ranks that have a file, and did not record the step in it.
        num_ranks: how many ranks the attempt has. There are fewer files if some are missing.

    Returns:
        The fault with its code: `OTHER_BATCHES` if the ranks disagree about the global batch,
        `LEFT_OUT` if samples are missing, `TRAINED_TWICE` if some were trained twice. None if there
        is no fault.
    """
    first_rank = next(iter(parts))
    first = parts[first_rank]
    place = f"global batch {first.position} of epoch {first.epoch}"
    for rank, part in parts.items():
        same_place = part.epoch == first.epoch and part.position == first.position
        same_size = part.global_samples == first.global_samples
        if not same_place or not same_size:
            return _Fault(
                OTHER_BATCHES,
                f"rank {first_rank} trained {place} ({first.global_samples} samples), "
                f"rank {rank} global batch {part.position} of epoch {part.epoch} "
                f"({part.global_samples} samples)",
            )
    if ranks_without_step:
        return _Fault(LEFT_OUT, f"{format_ranks(ranks_without_step)} did not record {place}")

    # The samples of a rank whose file is missing cannot be counted. That was reported already.
    some_files_are_missing = len(parts) < num_ranks
    if some_files_are_missing:
        return None

    num_recorded = sum(part.num_recorded for part in parts.values())
    if num_recorded == first.global_samples:
        return None

    samples_are_missing = num_recorded < first.global_samples
    return _Fault(
        LEFT_OUT if samples_are_missing else TRAINED_TWICE,
        f"{place} has {first.global_samples} samples, and the parts of the ranks have "
        f"{num_recorded} together",
    )


def _check_beginnings(
    attempts: Sequence[Attempt],
    epochs: Mapping[LoaderAndEpoch, Sequence[TrainedBatch]],
    final_attempts: FinalAttempts,
    report: LedgerReport,
) -> None:
    """Checks that each attempt at an epoch of a stream has read the same samples at its beginning.

    For example, a run was restarted in the middle of an epoch. Both starts have read the stream
    from its beginning, and rank 0 has recorded digests of the first samples that it got. If these
    digests differ, the stream had another sample at the same position after the restart.

    The first difference in an epoch is added to the report.
    """
    for (loader, epoch), batches in sorted(epochs.items()):
        # The attempts that have trained global batches of this epoch.
        attempt_indices = {final_attempts[batch.step] for batch in batches}

        # The digests of the first samples, by the index of the attempt.
        beginnings: dict[int, list[Any]] = {}
        for index in sorted(attempt_indices):
            beginning = _beginning_of_stream(attempts[index], loader, epoch)
            if beginning is not None:
                beginnings[index] = beginning
        if not beginnings:
            continue

        difference = _first_difference(beginnings)
        if difference is not None:
            # The report calls attempts starts, and counts them from 1.
            first_start = min(beginnings) + 1
            other_start = difference.attempt_index + 1
            report.add_finding(
                OTHER_DATA,
                f"loader {loader}, epoch {epoch}: in start {other_start} the stream began with "
                f"different samples than in start {first_start}, from sample {difference.sample} "
                "on, so the same position is another sample",
                loader=loader,
                epoch=epoch,
            )


class _DifferenceOfBeginnings(NamedTuple):
    """Says where the stream of an attempt begins to differ from that of the earliest attempt."""

    attempt_index: int
    sample: int


def _first_difference(beginnings: Mapping[int, list[Any]]) -> _DifferenceOfBeginnings | None:
    """Compares each attempt with the earliest one, and returns the first difference.

    Args:
        beginnings: digests of the first samples of a stream, by the index of the attempt.
    """
    beginning_of_earliest = beginnings[min(beginnings)]
    for index, beginning in beginnings.items():
        sample = first_differing_sample(beginning_of_earliest, beginning)
        if sample is not None:
            return _DifferenceOfBeginnings(index, sample)
    return None


def _beginning_of_stream(attempt: Attempt, loader: int, epoch: int) -> list[Any] | None:
    """Returns the digests of the first samples of a stream that rank 0 recorded in an attempt.

    Returns:
        None if the file of rank 0 is missing, or if the loader reads no stream. Also None for an
        attempt that is not the first of its start, as only the first one has the files.
    """
    file_of_rank_0 = attempt.files.get(0)
    if file_of_rank_0 is None:
        return None
    return file_of_rank_0.beginnings.get((loader, epoch))


def _check_steps(final_attempts: FinalAttempts, report: LedgerReport) -> None:
    """Reports steps that no rank has recorded, and notes at which step the ledger begins.

    Args:
        final_attempts: its keys are the recorded steps.
        report: the report, which is added to.
    """
    if not final_attempts:
        report.notes.append("no optimizer step is written down")
        return

    first_step = min(final_attempts)
    if first_step > 0:
        report.notes.append(f"the ledger begins at step {first_step}; what was before is not in it")
    missing = []
    for step in range(first_step, max(final_attempts)):
        if step not in final_attempts:
            missing.append(step)
    if missing:
        steps = format_ranges(missing, MAX_ITEMS_IN_TEXT)
        what = f"{count_noun(len(missing), 'step')} not written down: {steps}"
        report.add_finding(INCOMPLETE_RECORDS, what, step=missing[0])


def _check_epoch(
    loader: dict[str, Any],
    batches: Sequence[TrainedBatch],
    next_batch: TrainedBatch | None,
    final_attempts: FinalAttempts,
    report: LedgerReport,
) -> None:
    """Checks that every sample is in an epoch of a loader, and none twice.

    What was found is added to the report, and a description of the epoch.

    Args:
        loader: the description of the loader.
        batches: the global batches of the epoch that were trained, ordered by step.
        next_batch: the first global batch of the next epoch that was trained, if any.
        final_attempts: see `FinalAttempts`.
        report: the report, which is added to.
    """
    first = batches[0]
    positions = {batch.position for batch in batches}
    is_finished = max(positions) + 1 == loader["steps"]

    # The ledger may begin in the middle of this epoch, if it was switched on in a resumed run.
    # What was trained before is not in it then, and not missing.
    ledger_begins_here = first.step > 0 and first.step == min(final_attempts)
    begin_position = first.position if ledger_begins_here else 0
    no_batch_is_missing = _check_positions(
        loader, batches, begin_position, next_batch, final_attempts, report
    )
    if loader["own_order"]:
        # The user's own sampler may repeat samples, so only global batches can be compared.
        if len(positions) < len(batches):
            what = "a global batch of the user's own order was trained twice"
            _add_epoch_finding(loader, first.epoch, TRAINED_TWICE, what, report)
    else:
        # Missing batches, and missing parts of them, were reported already. Their samples are not
        # reported once more: then no sample is required, and only repeated ones are looked for.
        required_samples = range(0)
        parts_are_complete = all(b.num_recorded == b.global_samples for b in batches)
        if no_batch_is_missing and parts_are_complete:
            required_samples = _required_samples(
                loader, batches, begin_position, is_finished=is_finished
            )
        _check_samples(loader, batches, required_samples, report)
    report.epochs.append(
        {
            "loader": loader["loader"],
            "dataset": loader["dataset"],
            "epoch": first.epoch,
            "samples": sum(batch.num_recorded for batch in batches),
            "batches": len(positions),
            "steps": loader["steps"],
            "ended": is_finished,
        }
    )


def _add_epoch_finding(
    loader: Mapping[str, Any],
    epoch: int,
    code: str,
    what: str,
    report: LedgerReport,
    samples: Indices | Sequence[int] = (),
) -> None:
    """Adds a finding about an epoch of a loader to the report.

    Args:
        loader: the description of the loader.
        epoch: the epoch.
        code: the code of the finding, such as `TRAINED_TWICE`.
        what: a text for the user that says what is wrong.
        report: the report, which is added to.
        samples: the samples that the finding is about; the first few are added to it.
    """
    report.add_finding(
        code,
        f"loader {loader['loader']} ({loader['dataset']}), epoch {epoch}: {what}",
        loader=loader["loader"],
        epoch=epoch,
        samples=tuple(int(sample) for sample in samples[:MAX_ITEMS_IN_TEXT]),
    )


def _check_positions(
    loader: Mapping[str, Any],
    batches: Sequence[TrainedBatch],
    begin_position: int,
    next_batch: TrainedBatch | None,
    final_attempts: FinalAttempts,
    report: LedgerReport,
) -> bool:
    """Checks that no global batch was left out before the last one that was trained.

    Global batches that were left out are added to the report. For example, the global batches 0, 1
    and 2 of an epoch of 5 were trained:

    - The run ended there. Nothing was left out.
    - The same start of the run went on with the next epoch: the script has left its loop. Nothing
      was left out, but the report gets a note.
    - A restart went on with the next epoch, although it should have finished this one first. The
      global batches 3 and 4 were left out.

    Args:
        loader: the description of the loader.
        batches: the global batches of the epoch that were trained, ordered by step.
        begin_position: the position in the epoch at which the ledger begins.
        next_batch: the first global batch of the next epoch that was trained, if any.
        final_attempts: see `FinalAttempts`.
        report: the report, which is added to.

    Returns:
        True if no global batch was left out.
    """
    epoch = batches[0].epoch
    last_step = batches[-1].step
    positions = {batch.position for batch in batches}
    last_position = max(positions)
    expected_end = last_position + 1
    explanation = ""

    # Did the run go on with the next epoch before the end of this one?
    num_positions = loader["steps"]  # None: a stream that does not say its length
    is_unfinished = num_positions is not None and last_position + 1 != num_positions
    if is_unfinished and next_batch is not None:
        same_start_went_on = final_attempts[next_batch.step] == final_attempts[last_step]
        if same_start_went_on:  # a `break` in the script's loop, for example
            report.notes.append(
                f"loader {loader['loader']}: the script left epoch {epoch} after global "
                f"batch {last_position} of {num_positions}"
            )
        else:  # a restart, which should have trained the rest first
            expected_end = num_positions
            explanation = "; the run was then taken up in another epoch"

    expected = range(begin_position, expected_end)
    missing = [position for position in expected if position not in positions]
    if missing:
        places = format_ranges(missing, MAX_ITEMS_IN_TEXT)
        what = f"global batches were left out: {places}{explanation}"
        _add_epoch_finding(loader, epoch, LEFT_OUT, what, report)
    return not missing


def _check_samples(
    loader: Mapping[str, Any],
    batches: Sequence[TrainedBatch],
    required_samples: range,
    report: LedgerReport,
) -> None:
    """Adds samples of an epoch that were trained more than once or left out to the report.

    Args:
        loader: the description of the loader.
        batches: the global batches of the epoch that were trained, ordered by step.
        required_samples: the samples that must be in some batch.
        report: the report, which is added to.
    """
    epoch = batches[0].epoch
    repeated, absent = repeats_and_gaps(batches, required_samples)
    if repeated.count:
        number = count_noun(repeated.count, "sample")
        # One more than are shown, so that `join_first` adds ", ..." if there are more. (Describing
        # all of them would take long.)
        first_samples = repeated.first_samples[: MAX_ITEMS_IN_TEXT + 1].tolist()
        examples = [_describe_sample_with_steps(sample, batches) for sample in first_samples]
        what = f"{number} trained more than once: {join_first(examples, MAX_ITEMS_IN_TEXT)}"
        _add_epoch_finding(loader, epoch, TRAINED_TWICE, what, report, repeated.first_samples)
    if absent.count:
        number = count_noun(absent.count, "sample")
        examples_text = format_ranges(absent.first_samples.tolist(), MAX_ITEMS_IN_TEXT)
        what = f"{number} left out: {examples_text}"
        _add_epoch_finding(loader, epoch, LEFT_OUT, what, report, absent.first_samples)


def _describe_sample_with_steps(sample: int, batches: Sequence[TrainedBatch]) -> str:
    """Returns a sample and the steps that trained it, such as `7 (steps 3, 12)`."""
    steps: list[str] = []
    for batch in batches:
        if any(sample in samples for samples in batch.samples):
            steps.append(str(batch.step))
    plural = "s" if len(steps) > 1 else ""
    return f"{sample} (step{plural} {', '.join(steps)})"


def _required_samples(
    loader: dict[str, Any],
    batches: Sequence[TrainedBatch],
    begin_position: int,
    *,
    is_finished: bool,
) -> range:
    """Returns the indices of the samples that must have been trained in an epoch.

    It is only called if no global batch of the epoch is missing. The range is empty if the ledger
    does not tell which samples must have been trained.

    - A shuffled dataset of 100 samples, trained to its end: `range(0, 100)`.
    - The same, but the epoch is unfinished: `range(0, 0)`, as any sample may still be to come.
    - A stream in global batches of 8, from which samples up to 35 were trained: `range(0, 36)`, or
      `range(16, 36)` if the ledger begins at the third global batch.

    Args:
        loader: the description of the loader. Its "stream" is None for a dataset with an index.
            For a stream it says how the ranks divide it: each reads all of it ("whole"), each seeks
            its samples ("seek"), or the stream splits itself ("own").
        batches: the global batches of the epoch.
        begin_position: how many global batches of the epoch came before the ledger begins.
        is_finished: True if the epoch was trained to its end.
    """
    stream = loader["stream"]
    if stream is None:
        # Samples are shuffled, so only a whole epoch must have all of them; and with drop_last,
        # any of them may be among those that are dropped.
        is_whole_epoch = is_finished and begin_position == 0
        if is_whole_epoch and not loader["drop_last"]:
            return range(loader["length"])
        return range(0)

    # A stream that splits itself does not number its samples consecutively.
    if stream not in ("whole", "seek"):
        return range(0)

    # A stream's samples are numbered as they come, so all must be there from the first global batch
    # of the ledger to the last sample that was trained.
    first_sample = begin_position * loader["batch_size"]
    return range(first_sample, _last_sample(batches) + 1)


def _last_sample(batches: Sequence[TrainedBatch]) -> int:
    """Returns the largest index of a sample in some batches; -1 if they have no samples."""
    last_sample = -1
    for batch in batches:
        for samples in batch.samples:
            if len(samples):
                last_sample = max(last_sample, int(samples.max()))
    return last_sample


class SampleCount:
    """Counts samples, and keeps the first few of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first_samples = np.empty(0, np.int64)
        """The smallest indices, in ascending order."""

    def add(self, samples: Indices) -> None:
        """Counts samples that were not added before, and keeps the smallest of all of them."""
        self.count += len(samples)
        samples_in_order = np.sort(np.concatenate([self.first_samples, samples]))
        self.first_samples = samples_in_order[:MAX_SAMPLES_KEPT]


def repeats_and_gaps(
    batches: Sequence[TrainedBatch],
    required_samples: range,
    group_size: int = SAMPLES_COMPARED_AT_ONCE,
) -> tuple[SampleCount, SampleCount]:
    """Finds the samples that were trained twice, and those that were not trained.

    The samples are compared in groups, so that memory does not grow with the length of the epoch.
    With 4 groups, the samples 0, 4, 8, ... form the first group, 1, 5, 9, ... the second one, and
    so on.

    Args:
        batches: what was trained.
        required_samples: the samples that must be in some batch.
        group_size: about how many samples form a group.

    Returns:
        The samples that are in two places, and the required ones that are in none.
    """
    arrays: list[Indices] = []
    for batch in batches:
        arrays.extend(batch.samples)  # an array of each rank

    # Enough groups for the trained samples, and for the required ones.
    num_trained = sum(batch.num_recorded for batch in batches)
    num_samples = max(num_trained, len(required_samples))
    num_groups = max(1, ceil_div(num_samples, group_size))

    repeated = SampleCount()
    absent = SampleCount()
    for remainder in range(num_groups):
        # Only the samples of this group are copied, so memory is bounded by one group.
        group = np.concatenate([array[array % num_groups == remainder] for array in arrays])
        distinct, counts = np.unique(group, return_counts=True)
        repeated.add(distinct[counts > 1])  # counts them, and keeps the first ones as examples

        required = _required_samples_of_group(required_samples, remainder, num_groups)
        absent.add(np.setdiff1d(required, distinct, assume_unique=True))
    return repeated, absent


def _required_samples_of_group(required_samples: range, remainder: int, num_groups: int) -> Indices:
    """Returns the required samples that leave a remainder when divided by the number of groups.

    For `range(10, 20)`, remainder 1 and 4 groups they are 13 and 17.
    """
    start = required_samples.start
    distance = (remainder - start) % num_groups  # from 10 to 13: (1 - 10) % 4 = 3
    return np.arange(start + distance, required_samples.stop, num_groups, dtype=np.int64)
