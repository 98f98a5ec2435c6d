"""What the charts of a report show: numbers for the browser, which draws them (`web/page.js`).

A *start* is one start of the run (it may be started again after a failure), with a record of each
rank; a *row* of a record covers one or several steps. If there are more rows or ranks than a chart
can show, neighbours are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.extensions.report.analysis import WORK_PHASES, phases_by_rank, work_by_rank
from lockstep.extensions.report.reading import Floats, RankRecord, Record, Start
from lockstep.extensions.report.record_format import PHASES_WITHOUT_WAITING

STACKED_PHASES = (*PHASES_WITHOUT_WAITING, "communication")
"""From the bottom to the top: what a rank does itself, then waiting for others."""
MAX_POINTS = 1500  # of a line
MAX_COLUMNS = 160  # of the chart that shows all ranks over the steps
MAX_ROWS = 256  # of the same chart
MAX_BARS = 64  # of the chart that shows the phases by rank


def average_neighbours(values: Floats, weights: Floats, max_points: int = MAX_POINTS) -> Floats:
    """Thins out the values of a curve: averages neighbours until at most `max_points` remain.

    Args:
        values: the values, shape (N,).
        weights: the weight of each value in its average, shape (N,).
        max_points: how many values may remain.
    """
    if len(values) <= max_points:
        return values

    # The indices at which the groups of neighbours begin, shape (max_points,). For 5 values and 2
    # points the bounds are 0, 2.5 and 5, and the groups begin at 0 and 2.
    bounds = np.linspace(0, len(values), max_points + 1)
    group_begins = bounds.astype(int)[:-1]

    # Each group becomes one value; `reduceat` sums up each group.
    weighted_sums = np.add.reduceat(values * weights, group_begins)
    weight_sums = np.add.reduceat(weights, group_begins)

    # A group whose weights are all 0 gets the mean 0, without a division by 0.
    means: Floats = weighted_sums / np.maximum(weight_sums, 1e-12)
    return means


def numbers_for_json(values: Floats) -> list[float | int | None]:
    """Returns values with six significant digits, and whole numbers as they are.

    Values that are not finite become None, which a chart shows as a gap.
    """
    numbers: list[float | int | None] = []
    for value in values.tolist():
        if not math.isfinite(value):
            numbers.append(None)
        elif value == int(value):
            numbers.append(int(value))  # `12` is shorter than `12.0`
        else:
            numbers.append(float(f"{value:.6g}"))
    return numbers


@dataclass
class Line:
    """The values of a curve in one start of a run."""

    steps: Floats
    seconds: Floats
    """Seconds since the first start of the run, at each step."""
    values: Floats


@dataclass
class Curve:
    """A value over the steps of one run."""

    title: str
    unit: str
    """`bytes`, `%`, or empty for plain numbers."""
    lines: list[Line]
    """One for each start of the run that has values."""


def curve_charts(records: Sequence[Record], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what the browser draws of the curves of one or several runs.

    Curves of the same title are one chart, with the lines of all runs.

    Args:
        records: the records of the runs.
        names: how to call each of them.
    """
    charts: dict[str, dict[str, Any]] = {}
    for run_number, record in enumerate(records):
        for curve in curves(record):
            if curve.title not in charts:
                charts[curve.title] = {"title": curve.title, "unit": curve.unit, "lines": []}

            for line in curve.lines:
                # A curve with more points than a chart can show is thinned out. All points weigh
                # the same.
                weights = np.ones(len(line.steps))
                charts[curve.title]["lines"].append(
                    {
                        "run": run_number,
                        "name": names[run_number],
                        "steps": numbers_for_json(average_neighbours(line.steps, weights)),
                        "seconds": numbers_for_json(average_neighbours(line.seconds, weights)),
                        "values": numbers_for_json(average_neighbours(line.values, weights)),
                    }
                )
    return list(charts.values())


def curves(record: Record) -> list[Curve]:
    """Returns all curves of a record that have a finite value, the loss first."""
    lines_by_title: dict[str, list[Line]] = {}
    for start in record.starts:
        clock = _Clock(record, start)  # tells the time of each step, which the browser may show
        for title, line in _lines_of_start(start, clock).items():
            if np.isfinite(line.values).any():
                lines_by_title.setdefault(title, []).append(line)

    # The page shows the loss, then what the script has logged, then what the ranks have measured.
    measured_titles = list(_UNIT_OF_MEASURED)
    logged_titles = sorted(lines_by_title.keys() - {"loss", *measured_titles})
    titles = ["loss", *logged_titles, *measured_titles]
    found = []
    for title in titles:
        if title in lines_by_title:
            unit = _UNIT_OF_MEASURED.get(title, "")
            found.append(Curve(title, unit, lines_by_title[title]))
    return found


THROUGHPUT = "throughput"
LEARNING_RATE = "learning rate"
PEAK_MEMORY = "peak memory"
GPU_USE = "GPU use"
GPU_MEMORY = "GPU memory"
_UNIT_OF_MEASURED = {
    THROUGHPUT: "",
    LEARNING_RATE: "",
    PEAK_MEMORY: "bytes",
    GPU_USE: "%",
    GPU_MEMORY: "bytes",
}
"""The curves that the ranks measure, with their units, in the order of the page. Those of GPUs are
means over the ranks, the others are of rank 0."""


class _Clock:
    """Says when the steps of a start were made: seconds since the first start of the run."""

    def __init__(self, record: Record, start: Start) -> None:
        main = start.main
        self._steps = main.column("step")
        begin_s = float(main.header.get("time", start.time)) - record.starts[0].time
        self._seconds = begin_s + main.column("at")
        self._begin_s = begin_s

    def seconds_at(self, steps: Floats) -> Floats:
        """Returns when some steps were made, in seconds since the first start of the run.

        The record has the time of the last step of each row. Between two of them the time is
        interpolated. Without rows, all steps get the time at which this start began.
        """
        if not len(self._steps):
            return np.full(len(steps), self._begin_s)

        if self._steps[0] <= 0:
            known_steps = self._steps
            known_seconds = self._seconds
        else:
            # Before the first row, the time is interpolated from the beginning of the record, which
            # counts as step 0.
            known_steps = np.concatenate([[0.0], self._steps])
            known_seconds = np.concatenate([[self._begin_s], self._seconds])

        seconds: Floats = np.interp(steps, known_steps, known_seconds)
        return seconds


def _lines_of_start(start: Start, clock: _Clock) -> dict[str, Line]:
    """Returns the lines of all curves in one start, by their titles."""
    lines: dict[str, Line] = {}

    loss_steps, losses = start.loss()
    lines["loss"] = Line(loss_steps, clock.seconds_at(loss_steps), losses)

    for title, (steps, values) in logged_values(start).items():
        lines[title] = Line(steps, clock.seconds_at(steps), values)

    # What rank 0 has measured in each row.
    record_of_rank_0 = start.main
    steps = record_of_rank_0.column("step")
    seconds = clock.seconds_at(steps)
    measured = record_of_rank_0.curves()
    lines[THROUGHPUT] = Line(steps, seconds, measured["samples_per_second"])
    lines[LEARNING_RATE] = Line(steps, seconds, measured["learning_rate"])
    lines[PEAK_MEMORY] = Line(steps, seconds, measured["memory_bytes"])

    for title, key in ((GPU_USE, "gpu"), (GPU_MEMORY, "gpu_memory")):
        gpu_steps, means = _mean_over_gpus(start, key)
        lines[title] = Line(gpu_steps, clock.seconds_at(gpu_steps), means)
    return lines


def _mean_over_gpus(start: Start, key: str) -> tuple[Floats, Floats]:
    """Returns the mean over the ranks of what NVML said of their GPUs: the steps, and the means.

    Each rank asks NVML after steps of its own: for example one after steps 10 and 20, another after
    12 and 22. The means are taken at the steps of the first rank that has asked, here 10 and 20.
    The values of the others at these steps are interpolated between two of their answers.

    Args:
        start: the start of the run.
        key: `gpu`, the use in percent, or `gpu_memory`, in bytes.
    """
    curves_of_ranks = []
    for record in start.records.values():
        if record.gpu_uses:
            steps = np.array([use["step"] for use in record.gpu_uses], dtype=np.float64)
            values = np.array([use[key] for use in record.gpu_uses], dtype=np.float64)
            curves_of_ranks.append((steps, values))
    if not curves_of_ranks:
        return np.empty(0), np.empty(0)

    common_steps, _ = curves_of_ranks[0]  # of the first rank
    values_of_ranks = [np.interp(common_steps, steps, values) for steps, values in curves_of_ranks]
    means: Floats = np.mean(values_of_ranks, axis=0)
    return common_steps, means


def logged_values(start: Start) -> dict[str, tuple[Floats, Floats]]:
    """Returns the steps and values of what the script logged in one start, by title.

    A name that was logged in training and in an evaluation gives two curves. They are told apart by
    their titles, such as "accuracy (validation)".
    """
    # If several values were logged at one step, the last one counts.
    values_by_title: dict[str, dict[float, float]] = {}
    for logged in start.logged:
        value_at_step = values_by_title.setdefault(logged.title, {})
        value_at_step[logged.step] = logged.mean

    curves = {}
    for title, value_at_step in values_by_title.items():
        steps = sorted(value_at_step)
        values = [value_at_step[step] for step in steps]
        curves[title] = (np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64))
    return curves


def restarts(record: Record) -> list[float]:
    """Returns the first step of each start but the first; a restart is marked in the curves."""
    steps = []
    for start in record.starts[1:]:
        if start.main.rows:
            steps.append(float(start.main.column("step")[0] - start.main.column("steps")[0]))
    return steps


def bars_by_rank(start: Start) -> list[dict[str, Any]]:
    """Returns a bar for each rank: the milliseconds of a step that it spends on each phase.

    The width of each part of a bar is in percent of the longest bar. If there are too many ranks,
    those that work longest are shown.
    """
    phases_of_rank = phases_by_rank(start)
    work = work_by_rank(start)
    longest_work_first = sorted(work, key=lambda rank: -work[rank])
    shown = sorted(longest_work_first[:MAX_BARS])
    longest_bar_s = max([sum(phases_of_rank[rank].values()) for rank in shown], default=0.0)

    bars = []
    for rank in shown:
        parts = []
        for phase in STACKED_PHASES:
            seconds = phases_of_rank[rank][phase]
            if seconds > 0:
                percent = 100 * seconds / longest_bar_s
                parts.append({"phase": phase, "ms": seconds * 1e3, "percent": percent})
        bars.append({"rank": rank, "work_ms": work[rank] * 1e3, "parts": parts})
    return bars


def phases_over_time(start: Start) -> dict[str, Any] | None:
    """Returns the milliseconds of a step by phase, mean over the ranks; None without rows."""
    records = [record for record in start.records.values() if record.rows]
    if not records:
        return None

    # The n-th rows of all ranks cover the same steps, so the steps are taken from the first record.
    num_rows = _num_common_rows(records)
    last_step_of_row = records[0].column("step")[:num_rows]
    num_steps_of_row = records[0].column("steps")[:num_rows]

    # To fit the chart, neighbouring rows become one point. A row counts as often as it has steps:
    # a row over steps 1 to 4 and a row over step 5 become a point at (4 * 4 + 1 * 5) / 5 = 4.2.
    step_numbers = average_neighbours(last_step_of_row, weights=num_steps_of_row)

    heights: dict[str, Floats] = {}  # milliseconds of a step, one value for each point
    for phase in STACKED_PHASES:
        seconds_of_ranks = [record.column(phase)[:num_rows] for record in records]
        seconds_of_row = np.mean(seconds_of_ranks, axis=0)
        seconds_of_step = seconds_of_row / num_steps_of_row

        # Four steps of 10 ms and one of 20 ms have a mean of (4 * 10 + 1 * 20) / 5 = 12 ms.
        milliseconds = average_neighbours(seconds_of_step, weights=num_steps_of_row) * 1e3
        if milliseconds.any():
            heights[phase] = milliseconds
    if not heights:
        return None

    return {
        "steps": numbers_for_json(step_numbers),
        "phases": {phase: numbers_for_json(height) for phase, height in heights.items()},
        "top": _top_of_stack(heights),
    }


def _work_per_step(records: Sequence[RankRecord]) -> tuple[Floats, Floats]:
    """Returns the columns of the chart of slow ranks: their steps, and each rank's work in them.

    Only the rows that all ranks have are used. To fit the chart, neighbouring rows become one
    column: the mean of their work and the mean of their step numbers, in which each row weighs as
    much as the number of steps that it covers.

    Returns:
        The step number of each column, shape (columns,), and how many seconds each rank works in a
        step, shape (ranks, columns).
    """
    num_rows = _num_common_rows(records)
    last_step_of_row = records[0].column("step")[:num_rows]
    num_steps_of_row = records[0].column("steps")[:num_rows]
    step_numbers = average_neighbours(last_step_of_row, num_steps_of_row, MAX_COLUMNS)

    work_of_ranks = []
    for record in records:
        work_per_step = record.seconds(WORK_PHASES)[:num_rows] / num_steps_of_row
        work_of_ranks.append(average_neighbours(work_per_step, num_steps_of_row, MAX_COLUMNS))
    return step_numbers, np.array(work_of_ranks)


def _num_common_rows(records: Sequence[RankRecord]) -> int:
    """Returns how many rows all ranks have: one may not have written its last rows yet."""
    return min(len(record.rows) for record in records)


def _top_of_stack(heights: Mapping[str, Floats]) -> float:
    """Returns where the vertical axis ends: at most at four times the median of all steps.

    A few steps that took very long, such as those with a checkpoint, would hide the others.
    """
    totals = np.sum([*heights.values()], axis=0)
    top = min(float(totals.max()), 4 * float(np.median(totals)))
    if top == 0:
        return 1.0
    return top * 1.05


def slow_ranks(start: Start) -> dict[str, Any] | None:
    """Returns how much longer or shorter than the median rank each rank works in each step.

    The values are in percent: 20 if a rank works a fifth longer in a step than the median rank.
    Returns None if fewer than two ranks have rows. If there are too many ranks, those that differ
    most are shown.
    """
    ranks = [*work_by_rank(start)]
    if len(ranks) < 2:
        return None

    step_numbers, work = _work_per_step([start.records[rank] for rank in ranks])
    percent = _percent_over_median(work)  # shape (ranks, columns)

    # Choose the ranks that deviate most from the median rank, and show them in order of rank.
    mean_deviation = np.abs(percent).mean(axis=1)  # shape (ranks,)
    most_deviating_first = np.argsort(-mean_deviation, kind="stable")
    shown = np.sort(most_deviating_first[:MAX_ROWS])
    return {
        "steps": numbers_for_json(step_numbers),
        "ranks": [ranks[index] for index in shown],
        "percent": [np.rint(percent[index]).astype(int).tolist() for index in shown],
    }


def _percent_over_median(work: Floats) -> Floats:
    """Returns by how many percent each rank works longer than the median rank, at most 100.

    Args:
        work: seconds of a step, shape (ranks, steps).

    Returns:
        An array of the same shape; 20 for a fifth longer, -20 for a fifth shorter.
    """
    median_over_ranks = np.median(work, axis=0)
    usual = np.maximum(median_over_ranks, 1e-12)  # shape (steps,); no division by 0
    percent: Floats = np.clip(work / usual - 1, -1, 1) * 100
    return percent
