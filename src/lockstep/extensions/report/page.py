"""One self-contained page of a run's record: no script, nothing from the network.

All text of the run's is escaped by Jinja; what is not is the SVG of matplotlib's, which escapes the
names in it itself.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import CheckpointError, SettingError
from lockstep.extensions.report import analysis
from lockstep.extensions.report.console import clock, duration, number, thousands
from lockstep.extensions.report.reading import RankRecord, Record, Start
from lockstep.step import PHASES
from lockstep.units import format_bytes
from lockstep.wording import count_noun, replace_unprintable

_SILENT_S = 60.0
"""A start without an end, of which nothing came for so long and four steps, is not running."""
_SHOWN_LINES = 12
"""Of the evidence of a finding; what follows is folded."""


class Chart(NamedTuple):
    """A chart and what it shows, in words."""

    title: str
    text: str
    svg: str


def render(
    record: Record, baselines: Sequence[Record] = (), *, refresh_s: float | None = None
) -> str:
    """The page.

    Args:
        record: of the run.
        baselines: of other runs, such as one on one rank, to compare the throughput with.
        refresh_s: seconds after which a browser is to load it again; None: never.

    Raises:
        SettingError: matplotlib is not installed.
    """
    try:
        import matplotlib as _  # noqa: F401
        from jinja2 import Environment
        from markupsafe import Markup
    except ImportError as error:
        raise SettingError(
            "lockstep report",
            f"{error.name} is not installed",
            "pip install 'torch-lockstep[report]'",
        ) from None
    last = record.starts[-1]
    about = last.main.about
    environment = Environment(autoescape=True, trim_blocks=True)

    def figure(chart: Chart) -> str:
        head = Markup('<figure><h3>{}</h3><div class="wide" tabindex="0" role="group">').format(
            chart.title
        )
        svg = chart.svg.replace(
            "<svg", Markup('<svg role="img" aria-label="{}"').format(chart.text), 1
        )
        return Markup("{}{}</div><figcaption>{}</figcaption></figure>").format(
            head, Markup(svg), chart.text
        )

    template = environment.from_string(Path(__file__).with_name("page.html").read_text())
    command = about.get("command") or ["a run"]
    rates = analysis.scaling([s for each in (*baselines, record) for s in each.starts])
    ledger, now = _ledger(record), analysis.clock_time(time.time())
    choices = [*last.main.choices, *_versions(about)]
    several = last.joined and last.ranks > 1
    times, curves = _time_charts(last), _curves(record)
    shown: dict[str, Any] = {
        "Findings": True, "Time": times, "Curves": curves, "Scaling": rates or several,
        "Starts": True, "Choices": choices, "Samples": ledger,
    }  # fmt: skip
    text = template.render(
        figure=figure,
        refresh_s=refresh_s,
        title=f"{Path(command[0]).name} · {_state(last)}",
        subtitle=f"{shlex.join(command)} · {record.folder} · read {now}",
        parts=[name for name, content in shown.items() if content],
        numbers=_numbers(record, last),
        findings=analysis.find(record),
        time=times,
        curves=curves,
        phases=PHASES,
        ranks=[_rank_row(r) for _, r in sorted(last.records.items())],
        scaling=[
            (
                s.ranks,
                thousands(s.batch),
                s.steps,
                thousands(s.samples_s),
                f"{times:.2f}",
                f"{times / s.ranks:.0%}",
            )
            for s, times in rates
        ],
        working=_working(last),
        several=several,
        starts=[_start_row(n, start) for n, start in enumerate(record.starts, 1)],
        shown=_SHOWN_LINES,
        choices=choices,
        ledger=ledger,
    )
    return text.encode(errors="backslashreplace").decode()  # a folder's name may be no text


def _state(start: Start) -> str:
    """How a start has ended, or that it runs, as far as that can be told."""
    if start.end is not None:
        words = {"ok": "ended well", "restarted": "ended, to start again"}
        before = " without" if start.end == "ok" else " before"
        before = "" if start.joined else f"{before} lockstep.init"
        return words.get(start.end, start.end) + before
    longest = max(max(r.column("longest_s"), default=0.0) for r in start.records.values())
    steps = max(max(r.column("steps"), default=1.0) for r in start.records.values())
    quiet = time.time() - start.last_time
    if not start.joined:
        return f"not at lockstep.init, {clock(quiet)} after its start"
    if quiet < _SILENT_S + 4 * longest * steps:
        return "running"
    return f"without a word for {clock(quiet)}"


def _numbers(record: Record, last: Start) -> list[tuple[str, str]]:
    found = analysis.totals(last)
    _, losses = last.loss()
    speed = analysis.speed(last)
    hosts = {str(r.about.get("host")) for r in last.records.values()}
    where = f" on {count_noun(len(hosts), 'host')}" if last.joined else ""
    within = last.ranks > 1 and last.main.about.get("strategy") in analysis.COMMUNICATE_WITHIN
    numbers = [("ranks", f"{last.ranks}{where}")]
    if len(last.main.rows):
        numbers.append(("last step", thousands(last.main.column("step")[-1])))
    if speed is not None:
        numbers.append(("throughput", f"{thousands(speed.samples_s)} samples/s"))
        numbers.append(("time of a step", duration_of(speed.step_s)))
    if len(losses):
        numbers.append(("last loss", number(float(losses[-1]))))
    numbers.append(("starts", str(len(record.starts))))
    if len(last.main.rows):
        numbers += [
            ("trained for", duration(found["seconds"])),
            ("most memory of a rank", format_bytes(int(found["memory"]))),
            (
                "sent by rank 0",
                "not known: torch sends" if within else format_bytes(int(found["sent"])),
            ),
        ]
    return numbers


def duration_of(seconds: float) -> str:
    """`12.3 ms`, `1.25 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _time_charts(last: Start) -> list[Chart]:
    from lockstep.extensions.report import charts

    if not analysis.work_by_rank(last):
        return []
    found = [
        Chart(
            "By rank",
            "Milliseconds of a step that each rank spends on each phase, first steps left out; "
            "communication is waiting for others, on top: the rank that waits least is the one "
            "that the others wait for.",
            charts.by_rank(last),
        ),
        Chart(
            "As the run goes on",
            "Milliseconds of a step by phase, mean over the ranks.",
            charts.over_time(last),
        ),
    ]
    if len(analysis.work_by_rank(last)) > 1:
        found.append(
            Chart(
                "Ranks that are slower than the others",
                "How much longer (red) or shorter (blue) than the median rank each works on a "
                "step, waiting left out, as the run goes on.",
                charts.slow_ranks(last),
            )
        )
    return found


def _curves(record: Record) -> list[Chart]:
    from lockstep.extensions.report import charts

    return [
        Chart(
            title,
            _range(label, parts, format_bytes if unit == "B" else number),
            charts.lines(f"curve-{n}", label, parts, unit=unit),
        )
        for n, (title, label, unit, parts) in enumerate(charts.series(record))
    ]


def _range(label: str, parts: Sequence[Any], word: Callable[[Any], str]) -> str:
    """What a line shows, for those who do not see it."""
    steps = [s for s, _ in parts if len(s)]
    values = [v for _, v in parts if len(v)]
    least, most = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    return (
        f"{label} from step {min(s[0] for s in steps):.0f} to {max(s[-1] for s in steps):.0f}: "
        f"begins at {word(float(values[0][0]))}, ends at {word(float(values[-1][-1]))}, "
        f"least {word(least)}, most {word(most)}."
    )


def _working(start: Start) -> str:
    """How much faster than one rank they can be, from what each of them has measured."""
    part = analysis.working(start)
    if part is None:
        return ""
    return (
        f"The {start.ranks} ranks worked for {part:.0%} of the time and waited for each other for "
        f"the rest, so they were no more than {start.ranks * part:.3g} times as fast as one."
    )


def _rank_row(record: RankRecord) -> dict[str, Any]:
    found = analysis.per_step(record)
    longest = record.column("longest_s")[analysis.steady(record)]
    return {
        "rank": record.rank,
        "host": record.about.get("host", "not known"),
        "phases": [f"{found[phase] * 1e3:.3g}" if found else "" for phase in PHASES],
        "longest": duration_of(float(longest.max())) if len(longest) else "",
        "memory": format_bytes(int(record.column("memory").max())) if record.rows else "",
    }


def _start_row(number: int, start: Start) -> dict[str, Any]:
    steps = start.main.column("step")
    first = steps[0] - start.main.column("steps")[0] + 1 if len(steps) else 0
    return {
        "number": number,
        "time": analysis.clock_time(start.time),
        "ranks": start.ranks,
        "steps": f"{first:.0f} to {steps[-1]:.0f}" if len(steps) else "none",
        "end": _state(start),
        "level": {"ok": "ok", "failed": "failed"}.get(start.end or "", ""),
        "why": next((_why(told) for told in start.told if told["kind"] == "failure"), ""),
    }


def _why(told: dict[str, Any]) -> str:
    """The first lines of a failure: which rank, and what it raised."""
    return ": ".join(line.strip().rstrip(":") for line in told["text"].splitlines()[:2])


def _versions(about: dict[str, Any]) -> list[tuple[str, str, str]]:
    names = ("lockstep", "torch", "python")
    return [(name, str(about[name]), "") for name in names if name in about]


def _ledger(record: Record) -> str:
    """What the sample ledger tells, where the run has kept one."""
    from lockstep.batch.ledger import SUFFIX

    told = record.starts[-1].main.about.get("ledger")
    if not told:
        return ""
    try:
        # On another machine it may lie elsewhere, or with the record.
        folder = Path(told) if Path(told).is_dir() else record.folder
        files = sorted(folder.glob(f"*{SUFFIX}"))
        return _judged(folder, tuple((path, path.stat().st_size) for path in files))
    except CheckpointError as error:
        return error.parts


@lru_cache(maxsize=1)
def _judged(folder: Path, sizes: tuple[tuple[Path, int], ...]) -> str:
    """The same; a page that is drawn again does not judge again what has not grown."""
    from lockstep.batch.ledger import judge

    lines = judge(folder).lines()
    return "\n".join(replace_unprintable(line) if "\n" not in line else line for line in lines)
