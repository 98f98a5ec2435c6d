"""A verdict, and how it reads."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import source_line
from lockstep.run.watch.snapshot import CollectiveCall, RankState
from lockstep.run.watch.stacks import Frame, own_line
from lockstep.run.watch.wait_graph import Mismatch
from lockstep.wording import format_ranks, group_by_key, join_first

WIDTH = 100
_MOST_ROWS = 10
"""With many ranks a verdict still fits a screen."""

VerdictKind = Literal[
    "deadlock",  # the ranks wait for each other, and nothing can end that
    "stopped",  # the others wait for a rank that was stopped (SIGSTOP, a debugger)
    "left",  # ... that has ended with exit code 0
    "lost",  # ... that has died
    "working",  # ... that still works, or has a thread that may
    "blocked",  # ... that waits for something else: a lock, a file, a person
    "loading",  # ... that waits for data
    "gil",  # ... whose interpreter is blocked
    "unknown",  # ... that cannot be seen
    "transport",  # all ranks are in the same collective, and nothing moves
    "straggler",  # one rank is later than the others, step after step
]


@dataclass(frozen=True)
class Row:
    """What one rank does."""

    rank: int
    host: str
    does: str
    line: Frame | None
    """The user's own line that it is at."""
    for_s: float | None = None
    """How long it has been doing that, where known."""


@dataclass(frozen=True)
class Verdict:
    """One verdict about a run."""

    kind: VerdictKind
    fatal: bool
    """Nothing that the run itself can do will end this."""
    ranks: tuple[int, ...]
    """Those at fault, or waited for."""
    headline: str
    rows: tuple[Row, ...] = ()
    mismatch: Mismatch | None = None
    advice: tuple[str, ...] = ()
    waited_s: float = 0.0
    """How long nothing has moved."""
    found_at: float = 0.0
    """When it was found that the run cannot go on, in wall-clock seconds."""


def render(verdict: Verdict) -> str:
    """A verdict in plain English, in lines of at most 100 columns."""
    advice = [f"  do: {text}" for text in verdict.advice]
    parts = [*_wrap([verdict.headline]), *details(verdict), *_wrap(advice)]
    return "\n".join(parts)


def details(verdict: Verdict) -> list[str]:
    """The lines between a verdict's headline and its advice."""
    lines = []
    groups = [*group_by_key(((r.host, r.does, r.line), r) for r in verdict.rows).values()]
    if len(groups) > _MOST_ROWS:
        groups = [*group_by_key(((r.does, r.line), r) for r in verdict.rows).values()]
    if len(groups) > _MOST_ROWS:  # those at fault are among the ones that are shown
        at_fault = set(verdict.ranks)
        groups.sort(key=lambda rows: (at_fault.isdisjoint(r.rank for r in rows), len(rows)))
    for rows in groups[:_MOST_ROWS]:
        row, ranks = rows[0], [row.rank for row in rows]
        since = "" if row.for_s is None else f", for {row.for_s:.0f} s"
        hosts = join_first(sorted({row.host for row in rows}), 4)
        lines.append(f"  {format_ranks(ranks)} on {hosts}: {verb(row.does, len(ranks))}{since}")
        if row.line is not None:
            lines.append(_source(row.line, 4))
    if left := [row.rank for rows in groups[_MOST_ROWS:] for row in rows]:
        lines.append(f"  {format_ranks(left)}: see hang.txt")
    if verdict.mismatch is not None:
        lines += _mismatch_lines(verdict.mismatch)
    return _wrap(lines)


_PLURAL = {
    "is": "are", "was": "were", "has": "have", "waits": "wait", "holds": "hold", "works": "work",
    "comes": "come",
}  # fmt: skip


def verb(text: str, count: int) -> str:
    """Words that begin with a verb, for one rank or for several."""
    first, space, rest = text.partition(" ")
    return text if count == 1 else f"{_PLURAL.get(first, first)}{space}{rest}"


def describe(call: CollectiveCall) -> str:
    """`all_reduce of 25 float`, `barrier`."""
    sizes = call.input_sizes or call.output_sizes
    if call.op == "barrier" or not sizes:
        return call.op
    shown = " + ".join("x".join(map(str, size)) if size else "1" for size in sizes[:3])
    more = f" + {len(sizes) - 3} more" if len(sizes) > 3 else ""
    unit = call.dtypes[0] if call.dtypes else "element"
    return f"{call.op} of {shown}{more} {unit}"


def _mismatch_lines(mismatch: Mismatch) -> list[str]:
    lines = [f"  first mismatch: call {mismatch.seq} of {mismatch.group}:"]
    groups = group_by_key((_told(call), rank) for rank, call in mismatch.calls)
    for (what, line), ranks in [*groups.items()][:_MOST_ROWS]:
        lines.append(f"    {format_ranks(ranks)}: {what}")
        if line is not None:
            lines.append(_source(line, 6))
    if (number := mismatch.lines_differ_since) is not None:
        lines.append(f"    (already from call {number} on they called from different lines)")
    return lines


def _told(call: CollectiveCall | None) -> tuple[str, Frame | None]:
    return ("has not come to it", None) if call is None else (describe(call), own_line(call.frames))


def _source(line: Frame, indent: int) -> str:
    text = " " * indent + source_line(line.file, line.line, f", in {line.function}")
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _wrap(lines: Iterable[str]) -> list[str]:
    wrapped = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return wrapped


def render_state(state: RankState) -> str:
    """All that is known of a rank, for people."""
    lines = [f"rank {state.rank} on {state.host}, process {state.pid}"]
    if state.code is not None:
        how = f"exit code {state.code}" if state.code >= 0 else f"signal {-state.code}"
        lines[0] += f": ended, {how}"
    if state.steps is not None:
        lines.append(f"  optimizer steps: {state.steps}")
    lines += _stack_lines("main thread", state.stack)
    for stack in state.threads or ():
        lines += _stack_lines("another thread", stack)
    lines.append(f"  collectives{': not obtained' if state.calls is None else ', latest last:'}")
    lines += [
        f"    {call.backend}:{call.group} {call.seq} {call.op} {list(call.input_sizes)} "
        f"{call.state} {time.strftime('%H:%M:%S', time.localtime(call.time_s))}"
        for call in (state.calls or ())[-20:]
    ]
    return "\n".join(lines)


def _stack_lines(name: str, stack: Sequence[Frame] | None) -> list[str]:
    if stack is None:
        return [f"  {name}: no stack was obtained"]
    return [
        f"  {name}, innermost first:",
        *(f"    {frame.file}:{frame.line} in {frame.function}" for frame in stack),
    ]
