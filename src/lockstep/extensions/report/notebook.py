"""`lockstep.report`: the report of a run as an object, which a notebook shows as the page."""

from __future__ import annotations

import html
from pathlib import Path

from lockstep.extensions.report import analysis
from lockstep.extensions.report.console import number
from lockstep.extensions.report.reading import Record

FRAME_HEIGHT_PX = 700


class Report:
    """What the record of a run says.

    A notebook shows it as the page of `lockstep report`; elsewhere its text is a summary. The
    record is read again whenever it is shown, so that it may be one of a run that goes on.
    """

    def __init__(self, record: Record, others: list[Record]) -> None:
        self._record = record
        self._others = others

    def __repr__(self) -> str:
        self._refresh()
        last = self._record.starts[-1]
        lines = [f"report of {self._record.folder}: {last.num_ranks} ranks"]
        if last.end is not None:
            lines[0] += f", {last.end}"
        last_step = analysis.last_step(last)
        if last_step:
            lines[0] += f", last step {last_step}"
        _, losses = last.loss()
        if len(losses):
            lines[0] += f", loss {number(float(losses[-1]))}"
        for finding in analysis.find(self._record):
            lines.append(f"  {finding.level}: {finding.text}")
            if finding.advice:
                lines.append(f"    {finding.advice}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Returns the page in a frame of its own: its styles and scripts do not meet a notebook's.

        IPython calls the method by its name.
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
