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
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from lockstep.extensions.report.analysis import WORK_PHASES, phases_by_rank, work_by_rank
from lockstep.extensions.report.reading import Floats, Record, Start, evaluation_name
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
        height: in inches.
        draw: called with the axes to draw on.
        width: in inches.
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
    # Ids must differ from those of the page's other charts.
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

    def draw(axes: Axes) -> None:
        """Draws a line for each start of the run."""
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
                axes.axvline(
                    restart, color=_PLACEHOLDER_COLORS["text"], linewidth=0.8, linestyle="--"
                )
        first_steps = [float(line.steps[0]) for line in curve.lines if len(line.steps)]
        axes.set_xlim(left=min(first_steps))
        axes.set_xlabel("step")
        axes.set_ylabel(curve.label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if curve.unit is not None:
            axes.yaxis.set_major_formatter(EngFormatter(curve.unit))

    return chart(name, 2.4, draw, width=5.5)


def by_rank(start: Start) -> str:
    """Draws where the time of a step goes on each rank; waiting for others is on top."""
    phases = phases_by_rank(start)
    ranks = np.array([*phases])

    def draw(axes: Axes) -> None:
        """Stacks the phases: a bar for each rank, or areas if there are many ranks."""
        # `bottom` and `height` have a value for each rank, in milliseconds.
        bottom = np.zeros(len(ranks))
        for phase in STACKED_PHASES:
            height = np.array([seconds[phase] for seconds in phases.values()]) * 1e3
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

    return chart("by-rank", 3.4, draw)


def over_time(start: Start) -> str:
    """Draws where the time of a step goes, over the steps of the run: the mean over the ranks."""
    records = [record for record in start.records.values() if record.rows]
    # A rank may not have written its last rows yet.
    num_rows = min(len(record.rows) for record in records)
    steps_of_row = records[0].column("steps")[:num_rows]
    step_numbers = averaged(records[0].column("step")[:num_rows], steps_of_row)

    def draw(axes: Axes) -> None:
        """Stacks the phases as areas over the steps."""
        heights: dict[str, Floats] = {}  # milliseconds of a step, one value for each point
        for phase in STACKED_PHASES:
            by_record = [record.column(phase)[:num_rows] for record in records]
            seconds_of_row = np.mean(by_record, axis=0)  # over the ranks
            heights[phase] = averaged(seconds_of_row / steps_of_row, steps_of_row) * 1e3
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

    return chart("over-time", 3.0, draw)


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
    num_rows = min(len(record.rows) for record in records)
    steps_of_row = records[0].column("steps")[:num_rows]
    step_numbers = averaged(records[0].column("step")[:num_rows], steps_of_row, MAX_COLUMNS)
    work_of_rank = []
    for record in records:
        seconds_per_step = record.seconds(WORK_PHASES)[:num_rows] / steps_of_row
        work_of_rank.append(averaged(seconds_per_step, steps_of_row, MAX_COLUMNS))
    work = np.array(work_of_rank)  # shape (ranks, columns), as `percent` below
    median_over_ranks = np.median(work, axis=0)
    usual = np.maximum(median_over_ranks, 1e-12)  # shape (columns,); no division by 0
    percent = np.clip(work / usual - 1, -1, 1) * 100  # 20: a fifth longer than usual
    first_step = step_numbers[0]
    last_step = max(step_numbers[-1], first_step + 1)  # a single column needs some width

    def draw(axes: Axes) -> None:
        """Draws a row for each rank, rank 0 on top, with a colour for each column of steps."""
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

    return chart("slow-ranks", min(5.0, 1.6 + 0.12 * len(ranks)), draw)


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
    found = [Curve("Loss", "loss", None, [Line(*start.loss()) for start in starts])]
    found += _logged_curves(starts)
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
        points_by_title: dict[str, list[tuple[float, float]]] = {}
        for logged in start.main.logged:
            kind = "running mean of a pass" if logged["training"] else evaluation_name(logged)
            for name, value in logged["logged"].items():
                title = f"{name} ({kind})"
                points_by_title.setdefault(title, []).append((logged["step"], value))
        for title, points in points_by_title.items():
            lines = lines_by_title.setdefault(title, [])
            # Earlier starts that did not log it get empty lines: a curve has one line per start.
            while len(lines) < start_index:
                lines.append(Line(np.empty(0), np.empty(0)))
            steps = np.array([step for step, _ in points])
            values = np.array([value for _, value in points])
            lines.append(Line(steps, values))
    found = []
    for title in sorted(lines_by_title):
        label = title.partition(" (")[0]
        found.append(Curve(title, label, None, lines_by_title[title]))
    return found
