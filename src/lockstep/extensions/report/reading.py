"""Reads the record of a run: what its ranks and its launchers wrote down.

A `Record` is one folder. It has one or several *starts*, since a run may be started again after a
failure, and each `Start` has the file of every rank (`RankRecord`) and the lines that the launchers
wrote meanwhile. A *row* covers one or several optimizer steps; `record_format` lists its columns.

A file may still grow while it is read: reading the folder again costs as much as what was added.
Torch is not needed here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.distributed.rank_files import start_and_rank
from lockstep.errors import CheckpointError
from lockstep.extensions.report.record_format import (
    COLUMN_INDEX,
    FORMAT_VERSION,
    RECORD_SUFFIX,
    Row,
    parse_line,
)
from lockstep.session.extension import PHASES
from lockstep.wording import join_first

Floats = npt.NDArray[np.float64]
LauncherLine = dict[str, Any]
"""What a launcher wrote: `kind`, `text`, `host`, `time`, and `file`, the name of the file.

Its kinds are `start` (it starts the ranks), `failure`, `interrupted` (by a signal), `restart` (it
is about to start the ranks again), `end` (all ranks ended well) and `finding` (what the watchdog
saw)."""

_ENDING_OF_KIND = {"failure": "failed", "interrupted": "interrupted", "end": "ok"}
"""The kinds of launchers' lines that end a start, and how the start has ended then."""


class _GrowingFile:
    """A file of lines to which another process may still add."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.num_unread_lines = 0
        """How many lines were not understood."""

    def read_new_lines(self) -> Iterator[Row | dict[str, Any]]:
        """Yields the row or object of each complete line that was added since the last call."""
        with open(self._path, "rb") as file:
            file.seek(self._position)
            data = file.read()

        # The last line may not be whole yet; it is read again by the next call.
        complete_bytes = data.rfind(b"\n") + 1
        self._position += complete_bytes
        for line in data[:complete_bytes].splitlines():
            value = parse_line(line)
            if value is None:
                self.num_unread_lines += 1
            else:
                yield value


CURVES_OF_RECORDS = (
    "loss",
    "learning_rate",
    "samples_per_second",
    "seconds_per_step",
    "memory_bytes",
)
"""The curves that a record has without `World.log`."""


class LossRow(NamedTuple):
    """The loss of one row: the mean over its steps and over the ranks."""

    step: int
    """The last step of the row."""
    num_steps: int
    loss: float

    @property
    def first_step(self) -> int:
        """The first step of the row."""
        return self.step - self.num_steps + 1


class LoggedMean(NamedTuple):
    """The mean over the ranks of what the script has logged under one name, at one time."""

    step: int
    name: str
    kind: str
    """`training`, the description that the script gave its evaluation, or `evaluation` if it gave
    none; empty for a value that was logged outside of any loop. Of several loaders that are
    evaluated after one step and have values of one name, the second has `evaluation 2`."""
    mean: float
    weight: float
    """What the mean weighs: a number of samples, or of ranks outside of any loop."""

    @property
    def title(self) -> str:
        """What to call its curve, such as `accuracy (validation)`."""
        return f"{self.name} ({self.kind})" if self.kind else self.name


class _NumberedKinds:
    """Numbers the kinds of values of which several loaders have values with one name.

    Two loaders may be evaluated after step 30. If both have an `accuracy` of the kind "evaluation",
    the values of the second one get the kind "evaluation 2".
    """

    def __init__(self) -> None:
        self._loaders: dict[tuple[str, str, float], list[int]] = {}
        """The loaders so far with values of a name, a kind and a step, in this order."""

    def numbered(self, kind: str, name: str, step: float, loader: int | None) -> str:
        """Returns the kind of a value, with a number if another loader had such a value before.

        Args:
            kind: the kind without a number, such as "evaluation".
            name: the name of the value.
            step: the number of steps before the value was logged.
            loader: the number of the value's loader; None outside of any loop, where no number is
                needed.
        """
        if loader is None:
            return kind

        loaders = self._loaders.setdefault((name, kind, step), [])
        if loader not in loaders:
            loaders.append(loader)
        number = loaders.index(loader) + 1
        return kind if number == 1 else f"{kind} {number}"


def _kind_of_values(line: dict[str, Any], name: str) -> str:
    """Returns what stands in parentheses behind the name of a curve, or "" for nothing.

    - A value `accuracy` from a training loop has the curve `accuracy (training)`.
    - From an evaluation that the script called "validation": `accuracy (validation)`.
    - From an evaluation without a name: `accuracy (evaluation)`.
    - From outside of any loop: `accuracy`. But a value with the name of a curve of the record
      itself (`CURVES_OF_RECORDS`), such as `loss`, has `loss (logged)`.
    """
    is_outside_of_loops = "loader" not in line
    if is_outside_of_loops:
        return "logged" if name in CURVES_OF_RECORDS else ""

    if line["training"]:
        return "training"

    # The description of the pass in its progress bar: the name that the script gave the evaluation;
    # without a name, the number of the epoch, such as `epoch 3`, or nothing.
    description: str = line["pass"]
    is_number_of_epoch = re.fullmatch(r"epoch \d+", description) is not None
    has_name_from_script = description != "" and not is_number_of_epoch
    return description if has_name_from_script else "evaluation"


@dataclass
class RankRecord:
    """What one rank wrote in one start of the run."""

    rank: int
    header: dict[str, Any] = field(default_factory=dict)
    """The first line of the file: `host`, `device`, `command`, ...; empty if it is missing."""
    choices: list[list[str]] = field(default_factory=list)
    """A [name, value, reason] for each choice that the run printed."""
    logged: list[dict[str, Any]] = field(default_factory=list)
    """The means that this rank passed to `World.log`."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    gpu_uses: list[dict[str, Any]] = field(default_factory=list)
    """How much the rank's GPU was used: `gpu` in percent, `gpu_memory` in bytes, at a `step`."""
    traces: list[dict[str, Any]] = field(default_factory=list)
    """The files into which a step was traced."""
    end: str | None = None
    """`ok` or `failed`; None if the rank was killed or still runs."""
    has_lost_lines: bool = False
    """True if the rank could not read from its device what it had logged last."""
    rows: list[list[float]] = field(default_factory=list)
    rows_have_loss: list[bool] = field(default_factory=list)
    """For each row, whether the script gave a loss to `World.backward` in its steps."""

    def add(self, line: Any) -> None:
        """Adds a row or an object that was read from the file."""
        if isinstance(line, Row):
            self.rows.append(line.values)
            self.rows_have_loss.append(line.has_loss)
        elif "record" in line:  # the version of the format, which only the first line has
            self.header = line
        elif "choices" in line:
            self.choices += line["choices"]
        elif "logged" in line:
            self.logged.append(line)
        elif "warning" in line:
            self.warnings.append(line)
        elif "gpu" in line:
            self.gpu_uses.append(line)
        elif "trace" in line:
            self.traces.append(line)
        elif "end" in line:
            self.end = line["end"]

            # The last values were lost if the rank's GPU failed before they could be read.
            self.has_lost_lines = bool(line.get("lost", False))
        # Any other object is of a kind that no rank writes, and is left out.

    def is_past(self, step: float) -> bool:
        """Returns True if the rank writes nothing more about this step or an earlier one."""
        if self.end is not None and not self.has_lost_lines:
            return True
        has_later_row = bool(self.rows) and self.rows[-1][COLUMN_INDEX["step"]] > step
        has_later_values = bool(self.logged) and self.logged[-1]["step"] > step
        return has_later_row or has_later_values

    def column(self, name: str) -> Floats:
        """Returns one column of `COLUMNS`, with one value per row."""
        index = COLUMN_INDEX[name]
        return np.array([row[index] for row in self.rows], dtype=np.float64)

    def seconds(self, phases: Sequence[str] = PHASES) -> Floats:
        """Returns the seconds that each row spent in the given phases together."""
        by_phase = [self.column(phase) for phase in phases]
        total: Floats = np.sum(by_phase, axis=0, dtype=np.float64)
        return total

    def loss_by_steps(self) -> dict[tuple[float, float], float]:
        """Returns the loss of each row that has one, by the steps that the row covers.

        The key is the last step and the number of steps: (10, 4) for a row over steps 7 to 10.
        """
        last_step_of_row = self.column("step").tolist()
        num_steps_of_row = self.column("steps").tolist()
        loss_of_row = self.column("loss").tolist()

        losses: dict[tuple[float, float], float] = {}
        for row, has_loss in enumerate(self.rows_have_loss):
            if has_loss:
                losses[last_step_of_row[row], num_steps_of_row[row]] = loss_of_row[row]
        return losses

    def curves(self) -> dict[str, Floats]:
        """Returns all curves over the steps except the loss: by name, one value per row."""
        seconds = self.seconds()
        samples = self.column("samples")
        if not samples.any():  # they are not known without a prepared loader
            samples = np.full_like(samples, np.nan)
        return {
            "learning_rate": self.column("learning_rate"),
            "samples_per_second": samples / seconds.clip(1e-12),  # no division by 0
            "seconds_per_step": seconds / self.column("steps"),
            "memory_bytes": self.column("memory"),
        }


@dataclass
class Start:
    """One start of the run: from the moment its ranks were started to their end."""

    name: str
    """The beginning of the names of the start's files: its time in nanoseconds, `-`, an id."""
    records: dict[int, RankRecord] = field(default_factory=dict)
    """The records of the ranks in this start, by rank."""
    reached_init: bool = True
    """False if no rank reached `lockstep.init`: then only the launcher wrote about this start."""
    launcher_lines: list[LauncherLine] = field(default_factory=list)
    """What launchers wrote from this start to the next one, in the order of time."""

    @property
    def time(self) -> float:
        """When the start began, as `time.time()`."""
        nanoseconds = self.name.partition("-")[0]
        return int(nanoseconds) / 1e9

    @property
    def main(self) -> RankRecord:
        """The record of rank 0, or of the lowest rank if rank 0 wrote none."""
        return self.records[min(self.records)]

    @property
    def num_ranks(self) -> int:
        """How many ranks this start had, including those whose files are missing."""
        sizes = [int(record.header["ranks"]) for record in self._records_with_header()]
        return max([len(self.records), *sizes])

    @property
    def last_time(self) -> float:
        """When the last row was written, or when the start began if there is no row."""
        latest = self.time
        for record in self._records_with_header():
            if record.rows:
                seconds_to_last_row = record.rows[-1][COLUMN_INDEX["at"]]
                latest = max(latest, float(record.header["time"]) + seconds_to_last_row)
        return latest

    @property
    def end(self) -> str | None:
        """How the start ended, by what its launchers and its ranks wrote.

        `ok` if all ranks ended well, `failed` if one of them failed, `interrupted` if a signal to
        the launcher ended it, `restarted` if the launcher began again with other machines, None if
        nobody wrote anything about the end.
        """
        launcher_kinds = {line["kind"] for line in self.launcher_lines}
        rank_ends = {record.end for record in self.records.values()}

        # Launchers come first: a rank that is ended from outside may write that it has failed.
        if "interrupted" in launcher_kinds:
            return "interrupted"
        if "failure" in launcher_kinds:
            return "failed"
        if "restart" in launcher_kinds:
            return "restarted"
        if "failed" in rank_ends:
            return "failed"

        all_ranks_ended_well = rank_ends == {"ok"} and len(self.records) == self.num_ranks
        if "end" in launcher_kinds or all_ranks_ended_well:
            return "ok"
        return None

    @property
    def logged(self) -> list[LoggedMean]:
        """What the script has logged, as means over the ranks, sorted by step.

        As long as a rank may still write its part of a mean, the list ends before that mean. So a
        later call returns the same list with more at its end. For example, if rank 1 has written
        nothing about step 30 yet, the list ends with step 20. It is empty if the file of a rank is
        missing.
        """
        records = self._contributing_records()
        means: list[LoggedMean] = []
        kinds = _NumberedKinds()
        for line_by_rank in _lines_of_all_ranks(records):
            lines = list(line_by_rank.values())
            step = min(line["step"] for line in lines)

            ranks_without_line = [each for each in records if each.rank not in line_by_rank]
            may_still_write_one = [each for each in ranks_without_line if not each.is_past(step)]
            if may_still_write_one:
                return means

            # All lines of a group are about the same loop, or were logged outside of any.
            loader = lines[0].get("loader")  # None outside of any loop
            for name, (mean, weight) in _average(lines).items():
                kind = kinds.numbered(_kind_of_values(lines[0], name), name, step, loader)
                means.append(LoggedMean(int(step), name, kind, mean, weight))
        return means

    def loss(self) -> tuple[Floats, Floats]:
        """Returns the steps and the loss of their global batches: the mean over the ranks.

        Both arrays have one value for each of `loss_rows`.
        """
        rows = self.loss_rows()
        steps = np.array([row.step for row in rows], dtype=np.float64)
        losses = np.array([row.loss for row in rows], dtype=np.float64)
        return steps, losses

    def loss_rows(self) -> list[LossRow]:
        """Returns the loss of each row of the record, in which steps are averaged.

        Ranks that only repeat the work of another rank, as in a pipeline, are left out. So are rows
        that some rank has not written yet, and steps in which the script did not call
        `World.backward`, which is given the loss. The list is empty if the file of a rank is
        missing.
        """
        # For each rank, `{(last step of a row, number of its steps): loss}`.
        losses_of_ranks = [record.loss_by_steps() for record in self._contributing_records()]
        if not losses_of_ranks:
            return []

        # Rows of two ranks belong together if they cover the same steps.
        found: list[LossRow] = []
        for covered_steps in losses_of_ranks[0]:
            all_ranks_have_row = all(covered_steps in losses for losses in losses_of_ranks)
            if all_ranks_have_row:
                last_step, num_steps = covered_steps
                mean = np.mean([losses[covered_steps] for losses in losses_of_ranks])
                found.append(LossRow(int(last_step), int(num_steps), float(mean)))
        return found

    def _records_with_header(self) -> list[RankRecord]:
        return [record for record in self.records.values() if record.header]

    def _contributing_records(self) -> list[RankRecord]:
        """Returns the records of the ranks whose means count, in the order of the ranks.

        Ranks that only repeat the work of another rank, as in a pipeline, are left out. The list is
        empty if the file of a rank is missing, or its first line.
        """
        records = self._records_with_header()
        if len(records) < self.num_ranks:
            return []
        records.sort(key=lambda record: record.rank)
        return [record for record in records if record.header.get("contributes")]


class Record:
    """All that is in the folder of a record.

    Args:
        folder: the folder that was given to `lockstep run --report`.

    Raises:
        CheckpointError: there is no record, or one of another version.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.starts: list[Start] = []
        """In the order of time."""
        self._starts_of_ranks: dict[str, Start] = {}
        """The starts that reached `lockstep.init`, by their names."""
        self._launcher_lines: dict[str, list[LauncherLine]] = {}
        """The lines of each launcher, by the name of its file."""
        self._files: dict[str, _GrowingFile] = {}
        self.refresh()
        if not self.starts:
            raise _no_record(self.folder)

    def refresh(self) -> bool:
        """Reads what was added since the last call; returns True if there was anything.

        Raises:
            CheckpointError: the folder cannot be read, or its record is of another version.
        """
        num_lines = 0
        try:
            for path in sorted(self.folder.glob(f"*{RECORD_SUFFIX}")):
                num_lines += self._read_file(path)
        except OSError as error:
            raise CheckpointError(
                f"the record of a run in {self.folder}",
                f"it cannot be read: {error}",
                "make it readable, or copy the folder",
            ) from error

        # Starts that failed very early have no file of a rank: only a launcher wrote of them.
        starts = [*self._starts_of_ranks.values(), *self._starts_without_ranks()]
        self.starts = sorted(starts, key=lambda start: start.name)
        self._assign_launcher_lines()
        return num_lines > 0

    def _read_file(self, path: Path) -> int:
        """Adds the new lines of one file to what is known of its rank or launcher.

        Returns:
            How many lines were added. A line that is not understood is not among them.

        Raises:
            CheckpointError: the file is of another version.
        """
        if path.name not in self._files:
            self._files[path.name] = _GrowingFile(path)
        lines = list(self._files[path.name].read_new_lines())

        found = start_and_rank(path.name, RECORD_SUFFIX)
        if found is None:
            return self._add_launcher_lines(path.name, lines)

        start_name, rank = found
        record = self._record_of_rank(start_name, rank)
        for line in lines:
            self._check_version(line, path.name)
            record.add(line)
        return len(lines)

    def _check_version(self, line: Row | dict[str, Any], file_name: str) -> None:
        """Raises CheckpointError if a line is the first one of a file of another version."""
        # Only the first line of a file has the version, under the key "record".
        if isinstance(line, Row) or "record" not in line:
            return
        if line["record"] != FORMAT_VERSION:
            raise CheckpointError(
                f"the record of a run in {self.folder}",
                f"{file_name} is of version {line['record']}, and {FORMAT_VERSION} is read",
                "read it with the Lockstep that wrote it",
            )

    def _record_of_rank(self, start_name: str, rank: int) -> RankRecord:
        """Returns the record of a rank in a start; makes an empty one if there is none yet."""
        if start_name not in self._starts_of_ranks:
            self._starts_of_ranks[start_name] = Start(start_name)
        start = self._starts_of_ranks[start_name]
        if rank not in start.records:
            start.records[rank] = RankRecord(rank)
        return start.records[rank]

    def _add_launcher_lines(self, file_name: str, lines: Sequence[Any]) -> int:
        """Adds the new lines of a launcher's file; returns how many there were."""
        if file_name not in self._launcher_lines:
            self._launcher_lines[file_name] = []
        num_lines = 0
        for line in lines:
            # A launcher gives each of its lines a kind. A line without one, such as the row of a
            # rank, got into this file by mistake.
            if "kind" in line:
                self._launcher_lines[file_name].append({**line, "file": file_name})
                num_lines += 1
        return num_lines

    def _assign_launcher_lines(self) -> None:
        """Sets the `launcher_lines` of each start: the lines from its time to the next start's."""
        lines = [line for line in self._all_launcher_lines() if line["kind"] != "start"]
        lines.sort(key=lambda line: line["time"])
        for index, start in enumerate(self.starts):
            # Lines from before the first start belong to the first start.
            begin = start.time if index > 0 else -math.inf
            is_last = index == len(self.starts) - 1
            end = math.inf if is_last else self.starts[index + 1].time
            start.launcher_lines = [line for line in lines if begin <= line["time"] < end]

    def _all_launcher_lines(self) -> list[LauncherLine]:
        all_lines = []
        for lines in self._launcher_lines.values():
            all_lines += lines
        return all_lines

    @property
    def num_unread_lines(self) -> int:
        """How many lines of all files were not understood."""
        return sum(file.num_unread_lines for file in self._files.values())

    @property
    def is_over(self) -> bool:
        """True if the last start has ended and its launcher, if it had one, starts no other."""
        last = self.starts[-1]
        if not self._has_launcher(last):
            return last.end is not None

        # A line of the kind "failure", "interrupted" or "end" says that the start has ended. After
        # a failure the launcher may start the ranks again, and then there is a line "restart" too.
        kinds = {line["kind"] for line in last.launcher_lines}
        kinds_that_end_a_start = _ENDING_OF_KIND.keys()
        start_has_ended = not kinds.isdisjoint(kinds_that_end_a_start)
        return start_has_ended and "restart" not in kinds

    def _has_launcher(self, last: Start) -> bool:
        """Returns True if a launcher started the ranks of the last start.

        A launcher writes a line of the kind "start" just before it starts the ranks. So this line
        comes after the previous start and before the last one.
        """
        previous_time = self.starts[-2].time if len(self.starts) > 1 else -math.inf
        for line in self._all_launcher_lines():
            if line["kind"] == "start" and previous_time < line["time"] <= last.time:
                return True
        return False

    def _starts_without_ranks(self) -> Iterator[Start]:
        """Yields the starts of which only launchers know, since no rank reached `lockstep.init`.

        For example, a launcher starts the ranks at 10:00 and writes at 10:05 that they failed. If
        no rank has begun a file between 10:00 and 10:05, no rank of this start reached
        `lockstep.init`. As long as the launcher has written of no end, any file that was begun
        after 10:00 shows that a rank reached `lockstep.init`.
        """
        times_of_rank_files = [start.time for start in self._starts_of_ranks.values()]
        for lines in self._launcher_lines.values():
            for line, end in _starts_with_ends(lines):
                begin = line["time"]
                reached_init = any(begin <= time <= end for time in times_of_rank_files)
                if reached_init:
                    continue

                # The name has as many digits as those of ranks' files, so that names sort by time.
                name = f"{int(begin * 1e9):020d}-{line['file']}"
                placeholder = RankRecord(rank=0, header=line)  # the line has the same fields
                yield Start(name, {0: placeholder}, reached_init=False)


def _lines_of_all_ranks(records: Sequence[RankRecord]) -> list[dict[int, dict[str, Any]]]:
    """Groups the lines of logged values that several ranks have written about the same thing.

    In a loop this is the same pass; outside of any loop, the same name and step.

    Returns:
        The groups, sorted by step. Each is a dict from ranks to their lines, such as
        `{0: {"logged": {"loss": 0.5}, "step": 10, ...}, 1: {"logged": {"loss": 0.7}, ...}}`.
    """
    groups: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for record in records:
        for key, line in _logged_lines_by_key(record).items():
            groups.setdefault(key, {})[record.rank] = line

    def first_step(group: dict[int, dict[str, Any]]) -> float:
        return float(min(line["step"] for line in group.values()))

    return sorted(groups.values(), key=first_step)


def _logged_lines_by_key(record: RankRecord) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Returns the lines of values that a rank has logged, by a key that is equal on all ranks.

    In a loop, the key is that of the pass. Outside of any loop it is the step, the name, and how
    often the rank has logged the name at this step. For example, if a rank logs "size" twice after
    step 10, the keys are (10, "size", 1) and (10, "size", 2). So the second "size" of this rank
    belongs to the second one of each other rank.
    """
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    times_logged: Counter[tuple[float, str]] = Counter()
    for line in record.logged:
        is_in_loop = "loader" in line
        if is_in_loop:
            lines[_key_of_pass(line)] = line
            continue

        # Not every rank need log the same names, so each name gets a line of its own.
        for name, line_of_name in _split_by_name(line).items():
            step = line["step"]
            times_logged[step, name] += 1
            count = times_logged[step, name]
            lines[step, name, count] = line_of_name
    return lines


def _starts_with_ends(lines: Sequence[LauncherLine]) -> Iterator[tuple[LauncherLine, float]]:
    """Yields the line of each start of a launcher, and the time of the start's end, or infinity."""
    for index, line in enumerate(lines):
        if line["kind"] == "start":
            yield line, _time_of_end(lines[index + 1 :])


def _key_of_pass(line: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what is equal in the lines of several ranks about a pass.

    A pass has one line when it is over, and before that lines at several steps.
    """
    step = "at its end" if line["complete"] else line["step"]
    return line["loader"], line["training"], line["begun"], line["number"], step


def _split_by_name(line: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns a line of logged values for each of its names."""
    return {name: {**line, "logged": {name: value}} for name, value in line["logged"].items()}


def _average(parts: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Returns the weighted mean of what several ranks have logged, and its weight, by name."""
    totals: dict[str, float] = {}
    weights: dict[str, float] = {}
    for part in parts:
        means_of_rank = part["logged"]
        for name, mean in means_of_rank.items():
            weight = part["weights"].get(name, 0.0)
            totals[name] = totals.get(name, 0.0) + weight * mean
            weights[name] = weights.get(name, 0.0) + weight

    means: dict[str, tuple[float, float]] = {}
    for name, weight in weights.items():
        if weight:
            means[name] = (totals[name] / weight, weight)
    return means


def _time_of_end(lines: Sequence[LauncherLine]) -> float:
    """Returns the time of the first line that ends a start, or infinity if there is none."""
    for line in lines:
        if line["kind"] in _ENDING_OF_KIND:
            return float(line["time"])
    return math.inf


def _no_record(folder: Path) -> CheckpointError:
    """Returns the error of a folder without a record, with advice on what was meant instead.

    The error has the form "the record of a run in FOLDER: it is a file; give its folder: ...".
    """
    advice = "train with lockstep run --report FOLDER, and give that folder"
    if folder.is_file():  # perhaps one of the files of a record
        found = "it is a file"
        advice = f"give its folder: {folder.parent}"
    elif not folder.is_dir():
        found = "there is no such folder"
    else:
        found = "the folder holds none"
        subfolders = sorted({path.parent.name for path in folder.glob(f"*/*{RECORD_SUFFIX}")})
        if subfolders:
            advice = f"give one of the folders in it that hold one: {join_first(subfolders)}"

    return CheckpointError(f"the record of a run in {folder}", found, advice)
