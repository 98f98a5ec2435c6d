"""What a record tells of a run: where the time goes, who is slow, what happened. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from lockstep.extensions.report.console import duration
from lockstep.extensions.report.reading import OWN, RankRecord, Record, Start
from lockstep.step import PHASES
from lockstep.wording import count_noun, format_ranges, format_ranks, group_by_key, join_first

EVERY_STEP = tuple(phase for phase in OWN if phase not in ("checkpoint", "evaluation"))
"""The phases in which a rank does its part of each step."""
_SLOW = 0.1
"""Of a step: a rank that works so much longer than the others is a straggler."""
_MOST_WARNINGS = 20
COMMUNICATE_WITHIN = ("fsdp", "hsdp", "pipeline")
"""Strategies whose forward and backward passes wait for other ranks, which is not told apart."""
_MUCH = {
    "data": (0.2, "wait for data", "use more num_workers, or a cheaper transform"),
    "communication": (0.3, "wait for each other and for the network", "docs: slow networks"),
    "checkpoint": (0.1, "wait for checkpoints", "save less often, or to a faster disk"),
}
"""Of a step, on the rank with the least of it: from where on it is said, and what to do."""


class Finding(NamedTuple):
    """Something that is worth looking at."""

    level: str
    """`error`, `warning` or `note`."""
    text: str
    evidence: tuple[str, ...] = ()
    """Lines that show it."""


class Speed(NamedTuple):
    """How fast one start of a run was."""

    ranks: int
    samples_s: float
    """Samples a second, of all ranks together."""
    step_s: float
    """Seconds of a step."""
    steps: int
    """That were measured."""
    batch: float
    """Samples of a step."""


def steady(record: RankRecord) -> slice:
    """The rows after the first ones, in which buffers are made and caches filled."""
    return slice(min(3, len(record.rows) // 4), None)


def per_step(record: RankRecord) -> dict[str, float]:
    """Seconds of a step by phase; empty where there are no rows."""
    rows = steady(record)
    steps = record.column("steps")[rows].sum()
    if not steps:
        return {}
    return {phase: float(record.column(phase)[rows].sum() / steps) for phase in PHASES}


def work_by_rank(start: Start) -> dict[int, float]:
    """Seconds of a step in which each rank worked, and did not wait for others."""
    found = {rank: per_step(record) for rank, record in sorted(start.records.items())}
    return {rank: sum(of[p] for p in EVERY_STEP) for rank, of in found.items() if of}


def speed(start: Start) -> Speed | None:
    """How fast a start was, evaluation and checkpoints left out; None: no step is written down."""
    main = start.main
    rows = steady(main)
    seconds = main.seconds((*EVERY_STEP, "communication"))[rows].sum()
    steps, samples = main.column("steps")[rows].sum(), main.column("samples")[rows].sum()
    if not steps or not seconds:
        return None
    batch, times = float(samples / steps), float(seconds / steps)
    return Speed(start.ranks, float(samples / seconds), times, int(steps), batch)


def scaling(starts: Sequence[Start]) -> list[tuple[Speed, float]]:
    """The longest of each number of ranks, and how many times as fast as one rank it was.

    Empty where one rank alone is not known, or nothing else is.
    """
    by_ranks = group_by_key((found.ranks, found) for found in filter(None, map(speed, starts)))
    longest = {n: max(found, key=lambda speed: speed.steps) for n, found in by_ranks.items()}
    if 1 not in longest or len(longest) < 2 or not longest[1].samples_s:
        return []
    return [(longest[n], longest[n].samples_s / longest[1].samples_s) for n in sorted(longest)]


def working(start: Start) -> float | None:
    """Of the time of all ranks, the part in which they did not wait for each other; None: not
    known. So many times the number of ranks is the most that they can be as fast as one.
    """
    about = start.main.about
    on_cpu = not str(about.get("device", "")).startswith("cuda")
    work = work_by_rank(start)
    if not on_cpu or about.get("strategy") in COMMUNICATE_WITHIN or len(work) < 2:
        return None
    waited = sum(per_step(start.records[rank])["communication"] for rank in work)
    return sum(work.values()) / max(sum(work.values()) + waited, 1e-12)


def find(record: Record) -> list[Finding]:
    """All that is worth looking at, the worst first."""
    found: list[Finding] = []
    found += _told(record)
    for number, (before, after) in enumerate(
        zip(record.starts, record.starts[1:], strict=False), 1
    ):
        found += _restarted(number, before, after)
    last = record.starts[-1]
    found += [*_losses(last), *_stragglers(last), *_phases(last), *_warnings(record)]
    found += _unknown(last)
    if record.unread:
        found.append(
            Finding("note", f"not understood: {count_noun(record.unread, 'line')} of the files")
        )
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.level))


_LEVELS = {"failure": "error", "interrupted": "error", "finding": "warning"}


def _told(record: Record) -> Iterator[Finding]:
    """What the launchers have found; the launchers of several machines say the same."""
    said = group_by_key(
        ((told["kind"], *_without_folder(told)), (number, told))
        for number, start in enumerate(record.starts, 1)
        for told in start.told
        if told["kind"] in _LEVELS
    )
    for (kind, head, *rest), places in said.items():
        numbers = sorted({number for number, _ in places})
        first, (_, last) = places[0][1], places[-1]
        when = f"said by the launcher on {first['host']}, {clock_time(first['time'])}"
        when += f", in start {format_ranges(numbers)}" if len(record.starts) > 1 else ""
        often = sum(told["by"] == last["by"] for _, told in places)
        when += f"; {often} times, the last {clock_time(last['time'])}" if often > 1 else ""
        code = [f"exit code {last['exit_code']}"] if "exit_code" in last else []
        folder = last["text"].splitlines()[-1:] if last["text"].count(_FOLDER) else []
        yield Finding(_LEVELS[kind], head, (*rest, *folder, *code, when))


_FOLDER = "traceback and logs: "


def _without_folder(told: Mapping[str, Any]) -> list[str]:
    return [line for line in told["text"].splitlines() if not line.startswith(_FOLDER)] or [""]


def clock_time(seconds: float) -> str:
    """`2026-11-23 22:15:03`, in the time zone of the reader."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _restarted(number: int, before: Start, after: Start) -> Iterator[Finding]:
    mains = before.main, after.main
    hosts = {main.about.get("host") for main in mains}
    if before.last_time > after.time and len(hosts) == 1:
        yield Finding(
            "warning",
            f"starts {number} and {number + 1} ran at the same time: give each run a folder of its "
            "own",
            (f"start {number} still trained at {clock_time(before.last_time)}",
             f"start {number + 1} began at {clock_time(after.time)}"),
        )  # fmt: skip
        return
    if before.end == "ok":
        return
    words = f"start {number} of {count_noun(before.ranks, 'rank')} ended {ENDS[before.end]}"
    steps = [main.column("step") for main in mains]
    firsts = [step[0] - main.column("steps")[0] + 1 for step, main in zip(steps, mains, strict=True)
              if len(step)]  # fmt: skip
    evidence = [] if before.joined else ["none of its ranks came to lockstep.init"]
    if len(firsts) == 2:
        again = steps[0] >= firsts[1]
        seconds = float(mains[0].seconds()[again].sum())
        if again.any():
            words += f"; the next one trained steps {firsts[1]:.0f} to {steps[0][-1]:.0f} again"
            evidence.append(f"time spent on steps that were trained again: {duration(seconds)}")
        evidence.append(f"its last step: {steps[0][-1]:.0f}, the next one's first: {firsts[1]:.0f}")
    gap = after.time - before.last_time
    evidence.append(f"from its last sign to the next start: {duration(gap)}")
    yield Finding("warning", words, tuple(evidence))


ENDS = {
    "failed": "by a failure",
    "interrupted": "by a signal",
    "restarted": "as the machines of the run changed",
    None: "without a word: it was killed",
}
"""How a start may end that does not end well."""


def _losses(start: Start) -> Iterator[Finding]:
    steps, losses = start.loss()
    if len(losses) and not np.isfinite(losses).all():
        bad = int(np.argmin(np.isfinite(losses)))
        shown = [f"step {steps[n]:.0f}: {losses[n]:.6g}" for n in range(max(0, bad - 2), bad + 1)]
        words = f"the loss is not finite from step {steps[bad]:.0f} on"
        yield Finding("error", words, tuple(shown))


def _stragglers(start: Start) -> Iterator[Finding]:
    work = work_by_rank(start)
    if len(work) < 2:
        return
    usual = float(np.median(sorted(work.values())[:-1]))
    phases = {rank: per_step(start.records[rank]) for rank in work}
    slow = {}
    for rank, seconds in work.items():
        step = sum(phases[rank][phase] for phase in (*EVERY_STEP, "communication"))
        if seconds - usual >= _SLOW * step:
            slow[rank] = seconds
    # Where half of the ranks are slow they are of two kinds, and each of them is named.
    for rank, seconds in sorted(slow.items(), key=lambda item: -item[1])[:5]:
        others = [of for other, of in phases.items() if other not in slow] or [*phases.values()]
        more = {p: phases[rank][p] - float(np.median([of[p] for of in others])) for p in OWN}
        most = max(EVERY_STEP, key=lambda phase: more[phase])
        yield Finding(
            "warning",
            f"rank {rank} on {start.records[rank].about.get('host', 'an unknown host')} is a "
            f"straggler: it works {seconds * 1e3:.3g} ms a step, the others {usual * 1e3:.3g} ms, "
            f"and they wait for it; most of the difference is in {most}",
            tuple(
                f"{phase}: {phases[rank][phase] * 1e3:.3g} ms, "
                f"the others {(phases[rank][phase] - more[phase]) * 1e3:.3g} ms"
                for phase in EVERY_STEP
            ),
        )
    if len(slow) > 5:
        yield Finding("warning", f"{format_ranks(sorted(slow))} are slower than the others")


def _phases(start: Start) -> Iterator[Finding]:
    by_rank = [of for record in start.records.values() if (of := per_step(record))]
    for phase, (least, words, do) in _MUCH.items():
        part = min((of[phase] / max(sum(of.values()), 1e-12) for of in by_rank), default=0.0)
        if part >= least:
            yield Finding("warning", f"all ranks {words} for {part:.0%} of the time: {do}")


def _warnings(record: Record) -> Iterator[Finding]:
    """What rank 0 was warned of; in several starts it may be the same."""
    said = group_by_key((w["warning"], w["step"]) for s in record.starts for w in s.main.warnings)
    for text, steps in [*said.items()][:_MOST_WARNINGS]:
        head, *rest = text.splitlines() or [""]
        after = join_first([str(step) for step in steps])
        yield Finding("warning", head, (*rest, f"warned after step {after}"))


def _unknown(start: Start) -> Iterator[Finding]:
    about = start.main.about
    rows = {rank for rank, record in start.records.items() if record.rows}
    if rows and len(rows) < start.ranks:
        silent = format_ranks({*range(start.ranks)} - rows)
        words = f"no steps of {silent} are in the folder; without them the loss is not known"
        yield Finding("note", words)
    if not start.joined and start.end is not None:
        yield Finding(
            "note",
            "no rank came to lockstep.init, which begins the record of its steps: what is known is "
            "what the launcher has seen",
        )
    if str(about.get("device", "")).startswith("cuda"):
        yield Finding(
            "note",
            "the times are those of the CPU, which runs ahead of the GPU: the GPU's part, waiting "
            "for other GPUs among it, shows where the CPU waits for it",
        )
    elif about.get("strategy") in COMMUNICATE_WITHIN and start.ranks > 1:
        yield Finding(
            "note",
            f"{about['strategy']} communicates within forward and backward passes; that part of "
            "the communication is not known apart from them",
        )


def totals(start: Start) -> Mapping[str, float]:
    """Samples, steps, seconds, bytes sent by rank 0 and the most memory of any rank."""
    main = start.main
    if not main.rows:
        return {"steps": 0.0, "samples": 0.0, "seconds": 0.0, "sent": 0.0, "memory": 0.0}
    memory = [r.column("memory").max() for r in start.records.values() if r.rows]
    return {
        "steps": float(main.column("steps").sum()),
        "samples": float(main.column("samples").sum()),
        "seconds": float(main.column("at")[-1]),
        "sent": float(main.column("sent")[-1] + main.column("shared")[-1]),
        "memory": float(max(memory)),
    }
