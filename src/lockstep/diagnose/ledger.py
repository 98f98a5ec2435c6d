"""Judges a sample ledger: was every sample of every epoch trained once, over all restarts?

Where a run was started again from a checkpoint, the steps from there on were trained again by the
later attempt, from a state that knew nothing of the earlier ones. So the later attempt's records
take their place, and what is judged is the row of steps that led to the last state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.diagnose.ledger_epoch import SHOWN, Batch, Epoch, Finding, counted
from lockstep.diagnose.ledger_files import Attempt, Row, read_folder
from lockstep.errors import name_ranks, reference, spans

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
