"""One rank later than the others, step after step."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import name_ranks
from lockstep.watchdog.messages import Row, Verdict, describe, verb
from lockstep.watchdog.snapshot import Call, Snapshot
from lockstep.watchdog.stacks import own_line
from lockstep.watchdog.wait_graph import CallTable

_LONGEST_S = 30.0
_SHORTEST_S = 2.0
"""The time to look at; a rank may be slow for a moment on a busy machine."""
_AT_LEAST = 10
"""Times that the rank came last by about as much; once a step at least, so ten steps."""
_SHARE = 0.2
"""Of the time, that the others wait for it, in every fifth of the window."""
_SLICES = 5
_OTHERS = 0.25
"""Of its waits, that any other rank may cause at most: on busy machines all come last at times."""
_ALIKE = 0.25
"""Of the third longest wait, that the tenth must reach: many slow steps, not a few stalls."""


@dataclass(frozen=True)
class _Late:
    """One collective, and for whom the others waited in it."""

    rank: int
    wait_s: float
    """Of the last but one for the last: all others waited at least that long."""
    start_s: float
    """When the first came."""
    calls: dict[int, Call]


def find(snapshot: Snapshot) -> Verdict | None:
    """A rank for which the others wait a good part of every step.

    Ranks wait for each other inside a collective, so a slow rank is one that comes late to it: the
    times at which the ranks called the same collective are compared. It takes ten steps or more in
    the Flight Recorder, and ranks of one host, whose clocks agree. With NCCL the times are those of
    the call, not of the GPU: where the CPU runs ahead of its GPU a slow GPU is not seen.

    Returns:
        None where no rank stands out, or it cannot be known.
    """
    if not snapshot.one_host or len(snapshot.ranks) < 2:
        return None
    table = CallTable(snapshot)
    for group in table.calls:
        matched = _matched(table, group)
        # The later half as well: a stall before it must not hide what has come since.
        for since in (_LONGEST_S, _length(matched, _LONGEST_S) / 2):
            window = [late for late in matched if matched[-1].start_s - late.start_s <= since]
            rank = _late_rank(window)
            if rank is not None:
                return _finding(rank, window, snapshot)
    return None


def _length(matched: list[_Late], most: float) -> float:
    return min(most, matched[-1].start_s - matched[0].start_s) if matched else 0.0


def _matched(table: CallTable, group: str) -> list[_Late]:
    """The collectives that all members have called, oldest first."""
    members = table.members(group)
    found = []
    complete = 0.0
    for _, calls in sorted(table.calls[group].items()):
        if set(calls) == members and len(members) > 1:
            times = sorted(call.time_s for call in calls.values())
            last = max(calls, key=lambda rank: calls[rank].time_s)
            # Several may be under way at once; what was waited already is not counted again.
            wait_s = max(0.0, times[-1] - max(times[-2], complete))
            found.append(_Late(last, wait_s, times[0], calls))
            complete = max(complete, times[-1])
    return found


def _late_rank(window: list[_Late]) -> int | None:
    if _length(window, _LONGEST_S) < _SHORTEST_S:
        return None
    total: dict[int, float] = {}
    for late in window:
        total[late.rank] = total.get(late.rank, 0.0) + late.wait_s
    rank = max(total, key=lambda r: total[r])
    others = max((wait for r, wait in total.items() if r != rank), default=0.0)
    longest = sorted((late.wait_s for late in window if late.rank == rank), reverse=True)
    regular = len(longest) >= _AT_LEAST and longest[_AT_LEAST - 1] > _ALIKE * longest[2]
    if not regular or others > _OTHERS * total[rank]:
        return None
    return rank if min(_shares(window, rank)) > _SHARE else None


def _shares(window: list[_Late], rank: int) -> list[float]:
    """In each slice of the window the share of the time that the others waited for the rank."""
    start, end = window[0].start_s, window[-1].start_s
    length = (end - start) / _SLICES
    if length <= 0:
        return [0.0]
    waits = [0.0] * _SLICES
    for late in window[1:]:  # the wait in the first is of the time before it
        if late.rank == rank:
            waits[min(int((late.start_s - start) / length), _SLICES - 1)] += late.wait_s
    return [wait / length for wait in waits]


def _finding(rank: int, window: list[_Late], snapshot: Snapshot) -> Verdict:
    shares = _shares(window, rank)
    longest = max((late for late in window if late.rank == rank), key=lambda late: late.wait_s)
    others = [state.rank for state in snapshot.ranks if state.rank != rank]
    headline = (
        f"rank {rank} is slower than the others, step after step: {name_ranks(others)} "
        f"{verb('waits', len(others))} for it {sum(shares) / len(shares):.0%} of the time"
    )
    rows = []
    for state in snapshot.ranks:
        call = longest.calls.get(state.rank)
        if call is not None:
            when = "last" if state.rank == rank else "earlier"
            line = own_line(call.frames)
            rows.append(Row(state.rank, state.host, f"comes {when} to {describe(call)}", line))
    advice = (
        "look at its host: other programs on its cores or its GPU, an older or a hotter device, "
        "slower storage; and at what it does alone in every step. Uneven `shares` give it less",
    )
    return Verdict("straggler", False, (rank,), headline, tuple(rows), None, advice)
