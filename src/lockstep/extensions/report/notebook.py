"""`lockstep.report`: the report of a run as an object, which a notebook shows as the page."""

from __future__ import annotations

import html
from pathlib import Path

from lockstep.extensions.report import analysis
from lockstep.extensions.report.console import number
from lockstep.extensions.report.reading import Record
from lockstep.language import translate
from lockstep.wording import count_noun

FRAME_HEIGHT_PX = 700


class Report:
    """The report of a run.

    A notebook shows it as the page of `lockstep report`; elsewhere it prints a summary. The record
    of the run is read again each time, so that the report of a running run is up to date.
    """

    def __init__(self, record: Record, others: list[Record]) -> None:
        self._record = record
        self._others = others

    def __repr__(self) -> str:
        self._refresh()
        last = self._record.starts[-1]

        # The first line says how the run is, and the others what stands out.
        lines = [f"report of {self._record.folder}: {count_noun(last.num_ranks, 'rank')}"]
        if last.end is not None:
            lines[0] += f", {last.end}"

        last_step = analysis.last_step(last)
        if last_step:
            lines[0] += f", last step {last_step}"

        _steps, losses = last.loss()
        if len(losses):
            lines[0] += f", loss {number(float(losses[-1]))}"

        for finding in analysis.find(self._record):
            lines.append(f"  {finding.level}: {finding.text}")
            if finding.advice:
                lines.append(f"    {finding.advice}")

        return "\n".join(translate(line) for line in lines)

    def _repr_html_(self) -> str:
        """Returns the page in a frame, so that its styles and scripts do not affect the notebook.

        IPython looks for a method of this name and calls it.
        """
        from lockstep.extensions.report.page import render

        self._refresh()
        page = html.escape(render(self._record, self._others))
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" title="lockstep report" '
            f'style="width: 100%; height: {FRAME_HEIGHT_PX}px; border: 0"></iframe>'
        )

    def _refresh(self) -> None:
        for record in (self._record, *self._others):
            record.refresh()


def report(folder: str | Path, *others: str | Path) -> Report:
    """Reads the record of a run, as `lockstep.init(report=folder)` writes it, for a notebook.

    Args:
        folder: the folder of the record.
        *others: the folders of other runs to compare it with.

    Raises:
        CheckpointError: a folder has no record.
    """
    return Report(Record(folder), [Record(other) for other in others])
