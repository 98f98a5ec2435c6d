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
from lockstep.extensions.report.reading import Record
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
    """Returns the names of the runs: those of their folders, or the whole paths if two are alike.

    A folder that is given twice has one name with two numbers.
    """
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
    sentences = []
    for index in range(1, len(records)):
        sentences += _sentences(records[0], records[index], names[0], names[index])
    columns = [_figures(record) for record in records]
    rows = []
    for name in columns[0]:
        values = [column[name] for column in columns]
        if any(value != NOT_KNOWN for value in values):
            rows.append((name, values))
    return Comparison(names, sentences, rows, _differing_facts(records))


def _sentences(run: Record, other: Record, name: str, other_name: str) -> list[str]:
    """Returns how much slower or faster the run was than the other one, and the two losses."""
    speed = analysis.speed(run.starts[-1])
    other_speed = analysis.speed(other.starts[-1])
    sentences = []
    if speed is not None and other_speed is not None:
        ratio = speed.samples_per_second / max(other_speed.samples_per_second, 1e-12)
        if abs(ratio - 1) < MIN_DIFFERENCE:
            sentences.append(f"{name} and {other_name} train as fast as each other.")
        else:
            sentences.append(
                f"{name} trains {ratio:.3g} times as fast as {other_name}: "
                f"{thousands(speed.samples_per_second)} against "
                f"{thousands(other_speed.samples_per_second)} samples/s."
                f"{_main_phase(run, other, name)}"
            )
    common = _losses_at_last_common_step(run, other)
    if common is not None:
        step, loss, other_loss = common
        sentences.append(
            f"At step {step:.0f} the loss of {name} is {number(loss)}, that of {other_name} "
            f"{number(other_loss)}."
        )
    return sentences


def _main_phase(run: Record, other: Record, name: str) -> str:
    """Says which phase makes up most of the difference between two runs; empty if none does."""
    phases = _mean_phases(run)
    other_phases = _mean_phases(other)
    differences = {phase: phases[phase] - other_phases[phase] for phase in PHASES}
    total = sum(differences.values())
    if total == 0:
        return ""
    phase = max(PHASES, key=lambda phase: differences[phase] / total)
    if differences[phase] / total < MIN_PART_OF_DIFFERENCE:
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


def _losses_at_last_common_step(run: Record, other: Record) -> tuple[float, float, float] | None:
    """Returns the last step at which both runs have a loss, and the two losses; or None."""
    losses_by_step = []
    for record in (run, other):
        losses: dict[float, float] = {}
        for start in record.starts:
            steps, values = start.loss()
            losses.update(zip(steps.tolist(), values.tolist(), strict=True))
        losses_by_step.append(losses)
    losses, other_losses = losses_by_step
    common_steps = losses.keys() & other_losses.keys()
    if not common_steps:
        return None
    step = max(common_steps)
    return step, losses[step], other_losses[step]


def _figures(record: Record) -> dict[str, str]:
    """Returns the figures of a run, as texts by name."""
    last = record.starts[-1]
    figures = dict.fromkeys(
        ("Ranks", "Last step", "Samples/s", "Time of a step", "Last loss", "Trained for",
         "Peak memory of a rank", "Starts"),
        NOT_KNOWN,
    )  # fmt: skip
    figures["Ranks"] = str(last.num_ranks)
    figures["Starts"] = str(len(record.starts))
    last_step = analysis.last_step(last)
    if last_step:
        figures["Last step"] = thousands(last_step)
    speed = analysis.speed(last)
    if speed is not None:
        figures["Samples/s"] = thousands(speed.samples_per_second)
        figures["Time of a step"] = milliseconds_or_seconds(speed.seconds_per_step)
    _, losses = last.loss()
    if len(losses):
        figures["Last loss"] = number(float(losses[-1]))
    totals = analysis.totals(last)
    if totals is not None:
        figures["Trained for"] = duration(totals.seconds)
        figures["Peak memory of a rank"] = format_bytes(totals.peak_memory)
    findings = analysis.find(record)
    serious = [finding.text for finding in findings if finding.level != "note"]
    figures["What to look at"] = serious[0] if serious else "nothing stands out"
    if len(serious) > 1:
        figures["What to look at"] += f" (and {len(serious) - 1} more)"
    return figures


def _differing_facts(records: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """Returns the arguments, settings and versions that are not the same in all runs."""
    facts_of_runs = [all_facts(record.starts[-1]) for record in records]
    names: dict[str, None] = {}  # in the order in which they occur
    for facts in facts_of_runs:
        names.update(dict.fromkeys(facts))
    differing = []
    for name in names:
        values = [facts.get(name, NOT_KNOWN) for facts in facts_of_runs]
        if len(set(values)) > 1:
            differing.append((name, values))
    return differing
