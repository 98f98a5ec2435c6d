"""Reads what the ranks of a run have written down, and what their launchers have.

Needs no torch. A file may still grow: reading it again costs as much as what has been added.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import CheckpointError
from lockstep.step import PHASES
from lockstep.wording import join_first

FORMAT = 1
NAME, SUFFIX = ".rank", ".record"
LAUNCHER = ".launcher"
"""In the name of a launcher's file."""
COLUMNS = (
    "step", "steps", "at", "longest_s", "loss", "learning_rate", "samples", "memory", "sent",
    "shared", *PHASES,
)  # fmt: skip
"""Of a row: the number of its last step, from 1; how many steps it is of; seconds from the start of
the record; seconds of the longest step; the mean over its steps of this rank's part of the loss,
whose mean over the ranks is the loss of the global batch; the learning rate; samples on all ranks;
the most memory so far, in bytes; bytes sent to other ranks and written into shared memory since the
start; and seconds spent on each phase, in all of its steps."""
_COLUMN = {name: number for number, name in enumerate(COLUMNS)}
_LOSS = _COLUMN["loss"]
OWN = tuple(phase for phase in PHASES if phase != "communication")
"""The phases in which a rank does not wait for others."""

_ENDS = {"failure": "failed", "interrupted": "interrupted", "end": "ok"}
"""What the line of a launcher says of how a start has ended."""

Floats = npt.NDArray[np.float64]


_BEGUN = {"ranks": 0.0, "time": 0.0, "host": "", "command": [""]}
_SCHEMA: dict[str, dict[str, Any]] = {
    "record": _BEGUN,
    "choices": {"choices": [("", "", "")]},
    "logged": {"logged": {"": math.nan}, "training": True, "pass": "", "step": 0.0},
    "warning": {"warning": "", "step": 0.0},
    "end": {"end": ""},
    "kind": {"kind": "", "time": 0.0, "text": "", "host": ""},
    "start": {"kind": "", "text": "", **_BEGUN},
}
"""What a line that is no row is like: the first of them that it has says of what kind it is."""


def _matches(value: Any, form: Any) -> bool:
    """Whether it has the types of the form, and the names of a dict or any names for `""`, the
    length of a tuple, and finite numbers, or any for NaN.
    """
    match form:
        case {"": of}:
            return isinstance(value, dict) and all(_matches(v, of) for v in value.values())
        case dict():
            return isinstance(value, dict) and all(
                _matches(value.get(n), of) for n, of in form.items()
            )
        case tuple():
            return _matches(value, [""]) and len(value) == len(form)
        case list():
            return isinstance(value, list) and all(_matches(v, form[0]) for v in value)
        case float():
            finite = isinstance(value, int | float) and abs(value) < 2**63
            return finite or (math.isnan(form) and isinstance(value, float))
    return isinstance(value, type(form))


def _parse(line: bytes) -> Any:
    """What a line says, a row in floats; None: nothing."""
    with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
        value = json.loads(line)
        if b"\\ud" in line:  # halves of what is no text, such as bytes of a file's name
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        if isinstance(value, list):
            row = [math.nan if number is None else float(number) for number in value]
            others = sum(row[:_LOSS]) + sum(row[_LOSS + 2 :])  # loss and rate may be not finite
            whole = len(row) == len(COLUMNS) and row[1] > 0 and math.isfinite(others)
            return row if whole else None
        kind = next((kind for kind in _SCHEMA if kind in value), "")
        if kind == "kind" and value[kind] == "start":
            kind = "start"
        later = kind == "record" and isinstance(value[kind], int) and value[kind] > FORMAT
        return value if kind and (later or _matches(value, _SCHEMA[kind])) else None
    return None


class _Lines:
    """A file of lines of JSON that may still grow."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.unread = 0
        """Lines that were not understood, as of a disk that was full, and then was not."""

    def new(self) -> Iterator[Any]:
        """The values of the whole lines that have been added."""
        with open(self._path, "rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._at += whole
        for line in data[:whole].splitlines():
            value = _parse(line)
            if value is None:
                self.unread += 1
            else:
                yield value


def evaluation_name(told: dict[str, Any]) -> str:
    """Which one it was: what its pass is called, where that is not the number of the epoch."""
    return re.sub(r"^(epoch \d+)?$", "evaluation", told["pass"])


@dataclass
class RankRecord:
    """What one rank has written in one start of the run."""

    rank: int
    about: dict[str, Any] = field(default_factory=dict)
    """The first line: `host`, `device`, `command`, ...; empty: it was not written."""
    choices: list[list[str]] = field(default_factory=list)
    """Name, value and reason of each."""
    logged: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    end: str | None = None
    """`ok` or `failed`; None: it was killed, or still runs."""
    rows: list[list[float]] = field(default_factory=list)

    def add(self, line: Any) -> None:
        """Takes up a line of the file."""
        if isinstance(line, list):
            self.rows.append(line)
        elif "record" in line:
            self.about = line
        elif "choices" in line:
            self.choices += line["choices"]
        elif "logged" in line:
            self.logged.append(line)
        elif "warning" in line:
            self.warnings.append(line)
        elif "end" in line:
            self.end = line["end"]

    def column(self, name: str) -> Floats:
        """The values of a column, one a row."""
        return np.array([row[_COLUMN[name]] for row in self.rows], dtype=np.float64)

    def seconds(self, phases: Sequence[str] = PHASES) -> Floats:
        """Of each row, in some of the phases together."""
        summed: Floats = np.sum([self.column(p) for p in phases], axis=0, dtype=np.float64)
        return summed

    def curves(self) -> dict[str, Floats]:
        """What is drawn over the steps, but for the loss: by name, a value a row."""
        seconds = self.seconds()
        return {
            "learning_rate": self.column("learning_rate"),
            "samples_per_second": self.column("samples") / seconds.clip(1e-12),
            "seconds_per_step": seconds / self.column("steps"),
            "memory_bytes": self.column("memory"),
        }


@dataclass
class Start:
    """One start of the run."""

    name: str
    records: dict[int, RankRecord] = field(default_factory=dict)
    joined: bool = True
    """The ranks came to `lockstep.init`; if not, all that is known is what the launcher wrote."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """What the launchers have written from here to the next start: `kind`, `text`, `host`, `time`;
    `by`, the name of the file."""

    @property
    def time(self) -> float:
        """When it began, as `time.time()`."""
        return int(self.name.partition("-")[0]) / 1e9

    @property
    def main(self) -> RankRecord:
        """That of rank 0, or of the first that there is."""
        return self.records[min(self.records)]

    @property
    def ranks(self) -> int:
        """How many the run had, whether they have written or not."""
        told = (int(record.about["ranks"]) for record in self._written())
        return max([len(self.records), *told])

    @property
    def last_time(self) -> float:
        """When its last row was written, or it began."""
        written = [record for record in self._written() if record.rows]
        ends = [float(r.about["time"]) + r.rows[-1][_COLUMN["at"]] for r in written]
        return max([self.time, *ends])

    @property
    def end(self) -> str | None:
        """`ok`: all ranks came to the end; `failed`: one has failed; `interrupted`: by a signal to
        the launcher; `restarted`: with other machines; None: nobody has said it.
        """
        kinds = [told["kind"] for told in self.told]
        said = {_ENDS[kind] for kind in kinds if kind in _ENDS}
        for end in ("interrupted", "failed"):
            if end in said:
                return end
        if "restart" in kinds:
            return "restarted"
        ends = {record.end for record in self.records.values()}
        if "failed" in ends:
            return "failed"
        all_well = ends == {"ok"} and len(self.records) == self.ranks
        return "ok" if "ok" in said or all_well else None

    def loss(self) -> tuple[Floats, Floats]:
        """Steps, and the loss of their global batches: the mean over the ranks that count.

        Rows that not all of them have written yet are left out; without a rank's file, all are.
        """
        counting = [r for r in self._written() if r.about.get("contributes")]
        if not counting or len(self._written()) < self.ranks:
            return np.empty(0), np.empty(0)
        by_rank = [dict(zip(zip(r.column("step").tolist(), r.column("steps").tolist(), strict=True),
                            r.column("loss").tolist(), strict=True)) for r in counting]  # fmt: skip
        keys = [key for key in by_rank[0] if all(key in others for others in by_rank[1:])]
        losses = np.array([np.mean([losses[key] for losses in by_rank]) for key in keys])
        if np.isnan(losses).all():  # it was not given to `World.backward`
            return np.empty(0), np.empty(0)
        return np.array([key[0] for key in keys]), losses

    def _written(self) -> list[RankRecord]:
        return [record for record in self.records.values() if record.about]


class Record:
    """All that is in a folder.

    Args:
        folder: that `lockstep run --report` was given.

    Raises:
        CheckpointError: there is no record, or one of a later version.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.starts: list[Start] = []
        self._of_ranks: dict[str, Start] = {}
        self._of_launchers: dict[str, list[dict[str, Any]]] = {}
        self._lines: dict[str, _Lines] = {}
        self.refresh()
        if not self.starts:
            inside = sorted({path.parent.name for path in self.folder.glob(f"*/*{SUFFIX}")})
            found = "the folder holds none" if self.folder.is_dir() else "there is no such folder"
            do = "train with lockstep run --report FOLDER, and give that folder"
            if inside:
                do = f"give one of the folders in it that hold one: {join_first(inside)}"
            if self.folder.is_file():
                found, do = "it is a file", f"give its folder: {self.folder.parent}"
            raise CheckpointError(f"the record of a run in {self.folder}", found, do)

    def refresh(self) -> bool:
        """Reads what has been added since; whether that was anything.

        Raises:
            CheckpointError: it cannot be read, or is of a later version.
        """
        changed = False
        try:
            for path in sorted(self.folder.glob(f"*{SUFFIX}")):
                name, _, rank = path.name.removesuffix(SUFFIX).rpartition(NAME)
                lines = self._lines.setdefault(path.name, _Lines(path)).new()
                if not (rank.isdecimal() and name.partition("-")[0].isdecimal()):
                    told = self._of_launchers.setdefault(path.name, [])
                    before = len(told)
                    told += [{**line, "by": path.name} for line in lines if "kind" in line]
                    changed |= len(told) > before
                    continue
                # A file that is still empty tells that there is such a rank.
                start = self._of_ranks.setdefault(name, Start(name))
                record = start.records.setdefault(int(rank), RankRecord(int(rank)))
                for line in lines:
                    changed = True
                    if isinstance(line, dict) and line.get("record", FORMAT) != FORMAT:
                        raise CheckpointError(
                            f"the record of a run in {self.folder}",
                            f"{path.name} is of version {line['record']}, and {FORMAT} is read",
                            "read it with the Lockstep that wrote it",
                        )
                    record.add(line)
        except OSError as error:
            raise CheckpointError(
                f"the record of a run in {self.folder}",
                f"it cannot be read: {error}",
                "make it readable, or copy the folder",
            ) from error
        every = [*self._of_ranks.values(), *self._not_joined()]
        self.starts = sorted(every, key=lambda start: start.name)
        told = sorted((t for of in self._of_launchers.values() for t in of), key=itemgetter("time"))
        for start, after in zip(self.starts, [*self.starts[1:], None], strict=False):
            start.told = [
                t
                for t in told
                if t["kind"] != "start"
                and (start is self.starts[0] or t["time"] >= start.time)
                and (after is None or t["time"] < after.time)
            ]
        return changed

    @property
    def unread(self) -> int:
        """Lines that were not understood."""
        return sum(lines.unread for lines in self._lines.values())

    @property
    def over(self) -> bool:
        """The last start has ended, and its launcher, where it had one, begins no other."""
        last, before = self.starts[-1], self.starts[-2].time if self.starts[1:] else -math.inf
        told = (t for of in self._of_launchers.values() for t in of if t["kind"] == "start")
        kinds = {t["kind"] for t in last.told}
        if any(before < t["time"] <= last.time for t in told):
            return bool(kinds & _ENDS.keys()) and "restart" not in kinds
        return last.end is not None

    def _not_joined(self) -> Iterator[Start]:
        """Those of which no rank came to `lockstep.init`, as far as launchers know of them."""
        times = [start.time for start in self._of_ranks.values()]
        for told in self._of_launchers.values():
            for number, line in enumerate(told):
                if line["kind"] != "start":
                    continue
                ends = (t["time"] for t in told[number + 1 :] if t["kind"] in _ENDS)
                until = next(ends, math.inf)
                if not any(line["time"] <= time <= until for time in times):
                    name = f"{int(line['time'] * 1e9):020d}-{line['by']}"
                    yield Start(name, {0: RankRecord(0, line)}, joined=False)
