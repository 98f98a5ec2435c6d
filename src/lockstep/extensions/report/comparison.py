"""Compares two or more runs: how fast they were, why one was slower, and what was set differently.

The first run is the one that the page is about; the others are what it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.extensions.report import analysis
from lockstep.extensions.report.console import duration, number, thousands
from lockstep.extensions.report.facts import all_facts
from lockstep.extensions.report.reading import LossRow, Record
from lockstep.session.extension import PHASES
from lockstep.units import format_bytes

MIN_DIFFERENCE = 0.03
"""Two runs are as fast as each other if the times of a step differ by less than this fraction."""
MIN_PART_OF_DIFFERENCE = 0.5
"""A phase explains a difference if it makes up at least this fraction of it."""
NOT_KNOWN = "–"


class Comparison(NamedTuple):
    """What the page says of several runs."""

    names: list[str]
    sentences: list[str]
    """One for each run but the first."""
    rows: list[tuple[str, list[str]]]
    """The figures of each run: a name and a text for each run."""
    differing: list[tuple[str, list[str]]]
    """The settings, arguments and versions that differ, in the same form."""


def milliseconds_or_seconds(seconds: float) -> str:
    """Returns `12.3 ms` or `1.25 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def run_names(records: Sequence[Record]) -> list[str]:
    """Returns a different name for each run: that of its folder, or its path if two are alike.

    The names are shown as they are as long as they differ:

    - `runs/fast` and `runs/slow` are called `fast` and `slow`.
    - `monday/fast` and `tuesday/fast` are called `monday/fast` and `tuesday/fast`, as they were
      given.
    - `runs/fast`, given twice, is called `runs/fast (1)` and `runs/fast (2)`.
    """
    # Resolved, since a folder may be given as `.`, which has no name.
    folders = [record.folder.resolve() for record in records]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(record.folder) for record in records]
    if len(set(names)) < len(names):
        names = [f"{name} ({index})" for index, name in enumerate(names, 1)]
    return names


def compare(records: Sequence[Record]) -> Comparison:
    """Compares the last starts of several runs."""
    names = run_names(records)
    first_record, *other_records = records
    first_name, *other_names = names
    sentences = []
    for record, name in zip(other_records, other_names, strict=True):
        sentences += _sentences_on_difference(first_record, record, first_name, name)

    # One column of figures for each run. All columns have the same names, which are the rows.
    columns = [_figures(record) for record in records]
    rows = []
    for name in columns[0]:
        values = [column[name] for column in columns]
        if any(value != NOT_KNOWN for value in values):
            rows.append((name, values))
    return Comparison(names, sentences, rows, _differing_facts(records))


def _sentences_on_difference(run: Record, other: Record, name: str, other_name: str) -> list[str]:
    """Returns sentences that compare the speed of two runs, and their loss at the same step."""
    sentences = []
    last_start = run.starts[-1]
    last_start_of_other = other.starts[-1]
    speed = analysis.speed(last_start)
    other_speed = analysis.speed(last_start_of_other)
    if speed is not None and other_speed is not None:
        main_phase = _main_phase_sentence(run, other, name)
        sentences.append(_compare_speeds(speed, other_speed, name, other_name, main_phase))

    # The losses are compared in the last steps of which both runs have a row.
    common_rows = _last_common_rows(run, other)
    if common_rows is not None:
        row, row_of_other = common_rows
        sentences.append(_compare_losses(row, row_of_other.loss, name, other_name))
    return sentences


def _compare_losses(row: LossRow, other_loss: float, name: str, other_name: str) -> str:
    """Returns a sentence on the losses of two runs in the steps of a row.

    Args:
        row: a row of the first run, from `row.first_step` to its last step, `row.step`.
        other_loss: the loss of the other run in the same steps.
        name: name of the first run.
        other_name: name of the other run.
    """
    if row.num_steps == 1:
        return (
            f"At step {row.step} the loss of {name} is {number(row.loss)}, that of {other_name} "
            f"{number(other_loss)}."
        )
    return (
        f"In steps {row.first_step} to {row.step} the mean loss of {name} is {number(row.loss)}, "
        f"that of {other_name} {number(other_loss)}."
    )


def _compare_speeds(
    speed: analysis.Speed,
    other_speed: analysis.Speed,
    name: str,
    other_name: str,
    main_phase: str,
) -> str:
    """Returns a sentence on how fast a run is, compared with another one.

    Args:
        speed: the speed of the run.
        other_speed: the speed of the other run.
        name: the name of the run.
        other_name: the name of the other run.
        main_phase: a sentence to append, with a space before it: " Most of the difference is in
            data, ...". Empty if no phase has most of it.
    """
    if speed.samples_per_second == 0 or other_speed.samples_per_second == 0:
        return (
            f"A step of {name} takes {milliseconds_or_seconds(speed.seconds_per_step)}, one of "
            f"{other_name} {milliseconds_or_seconds(other_speed.seconds_per_step)}. How many "
            f"samples they have is not known without a prepared loader.{main_phase}"
        )

    ratio = speed.samples_per_second / other_speed.samples_per_second
    if abs(ratio - 1) < MIN_DIFFERENCE:
        return f"{name} and {other_name} train as fast as each other."
    return (
        f"{name} trains {ratio:.3g} times as fast as {other_name}: "
        f"{thousands(speed.samples_per_second)} against "
        f"{thousands(other_speed.samples_per_second)} samples/s.{main_phase}"
    )


def _main_phase_sentence(run: Record, other: Record, name: str) -> str:
    """Returns a sentence on the phase that makes up most of the difference between two runs.

    It begins with a space, since it is added to another sentence. It is empty if no phase makes up
    most of the difference. For example, if a step takes 120 ms instead of 100 ms, and the phase
    "data" takes 15 ms more, then "data" makes up 75 % of the difference.

    Args:
        run: record of the run.
        other: record of the run that it is compared with.
        name: name of the first run.
    """
    phases = _mean_phases(run)
    other_phases = _mean_phases(other)
    differences = {phase: phases[phase] - other_phases[phase] for phase in PHASES}
    total = sum(differences.values())
    if total == 0:
        return ""

    # A phase that differs in the same direction as the whole step has a positive share, also if
    # both differences are negative.
    shares = {phase: difference / total for phase, difference in differences.items()}
    phase = max(PHASES, key=lambda phase: shares[phase])
    if shares[phase] < MIN_PART_OF_DIFFERENCE:
        return ""

    amount = milliseconds_or_seconds(abs(differences[phase]))
    if differences[phase] > 0:
        return f" Most of the difference is in {phase}, where {name} needs {amount} more a step."
    return f" Most of the difference is in {phase}, where {name} needs {amount} less a step."


def _mean_phases(record: Record) -> dict[str, float]:
    """Returns the seconds of a step by phase, mean over the ranks of the last start."""
    by_rank = analysis.phases_by_rank(record.starts[-1]).values()
    means = {}
    for phase in PHASES:
        seconds = [phases[phase] for phases in by_rank]
        means[phase] = float(np.mean(seconds)) if seconds else 0.0
    return means


def _last_common_rows(run: Record, other: Record) -> tuple[LossRow, LossRow] | None:
    """Returns a row of each run: the last ones that cover the same steps; None if there are none.

    A row may be the mean over several steps. So a row over steps 9 and 10 is not compared with a
    row over step 10.
    """
    rows = _loss_rows_by_steps(run)
    other_rows = _loss_rows_by_steps(other)
    common = rows.keys() & other_rows.keys()
    if not common:
        return None

    # The keys are (last step of the row, number of its steps). So this is the row with the highest
    # last step, and of these the one that covers the most steps.
    last_common = max(common)
    return rows[last_common], other_rows[last_common]


def _loss_rows_by_steps(record: Record) -> dict[tuple[int, int], LossRow]:
    """Returns the losses of a run by the steps that they cover: (last step, number of steps)."""
    row_of_steps: dict[tuple[int, int], LossRow] = {}
    for start in record.starts:
        for row in start.loss_rows():
            row_of_steps[row.step, row.num_steps] = row
    return row_of_steps


def _figures(record: Record) -> dict[str, str]:
    """Returns the figures of a run, as texts by name. The names are the same for each run."""
    last = record.starts[-1]

    # A figure that is not known keeps a dash, so that the table has the same rows for each run.
    figures = dict.fromkeys(
        ("Ranks", "Last step", "Samples/s", "Time of a step", "Last loss", "Trained for",
         "Peak memory of a rank", "Starts", "What to look at"),
        NOT_KNOWN,
    )  # fmt: skip
    figures["Ranks"] = str(last.num_ranks)
    figures["Starts"] = str(len(record.starts))

    last_step = analysis.last_step(last)
    if last_step:
        figures["Last step"] = thousands(last_step)

    speed = analysis.speed(last)
    if speed is not None:
        if speed.samples_per_second:
            figures["Samples/s"] = thousands(speed.samples_per_second)
        figures["Time of a step"] = milliseconds_or_seconds(speed.seconds_per_step)

    _steps, losses = last.loss()
    if len(losses):
        figures["Last loss"] = number(float(losses[-1]))

    totals = analysis.totals(last)
    if totals is not None:
        figures["Trained for"] = duration(totals.seconds)
        figures["Peak memory of a rank"] = format_bytes(totals.peak_memory)

    # Only the first error or warning is named.
    findings = analysis.find(record)
    serious = [finding.text for finding in findings if finding.level != "note"]
    figures["What to look at"] = serious[0] if serious else "nothing stands out"
    if len(serious) > 1:
        figures["What to look at"] += f" (and {len(serious) - 1} more)"
    return figures


def _differing_facts(records: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """Returns the arguments, settings and versions that are not the same in all runs."""
    facts_of_runs = [all_facts(record.starts[-1]) for record in records]

    # The names of all facts, each once, in the order in which they occur.
    names: list[str] = []
    for facts in facts_of_runs:
        names += [name for name in facts if name not in names]

    differing = []
    for name in names:
        values = [facts.get(name, NOT_KNOWN) for facts in facts_of_runs]
        if len(set(values)) > 1:
            differing.append((name, values))
    return differing
