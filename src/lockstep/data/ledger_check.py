"""Judges a sample ledger: was every sample of every epoch trained once, over all restarts?

Where a run was started again from a checkpoint, the steps from there on were trained again by the
later attempt, from a state that knew nothing of the earlier ones. So the later attempt's records
take their place, and what is judged is the row of steps that led to the last state.

One epoch of one loader in a sample ledger: is every sample in it, and none twice?

Reads the files of a sample ledger; `lockstep.data.ledger` says what is in them.

What was cut off at the end of a file, because its process was killed, is no damage; a record in the
middle that its checksum does not fit is.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import CheckpointError, name_ranks, reference, spans

_LISTED = 20
"""Findings in the text; JSON has all."""


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

    def lines(self) -> list[str]:
        """The report as text."""
        found = [f"{self.folder}: {counted(self.steps, 'optimizer step')}"]
        for number, attempt in enumerate(self.attempts, 1):
            begun = datetime.fromtimestamp(attempt["started_ns"] / 1e9)
            text = (
                f"  start {number}, {begun:%Y-%m-%d %H:%M:%S}: {counted(attempt['ranks'], 'rank')}"
            )
            if attempt["last"] is None:
                text += ", no step"
            else:
                text += f", steps {attempt['first']} to {attempt['last']}"
            if attempt["again"]:
                text += f"; trained {counted(attempt['again'], 'step')} again"
            found.append(text)
        for epoch in self.epochs:
            of = "" if epoch["steps"] is None else f" of {epoch['steps']}"
            found.append(
                f"  loader {epoch['loader']} ({epoch['dataset']}), epoch {epoch['epoch']}: "
                f"{counted(epoch['samples'], 'sample')} in {epoch['batches']}{of} global batches"
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


def judge(folder: str | Path) -> Report:
    """Reads and judges the ledger of a run.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    attempts = read_folder(Path(folder))
    report = Report(str(folder))
    bounds = _last_words(attempts, report)
    loaders = _loaders(attempts, report)
    steps: set[int] = set()
    epochs: dict[tuple[int, int], list[Batch]] = defaultdict(list)
    faults: dict[str, list[Finding]] = defaultdict(list)
    for number, (attempt, bound) in enumerate(zip(attempts, bounds, strict=True)):
        steps |= {step for step in attempt.steps if step < bound}
        end = max(attempt.steps, default=-1) if bound == float("inf") else -1
        for rows in _by_batch(attempt, bound).values():
            absent = sorted(attempt.files.keys() - {rank for rank, _ in rows})
            if absent and rows[0][1].step == end:
                report.notes.append(
                    f"start {number + 1} was ended in step {end}, which {name_ranks(absent)} "
                    "did not come to write down; it is left out here"
                )
                continue
            batch = _joined(attempt, number, rows, absent, faults)
            if batch is not None:
                epochs[rows[0][1].loader, rows[0][1].epoch].append(batch)
    for found in faults.values():
        also = f"; so in {len(found)} steps, the last {found[-1].step}" if found[1:] else ""
        report.findings.append(replace(found[0], what=found[0].what + also))
    _check_steps(steps, report)
    begun = {key: min(batches, key=lambda batch: batch.step) for key, batches in epochs.items()}
    for (loader, number), batches in sorted(epochs.items()):
        later = [first for (other, e), first in begun.items() if other == loader and e > number]
        epoch = Epoch(loaders[loader], number, batches, begins=min(steps))
        report.epochs.append(epoch.check(min(later, key=lambda batch: batch.step, default=None)))
        report.findings += epoch.findings
        report.notes += epoch.notes
    return report


def _last_words(attempts: Sequence[Attempt], report: Report) -> list[float]:
    """For each attempt the step from which on later attempts have the last word."""
    bounds = [float("inf")] * len(attempts)
    standing: set[int] = set()
    for number, attempt in enumerate(attempts):
        steps = attempt.steps
        again = 0
        if steps:
            first = min(steps)
            again = sum(step >= first for step in standing)
            standing = {step for step in standing if step < first} | steps
            bounds[:number] = [min(bound, first) for bound in bounds[:number]]
        report.again += again
        report.attempts.append(
            {
                "name": attempt.name,
                "started_ns": attempt.started_ns,
                "ranks": attempt.ranks,
                "first": min(steps, default=None),
                "last": max(steps, default=None),
                "again": again,
            }
        )
        _check_files(attempt, number, report)
    report.steps = len(standing)
    return bounds


def _check_files(attempt: Attempt, number: int, report: Report) -> None:
    for rank in range(attempt.ranks):
        file = attempt.files.get(rank)
        if file is None:
            what = f"start {number + 1}: the file of rank {rank} is missing"
            report.findings.append(Finding("LS102", what))
            continue
        if file.cut:
            report.notes.append(
                f"start {number + 1}, rank {rank}: the last record is cut off; the process was "
                "ended while it wrote"
            )
        if file.damaged:
            what = (
                f"start {number + 1}, rank {rank}: {counted(len(file.damaged), 'record')} of "
                f"{file.name} cannot be read, the first at byte {file.damaged[0]}"
            )
            report.findings.append(Finding("LS405", what))


def _loaders(attempts: Sequence[Attempt], report: Report) -> dict[int, dict[str, Any]]:
    """What is known of each loader; it must be the same in all attempts."""
    found: dict[int, dict[str, Any]] = {}
    for number, attempt in enumerate(attempts):
        for rank, file in sorted(attempt.files.items()):
            for loader, values in file.loaders.items():
                known = found.setdefault(loader, values)
                for name in ("length", "batch_size", "drop_last"):
                    if values[name] != known[name]:
                        what = (
                            f"loader {loader}: {name} is {values[name]} on rank {rank} of start "
                            f"{number + 1}, and was {known[name]}"
                        )
                        code = "LS104" if name == "length" else "LS109"
                        report.findings.append(Finding(code, what, loader=loader))
                        values[name] = known[name]  # it is said once
    return found


def _by_batch(attempt: Attempt, bound: float) -> dict[tuple[int, int], list[tuple[int, Row]]]:
    """The rows of all ranks, by step and loader."""
    found: dict[tuple[int, int], list[tuple[int, Row]]] = defaultdict(list)
    for rank, file in sorted(attempt.files.items()):
        for row in file.rows:
            if row.step < bound and row.loader >= 0:
                found[row.step, row.loader].append((rank, row))
    return found


def _joined(
    attempt: Attempt,
    number: int,
    rows: list[tuple[int, Row]],
    absent: list[int],
    faults: dict[str, list[Finding]],
) -> Batch | None:
    """The parts of a global batch together; None where they do not make one."""
    _, first = rows[0]

    def find(code: str, kind: str, what: str) -> None:
        found = Finding(code, what, first.step, first.loader, first.epoch)
        faults[f"{code} {kind} {number}"].append(found)

    for rank, row in rows:
        if row[:5] != first[:5]:
            what = (
                f"step {first.step}: rank {rows[0][0]} trained global batch {first.position} of "
                f"epoch {first.epoch} ({first.total} samples), rank {rank} global batch "
                f"{row.position} of epoch {row.epoch} ({row.total} samples)"
            )
            find("LS109", "other", what)
            return None
    samples = np.concatenate([row.samples for _, row in rows])
    whole = len(rows) == attempt.ranks
    if absent:
        what = (
            f"step {first.step}: {name_ranks(absent)} did not write down what it had of global "
            f"batch {first.position} of epoch {first.epoch}"
        )
        find("LS102", "absent", what)
    elif whole and len(samples) != first.total:
        what = (
            f"step {first.step}: global batch {first.position} of epoch {first.epoch} has "
            f"{first.total} samples, and the parts of the ranks have {len(samples)} together"
        )
        find("LS102" if len(samples) < first.total else "LS101", "sum", what)
        whole = False
    return Batch(number, first.step, first.position, samples, whole)


def _check_steps(steps: set[int], report: Report) -> None:
    if not steps:
        report.notes.append("no optimizer step is written down")
        return
    first, last = min(steps), max(steps)
    if first > 0:
        report.notes.append(
            f"the ledger begins at step {first}; what was trained before is not in it"
        )
    missing = sorted(set(range(first, last)) - steps)
    if missing:
        what = f"{counted(len(missing), 'step')} not written down: {spans(missing, SHOWN)}"
        report.findings.append(Finding("LS405", what, step=missing[0]))


SHOWN = 5
"""Of several things in a text."""


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
class Batch:
    """A global batch in the step that trained it."""

    attempt: int
    step: int
    position: int
    samples: Samples
    whole: bool
    """All of its samples are written down."""


class Epoch:
    """The check of one epoch of one loader.

    Args:
        loader: what is known of the loader.
        epoch: which.
        batches: those of its global batches that were trained.
        begins: the first step of the ledger.
    """

    def __init__(
        self, loader: dict[str, Any], epoch: int, batches: list[Batch], begins: int
    ) -> None:
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self._loader = loader
        self._epoch = epoch
        self._batches = sorted(batches, key=lambda batch: batch.step)
        self._samples = np.concatenate([batch.samples for batch in self._batches])
        unknown = begins > 0 and self._batches[0].step == begins
        self._from = self._batches[0].position if unknown else 0
        """Where the ledger begins in this epoch."""

    def check(self, following: Batch | None) -> dict[str, Any]:
        """Fills `findings` and `notes`; returns the epoch in numbers.

        `following` is the first global batch of the next epoch that was trained, if there is one.
        """
        positions = {batch.position for batch in self._batches}
        steps, last = self._loader["steps"], max(positions)
        ended = steps is not None and last == steps - 1
        if following is not None and steps is not None and not ended:
            self._check_left(following, last)
        missing = sorted(set(range(self._from, last)) - positions)
        if missing:
            self._find("LS102", f"global batches were left out: {spans(missing, SHOWN)}")
        if not self._loader["own_order"]:
            self._check_repeats()
            if not missing and all(batch.whole for batch in self._batches):
                self._check_gaps(ended)
        elif len(positions) < len(self._batches):
            self._find("LS101", "a global batch of the user's own order was trained twice")
        return {
            "loader": self._loader["loader"],
            "dataset": self._loader["dataset"],
            "epoch": self._epoch,
            "samples": len(self._samples),
            "batches": len(positions),
            "steps": steps,
            "ended": ended,
        }

    def _check_left(self, following: Batch, last: int) -> None:
        """The epoch stops early: by the script's own will, or where the run was taken up."""
        steps = self._loader["steps"]
        if following.attempt != self._batches[-1].attempt:
            left = spans(range(last + 1, steps), SHOWN)
            self._find(
                "LS102",
                f"global batches were left out: {left}; the run was then taken up in another epoch",
            )
            return
        self.notes.append(
            f"loader {self._loader['loader']}: the script left epoch {self._epoch} after global "
            f"batch {last} of {steps}"
        )

    def _check_repeats(self) -> None:
        distinct, counts = np.unique(self._samples, return_counts=True)
        twice = distinct[counts > 1]
        if not len(twice):
            return
        shown = []
        for sample in twice[:SHOWN].tolist():
            steps = [batch.step for batch in self._batches if sample in batch.samples]
            shown.append(f"{sample} (step{'s' * (len(steps) > 1)} {_listed(steps)})")
        more = f" and {len(twice) - SHOWN} more" if len(twice) > SHOWN else ""
        self._find(
            "LS101",
            f"{counted(len(twice), 'sample')} trained more than once: {', '.join(shown)}{more}",
            twice,
        )

    def _check_gaps(self, ended: bool) -> None:
        """Where no global batch is missing, are there samples that are in none?"""
        length = self._loader["length"]
        if self._loader["stream"] is None:
            if not ended or self._from or self._loader["drop_last"]:
                return
            absent = np.setdiff1d(np.arange(length), self._samples)
        elif self._loader["stream"] == "own":  # its samples have no numbers in a row
            return
        else:
            first = self._from * self._loader["batch_size"]
            absent = np.setdiff1d(np.arange(first, self._samples.max() + 1), self._samples)
        if len(absent):
            shown = _listed(absent[:SHOWN].tolist())
            more = f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
            self._find("LS102", f"{counted(len(absent), 'sample')} left out: {shown}{more}", absent)

    def _find(self, code: str, what: str, samples: Iterable[int] = ()) -> None:
        loader = self._loader["loader"]
        text = f"loader {loader} ({self._loader['dataset']}), epoch {self._epoch}: {what}"
        first = tuple(int(sample) for sample in list(samples)[:SHOWN])
        found = Finding(code, text, loader=loader, epoch=self._epoch, samples=first)
        self.findings.append(found)


def counted(number: int, noun: str) -> str:
    """`3 samples`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


FORMAT = 1
_FRAME = struct.Struct("<II")
_NAME = ".rank"
_SUFFIX = ".ledger"

Samples = npt.NDArray[np.int64]


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
    header: dict[str, Any] = field(default_factory=dict)
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

    @property
    def steps(self) -> set[int]:
        """The numbers of the steps that some rank has written down."""
        return {row.step for file in self.files.values() for row in file.rows}


def read_folder(folder: Path) -> list[Attempt]:
    """The attempts in a folder, in the order in which they were started.

    Raises:
        CheckpointError: there is no ledger, or one of a later version.
    """
    paths = sorted(folder.glob(f"*{_NAME}*{_SUFFIX}")) if folder.is_dir() else []
    if not paths:
        raise CheckpointError(
            f"the ledger {folder}",
            "the folder holds none" if folder.is_dir() else "there is no such folder",
            "train with lockstep run --ledger FOLDER, and give that folder",
        )
    attempts: dict[str, Attempt] = {}
    for path in paths:
        name, _, rank = path.name.removesuffix(_SUFFIX).rpartition(_NAME)
        if not rank.isdigit():
            continue
        file = read_file(path)
        # The name alone tells as much of a file that was cut off at its very beginning.
        begun = name.partition("-")[0]
        attempt = attempts.setdefault(name, Attempt(name, int(begun) if begun.isdigit() else 0))
        attempt.ranks = max(attempt.ranks, file.header.get("ranks", 0))
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
    numbers = struct.Struct("<QHIQI")
    for begin, end in _records(data, file):
        if data[begin : begin + 1] == b"J":
            values = json.loads(bytes(data[begin + 1 : end]))
            if "loader" in values:
                file.loaders[values["loader"]] = values
            else:
                file.header = _checked(values, path)
                numbers = struct.Struct(values["step"])
            continue
        after = begin + 1 + numbers.size
        step, loader, epoch, position, count = numbers.unpack_from(data, begin + 1)
        samples = np.frombuffer(data, "<i8", (end - after) // 8, after)
        if loader == file.header.get("no_loader"):
            loader = -1
        file.rows.append(Row(step, loader, epoch, position, count, samples))
    return file


def _records(data: bytes | mmap.mmap, file: RankFile) -> Iterator[tuple[int, int]]:
    """Where each whole record begins and ends."""
    at = 0
    while at < len(data):
        if at + _FRAME.size > len(data):
            file.cut = True
            return
        length, checksum = _FRAME.unpack_from(data, at)
        begin = at + _FRAME.size
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


def _checked(header: dict[str, Any], path: Path) -> dict[str, Any]:
    version = header.get("ledger")
    if version != FORMAT:
        raise CheckpointError(
            f"the ledger {path.parent}",
            f"{path.name} is of version {version}, this Lockstep reads version {FORMAT}",
            "read it with the Lockstep that wrote it",
        )
    return header
