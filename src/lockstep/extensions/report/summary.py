"""Builds what `lockstep report --json` writes: the report as plain values, for other programs.

It has the figures of the report's page without formatting: seconds, bytes and fractions.
`docs/schemas/report.json` describes every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.extensions.report import analysis, comparison
from lockstep.extensions.report.charts import logged_values
from lockstep.extensions.report.facts import run_facts
from lockstep.extensions.report.reading import Floats, Record, Start


def summarize(record: Record, others: Sequence[Record] = ()) -> dict[str, Any]:
    """Returns the figures of the report on a run, and the comparison with other runs.

    Args:
        record: the record of the run.
        others: the records of the runs to compare it with.
    """
    last = record.starts[-1]
    speed = analysis.speed(last)
    totals = analysis.totals(last)
    loss_steps, losses = last.loss()
    return {
        "folder": str(record.folder),
        "end": last.end,
        "ranks": last.num_ranks,
        "last_step": analysis.last_step(last),
        "findings": [finding._asdict() for finding in analysis.find(record)],
        "speed": _speed_as_plain_values(speed),
        "working_fraction": analysis.working_fraction(last),
        "seconds_per_step": _seconds_per_step(last),
        "loss": _last_value(loss_steps, losses),
        "logged": _logged(last),
        "totals": None if totals is None else totals._asdict(),
        "starts": [_start(start) for start in record.starts],
        "facts": [fact._asdict() for fact in run_facts(last)],
        "comparison": _comparison(record, others),
    }


def _speed_as_plain_values(speed: analysis.Speed | None) -> dict[str, Any] | None:
    """Returns how fast the training ran.

    Only prepared loaders count samples. Without one, the record has 0 samples in each row, and the
    figures about samples are None.
    """
    if speed is None:
        return None

    values = speed._asdict()
    samples_are_not_known = speed.samples_per_step == 0
    if samples_are_not_known:
        values["samples_per_step"] = None
        values["samples_per_second"] = None
    return values


def _seconds_per_step(start: Start) -> dict[str, dict[str, float]]:
    """Returns how many seconds of a step each rank spends in each phase."""
    return {str(rank): phases for rank, phases in analysis.phases_by_rank(start).items()}


def _last_value(steps: Floats, values: Floats) -> dict[str, float] | None:
    """Returns the last point of a curve, or None if the curve is empty."""
    if not len(steps):
        return None
    return {"step": int(steps[-1]), "value": float(values[-1])}


def _logged(start: Start) -> dict[str, dict[str, float] | None]:
    """Returns the last mean of each value that the script logged, such as "accuracy (training)"."""
    last_means = {}
    for title, (steps, values) in logged_values(start).items():
        last_means[title] = _last_value(steps, values)
    return last_means


def _start(start: Start) -> dict[str, Any]:
    """Returns when one start of the run began and ended, with how many ranks, and its steps."""
    first_step = None
    last_step = None
    if start.main.rows:  # of rank 0
        first_step = int(analysis.first_step(start.main))
        last_step = analysis.last_step(start)
    return {
        "time": start.time,
        "ranks": start.num_ranks,
        "first_step": first_step,
        "last_step": last_step,
        "end": start.end,
    }


def _comparison(record: Record, others: Sequence[Record]) -> dict[str, Any] | None:
    """Returns how the run differs from the other runs, or None if there are none."""
    if not others:
        return None
    compared = comparison.compare([record, *others])
    return {
        "names": compared.names,
        "sentences": compared.sentences,
        "figures": dict(compared.rows),
        "differing": dict(compared.differing),
    }
