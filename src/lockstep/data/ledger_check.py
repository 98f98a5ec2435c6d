"""Judges a sample ledger: was every sample of every epoch trained once, over all restarts?

`data.ledger` writes the files and says what is in them. What was cut off at the end of a file,
because its process was killed, is no damage; a record in the middle that its checksum does not fit
is.

Where a run was started again from a checkpoint, the steps from there on were trained again by the
later attempt, from a state that knew nothing of the earlier ones. So the later attempt's records
take their place, and what is judged is the row of steps that led to the last state.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import CheckpointError, name_ranks, reference, some, spans

FORMAT = 1
FRAME = struct.Struct("<II")
STEP = struct.Struct("<QHIQI")
"""Number of the step, of the loader, epoch, which global batch of it, samples on all ranks."""
NO_LOADER = 0xFFFF
"""In a step that no prepared loader had to do with."""
_NAME, _SUFFIX = ".rank", ".ledger"
_LISTED = 20
"""Findings in the text; JSON has all."""
_SHOWN = 5
"""Of several things in a text."""

Samples = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    code: str
    """Of its entry in the catalogue."""
    what: str
    step: int | None = None
    loader: int | None = None
    epoch: int | None = None
    samples: tuple[int, ...] = ()
    """The first of those concerned."""


@dataclass
class Report:
    """What a ledger tells."""

    folder: str
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Of each start of the run: ranks, first and last step, how many steps it trained again."""
    steps: int = 0
    """That led to the last state."""
    again: int = 0
    """Steps that were trained again after a restart."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """Of each loader and epoch: samples, global batches, whether it came to its end."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is worth knowing and not wrong."""

    def find(self, code: str, what: str, **where: Any) -> None:
        """Adds a finding."""
        self.findings.append(Finding(code, what, **where))

    def lines(self) -> list[str]:
        """The report as text."""
        found = [f"{self.folder}: {_counted(self.steps, 'optimizer step')}"]
        for number, attempt in enumerate(self.attempts, 1):
            begun = datetime.fromtimestamp(attempt["started_ns"] / 1e9)
            ranks = _counted(attempt["ranks"], "rank")
            steps = f"steps {attempt['first']} to {attempt['last']}"
            text = f"  start {number}, {begun:%Y-%m-%d %H:%M:%S}: {ranks}, "
            text += "no step" if attempt["last"] is None else steps
            if attempt["again"]:
                text += f"; trained {_counted(attempt['again'], 'step')} again"
            found.append(text)
        for epoch in self.epochs:
            of = "" if epoch["steps"] is None else f" of {epoch['steps']}"
            found.append(
                f"  loader {epoch['loader']} ({epoch['dataset']}), epoch {epoch['epoch']}: "
                f"{_counted(epoch['samples'], 'sample')} in {epoch['batches']}{of} global batches"
            )
        found += [f"  note: {note}" for note in self.notes]
        for finding in self.findings[:_LISTED]:
            found.append(f"{finding.what}\n  more:  {reference(finding.code)}")
        if len(self.findings) > _LISTED:
            found.append(f"and {len(self.findings) - _LISTED} more findings")
        if not self.findings:
            found.append("every sample once: nothing was trained twice, nothing was left out")
        return found

    def as_json(self) -> dict[str, Any]:
        """The report as values for `json.dumps`."""
        verdict = "REPEATS OR GAPS" if self.findings else "EVERY SAMPLE ONCE"
        return {"verdict": verdict, **asdict(self)}


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
    ranks: int = 0
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
    until: float = float("inf")
    """The step from which on later attempts have the last word."""

    @property
    def steps(self) -> set[int]:
        """The numbers of the steps that some rank has written down."""
        return {row.step for file in self.files.values() for row in file.rows}


@dataclass
class Batch:
    """A global batch in the step that trained it."""

    attempt: int
    step: int
    position: int
    samples: Samples
    whole: bool
    """All of its samples are written down."""


def judge(folder: str | Path) -> Report:
    """Reads and judges the ledger of a run.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    attempts = read_folder(Path(folder))
    report = Report(str(folder))
    for number, attempt in enumerate(attempts, 1):
        _check_files(attempt, number, report)
    steps = _last_words(attempts, report)
    loaders = _loaders(attempts, report)
    epochs = _batches(attempts, report)
    _check_steps(steps, report)
    begun = {key: min(batches, key=lambda batch: batch.step) for key, batches in epochs.items()}
    for (loader, epoch), batches in sorted(epochs.items()):
        later = [first for (other, e), first in begun.items() if other == loader and e > epoch]
        following = min(later, key=lambda batch: batch.step, default=None)
        _check_epoch(loaders[loader], epoch, batches, following, min(steps), report)
    return report


def _check_files(attempt: Attempt, number: int, report: Report) -> None:
    for rank in range(attempt.ranks):
        file = attempt.files.get(rank)
        if file is None:
            report.find("LS102", f"start {number}: the file of rank {rank} is missing")
            continue
        if file.cut:
            report.notes.append(
                f"start {number}, rank {rank}: the last record is cut off; the process ended while "
                "it wrote"
            )
        if file.damaged:
            report.find(
                "LS405",
                f"start {number}, rank {rank}: {_counted(len(file.damaged), 'record')} of "
                f"{file.name} cannot be read, the first at byte {file.damaged[0]}",
            )


def _last_words(attempts: Sequence[Attempt], report: Report) -> set[int]:
    """The steps that led to the last state; says of each attempt how far it counts."""
    standing: set[int] = set()
    for number, attempt in enumerate(attempts):
        steps = attempt.steps
        first = min(steps, default=None)
        again = set() if first is None else {step for step in standing if step >= first}
        standing = standing - again | steps
        for earlier in attempts[:number]:
            earlier.until = min(earlier.until, earlier.until if first is None else first)
        report.again += len(again)
        report.attempts.append(
            {
                "name": attempt.name,
                "started_ns": attempt.started_ns,
                "ranks": attempt.ranks,
                "first": first,
                "last": max(steps, default=None),
                "again": len(again),
            }
        )
    report.steps = len(standing)
    return standing


def _loaders(attempts: Sequence[Attempt], report: Report) -> dict[int, dict[str, Any]]:
    """What is known of each loader; it must be the same in all attempts."""
    found: dict[int, dict[str, Any]] = {}
    for number, attempt in enumerate(attempts, 1):
        for rank, file in sorted(attempt.files.items()):
            for loader, values in file.loaders.items():
                known = found.setdefault(loader, values)
                for name in ("length", "batch_size", "drop_last"):
                    if values[name] != known[name]:
                        report.find(
                            "LS104" if name == "length" else "LS109",
                            f"loader {loader}: {name} is {values[name]} on rank {rank} of start "
                            f"{number}, and was {known[name]}",
                            loader=loader,
                        )
                        values[name] = known[name]  # it is said once
    return found


def _batches(attempts: Sequence[Attempt], report: Report) -> dict[tuple[int, int], list[Batch]]:
    """The global batches that count, by loader and epoch; a fault of many steps is said once."""
    epochs: dict[tuple[int, int], list[Batch]] = defaultdict(list)
    faults: dict[tuple[int, str], list[Finding]] = defaultdict(list)
    for number, attempt in enumerate(attempts):
        end = max(attempt.steps, default=-1) if attempt.until == float("inf") else -1
        by_batch: dict[tuple[int, int], dict[int, Row]] = defaultdict(dict)
        for rank, file in sorted(attempt.files.items()):
            for row in file.rows:
                if row.step < attempt.until and row.loader != NO_LOADER:
                    by_batch[row.step, row.loader][rank] = row
        for rows in by_batch.values():
            first = next(iter(rows.values()))
            absent = sorted(attempt.files.keys() - rows.keys())
            if absent and first.step == end:
                report.notes.append(
                    f"start {number + 1} ended in step {end}, before {name_ranks(absent)} had "
                    "written it down; that step is left out"
                )
                continue
            fault = _fault(rows, absent, attempt.ranks)
            if fault is not None:
                faults[number, fault.code].append(fault)
                if fault.code == "LS109":  # its parts are of different global batches
                    continue
            samples = np.concatenate([row.samples for row in rows.values()])
            whole = fault is None and len(rows) == attempt.ranks
            batch = Batch(number, first.step, first.position, samples, whole)
            epochs[first.loader, first.epoch].append(batch)
    for found in faults.values():
        also = f"; so in {len(found)} steps, the last {found[-1].step}" if found[1:] else ""
        report.findings.append(replace(found[0], what=found[0].what + also))
    return epochs


def _fault(rows: dict[int, Row], absent: Sequence[int], ranks: int) -> Finding | None:
    """Why what the ranks trained in a step does not make a global batch."""
    (rank, first), *others = rows.items()
    place = f"global batch {first.position} of epoch {first.epoch}"
    found = sum(len(row.samples) for row in rows.values())
    other = next(((r, row) for r, row in others if row[:5] != first[:5]), None)
    if other is not None:
        r, row = other
        code = "LS109"
        what = (
            f"rank {rank} trained {place} ({first.total} samples), rank {r} global batch "
            f"{row.position} of epoch {row.epoch} ({row.total} samples)"
        )
    elif absent:
        code = "LS102"
        what = f"{name_ranks(absent)} did not record {place}"
    elif len(rows) == ranks and found != first.total:
        code = "LS102" if found < first.total else "LS101"
        what = (
            f"{place} has {first.total} samples, and the parts of the ranks have {found} together"
        )
    else:
        return None
    what = f"step {first.step}: {what}"
    return Finding(code, what, first.step, first.loader, first.epoch)


def _check_steps(steps: set[int], report: Report) -> None:
    if not steps:
        report.notes.append("no optimizer step is written down")
        return
    first, last = min(steps), max(steps)
    if first > 0:
        report.notes.append(
            f"the ledger begins at step {first}; it does not cover what was trained before"
        )
    missing = sorted(set(range(first, last)) - steps)
    if missing:
        what = f"{_counted(len(missing), 'step')} not written down: {spans(missing, _SHOWN)}"
        report.find("LS405", what, step=missing[0])


def _check_epoch(
    loader: dict[str, Any],
    epoch: int,
    batches: list[Batch],
    following: Batch | None,
    begins: int,
    report: Report,
) -> None:
    """Is every sample in an epoch of a loader, and none twice?

    Args:
        loader: what is known of it.
        epoch: which.
        batches: those of its global batches that were trained.
        following: the first global batch of the next epoch that was trained, if there is one.
        begins: the first step of the ledger.
        report: where findings and numbers go.
    """

    def find(code: str, what: str, samples: Samples | Sequence[int] = ()) -> None:
        text = f"loader {loader['loader']} ({loader['dataset']}), epoch {epoch}: {what}"
        first = tuple(int(sample) for sample in samples[:_SHOWN])
        report.find(code, text, loader=loader["loader"], epoch=epoch, samples=first)

    batches = sorted(batches, key=lambda batch: batch.step)
    samples = np.concatenate([batch.samples for batch in batches])
    positions = {batch.position for batch in batches}
    # Where the ledger begins in this epoch.
    start = batches[0].position if begins > 0 and batches[0].step == begins else 0
    steps, last = loader["steps"], max(positions)
    ended = steps is not None and last == steps - 1
    if following is not None and steps is not None and not ended:
        if following.attempt == batches[-1].attempt:
            report.notes.append(
                f"loader {loader['loader']}: the script left epoch {epoch} after global batch "
                f"{last} of {steps}"
            )
        else:
            left = spans(range(last + 1, steps), _SHOWN)
            find(
                "LS102",
                f"global batches were left out: {left}; the run was then taken up in another epoch",
            )
    missing = sorted(set(range(start, last)) - positions)
    if missing:
        find("LS102", f"global batches were left out: {spans(missing, _SHOWN)}")
    if loader["own_order"]:
        if len(positions) < len(batches):
            find("LS101", "a global batch of the user's own order was trained twice")
    else:
        distinct, counts = np.unique(samples, return_counts=True)
        twice = distinct[counts > 1]
        if len(twice):
            first = [_with_steps(sample, batches) for sample in twice[: _SHOWN + 1].tolist()]
            number = _counted(len(twice), "sample")
            find("LS101", f"{number} trained more than once: {some(first, _SHOWN)}", twice)
        if not missing and all(batch.whole for batch in batches):
            absent = _absent(loader, samples, start, ended=ended)
            if len(absent):
                number = _counted(len(absent), "sample")
                find("LS102", f"{number} left out: {spans(absent.tolist(), _SHOWN)}", absent)
    report.epochs.append(
        {
            "loader": loader["loader"],
            "dataset": loader["dataset"],
            "epoch": epoch,
            "samples": len(samples),
            "batches": len(positions),
            "steps": steps,
            "ended": ended,
        }
    )


def _with_steps(sample: int, batches: Sequence[Batch]) -> str:
    steps = [str(batch.step) for batch in batches if sample in batch.samples]
    return f"{sample} (step{'s' * (len(steps) > 1)} {', '.join(steps)})"


def _absent(loader: dict[str, Any], samples: Samples, start: int, *, ended: bool) -> Samples:
    """Where no global batch is missing: the samples that are in none."""
    if loader["stream"] is None:
        wanted = range(loader["length"] if ended and not start and not loader["drop_last"] else 0)
    elif loader["stream"] == "own":  # its samples have no numbers in a row
        wanted = range(0)
    else:
        wanted = range(start * loader["batch_size"], int(samples.max()) + 1)
    return np.setdiff1d(np.asarray(wanted, dtype=np.int64), samples)


def _counted(number: int, noun: str) -> str:
    """`3 samples`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def read_folder(folder: Path) -> list[Attempt]:
    """The attempts in a folder, in the order in which they were started.

    Raises:
        CheckpointError: there is no ledger, or one of a later version.
    """
    paths = sorted(folder.glob(f"*{_NAME}*{_SUFFIX}"))
    if not paths:
        raise CheckpointError(
            f"the ledger {folder}",
            "the folder holds none" if folder.is_dir() else "there is no such folder",
            "train with lockstep run --ledger FOLDER, and give that folder",
        )
    attempts: dict[str, Attempt] = {}
    for path in paths:
        # The name alone tells as much of a file that was cut off at its very beginning.
        name, _, rank = path.name.removesuffix(_SUFFIX).rpartition(_NAME)
        file = read_file(path)
        attempt = attempts.setdefault(name, Attempt(name, int(name.partition("-")[0])))
        attempt.ranks = max(attempt.ranks, file.ranks)
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
    for begin, end in _records(data, file):
        if data[begin : begin + 1] == b"S":
            step, loader, epoch, position, total = STEP.unpack_from(data, begin + 1)
            after = begin + 1 + STEP.size
            samples = np.frombuffer(data, "<i8", (end - after) // 8, after)
            file.rows.append(Row(step, loader, epoch, position, total, samples))
            continue
        values = json.loads(bytes(data[begin + 1 : end]))
        if "loader" in values:
            file.loaders[values["loader"]] = values
            continue
        if values["ledger"] != FORMAT:
            raise CheckpointError(
                f"the ledger {path.parent}",
                f"{path.name} is of version {values['ledger']}, this Lockstep reads version "
                f"{FORMAT}",
                "read it with the Lockstep that wrote it",
            )
        file.ranks = values["ranks"]
    return file


def _records(data: bytes | mmap.mmap, file: RankFile) -> Iterator[tuple[int, int]]:
    """Where each whole record begins and ends."""
    at = 0
    while at < len(data):
        begin = at + FRAME.size
        length, checksum = FRAME.unpack(data[at:begin]) if begin <= len(data) else (0, 0)
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
