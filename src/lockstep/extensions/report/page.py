"""The page of a record: one HTML file that loads nothing from the network.

A record has one or several *starts*, since a run may be started again after a failure, and each
start has a record of every rank. What the record says is worked out in `analysis` and `comparison`.
The folder `web` has the template, the style sheet and the script of the page; the script draws what
`charts` returns with uPlot, a small library whose code is put into the page too.

Jinja escapes all text that comes from the run. The browser runs only the scripts whose hashes stand
in the page's Content-Security-Policy, so text that got past that would not run either.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import CheckpointError
from lockstep.extensions.report import analysis, charts, comparison
from lockstep.extensions.report.console import clock, duration, number, thousands
from lockstep.extensions.report.facts import (
    UserText,
    command_line,
    run_facts,
)
from lockstep.extensions.report.reading import (
    LauncherLine,
    RankRecord,
    Record,
    Start,
)
from lockstep.language import language, translate
from lockstep.session.extension import PHASES
from lockstep.strategies.registry import entry_of
from lockstep.units import format_bytes, format_number
from lockstep.wording import replace_unprintable

MIN_SILENCE_S = 60.0
"""A start without an end is not running if it wrote nothing for this long and for four steps."""
PHASE_NAMES = {phase: phase for phase in PHASES}
"""How the template and the script of the page call each phase: in each language by its own name."""
SHOWN_EVIDENCE_LINES = 12
"""More lines of evidence for a finding are folded."""

WEB_FOLDER = Path(__file__).with_name("web")
SCRIPTS = ("uplot/uPlot.iife.min.js", "page.js")
STYLES = ("uplot/uPlot.min.css", "page.css")


def render(record: Record, others: Sequence[Record] = (), *, refresh_s: float | None = None) -> str:
    """Returns the page of a record as HTML.

    Args:
        record: the record of the run.
        others: records of other runs to compare it with.
        refresh_s: the seconds after which the page asks its server for changes; None: never.
    """
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True)
    environment.globals["_"] = translate
    environment.filters["translate"] = translate
    environment.filters["with_code"] = _with_code
    template = environment.from_string(_web_text("page.html"))

    # The data go into a <script> element, which a "</script" in them would end. So each "<" in the
    # JSON is written as "\u003c", which means the same.
    scripts = [_web_text(name) for name in SCRIPTS]
    data = json.dumps(_chart_data(record, others), ensure_ascii=False, separators=(",", ":"))
    data_without_tags = data.replace("<", "\\u003c")

    # The Content-Security-Policy of the page lets the browser run only scripts with these hashes.
    script_hashes = " ".join([_script_hash(script) for script in scripts])

    # `Markup` keeps Jinja from escaping what is code or data.
    text = template.render(
        **_template_variables(record, others),
        refresh_s=refresh_s,
        style=Markup("".join([_web_text(name) for name in STYLES])),
        scripts=[Markup(script) for script in scripts],
        script_hashes=Markup(script_hashes),
        data=Markup(data_without_tags),
    )

    # The name of a folder may have bytes that are not text and cannot be encoded.
    return text.encode(errors="backslashreplace").decode()


def _with_code(text: str) -> str:
    """Returns a text as HTML in which what stands between backticks is code."""
    from markupsafe import Markup, escape

    html = Markup("")
    for index, part in enumerate(text.split("`")):
        is_code = index % 2 == 1
        html += Markup("<code>{}</code>").format(part) if is_code else escape(part)
    return html


@lru_cache
def _web_text(name: str) -> str:
    """Returns the text of a file in the folder `web`."""
    return (WEB_FOLDER / name).read_text(encoding="utf-8")


def _script_hash(script: str) -> str:
    """Returns the hash by which a Content-Security-Policy allows a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _chart_data(record: Record, others: Sequence[Record]) -> dict[str, Any]:
    """Returns the data that `web/page.js` draws, as a dict that is written into the page as JSON.

    These are the curves of all runs, the phases of the steps of the last start, how much longer its
    slow ranks work, and the names and texts that the charts show when the pointer is over them.
    """
    last = record.starts[-1]
    records = [record, *others]
    names = comparison.run_names(records)

    curves = charts.curve_charts(records, names)
    _translate_titles(curves)
    return {
        "run_names": names,
        "phase_names": PHASE_NAMES,
        "texts": {
            "median": translate("like the median rank"),
            "longer": translate("longer than the median rank"),
            "shorter": translate("shorter than the median rank"),
            # Shown when the page asks its server for changes, and gets none.
            "no_answer": translate("no answer, and the page is as it was"),
        },
        "restarts": charts.restarts(record),
        "curves": curves,
        "over_time": charts.phases_over_time(last),
        "slow_ranks": charts.slow_ranks(last),
    }


def _captions_of_measured_curves() -> dict[str, str]:
    """Returns the captions of the curves that Lockstep measures, by their titles in `charts`."""
    return {
        charts.THROUGHPUT: translate("Throughput in samples/s"),
        charts.LEARNING_RATE: translate("Learning rate"),
        charts.PEAK_MEMORY: translate("Peak memory of rank 0"),
        charts.GPU_USE: translate("GPU use, mean over ranks"),
        charts.GPU_MEMORY: translate("GPU memory in use, mean over ranks"),
    }


def _template_variables(record: Record, others: Sequence[Record]) -> dict[str, Any]:
    """Returns what the template fills in; the page shows the last start of the run at length."""
    last = record.starts[-1]
    command = last.main.header.get("command") or ["a run"]
    records = [record, *others]

    # The bars of the ranks, and the phases that they show.
    bars = charts.bars_by_rank(last)
    longest_ms = 0.0
    phases_in_bars: set[str] = set()
    for bar in bars:
        longest_ms = max(longest_ms, sum(part["ms"] for part in bar["parts"]))
        phases_in_bars.update(part["phase"] for part in bar["parts"])

    variables = {
        "language": language(),
        "title": Path(command[0]).name,
        "state": _badge(last),
        "folder": str(record.folder),
        "command": command_line(last.main.header),
        "read_at": analysis.clock_time(time.time()),
        "numbers": _key_numbers(record, last),
        "findings": analysis.find(record),
        "level_names": {
            "error": translate("Error"),
            "warning": translate("Warning"),
            "note": translate("Note"),
        },
        "shown": SHOWN_EVIDENCE_LINES,
        "has_steps": bool(last.main.rows),
        "comparison": comparison.compare(records) if others else None,
        "curves": any(charts.curves(each) for each in records),
        "run_names": comparison.run_names(records),
        "bars": bars,
        "longest_ms": longest_ms,
        "hidden_bars": len(analysis.work_by_rank(last)) > len(bars),
        "shown_phases": [phase for phase in charts.STACKED_PHASES if phase in phases_in_bars],
        "phases": PHASES,
        "phase_names": PHASE_NAMES,
        "ranks": [_rank_row(rank_record) for _, rank_record in sorted(last.records.items())],
        "has_gpu_use": any(rank_record.gpu_uses for rank_record in last.records.values()),
        "scaling": _scaling_rows(records),
        "had_several_ranks": last.reached_init and last.num_ranks > 1,
        "working": _working_sentence(last),
        "starts": [_start_row(number, start) for number, start in enumerate(record.starts, 1)],
        "facts": _rows_of_facts(last),
        "traces": _traces(record),
        "ledger": ledger_text(record),
    }

    # The links at the top of the page lead to the parts that are not empty.
    variables["parts"] = _parts(variables)
    return variables


def _translate_titles(curves: Sequence[dict[str, Any]]) -> None:
    """Gives each curve that Lockstep measures a caption, such as "Throughput in samples/s".

    A curve that the script logs keeps the script's own title.
    """
    captions = _captions_of_measured_curves()
    for curve in curves:
        if curve["title"] in captions:
            curve["title"] = captions[curve["title"]]


def _parts(variables: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the parts of the page that are not empty, as pairs of a title and an anchor.

    For example `("Curves", "curves")`, for a link to `#curves` at the top of the page. "What to
    look at" is not among them, since it is the first part.

    Args:
        variables: what the template is filled with. "had_several_ranks" is True if the last start
            had several ranks; then "Scaling" says how long they waited for each other.
    """
    has_scaling = bool(variables["scaling"] or variables["had_several_ranks"])
    parts = [  # title, anchor, whether the part has content
        (translate("Comparison"), "comparison", bool(variables["comparison"])),
        (translate("Curves"), "curves", bool(variables["curves"])),
        (translate("Time of a step"), "time", bool(variables["bars"])),
        (translate("Scaling"), "scaling", has_scaling),
        (translate("Starts"), "starts", True),
        (translate("What was run"), "run", True),
        (translate("Traces"), "traces", bool(variables["traces"])),
        (translate("Samples"), "samples", bool(variables["ledger"])),
    ]
    return [(title, anchor) for title, anchor, has_content in parts if has_content]


class Badge(NamedTuple):
    """How the run is, in a few words beside its name."""

    text: str
    level: str
    """`ok`, `failed`, `running`, or empty for none of these; the style sheet has a colour for
    each."""


def _badge(start: Start) -> Badge:
    """Says how a start has ended, or that it is running if its last row is recent enough."""
    if start.end is not None:
        return _badge_of_end(start)

    # No end was written: the start is running, or all its ranks were killed.
    silent_s = time.time() - start.last_time
    if not start.reached_init:
        return Badge(translate(f"Not at lockstep.init {clock(silent_s)} after its start"), level="")

    if silent_s < _max_silence_s(start):
        return Badge(translate("Running"), level="running")
    return Badge(translate(f"No sign of life for {clock(silent_s)}"), level="")


def _max_silence_s(start: Start) -> float:
    """Returns after how many seconds without a new row a start no longer counts as running.

    A run writes a row when all steps of the row have ended. With 10 steps per row and at most 2 s
    per step, it may write nothing for 20 s. It is given the time of four such rows and a minute
    (`MIN_SILENCE_S`), here 140 s.
    """
    longest_step_s = 0.0
    steps_per_row = 1.0
    for record in start.records.values():
        if record.rows:
            longest_step_s = max(longest_step_s, record.column("longest_s").max())
            steps_per_row = max(steps_per_row, record.column("steps").max())
    return MIN_SILENCE_S + 4 * longest_step_s * steps_per_row


def _badge_of_end(start: Start) -> Badge:
    """Says how a start has ended. The caller knows that it has: `start.end` is not None."""
    if start.end == "ok":
        if start.reached_init:
            return Badge(translate("Ended well"), "ok")
        return Badge(translate("Ended without lockstep.init"), "ok")
    if start.end == "failed":
        if start.reached_init:
            return Badge(translate("Failed"), "failed")
        return Badge(translate("Failed before lockstep.init"), "failed")
    if start.end == "interrupted":
        return Badge(translate("Interrupted"), level="")

    # The rest is "restarted": the launcher began again with other machines.
    return Badge(translate("Ended, to start again"), level="")


def _key_numbers(record: Record, last: Start) -> list[tuple[str, str]]:
    """Returns the numbers at the top of the page: pairs of a name and a text.

    Args:
        record: the record of the run.
        last: its last start, whose `main` is the record of rank 0.
    """
    # The hosts are known only if the ranks have begun their records, at lockstep.init.
    hosts = {str(rank_record.header.get("host")) for rank_record in last.records.values()}
    ranks = str(last.num_ranks)
    if last.reached_init:
        # `translate` recognizes a text of the catalogue also after values were filled in.
        num_hosts = len(hosts)
        ranks = translate(
            f"{ranks} on {num_hosts} hosts" if num_hosts > 1 else f"{ranks} on 1 host"
        )
    figures = [(translate("Ranks"), ranks)]

    last_step = analysis.last_step(last)
    if last_step:
        figures.append((translate("Last step"), thousands(last_step)))

    speed = analysis.speed(last)
    if speed is not None and speed.samples_per_second:
        figures.append(
            (translate("Throughput"), f"{thousands(speed.samples_per_second)} samples/s")
        )
    if speed is not None:
        figures.append(
            (
                translate("Time of a step"),
                comparison.milliseconds_or_seconds(speed.seconds_per_step),
            )
        )

    _steps, losses = last.loss()
    if len(losses):
        figures.append((translate("Last loss"), number(float(losses[-1]))))

    gpu_use = _gpu_use(last)
    if gpu_use:
        figures.append((translate("GPU use"), gpu_use))

    figures.append((translate("Starts"), str(len(record.starts))))

    totals = analysis.totals(last)
    if totals is not None:
        figures.append((translate("Trained for"), duration(totals.seconds)))
        figures.append((translate("Peak memory of a rank"), format_bytes(int(totals.peak_memory))))
        figures.append((translate("Sent by rank 0"), _sent(last, totals.bytes_sent)))

    return figures


def _gpu_use(start: Start) -> str:
    """Says how busy the GPUs were, and which was the least busy; empty if that is not known."""
    use_of_rank = {}
    for rank, record in start.records.items():
        use = analysis.mean_gpu_use(record)
        if use is not None:
            use_of_rank[rank] = use
    if not use_of_rank:
        return ""

    mean = sum(use_of_rank.values()) / len(use_of_rank)
    least = min(use_of_rank, key=lambda rank: use_of_rank[rank])
    text = f"{mean:.0f} %"

    # A rank is named if its use is more than 5 percentage points below the mean.
    if use_of_rank[least] < mean - 5:
        text += f", rank {least} {use_of_rank[least]:.0f} %"
    return text


def _traces(record: Record) -> list[dict[str, Any]]:
    """Returns the files into which steps were traced: step, rank and path."""
    traces = []
    for start in record.starts:
        for rank, rank_record in sorted(start.records.items()):
            for trace in rank_record.traces:
                path = str(record.folder / trace["trace"])
                traces.append({"step": trace["step"], "rank": rank, "path": path})
    return traces


def _sent(start: Start, num_bytes: float) -> str:
    """Says how much rank 0 sent, or that it is not known because torch sends the data itself."""
    entry = entry_of(start.main.header.get("strategy"))
    if start.num_ranks > 1 and entry.communicates_within_passes:
        return translate("not known, as torch sends it")
    return format_bytes(int(num_bytes))


def _scaling_rows(records: Sequence[Record]) -> list[tuple[object, ...]]:
    """Returns the rows of the table of speedups by the number of ranks.

    Of other runs, only starts on other numbers of ranks are added. For example, if this run was
    started on 1 and on 4 ranks, a start of another run on 2 ranks is added, and one on 4 ranks is
    not added.

    Args:
        records: the record of this run, and then those of the runs that it is compared with.
    """
    this_run, *other_runs = records
    starts = list(this_run.starts)
    own_numbers_of_ranks = {start.num_ranks for start in starts}
    for other_run in other_runs:
        for start in other_run.starts:
            if start.num_ranks not in own_numbers_of_ranks:
                starts.append(start)

    rows: list[tuple[object, ...]] = []
    for speed, speedup in analysis.scaling(starts):
        rows.append(
            (
                speed.ranks,
                thousands(speed.samples_per_step),
                speed.steps,
                thousands(speed.samples_per_second),
                f"{speedup:.2f}",
                f"{speedup / speed.ranks:.0%}",  # 100 %: n ranks are n times as fast as one
            )
        )
    return rows


def _rows_of_facts(start: Start) -> list[tuple[str, str, str]]:
    """Returns names, values and reasons of what was run, in the language of the page.

    Lockstep's own words are translated; those of the user's command line stay as they are:

        strategy, ddp, one process per GPU    all of it is translated
        argument, data/                       the name is Lockstep's, so it alone is translated
        --lr, 0.1                             nothing is translated
    """
    rows = []
    for name, value, reason in run_facts(start):
        shown_name = _translate_unless_from_user(name)
        shown_value = _translate_unless_from_user(value)
        shown_reason = _translate_unless_from_user(reason)
        rows.append((shown_name, shown_value, shown_reason))
    return rows


def _translate_unless_from_user(text: str) -> str:
    """Translates a text into the language of the page, unless it comes from the user."""
    return text if isinstance(text, UserText) else translate(text)


def _working_sentence(start: Start) -> str:
    """Says how much faster than one rank the ranks can be at most; empty if that is not known."""
    fraction = analysis.working_fraction(start)
    if fraction is None:
        return ""

    # If 4 ranks wait for a quarter of the time, they do the work of 3 at most.
    return translate(
        f"The {start.num_ranks} ranks worked for {fraction:.0%} of the time and waited for each "
        f"other for the rest, so they were no more than {start.num_ranks * fraction:.3g} times as "
        "fast as one."
    )


def _longest_step(record: RankRecord) -> str:
    """Returns the duration of a rank's longest step as a text; empty if it is not known.

    The first rows are left out, whose steps are always long.
    """
    rows = analysis.steady_rows(record)
    longest_of_rows = record.column("longest_s")[rows]
    if not len(longest_of_rows):
        return ""
    return comparison.milliseconds_or_seconds(float(longest_of_rows.max()))


def _rank_row(record: RankRecord) -> dict[str, Any]:
    """Returns the cells of a rank in the table of times.

    "phases" has the milliseconds of a step in each phase, and "longest" the longest step. The cells
    with times are empty if the rank has written no row.
    """
    # The cells of the phases, in milliseconds.
    phase_cells = [""] * len(PHASES)
    phases = analysis.seconds_per_step(record)
    if phases:
        phase_cells = [format_number(phases[phase] * 1e3) for phase in PHASES]

    memory = ""
    if record.rows:
        memory = format_bytes(int(record.column("memory").max()))

    gpu_use = analysis.mean_gpu_use(record)
    return {
        "rank": record.rank,
        "host": record.header.get("host", "not known"),
        "phases": phase_cells,
        "longest": _longest_step(record),
        "memory": memory,
        "gpu_use": "" if gpu_use is None else f"{gpu_use:.0f} %",
    }


def _start_row(number: int, start: Start) -> dict[str, Any]:
    """Returns the cells of a start in the table of starts."""
    steps = "–"
    if start.main.rows:
        steps = f"{analysis.first_step(start.main):.0f}–{analysis.last_step(start):.0f}"

    badge = _badge(start)
    failures = [line for line in start.launcher_lines if line["kind"] == "failure"]
    return {
        "number": number,
        "time": analysis.clock_time(start.time),
        "ranks": start.num_ranks,
        "steps": steps,
        "end": badge.text,
        "level": badge.level,
        # The first failure, from which the others usually follow.
        "why": _failure_in_one_line(failures[0]) if failures else "",
    }


def _failure_in_one_line(failure: LauncherLine) -> str:
    """Joins the first two lines of a failure: which rank it was, and what it raised."""
    lines = failure["text"].splitlines()[:2]
    return ": ".join(line.strip().rstrip(":") for line in lines)


def ledger_text(record: Record) -> str:
    """Returns the report on the sample ledger of the run, or why it cannot be read.

    It is empty if the run kept no ledger.
    """
    from lockstep.extensions.ledger.file_format import LEDGER_SUFFIX

    ledger_folder = record.starts[-1].main.header.get("ledger")
    if not ledger_folder:
        return ""

    try:
        folder = Path(ledger_folder)
        if not folder.is_dir():
            # The record is read on another machine; the ledger may have come with it.
            folder = record.folder

        # The last result is kept, and used again as long as no file has grown.
        paths = sorted(folder.glob(f"*{LEDGER_SUFFIX}"))
        sizes = tuple((path, path.stat().st_size) for path in paths)
        return _judge_ledger(folder, sizes_as_cache_key=sizes)
    except CheckpointError as error:  # also raised for files of a ledger that cannot be read
        return error.message


@lru_cache(maxsize=1)
def _judge_ledger(folder: Path, sizes_as_cache_key: tuple[tuple[Path, int], ...]) -> str:
    """Returns the lines of the report on a ledger, judged again only if a file has grown.

    Args:
        folder: the folder of the ledger.
        sizes_as_cache_key: its files and their sizes. They are not used here: once a file has
            grown, `lru_cache` takes the call for a new one.
    """
    from lockstep.extensions.ledger.judge import judge

    # The report may quote text from foreign files, which is cleaned. An entry of the report may
    # have two lines: it is split first, since cleaning would replace the line break.
    clean_lines = []
    for entry in judge(folder).lines(translate):
        clean_lines += [replace_unprintable(line) for line in entry.split("\n")]
    return "\n".join(clean_lines)
