"""What a record says about a run: where the time goes, which rank is slow, what went wrong.

A `Record` has one or several *starts* (a run may be started again after a failure), and a start has
the record of each rank. A *row* of such a record covers one or several steps and says how many
seconds the rank spent in each *phase* of them (`PHASES`); waiting for other ranks is the phase
`communication`, and all other phases are *work*. Nothing here reads files or writes anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import numpy as np

from lockstep.extensions.report.console import duration
from lockstep.extensions.report.reading import LauncherLine, LossRow, RankRecord, Record, Start
from lockstep.extensions.report.record_format import PHASES_WITHOUT_WAITING
from lockstep.session.extension import PHASES
from lockstep.strategies.registry import entry_of
from lockstep.units import format_number
from lockstep.wording import count_noun, format_ranges, format_ranks, join_first

WORK_PHASES = tuple(
    phase for phase in PHASES_WITHOUT_WAITING if phase not in ("checkpoint", "evaluation")
)
"""The phases in which a rank works on its part of a step. Checkpoints and evaluations are left out,
because often one rank alone has them."""
STRAGGLER_MIN_EXCESS = 0.1
"""A rank is a straggler if it works longer than usual by this fraction of a step."""
MAX_STRAGGLERS = 5
MAX_WARNINGS = 20


class LongPhase(NamedTuple):
    """When too much of a step goes into one phase on all ranks, and what helps."""

    min_fraction: float
    """The fraction of the time of a step from which on there is a finding."""
    ranks_do: str
    advice: str


LONG_PHASES = {
    "data": LongPhase(
        0.2,
        "wait for data",
        "Give the DataLoader more num_workers, or make the transform cheaper.",
    ),
    "communication": LongPhase(
        0.3,
        "wait for each other and for the network",
        "A larger batch per rank makes fewer exchanges; the page on slow networks in the "
        "documentation says when compression or another strategy helps.",
    ),
    "checkpoint": LongPhase(0.1, "wait for checkpoints", "Save less often, or to a faster disk."),
}
LIMIT_OF_COMMUNICATION_ON_ONE_HOST = LongPhase(
    0.3,
    "wait for each other",
    "A larger batch per rank gives them more work between two exchanges. On CPUs, run no more "
    "ranks and threads than there are cores.",
)
"""The communication of ranks that are all on one host, which no network takes part in."""
ADVICE_FOR_STRAGGLER = {
    "data": "Compare what this rank reads, and its disk, with the others'; more num_workers may "
    "hide the difference.",
    "other": "Look at what the script does on this rank alone between two steps, such as logging "
    "or saving.",
}
"""What to do about a straggler, by the phase in which it loses most."""
ADVICE_FOR_SLOW_DEVICE = (
    "Run `lockstep doctor` on its host, which may be busy, hot or throttled. If the device is "
    'slower by design, shares="auto" gives it fewer samples.'
)
"""The same, for a phase in which the device computes."""

ENDINGS = {
    "failed": "by a failure",
    "interrupted": "by a signal",
    "restarted": "as the machines of the run changed",
    None: "without a word: it was killed",
}
"""How a start ended that did not end well, by `Start.end`."""

LEVEL_OF_LAUNCHER_KIND = {"failure": "error", "interrupted": "error", "finding": "warning"}
LOG_FOLDER_PREFIX = "traceback and logs: "
"""How the line of a launcher's message begins that names its folder of logs."""


class Finding(NamedTuple):
    """Something about the run that somebody should look at."""

    level: str
    """`error`, `warning` or `note`."""
    text: str
    evidence: tuple[str, ...] = ()
    """Lines that support it."""
    advice: str = ""
    """What to do next; empty if that follows from the text."""


class Speed(NamedTuple):
    """How fast one start of a run was."""

    ranks: int
    samples_per_second: float
    """On all ranks together."""
    seconds_per_step: float
    steps: int
    """How many steps were measured."""
    samples_per_step: float


def steady_rows(record: RankRecord) -> slice:
    """Returns all rows but the first three, in which buffers are made and caches filled.

    Of a record with fewer than twelve rows only the first quarter is left out.
    """
    return slice(min(3, len(record.rows) // 4), None)


def seconds_per_step(record: RankRecord) -> dict[str, float]:
    """Returns the seconds of a step by phase, or an empty dict if there are no rows."""
    rows = steady_rows(record)
    num_steps = record.column("steps")[rows].sum()
    if not num_steps:
        return {}
    return {phase: float(record.column(phase)[rows].sum() / num_steps) for phase in PHASES}


def phases_by_rank(start: Start) -> dict[int, dict[str, float]]:
    """Returns the seconds of a step by phase, for each rank that has rows, in order."""
    by_rank = {}
    for rank, record in sorted(start.records.items()):
        phases = seconds_per_step(record)
        if phases:
            by_rank[rank] = phases
    return by_rank


def work_by_rank(start: Start) -> dict[int, float]:
    """Returns the seconds of a step in which each rank worked and did not wait for others."""
    work = {}
    for rank, phases in phases_by_rank(start).items():
        work[rank] = sum(phases[phase] for phase in WORK_PHASES)
    return work


def speed(start: Start) -> Speed | None:
    """Returns how fast a start was, or None if no step was measured.

    The time of evaluations and checkpoints is left out, since neither is in `WORK_PHASES`.
    """
    record = start.main  # of rank 0
    rows = steady_rows(record)  # without the first ones, which include the warm-up
    phases_of_training = (*WORK_PHASES, "communication")
    seconds = record.seconds(phases_of_training)[rows].sum()
    num_steps = record.column("steps")[rows].sum()
    num_samples = record.column("samples")[rows].sum()
    if not num_steps or not seconds:
        return None

    return Speed(
        ranks=start.num_ranks,
        samples_per_second=float(num_samples / seconds),
        seconds_per_step=float(seconds / num_steps),
        steps=int(num_steps),
        samples_per_step=float(num_samples / num_steps),
    )


def scaling(starts: Sequence[Start]) -> list[tuple[Speed, float]]:
    """Compares starts with different numbers of ranks.

    Of several starts with the same number of ranks, the one with the most measured steps is taken.

    Returns:
        For each number of ranks its speed and its speedup: how many times as fast as one rank it
        was. Empty if there is no start with one rank, or no start with several.
    """
    longest: dict[int, Speed] = {}  # the speed of the start with the most steps, by ranks
    for start in starts:
        speed_of_start = speed(start)
        if speed_of_start is None:
            continue

        num_ranks = speed_of_start.ranks
        if num_ranks not in longest or speed_of_start.steps > longest[num_ranks].steps:
            longest[num_ranks] = speed_of_start

    if 1 not in longest or len(longest) < 2:
        return []

    throughput_of_one_rank = longest[1].samples_per_second
    if throughput_of_one_rank == 0:  # its batches had no samples
        return []

    compared = []
    for num_ranks in sorted(longest):
        speedup = longest[num_ranks].samples_per_second / throughput_of_one_rank
        compared.append((longest[num_ranks], speedup))
    return compared


def working_fraction(start: Start) -> float | None:
    """Returns the fraction of the ranks' time in which they did not wait for each other.

    It bounds the speedup over one rank: 8 ranks that work 90 % of the time do the work of 7.2 ranks
    that never wait, so they are at most 7.2 times as fast as one.

    Returns:
        The fraction, or None if it is not known: on GPUs, for which the CPU's times say little, for
        a strategy that communicates within passes, and on one rank.
    """
    header = start.main.header
    on_gpu = str(header.get("device", "")).startswith("cuda")
    strategy = entry_of(header.get("strategy"))
    if on_gpu or strategy.communicates_within_passes:
        return None

    phases = phases_by_rank(start)
    if len(phases) < 2:
        return None

    # Both are sums over the ranks, of the seconds of a step.
    worked = sum(work_by_rank(start).values())
    waited = sum(seconds["communication"] for seconds in phases.values())
    return worked / max(worked + waited, 1e-12)  # no division by 0 if nothing took time


def find(record: Record) -> list[Finding]:
    """Returns all that somebody should look at: errors first, then warnings, then notes."""
    findings = [*_launcher_findings(record)]
    for number in range(1, len(record.starts)):
        findings += _restart_findings(number, record.starts[number - 1], record.starts[number])

    # The training itself is judged by the last start.
    last = record.starts[-1]
    findings += _loss_findings(last)
    findings += _straggler_findings(last)
    findings += _phase_findings(last)
    findings += _warning_findings(record)
    findings += _findings_on_gaps(last)

    if record.num_unread_lines:
        lines = count_noun(record.num_unread_lines, "line")
        findings.append(Finding("note", f"not understood: {lines} of the files"))

    levels = ("error", "warning", "note")
    return sorted(findings, key=lambda finding: levels.index(finding.level))


class _LauncherMessage(NamedTuple):
    """What a launcher wrote, without the name of its log folder.

    The launchers of several machines write the same message about one failure, each with a folder
    of its own.
    """

    kind: str
    lines: tuple[str, ...]


def _launcher_findings(record: Record) -> Iterator[Finding]:
    """Yields a finding for each different message of the launchers: failures, signals, findings."""
    for message, occurrences in _occurrences_by_message(record).items():
        in_starts = ""
        if len(record.starts) > 1:
            start_numbers = sorted({occurrence.start_number for occurrence in occurrences})
            in_starts = f"in start {format_ranges(start_numbers)}"

        # The first line of the message's text is the finding. The evidence is the rest of the text,
        # the folder of logs, the exit code, and when the message was written.
        headline, *rest_of_text = message.lines
        launcher_lines = [occurrence.line for occurrence in occurrences]
        evidence = [*rest_of_text, *_evidence_of_lines(launcher_lines, in_starts)]
        yield Finding(LEVEL_OF_LAUNCHER_KIND[message.kind], headline, tuple(evidence))


class _Occurrence(NamedTuple):
    """A line in which some launcher wrote a message."""

    start_number: int
    """The start of the run in which it was written, counted from 1."""
    line: LauncherLine


def _occurrences_by_message(record: Record) -> dict[_LauncherMessage, list[_Occurrence]]:
    """Returns the occurrences of each message of the launchers.

    Several launchers write about one failure. Their texts differ only in the path of the log
    folder, which is removed, so that they are one message.
    """
    occurrences: dict[_LauncherMessage, list[_Occurrence]] = {}
    for start_number, start in enumerate(record.starts, 1):
        for line in start.launcher_lines:
            if line["kind"] in LEVEL_OF_LAUNCHER_KIND:
                message = _LauncherMessage(line["kind"], _lines_without_log_folder(line["text"]))
                occurrences.setdefault(message, []).append(_Occurrence(start_number, line))
    return occurrences


def _evidence_of_lines(lines: Sequence[LauncherLine], in_starts: str) -> Iterator[str]:
    """Yields lines about a launcher's message: its log folder, its exit code, when it was written.

    Args:
        lines: every occurrence of the message, in the order of time.
        in_starts: text that names the starts in which it was written, such as `in start 2`;
            empty if the run has only one start.
    """
    last = lines[-1]
    if LOG_FOLDER_PREFIX in last["text"]:
        # A launcher's message that names a folder of logs does so in its last line.
        yield last["text"].splitlines()[-1]
    if "exit_code" in last:
        yield f"exit code {last['exit_code']}"
    yield _when(lines, in_starts)


def _when(lines: Sequence[LauncherLine], in_starts: str) -> str:
    """Says which launcher wrote a message, when, and how often.

    Args:
        lines: every occurrence of the message, in the order of time.
        in_starts: text that names the starts in which it was written, such as `in start 2`;
            empty if the run has only one start.
    """
    first = lines[0]
    last = lines[-1]
    text = f"said by the launcher on {first['host']}, {clock_time(first['time'])}"
    if in_starts:
        text = f"{text}, {in_starts}"

    # The launchers of all machines write the same message, each to a file of its own. If 2 machines
    # have 3 failures each, there are 6 lines, but the message was written 3 times. So only the
    # lines of the launcher that wrote last are counted.
    lines_of_last_launcher = [line for line in lines if line["file"] == last["file"]]
    times = len(lines_of_last_launcher)
    if times > 1:
        text += f"; {times} times, the last {clock_time(last['time'])}"
    return text


def _lines_without_log_folder(text: str) -> tuple[str, ...]:
    """Returns the lines of a launcher's message, at least one, without its log folder."""
    lines = [line for line in text.splitlines() if not line.startswith(LOG_FOLDER_PREFIX)]
    if not lines:
        lines = [""]
    return tuple(lines)


def clock_time(seconds: float) -> str:
    """Returns `2026-11-23 22:15:03`, in the time zone of the reader, for a `time.time()`."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def first_step(record: RankRecord) -> float:
    """Returns the number of the first step of a record that has rows, counted from 1."""
    return float(record.column("step")[0] - record.column("steps")[0] + 1)


def last_step(start: Start) -> int:
    """Returns the last step that rank 0 wrote anything about, counted from 1; 0 if there is none.

    A killed rank lacks the rows of its last second, while a warning is written at once.
    """
    steps = [0.0]
    if start.main.rows:
        steps.append(float(start.main.column("step")[-1]))
    steps += [float(warning["step"]) for warning in start.main.warnings]
    steps += [float(logged["step"]) for logged in start.main.logged]
    return int(max(steps))


def _restart_findings(number: int, before: Start, after: Start) -> Iterator[Finding]:
    """Yields a warning if a start ended badly, or if the next one began while it still ran.

    Args:
        number: the number of the first of the two starts, counted from 1.
        before: the first of the two starts.
        after: the next start.
    """
    # The clocks of two hosts may differ, so times are compared on one host only.
    is_one_host = before.main.header.get("host") == after.main.header.get("host")
    ran_at_the_same_time = is_one_host and before.last_time > after.time
    if ran_at_the_same_time:
        yield Finding(
            "warning",
            f"starts {number} and {number + 1} ran at the same time: give each run a folder of its "
            "own",
            (
                f"start {number} still trained at {clock_time(before.last_time)}",
                f"start {number + 1} began at {clock_time(after.time)}",
            ),
        )
        return
    if before.end != "ok":
        yield _bad_end_finding(number, before, after)


def _bad_end_finding(number: int, start: Start, next_start: Start) -> Finding:
    """Returns the warning about a start that ended badly: how, and what was trained again.

    Args:
        number: the number of the start, counted from 1.
        start: the start.
        next_start: the next start.
    """
    text = f"start {number}, of {count_noun(start.num_ranks, 'rank')}, ended {ENDINGS[start.end]}"
    evidence = []
    if not start.reached_init:
        evidence.append("none of its ranks came to lockstep.init")

    # `main` is the record of rank 0. Its columns are arrays of floats, also the step numbers.
    if start.main.rows and next_start.main.rows:
        steps = start.main.column("step")
        last_step = steps[-1]
        next_first_step = first_step(next_start.main)
        was_trained_again = steps >= next_first_step  # for each row of `start`
        if was_trained_again.any():
            text += f"; the next one trained steps {next_first_step:.0f} to {last_step:.0f} again"
            seconds = float(start.main.seconds()[was_trained_again].sum())
            evidence.append(f"time spent on steps that were trained again: {duration(seconds)}")
        evidence.append(
            f"its last step: {last_step:.0f}, the next one's first: {next_first_step:.0f}"
        )

    # `last_time` is when rank 0 or another rank wrote its last row.
    pause = next_start.time - start.last_time
    evidence.append(f"from its last sign to the next start: {duration(pause)}")
    return Finding("warning", text, tuple(evidence))


def _loss_findings(start: Start) -> Iterator[Finding]:
    """Yields an error if the loss became NaN or infinite, with the two losses before it.

    If the loss was finite again later, it is a warning.
    """
    rows = start.loss_rows()
    is_finite = [math.isfinite(row.loss) for row in rows]
    if all(is_finite):  # also if there are no losses
        return

    # The loss was finite again at the end: the first row with such a loss is named.
    if is_finite[-1]:
        first_bad = is_finite.index(False)
        row = rows[first_bad]
        bad_steps = [row.step for row in rows if not math.isfinite(row.loss)]
        if row.num_steps > 1:
            text = (
                f"the loss is not finite within steps {row.first_step} to {row.step}, and finite "
                "again later"
            )
        else:
            text = f"the loss is not finite at step {row.step}, and finite again later"
        yield Finding(
            "warning",
            text,
            (
                *_losses_up_to(rows, first_bad),
                f"rows of the record with such a loss: {len(bad_steps)} of {len(rows)}, the last "
                f"at step {bad_steps[-1]}",
            ),
            "Look at the samples of these steps, and at what the model computes of them.",
        )
        return

    # The loss was not finite up to the end: the step is named from which on it never was. This row
    # comes after the last row with a finite loss, or is the first row of all.
    since = len(rows) - 1
    while since > 0 and not is_finite[since - 1]:
        since -= 1
    yield Finding(
        "error",
        f"the loss is not finite from step {rows[since].step} on",
        tuple(_losses_up_to(rows, since)),
        "Resume from a checkpoint before that step with a smaller learning rate or with gradient "
        "clipping; with fp16, try bf16.",
    )


def _losses_up_to(rows: Sequence[LossRow], index: int) -> Iterator[str]:
    """Yields a line for a row and for each of the two before it, with the loss."""
    for row in rows[max(0, index - 2) : index + 1]:
        yield f"step {row.step}: {row.loss:.6g}"


def _straggler_findings(start: Start) -> Iterator[Finding]:
    """Yields a warning for each rank that works longer than the others, which wait for it.

    All times are seconds of a step.
    """
    phases = phases_by_rank(start)
    work = work_by_rank(start)
    if len(work) < 2:
        return

    # The usual work is the median of all ranks but the slowest. Of two ranks, only the faster one
    # remains, and the slower one is compared with it.
    work_without_slowest = sorted(work.values())[:-1]
    usual_work = float(np.median(work_without_slowest))
    slow_ranks = _slow_ranks(work, phases, usual_work)

    # A finding also says in which phase a slow rank loses most time. Each phase is compared with
    # its median over the ranks that are not slow.
    phases_of_others = _phases_of_other_ranks(phases, slow_ranks)
    slowest_first = sorted(slow_ranks, key=lambda rank: -work[rank])
    for rank in slowest_first[:MAX_STRAGGLERS]:
        host = start.records[rank].header.get("host", "an unknown host")
        excess = {phase: phases[rank][phase] - phases_of_others[phase] for phase in WORK_PHASES}
        slowest_phase = max(WORK_PHASES, key=lambda phase: excess[phase])
        work_ms = format_number(work[rank] * 1e3)
        usual_work_ms = format_number(usual_work * 1e3)
        yield Finding(
            "warning",
            f"rank {rank} on {host} is a straggler: it works {work_ms} ms a step, the "
            f"others {usual_work_ms} ms, and they wait for it; most of the difference is in "
            f"{slowest_phase}",
            tuple(_compare_phases(phases[rank], phases_of_others)),
            ADVICE_FOR_STRAGGLER.get(slowest_phase, ADVICE_FOR_SLOW_DEVICE),
        )

    if len(slow_ranks) > MAX_STRAGGLERS:
        yield Finding("warning", f"{format_ranks(sorted(slow_ranks))} are slower than the others")


def _slow_ranks(
    work: Mapping[int, float], phases: Mapping[int, Mapping[str, float]], usual_work: float
) -> list[int]:
    """Returns the ranks that work clearly longer than is usual.

    For example, a rank works 70 ms and waits 30 ms in each step, and 55 ms of work are usual. It
    works longer by 15 % of its step, which is more than `STRAGGLER_MIN_EXCESS`, so it is slow.

    Args:
        work: the seconds of a step in which each rank works.
        phases: the seconds of a step by phase, for each rank.
        usual_work: the usual seconds of work.
    """
    slow_ranks = []
    for rank, work_s in work.items():
        step_s = work_s + phases[rank]["communication"]
        if work_s - usual_work >= STRAGGLER_MIN_EXCESS * step_s:
            slow_ranks.append(rank)
    return slow_ranks


def _phases_of_other_ranks(
    phases: Mapping[int, Mapping[str, float]], slow_ranks: Sequence[int]
) -> dict[str, float]:
    """Returns the seconds of a step by phase of work: medians over the ranks that are not slow.

    Args:
        phases: the seconds of a step by phase, for each rank.
        slow_ranks: the ranks that are left out.
    """
    other_ranks = [rank for rank in phases if rank not in slow_ranks]
    if not other_ranks:
        other_ranks = [*phases]  # if all times are 0, `_slow_ranks` returns all ranks

    medians = {}
    for phase in WORK_PHASES:
        seconds_of_ranks = [phases[rank][phase] for rank in other_ranks]
        medians[phase] = float(np.median(seconds_of_ranks))
    return medians


def _compare_phases(slow: Mapping[str, float], usual: Mapping[str, float]) -> Iterator[str]:
    """Yields a line for each phase of work: the seconds of a slow rank, and those of the others."""
    for phase in WORK_PHASES:
        slow_ms = format_number(slow[phase] * 1e3)
        usual_ms = format_number(usual[phase] * 1e3)
        yield f"{phase}: {slow_ms} ms, the others {usual_ms} ms"


def _phase_findings(start: Start) -> Iterator[Finding]:
    """Yields a warning for each phase on which all ranks spend too much of a step."""
    phases = phases_by_rank(start)
    if not phases:
        return

    hosts = {record.header.get("host") for record in start.records.values()}
    for phase, usual_limit in LONG_PHASES.items():
        is_within_host = phase == "communication" and len(hosts) == 1
        limit = LIMIT_OF_COMMUNICATION_ON_ONE_HOST if is_within_host else usual_limit

        fractions_of_ranks = []
        for seconds in phases.values():
            step_seconds = max(sum(seconds.values()), 1e-12)  # no division by 0
            fractions_of_ranks.append(seconds[phase] / step_seconds)

        # `ranks_do` completes the sentence, for example with "wait for data".
        fraction = min(fractions_of_ranks)  # of the rank that spends least on the phase
        if fraction >= limit.min_fraction:
            yield Finding(
                "warning",
                f"all ranks {limit.ranks_do} for {fraction:.0%} of the time",
                advice=limit.advice,
            )


def _warning_findings(record: Record) -> Iterator[Finding]:
    """Yields the first warnings that the run gave on rank 0, each different one once.

    A finding has the first line of a warning as its text. Its evidence is the other lines, and the
    steps after which the warning was given.
    """
    steps_by_text: dict[str, list[str]] = {}
    for start in record.starts:
        for warning in start.main.warnings:
            text = warning["warning"]
            if text not in steps_by_text:
                steps_by_text[text] = []
            steps_by_text[text].append(str(warning["step"]))

    for text in [*steps_by_text][:MAX_WARNINGS]:
        lines = text.splitlines()
        if not lines:  # a warning without a text
            lines = [""]
        after_steps = f"warned after step {join_first(steps_by_text[text])}"
        yield Finding("warning", lines[0], (*lines[1:], after_steps))


def _findings_on_gaps(start: Start) -> Iterator[Finding]:
    """Yields notes on what the record cannot tell about a start."""
    yield from _findings_on_missing_ranks(start)

    # Only a launcher wrote about the start, and it has ended, so nothing more will come.
    if not start.reached_init and start.end is not None:
        yield Finding(
            "note",
            "no rank came to lockstep.init, which begins the record of its steps: what is known is "
            "what the launcher has seen",
        )

    header = start.main.header
    strategy = header.get("strategy")
    on_gpu = str(header.get("device", "")).startswith("cuda")
    communicates_within_passes = entry_of(strategy).communicates_within_passes
    if on_gpu:
        yield Finding(
            "note",
            "the times are those of the CPU, which runs ahead of the GPU: what the GPU takes, also "
            "to wait for other GPUs, is counted where the CPU waits for it",
        )
    elif communicates_within_passes and start.num_ranks > 1:
        # Only for the CPU: on a GPU no phase is known exactly, which the note above says.
        yield Finding(
            "note",
            f"{strategy} communicates within forward and backward passes; that part of "
            "the communication is not known apart from them",
        )


def _findings_on_missing_ranks(start: Start) -> Iterator[Finding]:
    """Yields a note if some ranks have steps in the folder and others do not.

    The files of another machine, for example, may not have been copied here.
    """
    ranks_with_rows = {rank for rank, record in start.records.items() if record.rows}
    if not ranks_with_rows or len(ranks_with_rows) == start.num_ranks:
        return

    # The loss of a rank is in its rows. What its script gave to world.log is in other lines of its
    # file, so it may be known without any rows.
    missing = format_ranks(set(range(start.num_ranks)) - ranks_with_rows)
    ranks_with_file = [rank for rank, record in start.records.items() if record.header]
    all_files_are_here = len(ranks_with_file) == start.num_ranks
    if all_files_are_here:
        text = f"no steps of {missing} are in the folder; without them the loss is not known"
    else:
        text = (
            f"no steps of {missing} are in the folder; without them neither the loss nor what "
            "world.log was given is known"
        )
    yield Finding("note", text)


class Totals(NamedTuple):
    """What a start did from its beginning to its end."""

    seconds: float
    bytes_sent: float
    """What rank 0 sent to other ranks and wrote into shared memory."""
    peak_memory: float
    """Bytes on the rank that needed most."""


def totals(start: Start) -> Totals | None:
    """Returns what a start did in all, or None if it has no rows."""
    record = start.main  # of rank 0
    if not record.rows:
        return None

    peaks = [record.column("memory").max() for record in start.records.values() if record.rows]

    # The columns "at" (seconds), "sent" (bytes to other ranks) and "shared" (bytes written into
    # shared memory) are running totals since the start, so the last value of each is the total.
    return Totals(
        seconds=float(record.column("at")[-1]),
        bytes_sent=float(record.column("sent")[-1] + record.column("shared")[-1]),
        peak_memory=float(max(peaks)),
    )


def mean_gpu_use(record: RankRecord) -> float | None:
    """Returns the percentage of time in which a rank's GPU was busy, or None if it is not known."""
    if not record.gpu_uses:
        return None
    return float(np.mean([use["gpu"] for use in record.gpu_uses]))
