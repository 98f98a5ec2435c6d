"""The page of a record: one HTML file without scripts that loads nothing from the network.

A record has one or several *starts*, since a run may be started again after a failure, and each
start has a record of every rank. What the record says is worked out in `analysis`, the charts are
drawn in `charts`, and the template is `page.html`.

Jinja escapes all text that comes from the run. Only the SVG of the charts is not escaped;
matplotlib escapes the names in it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import CheckpointError, SettingError
from lockstep.extensions.report import analysis
from lockstep.extensions.report.console import clock, duration, number, thousands
from lockstep.extensions.report.reading import (
    Floats,
    LauncherLine,
    RankRecord,
    Record,
    Start,
)
from lockstep.session.extension import PHASES
from lockstep.units import format_bytes
from lockstep.wording import count_noun, replace_unprintable

SILENT_S = 60.0
"""A start without an end is not running if it wrote nothing for this long and for four steps."""
SHOWN_EVIDENCE_LINES = 12
"""More lines of evidence for a finding are folded."""


class Chart(NamedTuple):
    """A chart of the page."""

    title: str
    caption: str
    """What the chart shows, also for readers who cannot see it."""
    svg: str


def render(
    record: Record, baselines: Sequence[Record] = (), *, refresh_s: float | None = None
) -> str:
    """Returns the page of a record as HTML.

    Args:
        record: the record of the run.
        baselines: records of other runs, such as one on one rank, to compare the throughput with.
        refresh_s: the seconds after which a browser loads the page again; None: never.

    Raises:
        SettingError: matplotlib is not installed.
    """
    try:
        import matplotlib as _  # noqa: F401  # `charts` uses it; here it is only asked for
        from jinja2 import Environment
    except ImportError as error:
        raise SettingError(
            "lockstep report",
            f"{error.name} is not installed",
            "pip install 'torch-lockstep[report]'",
        ) from None
    environment = Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text())
    text = template.render(**_template_variables(record, baselines), refresh_s=refresh_s)
    # The name of a folder may have bytes that are not text and cannot be encoded.
    return text.encode(errors="backslashreplace").decode()


def _template_variables(record: Record, baselines: Sequence[Record]) -> dict[str, Any]:
    """Returns what the template fills in; the page shows the last start of the run at length."""
    last = record.starts[-1]
    command = last.main.header.get("command") or ["a run"]
    read_at = analysis.clock_time(time.time())
    variables = {
        "title": f"{Path(command[0]).name} · {_state(last)}",
        "subtitle": f"{shlex.join(command)} · {record.folder} · read {read_at}",
        "numbers": _key_numbers(record, last),
        "findings": analysis.find(record),
        "shown": SHOWN_EVIDENCE_LINES,
        "time": _time_charts(last),
        "phases": PHASES,
        "ranks": [_rank_row(rank_record) for _, rank_record in sorted(last.records.items())],
        "curves": _curve_charts(record),
        "scaling": _scaling_rows(record, baselines),
        "had_several_ranks": last.reached_init and last.num_ranks > 1,
        "working": _working_sentence(last),
        "starts": [_start_row(number, start) for number, start in enumerate(record.starts, 1)],
        "choices": [*last.main.choices, *_versions(last.main.header)],
        "ledger": ledger_text(record),
        "figure": _figure_html,
    }
    variables["parts"] = _parts(variables)
    return variables


def _parts(variables: Mapping[str, Any]) -> list[str]:
    """Returns the parts of the page that are not empty; the links at its top lead to them."""
    has_content = {
        "Findings": True,
        "Time": bool(variables["time"]),
        "Curves": bool(variables["curves"]),
        "Scaling": bool(variables["scaling"] or variables["had_several_ranks"]),
        "Starts": True,
        "Choices": bool(variables["choices"]),
        "Samples": bool(variables["ledger"]),
    }
    return [part for part, is_shown in has_content.items() if is_shown]


def _figure_html(chart: Chart) -> str:
    """Returns a chart as HTML. `Markup.format` escapes what it inserts, unless that is Markup."""
    from markupsafe import Markup

    labelled_svg = Markup('<svg role="img" aria-label="{}"').format(chart.caption)
    svg = Markup(chart.svg.replace("<svg", labelled_svg, 1))
    return Markup(
        '<figure><h3>{}</h3><div class="wide" tabindex="0" role="group">{}</div>'
        "<figcaption>{}</figcaption></figure>"
    ).format(chart.title, svg, chart.caption)


def _state(start: Start) -> str:
    """Says how a start has ended, or that it is running if its last row is recent enough."""
    if start.end is not None:
        # "failed" and "interrupted" are said as they are.
        endings = {"ok": "ended well", "restarted": "ended, to start again"}
        text = endings.get(start.end, start.end)
        if not start.reached_init:
            text += " without lockstep.init" if start.end == "ok" else " before lockstep.init"
        return text
    silent_s = time.time() - start.last_time
    if not start.reached_init:
        return f"not at lockstep.init, {clock(silent_s)} after its start"
    # No end was written: the start runs, or all its ranks were killed. A row is written when its
    # last step has ended, so a run may be silent for as long as the steps of a row take. It counts
    # as running until the time of four such rows, with steps as long as the longest, has passed.
    longest_step_s = 0.0
    steps_per_row = 1.0
    for record in start.records.values():
        if record.rows:
            longest_step_s = max(longest_step_s, record.column("longest_s").max())
            steps_per_row = max(steps_per_row, record.column("steps").max())
    if silent_s < SILENT_S + 4 * longest_step_s * steps_per_row:
        return "running"
    return f"without a word for {clock(silent_s)}"


def _key_numbers(record: Record, last: Start) -> list[tuple[str, str]]:
    """Returns the numbers at the top of the page: pairs of a name and a text.

    Args:
        record: the record of the run.
        last: its last start, whose `main` is the record of rank 0.
    """
    # The hosts are known only if the ranks have begun their records, at lockstep.init.
    hosts = {str(rank_record.header.get("host")) for rank_record in last.records.values()}
    on_hosts = f" on {count_noun(len(hosts), 'host')}" if last.reached_init else ""
    numbers = [("ranks", f"{last.num_ranks}{on_hosts}")]
    if last.main.rows:
        numbers.append(("last step", thousands(last.main.column("step")[-1])))
    speed = analysis.speed(last)
    if speed is not None:
        numbers.append(("throughput", f"{thousands(speed.samples_per_second)} samples/s"))
        numbers.append(("time of a step", milliseconds_or_seconds(speed.seconds_per_step)))
    _, losses = last.loss()
    if len(losses):
        numbers.append(("last loss", number(float(losses[-1]))))
    numbers.append(("starts", str(len(record.starts))))
    totals = analysis.totals(last)
    if totals is not None:
        numbers.append(("trained for", duration(totals.seconds)))
        numbers.append(("most memory of a rank", format_bytes(int(totals.peak_memory))))
        numbers.append(("sent by rank 0", _sent(last, totals.bytes_sent)))
    return numbers


def _sent(start: Start, num_bytes: float) -> str:
    """Says how much rank 0 sent, or that it is not known because torch sends the data itself."""
    strategy = start.main.header.get("strategy")
    within_passes = strategy in analysis.STRATEGIES_THAT_COMMUNICATE_WITHIN_PASSES
    if start.num_ranks > 1 and within_passes:
        return "not known: torch sends"
    return format_bytes(int(num_bytes))


def milliseconds_or_seconds(seconds: float) -> str:
    """Returns `12.3 ms` or `1.25 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _time_charts(start: Start) -> list[Chart]:
    """Returns the charts of where the time of a step goes; none if there are no rows."""
    from lockstep.extensions.report import charts

    num_ranks_with_rows = len(analysis.work_by_rank(start))
    if num_ranks_with_rows == 0:
        return []
    found = [
        Chart(
            "By rank",
            "Milliseconds of a step that each rank spends on each phase, without the first steps. "
            "On top is communication, in which a rank waits for others. The rank that waits least "
            "is the one that the others wait for.",
            charts.by_rank(start),
        ),
        Chart(
            "As the run goes on",
            "Milliseconds of a step by phase, mean over the ranks.",
            charts.over_time(start),
        ),
    ]
    if num_ranks_with_rows > 1:
        found.append(
            Chart(
                "Ranks that are slower than the others",
                "How much longer (red) or shorter (blue) than the median rank each works on a "
                "step, waiting left out, as the run goes on.",
                charts.slow_ranks(start),
            )
        )
    return found


def _curve_charts(record: Record) -> list[Chart]:
    """Returns a chart for each curve of the record: the loss, logged values, throughput, ..."""
    from lockstep.extensions.report import charts

    found = []
    for index, curve in enumerate(charts.curves(record)):
        steps = [line.steps for line in curve.lines if len(line.steps)]
        values = [line.values for line in curve.lines if len(line.values)]
        as_text = format_bytes if curve.unit == "B" else number
        caption = _curve_caption(curve.label, steps, values, as_text)
        found.append(Chart(curve.title, caption, charts.draw_curve(f"curve-{index}", curve)))
    return found


def _curve_caption(
    label: str,
    steps: Sequence[Floats],
    values: Sequence[Floats],
    as_text: Callable[[float], str],
) -> str:
    """Says in a sentence what a curve shows, for readers who cannot see it.

    Args:
        label: what the values are.
        steps: the steps of each start of the run.
        values: the values of each start, at these steps.
        as_text: writes a value.
    """
    first_step = min(steps_of_start[0] for steps_of_start in steps)
    last_step = max(steps_of_start[-1] for steps_of_start in steps)
    least = min(float(values_of_start.min()) for values_of_start in values)
    most = max(float(values_of_start.max()) for values_of_start in values)
    first = float(values[0][0])
    last = float(values[-1][-1])
    return (
        f"{label} from step {first_step:.0f} to {last_step:.0f}: "
        f"begins at {as_text(first)}, ends at {as_text(last)}, "
        f"least {as_text(least)}, most {as_text(most)}."
    )


def _scaling_rows(record: Record, baselines: Sequence[Record]) -> list[tuple[object, ...]]:
    """Returns the rows of the table that compares the run with one rank."""
    starts: list[Start] = []
    for baseline in baselines:
        starts += baseline.starts
    starts += record.starts
    rows: list[tuple[object, ...]] = []
    for speed, times_one_rank in analysis.scaling(starts):
        rows.append(
            (
                speed.ranks,
                thousands(speed.samples_per_step),
                speed.steps,
                thousands(speed.samples_per_second),
                f"{times_one_rank:.2f}",
                f"{times_one_rank / speed.ranks:.0%}",  # 100 %: n ranks are n times as fast as one
            )
        )
    return rows


def _working_sentence(start: Start) -> str:
    """Says how much faster than one rank the ranks can be at most; empty if that is not known."""
    fraction = analysis.working_fraction(start)
    if fraction is None:
        return ""
    return (
        f"The {start.num_ranks} ranks worked for {fraction:.0%} of the time and waited for each "
        f"other for the rest, so they were no more than {start.num_ranks * fraction:.3g} times as "
        "fast as one."
    )


def _rank_row(record: RankRecord) -> dict[str, Any]:
    """Returns the cells of a rank in the table of times; those of times are empty without rows.

    "phases" has the milliseconds of a step in each phase, and "longest" the longest step.
    """
    phase_cells = [""] * len(PHASES)
    phases = analysis.seconds_per_step(record)
    if phases:
        phase_cells = [f"{phases[phase] * 1e3:.3g}" for phase in PHASES]
    longest = ""
    steady_rows = analysis.steady_rows(record)  # the first steps are always long
    longest_s = record.column("longest_s")[steady_rows]
    if len(longest_s):
        longest = milliseconds_or_seconds(float(longest_s.max()))
    memory = ""
    if record.rows:
        memory = format_bytes(int(record.column("memory").max()))
    return {
        "rank": record.rank,
        "host": record.header.get("host", "not known"),
        "phases": phase_cells,
        "longest": longest,
        "memory": memory,
    }


def _start_row(number: int, start: Start) -> dict[str, Any]:
    """Returns the cells of a start in the table of starts."""
    steps = "none"
    if start.main.rows:
        last_step = start.main.column("step")[-1]
        steps = f"{analysis.first_step(start.main):.0f} to {last_step:.0f}"
    # The style sheet has a colour for these two ends; the others have none.
    css_class = start.end if start.end in ("ok", "failed") else ""
    failures = [line for line in start.launcher_lines if line["kind"] == "failure"]
    return {
        "number": number,
        "time": analysis.clock_time(start.time),
        "ranks": start.num_ranks,
        "steps": steps,
        "end": _state(start),
        "level": css_class,
        "why": _failure_in_one_line(failures[0]) if failures else "",
    }


def _failure_in_one_line(failure: LauncherLine) -> str:
    """Joins the first two lines of a failure: which rank it was, and what it raised."""
    lines = failure["text"].splitlines()[:2]
    return ": ".join(line.strip().rstrip(":") for line in lines)


def _versions(header: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the versions as rows for the table of choices, which have no reason."""
    names = ("lockstep", "torch", "python")
    return [(name, str(header[name]), "") for name in names if name in header]


def ledger_text(record: Record) -> str:
    """Returns what the sample ledger of the run says; empty if the run kept none."""
    from lockstep.extensions.ledger.file_format import LEDGER_SUFFIX

    ledger_folder = record.starts[-1].main.header.get("ledger")
    if not ledger_folder:
        return ""
    try:
        folder = Path(ledger_folder)
        if not folder.is_dir():
            # The record is read on another machine; the ledger may have come with it.
            folder = record.folder
        # The sizes say whether the ledger has grown since it was judged last.
        files_and_sizes: list[tuple[Path, int]] = []
        for path in sorted(folder.glob(f"*{LEDGER_SUFFIX}")):
            files_and_sizes.append((path, path.stat().st_size))
        return _judge_ledger(folder, tuple(files_and_sizes))
    except CheckpointError as error:
        return error.parts


@lru_cache(maxsize=1)
def _judge_ledger(folder: Path, files_and_sizes: tuple[tuple[Path, int], ...]) -> str:
    """Returns the lines of the report on a ledger, judged again only if a file has grown.

    Args:
        folder: the folder of the ledger.
        files_and_sizes: the key of the cache, which is another one when a file has grown.
    """
    from lockstep.extensions.ledger.judge import judge

    lines = []
    for line in judge(folder).lines():
        # A finding has two lines, whose line break is not to be replaced.
        lines.append(line if "\n" in line else replace_unprintable(line))
    return "\n".join(lines)
