"""What a record tells of a run: where the time goes, who is slow, what happened. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.errors import counted, name_ranks
from lockstep.report.reading import OWN, RankRecord, Record, Start
from lockstep.step import PHASES

_EVERY_STEP = tuple(phase for phase in OWN if phase not in ("checkpoint", "evaluation"))
_SLOW = 0.1
"""Of a step: a rank that works so much longer than the others is a straggler."""
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


class Speed(NamedTuple):
    """How fast one start of a run was."""

    ranks: int
    samples_s: float
    """Samples a second, of all ranks together."""
    step_s: float
    """Seconds of a step."""


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
    return {rank: sum(of[p] for p in _EVERY_STEP) for rank, of in found.items() if of}


def speed(start: Start) -> Speed | None:
    """How fast a start was, evaluation and checkpoints left out; None: no step is written down."""
    main = start.main
    rows = steady(main)
    seconds = main.seconds((*_EVERY_STEP, "communication"))[rows].sum()
    steps, samples = main.column("steps")[rows].sum(), main.column("samples")[rows].sum()
    if not steps or not seconds:
        return None
    return Speed(start.ranks, float(samples / seconds), float(seconds / steps))


def scaling(starts: Sequence[Start]) -> list[tuple[Speed, float]]:
    """The fastest of each number of ranks, and how many times as fast as one rank it was.

    Empty where one rank alone is not known, or nothing else is.
    """
    best: dict[int, Speed] = {}
    for found in filter(None, map(speed, starts)):
        if found.samples_s > best.get(found.ranks, found).samples_s or found.ranks not in best:
            best[found.ranks] = found
    if 1 not in best or len(best) < 2 or not best[1].samples_s:
        return []
    return [(best[n], best[n].samples_s / best[1].samples_s) for n in sorted(best)]


def find(record: Record) -> list[Finding]:
    """All that is worth looking at, the worst first."""
    found: list[Finding] = []
    for told in record.told:
        level = {"failure": "error", "interrupted": "error", "finding": "warning"}.get(told["kind"])
        if level is not None:
            found.append(Finding(level, told["text"].partition("\n")[0]))
    for number, (before, after) in enumerate(
        zip(record.starts, record.starts[1:], strict=False), 1
    ):
        found += _restarted(number, before, after)
    last = record.starts[-1]
    found += [*_losses(last), *_stragglers(last), *_phases(last), *_unknown(last)]
    order = ("error", "warning", "note")
    return sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.level))


def _restarted(number: int, before: Start, after: Start) -> Iterator[Finding]:
    steps = [s.main.column("step") for s in (before, after)]
    words = f"start {number} of {counted(before.ranks, 'rank')} ended {_ENDS[before.end]}"
    if before.end == "ok":
        return
    again = steps[0][steps[0] >= steps[1][0]] if len(steps[1]) else steps[0][:0]
    if len(again) and len(steps[0]):
        words += f"; the next one trained steps {steps[1][0]:.0f} to {steps[0][-1]:.0f} again"
    yield Finding("warning", words)


_ENDS = {"failed": "by a failure", None: "without a word: it was killed", "ok": "well"}


def _losses(start: Start) -> Iterator[Finding]:
    steps, losses = start.loss()
    if len(losses) and not np.isfinite(losses).all():
        first = steps[~np.isfinite(losses)][0]
        yield Finding("error", f"the loss is not finite from step {first:.0f} on")


def _stragglers(start: Start) -> Iterator[Finding]:
    work = work_by_rank(start)
    if len(work) < 2:
        return
    usual = float(np.median(sorted(work.values())[:-1]))
    phases = {rank: per_step(start.records[rank]) for rank in work}
    slow = {}
    for rank, seconds in work.items():
        step = sum(phases[rank][phase] for phase in (*_EVERY_STEP, "communication"))
        if seconds - usual >= _SLOW * step:
            slow[rank] = seconds
    # Where half of the ranks are slow they are of two kinds, and each of them is named.
    for rank, seconds in sorted(slow.items(), key=lambda item: -item[1])[:5]:
        others = [of for other, of in phases.items() if other not in slow] or [*phases.values()]
        more = {p: phases[rank][p] - float(np.median([of[p] for of in others])) for p in OWN}
        most = max(_EVERY_STEP, key=lambda phase: more[phase])
        yield Finding(
            "warning",
            f"rank {rank} on {start.records[rank].about.get('host', 'an unknown host')} is a "
            f"straggler: it works {seconds * 1e3:.3g} ms a step, the others {usual * 1e3:.3g} ms, "
            f"and they wait for it; most of the difference is in {most}",
        )
    if len(slow) > 5:
        yield Finding("warning", f"{name_ranks(sorted(slow))} are slower than the others")


def _phases(start: Start) -> Iterator[Finding]:
    by_rank = [of for record in start.records.values() if (of := per_step(record))]
    for phase, (least, words, do) in _MUCH.items():
        part = min((of[phase] / max(sum(of.values()), 1e-12) for of in by_rank), default=0.0)
        if part >= least:
            yield Finding("warning", f"all ranks {words} for {part:.0%} of the time: {do}")


def _unknown(start: Start) -> Iterator[Finding]:
    about = start.main.about
    if str(about.get("device", "")).startswith("cuda"):
        yield Finding(
            "note",
            "the times are those of the CPU, which runs ahead of the GPU: the GPU's part, waiting "
            "for other GPUs among it, shows where the CPU waits for it",
        )
    elif about.get("strategy") in ("fsdp", "hsdp", "pipeline") and start.ranks > 1:
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
