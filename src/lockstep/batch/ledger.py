"""The sample ledger: every rank writes which samples it trained in which optimizer step.

A folder holds one file for each rank and each start of the run, whose name tells which. A file is a
row of records that is only ever added to: 4 bytes length and 4 bytes CRC-32, both of what follows;
then `J` and JSON, or `S` and a step: the numbers of `STEP`, and the indices of this rank's samples
as 64-bit integers, all little-endian. The first record tells the version and the number of ranks.
What was cut off at the end of a file, because its process was killed, shows by its length and is no
damage; a record in the middle that its checksum does not fit is.

`judge` reads it: was every sample of every epoch trained once, over all restarts? Where a run was
started again from a checkpoint, the steps from there on were trained again by the later attempt,
from a state that knew nothing of the earlier ones. So the later attempt's records take their place,
and what is judged is the row of steps that led to the last state.
"""

from __future__ import annotations

import io
import itertools
import json
import mmap
import re
import secrets
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lockstep.batch.fingerprint import Fingerprint, compare, differing_sample
from lockstep.batch.plan import Indices
from lockstep.errors import CheckpointError, SettingError, explain_hint
from lockstep.session.extension import DeliveredBatch, Extension
from lockstep.wording import count_noun, format_ranges, format_ranks, join_first

if TYPE_CHECKING:  # reading needs no torch
    from lockstep.batch.loader import Loader
    from lockstep.distributed.collectives import Collectives

FORMAT = 1
FRAME = struct.Struct("<II")
_KIND = re.compile(rb"S|J\{")
"""How a record begins behind its frame: a step, or JSON."""
STEP = struct.Struct("<QHIQI")
"""Number of the step, of the loader, epoch, which global batch of it, samples on all ranks."""
NO_LOADER = 0xFFFF
"""In a step that no prepared loader had to do with."""
_NAME, SUFFIX = ".rank", ".ledger"
_LISTED = 20
"""Findings in the text; JSON has all."""
_SHOWN = 5
"""Of several things in a text."""
_AT_ONCE, _KEPT = 2**24, 2**16
"""Samples that are compared at a time, and that are kept of those with the same fault."""


class Ledger(Extension):
    """Watches a training and writes its samples down.

    A global batch counts as trained when the first optimizer has stepped for it.

    Args:
        folder: where; made when it is needed.
        collectives: of the run; the ranks agree on a name for this start of it.
        loaders: all prepared ones, by whose order they are numbered; the list may still grow.

    Raises:
        SettingError: on all ranks, where one cannot write there.
    """

    def __init__(
        self, folder: str | Path, collectives: Collectives, loaders: Sequence[Loader]
    ) -> None:
        self._folder = Path(folder)
        self._loaders = loaders
        self._introduced: set[int] = set()
        """The numbers of the loaders that have been written down."""
        self._begun: set[tuple[int, int]] = set()
        """Numbers of streams, and the epochs whose first samples have been written down."""
        self._open: dict[Loader, list[DeliveredBatch]] = {}
        """The micro-batches of a global batch for which no optimizer has stepped."""
        name = f"{_NAME}{collectives.data_parallel.rank}{SUFFIX}"
        writes = collectives.contributes
        self._file = open_on_all_ranks(folder, collectives, name if writes else None, "ledger")
        self._write_json({"ledger": FORMAT, "ranks": collectives.data_parallel.size})

    def close(self, failed: bool) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def delivered(self, event: DeliveredBatch) -> None:
        """Remembers what the training loop is about to get."""
        if event.micro_batch.first:
            self._open[event.loader] = []
        self._open.setdefault(event.loader, []).append(event)

    def step_finished(self, number: int) -> None:
        """Writes down what the step of this number was made of."""
        # The last global batch of an earlier pass was not trained now.
        trained = {loader: events for loader, events in self._open.items() if loader.mid_epoch}
        self._open.clear()
        for loader, events in trained.items():
            first = events[0]
            place = first.epoch, first.position, first.micro_batch.global_samples
            samples = np.concatenate([event.samples for event in events])
            indices = samples.astype("<i8", copy=False).tobytes()
            loader_number = self._number(loader)
            self._write(b"S" + STEP.pack(number, loader_number, *place) + indices)
            self._write_beginning(loader_number, loader, first.epoch)
        if not trained:
            self._write(b"S" + STEP.pack(number, NO_LOADER, 0, 0, 0))

    def _number(self, loader: Loader) -> int:
        """That of a loader; the first time it is written down what its positions mean."""
        number = list(self._loaders).index(loader)
        if number not in self._introduced:
            self._introduced.add(number)
            source = loader.source
            self._write_json(
                {
                    "loader": number,
                    "dataset": type(source.dataset).__name__,
                    "stream": source.sharding,
                    "length": None if source.steps is None else source.length,
                    "steps": source.steps,
                    "batch_size": source.batch_size,
                    "drop_last": source.drop_last,
                    "own_order": source.custom_order,
                    "data": None if loader.fingerprint is None else loader.fingerprint.to_text(),
                }
            )
        return number

    def _write_beginning(self, number: int, loader: Loader, epoch: int) -> None:
        """Writes down, once an epoch, what a stream began with."""
        if (number, epoch) in self._begun or not loader.first_samples_of_epoch:
            return
        self._begun.add((number, epoch))
        beginning = loader.first_samples_of_epoch
        self._write_json({"stream": number, "epoch": epoch, "beginning": beginning})

    def _write_json(self, values: dict[str, Any]) -> None:
        self._write(b"J" + json.dumps(values).encode())

    def _write(self, record: bytes) -> None:
        """With one call of the system, so that it is there whole, whatever ends this process."""
        if self._file is None or self._file.closed:
            return
        data = FRAME.pack(len(record), zlib.crc32(record)) + record
        try:
            written = self._file.write(data)
        except OSError as error:
            raise _cannot_write("ledger", self._folder, str(error)) from error
        if written < len(data):
            found = f"{written} of {len(data)} bytes were written"
            raise _cannot_write("ledger", self._folder, found)


def open_on_all_ranks(
    folder: str | Path, collectives: Collectives, name: str | None, setting: str
) -> io.FileIO | None:
    """Opens a new file of this rank's, for this start of the run.

    Args:
        folder: where; made when it is needed.
        collectives: of the run; the ranks agree on what the names of this start begin with.
        name: what this rank's begins with that and ends with; None: it writes none.
        setting: of `init`, that asked for it.

    Raises:
        SettingError: on all ranks, where one cannot write there.
    """
    names = (path.name.partition("-")[0] for path in Path(folder).glob("*-*"))
    latest = max((int(name) for name in names if name.isdecimal()), default=0)
    found = collectives.exchange((time.time_ns(), secrets.token_hex(4), latest))
    # After all before it, wherever this start is: clocks differ, and are set back.
    began = max(found[0][0], max(before for _, _, before in found) + 1)
    start = f"{began:020d}-{found[0][1]}"
    file, problem = None, ""
    if name is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            file = io.FileIO(Path(folder, f"{start}{name}"), "x")
        except OSError as error:
            problem = f"rank {collectives.topology.rank}: {error}"
    problems = [text for text in collectives.exchange(problem) if text]
    if problems:
        if file is not None:
            file.close()
        raise _cannot_write(setting, folder, problems[0])
    return file


def _cannot_write(setting: str, folder: str | Path, found: str) -> SettingError:
    return SettingError(
        f"{setting}={str(folder)!r}",
        f"it cannot be written: {found}",
        f"make room or choose another folder; or leave the {setting} out",
    )


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
    by_sample: list[int] = field(default_factory=list)
    """Loaders of which the ledger knows the samples."""
    by_position: list[int] = field(default_factory=list)
    """Loaders of streams, of which it knows positions."""
    by_batch: list[int] = field(default_factory=list)
    """Loaders with a sampler of the script's own, which may repeat and leave out samples."""

    def find(self, code: str, what: str, **where: Any) -> None:
        """Adds a finding."""
        self.findings.append(Finding(code, what, **where))

    def lines(self) -> list[str]:
        """The report as text."""
        found = [f"{self.folder}: {count_noun(self.steps, 'optimizer step')}"]
        for number, attempt in enumerate(self.attempts, 1):
            begun = datetime.fromtimestamp(attempt["started_ns"] / 1e9)
            ranks = count_noun(attempt["ranks"], "rank")
            steps = f"steps {attempt['first']} to {attempt['last']}"
            text = f"  start {number}, {begun:%Y-%m-%d %H:%M:%S}: {ranks}, "
            text += "no step" if attempt["last"] is None else steps
            if attempt["again"]:
                text += f"; trained {count_noun(attempt['again'], 'step')} again"
            found.append(text)
        for epoch in self.epochs:
            of = "" if epoch["steps"] is None else f" of {epoch['steps']}"
            found.append(
                f"  loader {epoch['loader']} ({epoch['dataset']}), epoch {epoch['epoch']}: "
                f"{count_noun(epoch['samples'], 'sample')} in {epoch['batches']}{of} global batches"
            )
        found += [f"  note: {note}" for note in self.notes]
        for finding in self.findings[:_LISTED]:
            found.append(f"{finding.what}\n  more:  {explain_hint(finding.code)}")
        if len(self.findings) > _LISTED:
            found.append(f"and {len(self.findings) - _LISTED} more findings")
        if not self.findings:
            found += self._what_is_once()
        return found

    def _what_is_once(self) -> list[str]:
        """What a ledger without findings shows, which is not the same for all loaders."""
        if not self.by_position and not self.by_batch:
            return ["every sample once: nothing was trained twice, nothing was left out"]
        found = []
        if self.by_position:
            found.append(
                f"every position of the streams once ({_name_loaders(self.by_position)}): nothing "
                "was trained twice, nothing was left out, if they give the same samples in the "
                "same order to every rank, worker and start; the ledger records positions, and "
                "the first samples of each epoch"
            )
        if self.by_batch:
            found.append(
                f"every global batch of the script's own order once "
                f"({_name_loaders(self.by_batch)}): which samples are in it, and how often, is up "
                "to the sampler"
            )
        if self.by_sample:
            found.append(f"every sample once ({_name_loaders(self.by_sample)})")
        return found

    def as_json(self) -> dict[str, Any]:
        """The report as values for `json.dumps`."""
        verdict = "EVERY SAMPLE ONCE"
        if self.by_batch:
            verdict = "EVERY GLOBAL BATCH ONCE"
        if self.by_position:
            verdict = "EVERY POSITION ONCE"
        if self.findings:
            verdict = "REPEATS OR GAPS"
        return {"verdict": verdict, **asdict(self)}


def _name_loaders(numbers: Sequence[int]) -> str:
    plural = "s" if len(numbers) > 1 else ""
    return f"loader{plural} {', '.join(map(str, numbers))}"


class Row(NamedTuple):
    """What was trained of one global batch: by one rank, or by all of them together."""

    step: int
    loader: int
    epoch: int
    position: int
    total: int
    """Samples of the global batch on all ranks."""
    samples: tuple[Indices, ...]
    """One array a rank."""

    @property
    def written(self) -> int:
        """Samples that are written down."""
        return sum(map(len, self.samples))


@dataclass
class RankFile:
    """One rank's file of one start of the run."""

    name: str
    ranks: int = 0
    loaders: list[dict[str, Any]] = field(default_factory=list)
    beginnings: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """Digests of the first samples of a stream, by its loader and the epoch."""
    parts: list[list[Row]] = field(default_factory=lambda: [[]])
    """What was trained; a new part begins where the run went back to an earlier step."""
    cut: bool = False
    """The last record is not whole."""
    damaged: list[int] = field(default_factory=list)
    """Bytes at which records begin that are not what was written."""


class Attempt(NamedTuple):
    """One start of the run, or what followed when it went back to an earlier step."""

    name: str
    ranks: int
    files: Mapping[int, RankFile]
    """Of the ranks; none where the run went back."""
    rows: Mapping[int, list[Row]]
    """Of the ranks that have a file."""


def judge(folder: str | Path) -> Report:
    """Reads and judges the ledger of a run.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    attempts = read_folder(Path(folder))
    report = Report(str(folder))
    for number, attempt in enumerate(attempts, 1):
        _check_files(attempt, number, report)
    trained_by = _last_words(attempts, report)
    loaders = _loaders(attempts, report)
    epochs = _batches(attempts, trained_by, report)
    _check_beginnings(attempts, epochs, trained_by, report)
    _check_steps(trained_by, report)
    keys = sorted(epochs)
    for key, later in itertools.zip_longest(keys, keys[1:]):
        batches = sorted(epochs[key], key=lambda batch: batch.step)
        following = None
        if later is not None and later[0] == key[0]:
            following = min(epochs[later], key=lambda batch: batch.step)
        _check_epoch(loaders[key[0]], batches, following, trained_by, report)
    return report


def _check_files(attempt: Attempt, number: int, report: Report) -> None:
    for rank in sorted(set(range(attempt.ranks)) - attempt.rows.keys()):
        report.find("LS102", f"start {number}: the file of rank {rank} is missing")
    for rank, file in sorted(attempt.files.items()):
        if file.cut:
            report.notes.append(f"start {number}, rank {rank}: the last record is cut off")
        if file.damaged:
            report.find(
                "LS405",
                f"start {number}, rank {rank}: {count_noun(len(file.damaged), 'record')} of "
                f"{file.name} cannot be read, the first at byte {file.damaged[0]}",
            )


def _last_words(attempts: Sequence[Attempt], report: Report) -> dict[int, int]:
    """The steps that led to the last state, each with the place of the attempt that counts."""
    trained_by: dict[int, int] = {}
    for number, attempt in enumerate(attempts):
        steps = {row.step for rows in attempt.rows.values() for row in rows}
        first, last = min(steps, default=None), max(steps, default=None)
        again = [step for step in trained_by if first is not None and step >= first]
        for step in again:
            del trained_by[step]
        trained_by |= dict.fromkeys(steps, number)
        report.again += len(again)
        report.attempts.append(
            {
                "name": attempt.name,
                "started_ns": int(attempt.name.partition("-")[0]),
                "ranks": attempt.ranks,
                "first": first,
                "last": last,
                "again": len(again),
            }
        )
    report.steps = len(trained_by)
    return trained_by


def _loaders(attempts: Sequence[Attempt], report: Report) -> dict[int, dict[str, Any]]:
    """What is known of each loader; it must be the same in all attempts."""
    found: dict[int, dict[str, Any]] = {}
    said: set[tuple[int, str]] = set()
    for number, attempt in enumerate(attempts, 1):
        for rank, file in sorted(attempt.files.items()):
            for values in file.loaders:
                loader = values["loader"]
                known = found.setdefault(loader, values)
                for name in ("length", "batch_size", "drop_last"):
                    if values[name] != known[name] and (loader, name) not in said:
                        said.add((loader, name))
                        report.find(
                            "LS104" if name == "length" else "LS109",
                            f"loader {loader}: {name} is {values[name]} on rank {rank} of start "
                            f"{number}, and was {known[name]}",
                            loader=loader,
                        )
                if (loader, "data") not in said and _check_data(known, values, number, report):
                    said.add((loader, "data"))
    trained = {row.loader for attempt in attempts for rows in attempt.rows.values() for row in rows}
    for loader in sorted(found.keys() & trained):
        if found[loader]["stream"] is not None:
            report.by_position.append(loader)
        elif found[loader]["own_order"]:
            report.by_batch.append(loader)
        else:
            report.by_sample.append(loader)
    return found


def _check_data(
    known: Mapping[str, Any], values: Mapping[str, Any], number: int, report: Report
) -> bool:
    """Compares the dataset of a loader with that of the first start; True: something differs."""
    if known.get("data") is None or values.get("data") is None:
        return False
    before, now = Fingerprint.from_text(known["data"]), Fingerprint.from_text(values["data"])
    difference = compare(before, now)
    if difference is None:
        return False
    what = f"loader {known['loader']}: the data of start {number} are not those of the first start"
    if difference.other_samples:
        report.find("LS104", f"{what}: {difference.found}", loader=known["loader"])
    else:
        report.notes.append(
            f"loader {known['loader']}: start {number} read the samples in another way, "
            f"{difference.found}; other parts of them, such as the labels, are the same"
        )
    return True


def _check_beginnings(
    attempts: Sequence[Attempt],
    epochs: Mapping[tuple[int, int], Sequence[Row]],
    trained_by: Mapping[int, int],
    report: Report,
) -> None:
    """Compares the first samples of a stream in an epoch that several starts have trained."""
    for (loader, epoch), batches in sorted(epochs.items()):
        first: tuple[int, list[Any]] | None = None
        for number in sorted({trained_by[batch.step] for batch in batches}):
            file = attempts[number].files.get(0)
            beginning = None if file is None else file.beginnings.get((loader, epoch))
            if beginning is None:
                continue
            if first is None:
                first = number, beginning
                continue
            place = differing_sample(first[1], beginning)
            if place is not None:
                what = (
                    f"loader {loader}, epoch {epoch}: in start {number + 1} the stream began with "
                    f"other samples than in start {first[0] + 1}, from sample {place} on, so the "
                    "same position is another sample"
                )
                report.find("LS104", what, loader=loader, epoch=epoch)
                break


def _batches(
    attempts: Sequence[Attempt], trained_by: Mapping[int, int], report: Report
) -> dict[tuple[int, int], list[Row]]:
    """The global batches that count, by loader and epoch; a fault of many steps is said once."""
    epochs: dict[tuple[int, int], list[Row]] = defaultdict(list)
    faults: dict[tuple[int, str], list[Finding]] = defaultdict(list)
    for number, attempt in enumerate(attempts):
        by_batch: dict[tuple[int, int], dict[int, Row]] = defaultdict(dict)
        for rank, parts in sorted(attempt.rows.items()):
            for row in parts:
                if trained_by.get(row.step) == number and row.loader != NO_LOADER:
                    by_batch[row.step, row.loader][rank] = row
        for (step, loader), rows in by_batch.items():
            first = next(iter(rows.values()))
            absent = sorted(attempt.rows.keys() - rows.keys())
            if absent and step == max(trained_by):
                report.notes.append(
                    f"start {number + 1} ended in step {step}, before {format_ranks(absent)} had "
                    "written it down; that step is left out"
                )
                continue
            code, what = _fault(rows, absent, attempt.ranks)
            if code:
                what = f"step {step}: {what}"
                faults[number, code].append(Finding(code, what, step, loader, first.epoch))
                if code == "LS109":  # its parts are of different global batches
                    continue
            samples = tuple(part for row in rows.values() for part in row.samples)
            epochs[loader, first.epoch].append(first._replace(samples=samples))
    for found in faults.values():
        also = f"; so in {len(found)} steps, the last {found[-1].step}" if found[1:] else ""
        report.findings.append(replace(found[0], what=found[0].what + also))
    return epochs


def _fault(rows: Mapping[int, Row], absent: Sequence[int], ranks: int) -> tuple[str, str]:
    """Why what the ranks trained in a step does not make a global batch: code and words."""
    (rank, first), *others = rows.items()
    place = f"global batch {first.position} of epoch {first.epoch}"
    found = sum(row.written for row in rows.values())
    other = next(((r, row) for r, row in others if row[:5] != first[:5]), None)
    if other is not None:
        r, row = other
        here = f"rank {rank} trained {place} ({first.total} samples)"
        there = f"global batch {row.position} of epoch {row.epoch} ({row.total} samples)"
        return "LS109", f"{here}, rank {r} {there}"
    if absent:
        return "LS102", f"{format_ranks(absent)} did not record {place}"
    if len(rows) < ranks or found == first.total:
        return "", ""
    what = f"{place} has {first.total} samples, and the parts of the ranks have {found} together"
    return "LS102" if found < first.total else "LS101", what


def _check_steps(steps: Mapping[int, int], report: Report) -> None:
    if not steps:
        report.notes.append("no optimizer step is written down")
        return
    first, last = min(steps), max(steps)
    if first > 0:
        report.notes.append(f"the ledger begins at step {first}; what was before is not in it")
    missing = sorted(set(range(first, last)) - steps.keys())
    if missing:
        what = (
            f"{count_noun(len(missing), 'step')} not written down: {format_ranges(missing, _SHOWN)}"
        )
        report.find("LS405", what, step=missing[0])


def _check_epoch(
    loader: dict[str, Any],
    batches: Sequence[Row],
    following: Row | None,
    trained_by: Mapping[int, int],
    report: Report,
) -> None:
    """Is every sample in an epoch of a loader, and none twice?

    Args:
        loader: what is known of it.
        batches: those of the epoch's global batches that were trained, by step.
        following: the first global batch of the next epoch that was trained, if there is one.
        trained_by: which attempt trained a step.
        report: where findings and numbers go.
    """
    begin, end = batches[0], batches[-1]
    title = f"loader {loader['loader']} ({loader['dataset']}), epoch {begin.epoch}"

    def find(code: str, what: str, samples: Indices | Sequence[int] = ()) -> None:
        first = tuple(int(sample) for sample in samples[:_SHOWN])
        where = {"loader": loader["loader"], "epoch": begin.epoch, "samples": first}
        report.find(code, f"{title}: {what}", **where)

    positions = {batch.position for batch in batches}
    steps, stop = loader["steps"], max(positions) + 1
    ended = stop == steps
    # Where the ledger begins in this epoch.
    start = begin.position if begin.step == min(trained_by) > 0 else 0
    why = ""
    if following is not None and steps is not None and not ended:
        if trained_by[following.step] == trained_by[end.step]:
            report.notes.append(
                f"loader {loader['loader']}: the script left epoch {begin.epoch} after global "
                f"batch {stop - 1} of {steps}"
            )
        else:
            stop, why = steps, "; the run was then taken up in another epoch"
    missing = sorted(set(range(start, stop)) - positions)
    if missing:
        find("LS102", f"global batches were left out: {format_ranges(missing, _SHOWN)}{why}")
    if loader["own_order"]:
        if len(positions) < len(batches):
            find("LS101", "a global batch of the user's own order was trained twice")
    else:
        whole = not missing and all(batch.written == batch.total for batch in batches)
        wanted = _wanted(loader, batches, start, ended=ended) if whole else range(0)
        twice, absent = repeats_and_gaps(batches, wanted)
        if twice.count:
            first = [_with_steps(sample, batches) for sample in twice.first[: _SHOWN + 1].tolist()]
            number = count_noun(twice.count, "sample")
            find(
                "LS101",
                f"{number} trained more than once: {join_first(first, _SHOWN)}",
                twice.first,
            )
        if absent.count:
            number = count_noun(absent.count, "sample")
            shown = format_ranges(absent.first.tolist(), _SHOWN)
            find("LS102", f"{number} left out: {shown}", absent.first)
    report.epochs.append(
        {
            "loader": loader["loader"],
            "dataset": loader["dataset"],
            "epoch": begin.epoch,
            "samples": sum(batch.written for batch in batches),
            "batches": len(positions),
            "steps": steps,
            "ended": ended,
        }
    )


def _with_steps(sample: int, batches: Sequence[Row]) -> str:
    steps = [str(b.step) for b in batches if any(sample in part for part in b.samples)]
    return f"{sample} (step{'s' * (len(steps) > 1)} {', '.join(steps)})"


def _wanted(loader: dict[str, Any], batches: Sequence[Row], start: int, *, ended: bool) -> range:
    """Where no global batch is missing: the samples that have to be in one."""
    if loader["stream"] is None and ended and not start and not loader["drop_last"]:
        return range(loader["length"])
    if loader["stream"] in ("whole", "seek"):  # a stream of a rank's own has no numbers in a row
        last = max(int(part.max()) for b in batches for part in b.samples if len(part))
        return range(start * loader["batch_size"], last + 1)
    return range(0)


class Some:
    """Samples that are counted, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first = np.empty(0, np.int64)

    def add(self, samples: Indices) -> None:
        """Some more, each of them once."""
        self.count += len(samples)
        self.first = np.sort(np.concatenate([self.first, samples]))[:_KEPT]


def repeats_and_gaps(
    batches: Sequence[Row], wanted: range, at_once: int = _AT_ONCE
) -> tuple[Some, Some]:
    """The samples that are in two places, and those of `wanted` that are in none.

    Memory does not grow with the epoch: of the samples those are compared that leave the same
    remainder, about `at_once` at a time.
    """
    total = max(len(wanted), sum(batch.written for batch in batches))
    parts = [part for batch in batches for part in batch.samples]
    divisor, twice, absent = max(1, -(-total // at_once)), Some(), Some()
    for rest in range(divisor):
        samples = np.concatenate([part[part % divisor == rest] for part in parts])
        distinct, counts = np.unique(samples, return_counts=True)
        twice.add(distinct[counts > 1])
        first = wanted.start + (rest - wanted.start) % divisor
        due = np.arange(first, wanted.stop, divisor, dtype=np.int64)
        absent.add(np.setdiff1d(due, distinct, assume_unique=True))
    return twice, absent


def read_folder(folder: Path) -> list[Attempt]:
    """The attempts in a folder, in the order in which they were started.

    Raises:
        CheckpointError: there is no ledger, or one of a later version.
    """
    starts: dict[str, dict[int, RankFile]] = defaultdict(dict)
    for path in sorted(folder.glob(f"*{_NAME}*{SUFFIX}")):
        # The name alone tells as much of a file that was cut off at its very beginning.
        name, _, rank = path.name.removesuffix(SUFFIX).rpartition(_NAME)
        starts[name][int(rank)] = read_file(path)
    if not starts:
        raise CheckpointError(
            f"the ledger {folder}",
            "the folder holds none" if folder.is_dir() else "there is no such folder",
            "train with lockstep run --ledger FOLDER, and give that folder",
        )
    attempts = []
    for name, files in starts.items():
        ranks = max(file.ranks for file in files.values())
        of_ranks = (file.parts for file in files.values())
        for n, parts in enumerate(zip_longest(*of_ranks, fillvalue=[])):
            rows = dict(zip(files, parts, strict=True))
            attempts.append(Attempt(name, ranks, {} if n else files, rows))
    return attempts


def read_file(path: Path) -> RankFile:
    """One rank's file.

    Raises:
        CheckpointError: it is of a later version, or cannot be opened.
    """
    file = RankFile(path.name)
    try:
        with path.open("rb") as opened:
            mapped = path.stat().st_size  # of nothing there is no map
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if mapped else b""
    except OSError as error:
        raise CheckpointError(
            f"the ledger {path.parent}",
            f"{path.name} cannot be read: {error}",
            "make it readable, or copy the folder",
        ) from error
    for begin, end in _records(data, file):
        if data[begin : begin + 1] == b"S":
            after = begin + 1 + STEP.size
            samples = np.frombuffer(data, "<i8", (end - after) // 8, after)
            step, loader, epoch, position, total = STEP.unpack_from(data, begin + 1)
            if file.parts[-1] and step < file.parts[-1][-1].step:
                file.parts.append([])
            file.parts[-1].append(Row(step, loader, epoch, position, total, (samples,)))
            continue
        values = json.loads(data[begin + 1 : end])
        if "loader" in values:
            file.loaders.append(values)
        elif "stream" in values:
            file.beginnings[values["stream"], values["epoch"]] = values["beginning"]
        elif values["ledger"] == FORMAT:
            file.ranks = values["ranks"]
        else:
            raise CheckpointError(
                f"the ledger {path.parent}",
                f"{path.name} is of version {values['ledger']}, and {FORMAT} is read here",
                "read it with the Lockstep that wrote it",
            )
    return file


def _records(data: bytes | mmap.mmap, file: RankFile) -> Iterator[tuple[int, int]]:
    """Where each whole record begins and ends; behind a damaged one the next is looked for."""
    at = 0
    while at < len(data):
        begin = at + FRAME.size
        if end := _end_of_record(data, at):
            yield begin, end
            at = end
            continue
        later = (kind.start() - FRAME.size for kind in _KIND.finditer(data, begin + 1))
        following = next((place for place in later if _end_of_record(data, place)), None)
        length = FRAME.unpack(data[at:begin])[0] if begin <= len(data) else 0
        if following is not None or (length and begin + length < len(data)):
            file.damaged.append(at)
        if following is None:
            file.cut = True
            return
        at = following


def _end_of_record(data: bytes | mmap.mmap, at: int) -> int:
    """Where the record that begins there ends; 0: none does."""
    begin = at + FRAME.size
    if not _KIND.match(data, begin):
        return 0
    length, checksum = FRAME.unpack(data[at:begin])
    end = begin + length
    whole = begin < end <= len(data) and zlib.crc32(memoryview(data)[begin:end]) == checksum
    return end if whole else 0
