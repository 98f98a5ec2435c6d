"""The charts of a report, drawn by matplotlib as SVG.

A *start* is one start of the run (it may be started again after a failure), with a record of each
rank; a *row* of a record covers one or several steps. If there are more rows or ranks than a chart
can show, neighbours are averaged.

The page's style sheet has the colours as variables, for light and for dark. Matplotlib takes no
variables, so the charts are drawn with *placeholder colours*, which are replaced in the SVG.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from lockstep.extensions.report.analysis import WORK_PHASES, phases_by_rank, work_by_rank
from lockstep.extensions.report.reading import Floats, RankRecord, Record, Start, evaluation_name
from lockstep.extensions.report.record_format import PHASES_WITHOUT_WAITING
from lockstep.session.extension import PHASES

STACKED_PHASES = (*PHASES_WITHOUT_WAITING, "communication")
"""From the bottom to the top: what a rank does itself, then waiting for others."""
MAX_POINTS = 800  # of a line
MAX_COLUMNS = 160  # of the chart that shows all ranks over the steps
MAX_BARS = 32  # if there are more ranks they are drawn as one outline
MAX_POINTS_WITH_MARKERS = 39
PAGE_WIDTH = 9.0  # inches

_COLOR_VARIABLES = ("text", "grid", "line", *PHASES)
_PLACEHOLDER_COLORS = {
    variable: f"#0{number:x}0b0{number:x}" for number, variable in enumerate(_COLOR_VARIABLES)
}
"""The color that stands for each variable: #000b00, #010b01, ..."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lockstep",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": _PLACEHOLDER_COLORS["grid"],
    "axes.labelcolor": _PLACEHOLDER_COLORS["text"],
    "grid.color": _PLACEHOLDER_COLORS["grid"],
    "grid.linewidth": 0.6,
    "text.color": _PLACEHOLDER_COLORS["text"],
    "text.parse_math": False,  # a metric's name may have dollar signs
    "xtick.color": _PLACEHOLDER_COLORS["text"],
    "ytick.color": _PLACEHOLDER_COLORS["text"],
    "legend.frameon": False,
}
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
# The id of an element, or a reference to one: id="text_1", href="#text_1", url(#text_1).
_ID_OR_REFERENCE = re.compile(r'\b(id="|href="#|url\(#)(?=[\w.-])')


def chart(name: str, height: float, draw: Callable[[Axes], Any], width: float = PAGE_WIDTH) -> str:
    """Draws a chart and returns it as SVG.

    Args:
        name: the name of the chart, which no other chart of the page has.
        height: the height of the chart in inches.
        draw: a function that draws on the axes that it is called with.
        width: the width of the chart in inches.
    """
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0.0)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration, since it goes into HTML
    svg = _METADATA.sub("", svg)
    # Ids must differ from those of the page's other charts: id="text_1" becomes id="NAME-text_1".
    svg = _ID_OR_REFERENCE.sub(rf"\1{name}-", svg)
    for variable, color in _PLACEHOLDER_COLORS.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg


def averaged(values: Floats, weights: Floats, max_points: int = MAX_POINTS) -> Floats:
    """Averages neighbours, so that at most `max_points` values remain.

    Args:
        values: the values, shape (N,).
        weights: the weight of each value in its average, shape (N,).
        max_points: how many values may remain.
    """
    if len(values) <= max_points:
        return values
    # The indices at which the groups of neighbours begin, shape (max_points,): for 5 values and 2
    # points they are 0 and 2. Each group becomes one value; `reduceat` sums up each group.
    group_begins = np.linspace(0, len(values), max_points + 1).astype(int)[:-1]
    weighted_sums = np.add.reduceat(values * weights, group_begins)
    weight_sums = np.add.reduceat(weights, group_begins)
    means: Floats = weighted_sums / np.maximum(weight_sums, 1e-12)
    return means


@dataclass
class Line:
    """The values of a curve in one start of the run."""

    steps: Floats
    values: Floats


@dataclass
class Curve:
    """A value over the steps of the run."""

    title: str
    label: str
    """The label of the vertical axis."""
    unit: str | None
    """The unit, which is shown with prefixes such as kilo; None for plain numbers."""
    lines: list[Line]
    """One for each start of the run; those of starts without a value are empty."""


def draw_curve(name: str, curve: Curve) -> str:
    """Draws a curve; a dashed line marks where the run was started again.

    Args:
        name: the name of the chart, which no other chart of the page has.
        curve: what is drawn; some line of it must have values.
    """
    return chart(name, 2.4, partial(_draw_lines, curve=curve), width=5.5)


def _draw_lines(axes: Axes, curve: Curve) -> None:
    """Draws a line for each start of the run, and a dashed line where it was started again."""
    for line in curve.lines:
        weights = np.ones(len(line.steps))
        axes.plot(
            averaged(line.steps, weights),
            averaged(line.values, weights),
            color=_PLACEHOLDER_COLORS["line"],
            linewidth=1.6,
            marker="." if len(line.steps) <= MAX_POINTS_WITH_MARKERS else "",
        )
    for line in curve.lines[1:]:
        if len(line.steps):
            restart = float(line.steps[0])
            axes.axvline(restart, color=_PLACEHOLDER_COLORS["text"], linewidth=0.8, linestyle="--")
    first_steps = [float(line.steps[0]) for line in curve.lines if len(line.steps)]
    axes.set_xlim(left=min(first_steps))
    axes.set_xlabel("step")
    axes.set_ylabel(curve.label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if curve.unit is not None:
        axes.yaxis.set_major_formatter(EngFormatter(curve.unit))


def by_rank(start: Start) -> str:
    """Draws where the time of a step goes on each rank; waiting for others is on top."""
    return chart("by-rank", 3.4, partial(_draw_ranks, phases_of_rank=phases_by_rank(start)))


def _draw_ranks(axes: Axes, phases_of_rank: Mapping[int, Mapping[str, float]]) -> None:
    """Stacks the phases: a bar for each rank, or areas if there are many ranks.

    Args:
        axes: the axes to draw on.
        phases_of_rank: for each rank, the seconds of a step by phase.
    """
    ranks = np.array([*phases_of_rank])
    # `bottom` and `height` have a value for each rank, in milliseconds.
    bottom = np.zeros(len(ranks))
    for phase in STACKED_PHASES:
        height = np.array([seconds[phase] for seconds in phases_of_rank.values()]) * 1e3
        if not height.any():  # no rank spent time on it, so it is not in the legend either
            continue
        color = _PLACEHOLDER_COLORS[phase]
        if len(ranks) <= MAX_BARS:
            axes.bar(ranks, height, 0.8, bottom=bottom, color=color, label=phase)
        else:
            # One outline of all ranks; each rank is as wide as the step from one to the next.
            edges = np.append(ranks - 0.5, ranks[-1] + 0.5)
            top = bottom + height
            axes.stairs(top, edges, baseline=bottom, fill=True, color=color, label=phase)
        bottom = bottom + height
    axes.set_xlabel("rank")
    axes.set_ylabel("ms a step")
    if len(ranks) <= MAX_BARS:
        axes.set_xticks(ranks)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # Room for four bars at least, so that those of one rank are not as wide as the page.
    last_place = max(ranks[-1], ranks[0] + 3)
    axes.set_xlim(ranks[0] - 0.6, last_place + 0.6)
    axes.grid(visible=False, axis="x")
    _draw_legend(axes)


def over_time(start: Start) -> str:
    """Draws where the time of a step goes, over the steps of the run: the mean over the ranks."""
    records = [record for record in start.records.values() if record.rows]
    num_rows = _num_common_rows(records)
    steps_of_row = records[0].column("steps")[:num_rows]
    step_numbers = averaged(records[0].column("step")[:num_rows], steps_of_row)
    heights: dict[str, Floats] = {}  # milliseconds of a step, one value for each step number
    for phase in STACKED_PHASES:
        by_record = [record.column(phase)[:num_rows] for record in records]
        seconds_of_row = np.mean(by_record, axis=0)  # over the ranks
        heights[phase] = averaged(seconds_of_row / steps_of_row, steps_of_row) * 1e3
    return chart("over-time", 3.0, partial(_draw_areas, step_numbers=step_numbers, heights=heights))


def _num_common_rows(records: Sequence[RankRecord]) -> int:
    """Returns how many rows all ranks have: one may not have written its last rows yet."""
    return min(len(record.rows) for record in records)


def _draw_areas(axes: Axes, step_numbers: Floats, heights: Mapping[str, Floats]) -> None:
    """Stacks the phases as areas over the steps.

    Args:
        axes: the axes to draw on.
        step_numbers: the steps at which there are values.
        heights: for each phase, the milliseconds of a step that it takes, at these steps.
    """
    shown = {phase: height for phase, height in heights.items() if height.any()}
    axes.stackplot(
        step_numbers,
        *shown.values(),
        labels=[*shown],
        linewidth=0,
        colors=[_PLACEHOLDER_COLORS[phase] for phase in shown],
    )
    axes.set_ylim(0, _top_of_stack(heights))
    first = step_numbers[0]
    last = step_numbers[-1]
    if len(step_numbers) == 1:
        last = first + 1  # a single row needs some width
    axes.set_xlim(first, last)
    axes.set_xlabel("step")
    axes.set_ylabel("ms a step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _draw_legend(axes)


def _top_of_stack(heights: Mapping[str, Floats]) -> float:
    """Returns where the vertical axis ends: at most at four times the median of all steps.

    A few steps that took very long, such as those with a checkpoint, would hide the others.
    """
    totals = np.sum([*heights.values()], axis=0)
    top = min(float(totals.max()), 4 * float(np.median(totals)))
    if top == 0:
        return 1.0
    return top * 1.05


def slow_ranks(start: Start) -> str:
    """Draws how much longer or shorter than the median rank each one works, over the steps."""
    ranks = [*work_by_rank(start)]
    records = [start.records[rank] for rank in ranks]
    num_rows = _num_common_rows(records)
    steps_of_row = records[0].column("steps")[:num_rows]
    step_numbers = averaged(records[0].column("step")[:num_rows], steps_of_row, MAX_COLUMNS)
    work_of_rank = []
    for record in records:
        seconds_per_step = record.seconds(WORK_PHASES)[:num_rows] / steps_of_row
        work_of_rank.append(averaged(seconds_per_step, steps_of_row, MAX_COLUMNS))
    draw = partial(
        _draw_percentages,
        percent=_percent_over_median(np.array(work_of_rank)),
        ranks=ranks,
        step_numbers=step_numbers,
    )
    return chart("slow-ranks", min(5.0, 1.6 + 0.12 * len(ranks)), draw)


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


def _draw_percentages(
    axes: Axes, percent: Floats, ranks: Sequence[int], step_numbers: Floats
) -> None:
    """Draws a row for each rank, rank 0 on top, with a colour for each step.

    Args:
        axes: the axes to draw on.
        percent: as `_percent_over_median` returns it.
        ranks: the ranks of its rows.
        step_numbers: the steps of its columns.
    """
    first_step = step_numbers[0]
    last_step = max(step_numbers[-1], first_step + 1)  # a single column needs some width
    image = axes.imshow(
        percent,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=-60,  # percent at which the colours end
        vmax=60,
        # Left, right, bottom, top: the first rank is on top.
        extent=(first_step, last_step, ranks[-1] + 0.5, ranks[0] - 0.5),
    )
    axes.set_xlabel("step")
    axes.set_ylabel("rank")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    bar = axes.figure.colorbar(image, ax=axes, format="%+.0f %%")
    bar.outline.set_visible(False)


def _draw_legend(axes: Axes) -> None:
    """Draws the legend above the chart, in one line."""
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(PHASES),
        fontsize=10,
        handlelength=1.0,
        columnspacing=1.2,
    )


def curves(record: Record) -> list[Curve]:
    """Returns all curves of a record that have a finite value."""
    starts = record.starts
    loss_lines = []
    for start in starts:
        steps, losses = start.loss()
        loss_lines.append(Line(steps, losses))
    found = [Curve(title="Loss", label="loss", unit=None, lines=loss_lines)]
    found += _logged_curves(starts)
    # The other curves are those of rank 0, the arrays by name.
    steps_of_start = [start.main.column("step") for start in starts]
    curves_of_start = [start.main.curves() for start in starts]
    # The unit "" stands for numbers that are shown with prefixes, such as 12 k; None for others.
    for title, label, unit, name in (
        ("Throughput", "samples/s", "", "samples_per_second"),
        ("Learning rate", "learning rate", None, "learning_rate"),
        ("Memory, the most so far on rank 0", "memory", "B", "memory_bytes"),
    ):
        lines = []
        for steps, values_by_name in zip(steps_of_start, curves_of_start, strict=True):
            lines.append(Line(steps, values_by_name[name]))
        found.append(Curve(title, label, unit, lines))
    return [curve for curve in found if _has_finite_value(curve)]


def _has_finite_value(curve: Curve) -> bool:
    return any(np.isfinite(line.values).any() for line in curve.lines)


def _logged_curves(starts: Sequence[Start]) -> list[Curve]:
    """Returns a curve for each name that the script logged, in training and in evaluations.

    What was logged under one name in training and in an evaluation are different curves. They are
    told apart by their titles, such as "accuracy (validation)".
    """
    lines_by_title: dict[str, list[Line]] = {}
    for start_index, start in enumerate(starts):
        for title, line in _logged_lines(start).items():
            if title not in lines_by_title:
                lines_by_title[title] = []
            lines = lines_by_title[title]
            # A curve has a line for each start. The starts since the last one that logged this have
            # no values.
            num_starts_without = start_index - len(lines)
            lines += [Line(np.empty(0), np.empty(0)) for _ in range(num_starts_without)]
            lines.append(line)
    found = []
    for title in sorted(lines_by_title):
        label = title.partition(" (")[0]
        found.append(Curve(title, label, unit=None, lines=lines_by_title[title]))
    return found


def _logged_lines(start: Start) -> dict[str, Line]:
    """Returns the lines of what the script logged in one start, by the titles of their curves."""
    steps_by_title: dict[str, list[float]] = {}
    values_by_title: dict[str, list[float]] = {}
    for logged in start.main.logged:
        kind = "running mean of a pass" if logged["training"] else evaluation_name(logged)
        for name, value in logged["logged"].items():
            title = f"{name} ({kind})"
            if title not in steps_by_title:
                steps_by_title[title] = []
                values_by_title[title] = []
            steps_by_title[title].append(logged["step"])
            values_by_title[title].append(value)
    lines = {}
    for title, steps in steps_by_title.items():
        lines[title] = Line(np.array(steps), np.array(values_by_title[title]))
    return lines
