"""The charts of a report, drawn by matplotlib as SVG.

Colours are variables of the page's style sheet, which has them for light and for dark. Where there
are more points or ranks than can be told apart, neighbours are averaged.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from lockstep.extensions.report.analysis import EVERY_STEP, per_step, work_by_rank
from lockstep.extensions.report.reading import OWN, Floats, Record, Start, evaluation_name
from lockstep.step import PHASES

_ORDER = (*OWN, "communication")
"""From below: what a rank does itself, then waiting for others."""
_POINTS = 800
_BINS = 160
"""Of time, in the chart of all ranks over time."""
_BARS = 32
"""Ranks that have a bar each; more are drawn as one outline."""
_NAMES = ("text", "grid", "line", *PHASES)
_PLACES = {name: f"#0{number:x}0b0{number:x}" for number, name in enumerate(_NAMES)}
"""Colours that stand for the variables: an SVG of matplotlib's takes colours alone."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lockstep",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": _PLACES["grid"],
    "axes.labelcolor": _PLACES["text"],
    "grid.color": _PLACES["grid"],
    "grid.linewidth": 0.6,
    "text.color": _PLACES["text"],
    "text.parse_math": False,  # a metric's name may hold dollars
    "xtick.color": _PLACES["text"],
    "ytick.color": _PLACES["text"],
    "legend.frameon": False,
}


def chart(name: str, height: float, draw: Callable[[Axes], Any], width: float = 9.0) -> str:
    """One chart as SVG.

    Args:
        name: its own on the page.
        height: in inches.
        draw: draws it.
        width: in inches; the whole page has 9.
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
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Where several charts are on one page, what they refer to must be told apart.
    svg = re.sub(r'\b(id="|href="#|url\(#)(?=[\w.-])', rf"\1{name}-", svg)
    for variable, place in _PLACES.items():
        svg = svg.replace(place, f"var(--{variable})")
    return svg


def averaged(values: Floats, weights: Floats, points: int = _POINTS) -> Floats:
    """Means over neighbours, so that there are no more than so many points."""
    if len(values) <= points:
        return values
    bounds = np.linspace(0, len(values), points + 1).astype(int)[:-1]
    sums = np.add.reduceat(values * weights, bounds)
    found: Floats = sums / np.maximum(np.add.reduceat(weights, bounds), 1e-12)
    return found


Line = tuple[Floats, Floats]
"""Steps and values."""


def lines(name: str, label: str, parts: Sequence[Line], *, unit: str | None = None) -> str:
    """A value over the steps; one part for each start of the run.

    Args:
        name: of the chart, on the page.
        label: of the axis.
        parts: the lines.
        unit: what is counted, with prefixes such as kilo; None: plain numbers.
    """

    def draw(axes: Axes) -> None:
        for steps, values in parts:
            ones = np.ones(len(steps))
            shown = averaged(steps, ones), averaged(values, ones)
            marker = "." if len(steps) < 40 else ""
            axes.plot(*shown, color=_PLACES["line"], linewidth=1.6, marker=marker)
        for steps, _ in parts[1:]:
            if len(steps):
                axes.axvline(float(steps[0]), color=_PLACES["text"], linewidth=0.8, linestyle="--")
        axes.set_xlim(left=min(float(steps[0]) for steps, _ in parts if len(steps)))
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if unit is not None:
            axes.yaxis.set_major_formatter(EngFormatter(unit))

    return chart(name, 2.4, draw, width=5.5)


def by_rank(start: Start) -> str:
    """Where the time of a step goes, for each rank; waiting for others on top."""
    found = {rank: of for rank, r in sorted(start.records.items()) if (of := per_step(r))}
    ranks = np.array([*found])

    def draw(axes: Axes) -> None:
        base = np.zeros(len(ranks))
        for phase in _ORDER:
            height = np.array([of[phase] for of in found.values()]) * 1e3
            if not height.any():
                continue
            color = _PLACES[phase]
            if len(ranks) <= _BARS:
                axes.bar(ranks, height, 0.8, bottom=base, color=color, label=phase)
            else:
                edges = np.append(ranks - 0.5, ranks[-1] + 0.5)
                axes.stairs(base + height, edges, baseline=base, fill=True, color=color,
                            label=phase)  # fmt: skip
            base = base + height
        axes.set_xlabel("rank")
        axes.set_ylabel("ms a step")
        if len(ranks) <= _BARS:
            axes.set_xticks(ranks)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(ranks[0] - 0.6, max(ranks[-1], ranks[0] + 3) + 0.6)
        axes.grid(visible=False, axis="x")
        _legend(axes)

    return chart("by-rank", 3.4, draw)


def over_time(start: Start) -> str:
    """Where the time of a step goes, as the run goes on: the mean over the ranks."""
    rows = min(len(record.rows) for record in start.records.values() if record.rows)
    records = [record for record in start.records.values() if record.rows]
    steps = records[0].column("steps")[:rows]
    number = averaged(records[0].column("step")[:rows], steps)

    def draw(axes: Axes) -> None:
        heights = {}
        for phase in _ORDER:
            seconds = np.mean([record.column(phase)[:rows] for record in records], axis=0)
            heights[phase] = averaged(seconds / steps, steps) * 1e3
        shown = {phase: height for phase, height in heights.items() if height.any()}
        axes.stackplot(number, *shown.values(), labels=[*shown], linewidth=0,
                       colors=[_PLACES[phase] for phase in shown])  # fmt: skip
        # A few steps that took very long, such as those with a checkpoint, would hide the others.
        total = np.sum([*heights.values()], axis=0)
        axes.set_ylim(0, min(float(total.max()), 4 * float(np.median(total))) * 1.05 or 1)
        axes.set_xlim(number[0], number[-1] if len(number) > 1 else number[0] + 1)
        axes.set_xlabel("step")
        axes.set_ylabel("ms a step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(axes)

    return chart("over-time", 3.0, draw)


def slow_ranks(start: Start) -> str:
    """How much longer or shorter than usual each rank works, as the run goes on."""
    ranks = [*work_by_rank(start)]
    records = [start.records[rank] for rank in ranks]
    rows = min(len(record.rows) for record in records)
    steps = records[0].column("steps")[:rows]
    number = averaged(records[0].column("step")[:rows], steps, _BINS)
    work = np.array([averaged(r.seconds(EVERY_STEP)[:rows] / steps, steps, _BINS) for r in records])
    usual = np.maximum(np.median(work, axis=0), 1e-12)
    relative = np.clip(work / usual - 1, -1, 1) * 100

    def draw(axes: Axes) -> None:
        image = axes.imshow(
            relative,
            aspect="auto",
            interpolation="nearest",
            cmap="RdBu_r",
            vmin=-60,
            vmax=60,
            extent=(number[0], max(number[-1], number[0] + 1), ranks[-1] + 0.5, ranks[0] - 0.5),
        )
        axes.set_xlabel("step")
        axes.set_ylabel("rank")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False)
        bar = axes.figure.colorbar(image, ax=axes, format="%+.0f %%")
        bar.outline.set_visible(False)

    return chart("slow-ranks", min(5.0, 1.6 + 0.12 * len(ranks)), draw)


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PHASES), fontsize=10,
                handlelength=1.0, columnspacing=1.2)  # fmt: skip


def series(record: Record) -> list[tuple[str, str, str | None, list[Line]]]:
    """What is drawn over the steps: title, label, unit, and a line for each start."""
    starts = record.starts
    found: list[tuple[str, str, str | None, list[Line]]] = [
        ("Loss", "loss", None, [start.loss() for start in starts])
    ]
    names: dict[str, list[Line]] = {}
    for number, start in enumerate(starts):
        points: dict[str, list[tuple[float, float]]] = {}
        for told in start.main.logged:
            kind = "running mean of a pass" if told["training"] else evaluation_name(told)
            for name, value in told["logged"].items():
                points.setdefault(f"{name} ({kind})", []).append((told["step"], value))
        for name, pairs in points.items():
            parts = names.setdefault(name, [])
            parts += [(np.empty(0), np.empty(0))] * (number - len(parts))
            parts.append((np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])))
    found += [(name, name.partition(" (")[0], None, parts) for name, parts in sorted(names.items())]
    mains = [(start.main.column("step"), start.main.curves()) for start in starts]
    found += [
        (title, label, unit, [(steps, curves[name]) for steps, curves in mains])
        for title, label, unit, name in (
            ("Throughput", "samples/s", "", "samples_per_second"),
            ("Learning rate", "learning rate", None, "learning_rate"),
            ("Memory, the most so far on rank 0", "memory", "B", "memory_bytes"),
        )
    ]
    return [
        (title, label, unit, parts)
        for title, label, unit, parts in found
        if any(len(values) and np.isfinite(values).any() for _, values in parts)
    ]
