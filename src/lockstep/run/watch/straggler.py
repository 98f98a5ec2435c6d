"""Finds a *straggler*: a rank that is slower than the others, step after step.

Ranks wait for each other in collectives, so a slow rank *arrives late*: it makes the call last. The
wait that it causes is the time from the second last call to its own. A straggler is a rank that
arrives last at least ten times in the *window* (the last seconds of the run), causes most of the
waiting, and does so throughout the window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.run.watch.call_table import CallTable
from lockstep.run.watch.messages import describe
from lockstep.run.watch.snapshot import CollectiveCall, Snapshot, with_unique_group_names
from lockstep.run.watch.stacks import user_frame
from lockstep.run.watch.verdict import Row, Verdict
from lockstep.wording import conjugate, format_ranks

# On a busy machine any rank may be slow for a moment, so the window must not be too short.
WINDOW_MAX_S = 30.0
WINDOW_MIN_S = 2.0
# A rank arrives late once in a step at least, so this means ten steps.
STRAGGLER_MIN_LATE_ARRIVALS = 10
# Ten slow steps, not three long stalls: the tenth longest wait for the rank must be longer than
# this share of the third longest.
MIN_RATIO_OF_TENTH_TO_THIRD_WAIT = 0.25
# On a busy machine every rank arrives last now and then, so a straggler must stand out: no other
# rank may cause more than this share of the waiting that the straggler causes.
OTHER_RANK_MAX_SHARE = 0.25
# The others must wait for the straggler more than this share of the time, in each part of the
# window.
STRAGGLER_MIN_SHARE_OF_TIME = 0.2
NUM_WINDOW_PARTS = 5


@dataclass(frozen=True)
class _Collective:
    """One collective that all ranks of its group have called."""

    last_rank: int
    """The rank that arrived last."""
    wait_s: float
    """How long all other ranks waited for it at least."""
    began_at_s: float
    """When the first rank arrived."""
    calls: dict[int, CollectiveCall]
    """The call of each rank."""


def find_straggler(snapshot: Snapshot) -> Verdict | None:
    """Finds a rank that the others wait for during a good part of every step.

    The times at which the ranks made the same call are compared. For that, torch's Flight Recorder
    must have kept the calls of ten steps or more, and all ranks must be on one host, so that they
    share a clock. With NCCL, the recorded time is that of the call, not of its execution: if the
    CPU runs ahead of the GPU, a slow GPU is not noticed.

    Returns:
        The verdict on the straggler, or None if no rank stands out or the times are not known.
    """
    if not snapshot.one_host or len(snapshot.ranks) < 2:
        return None

    # Calls are compared by the names of their groups, so a name must not stand for two groups.
    snapshot = with_unique_group_names(snapshot)
    table = CallTable(snapshot)
    for key in table.calls:  # one key for each process group
        collectives = _collectives_of_all_members(table, key)
        if not collectives:
            continue

        recorded_s = collectives[-1].began_at_s - collectives[0].began_at_s

        # The whole window is judged first, and then its second half, so that a single long stall in
        # the first half cannot hide a straggler that came after it.
        half_window_s = min(WINDOW_MAX_S, recorded_s) / 2
        for window_s in (WINDOW_MAX_S, half_window_s):
            verdict = _judge_window(_last_collectives(collectives, window_s), snapshot)
            if verdict is not None:
                return verdict

    return None


def _last_collectives(collectives: Sequence[_Collective], window_s: float) -> list[_Collective]:
    """Returns the collectives that began at most `window_s` seconds before the last one did."""
    last_began_at_s = collectives[-1].began_at_s
    return [
        collective
        for collective in collectives
        if last_began_at_s - collective.began_at_s <= window_s
    ]


def _collectives_of_all_members(table: CallTable, key: str) -> list[_Collective]:
    """Measures how long each collective of a group waited for its last rank.

    Collectives that some member has not called are left out. For example, three ranks come to a
    collective at 1 s, 2 s and 9 s. The wait is 7 s; if the collective before it was complete only
    at 5 s, it is 4 s.

    Args:
        table: the calls of all ranks.
        key: the key of the group, `backend:group`.

    Returns:
        The collectives, the oldest first.
    """
    members = table.members(key)
    if len(members) < 2:
        return []

    collectives = []
    earlier_completed_at_s = 0.0  # when the last rank had come to all earlier collectives
    for _, calls in sorted(table.calls[key].items()):  # in the order in which they were called
        if set(calls) != members:  # some member has not called it yet, or its record is lost
            continue

        arrivals_s = sorted(call.time_s for call in calls.values())
        first_came_at_s = arrivals_s[0]
        second_last_came_at_s, last_came_at_s = arrivals_s[-2:]
        last_rank = max(calls, key=lambda rank: calls[rank].time_s)

        # All other ranks wait from the second last arrival to the last one. If collectives are
        # asynchronous, ranks come to this one while they still wait in an earlier one. So the wait
        # in this one begins no earlier than the other has ended.
        wait_began_at_s = max(second_last_came_at_s, earlier_completed_at_s)
        wait_s = max(0.0, last_came_at_s - wait_began_at_s)
        collectives.append(_Collective(last_rank, wait_s, first_came_at_s, calls))
        earlier_completed_at_s = max(earlier_completed_at_s, last_came_at_s)

    return collectives


def _judge_window(window: Sequence[_Collective], snapshot: Snapshot) -> Verdict | None:
    """Looks for a straggler in the collectives of a window of time.

    Args:
        window: collectives of one process group, the oldest first.
        snapshot: the state of the ranks, which the verdict shows.

    Returns:
        The verdict on the straggler, or None if there is none.
    """
    if not window:
        return None
    window_s = window[-1].began_at_s - window[0].began_at_s
    if window_s < WINDOW_MIN_S:
        return None

    rank = _rank_that_stands_out(window)
    if rank is None:
        return None

    # A single long stall does not make a straggler: the others must have waited in every part of
    # the window.
    wait_s_by_part = _wait_by_part(window, rank, window_s)
    part_s = window_s / NUM_WINDOW_PARTS
    if min(wait_s_by_part) <= STRAGGLER_MIN_SHARE_OF_TIME * part_s:
        return None

    share_of_time = sum(wait_s_by_part) / window_s
    return _straggler_verdict(rank, share_of_time, window, snapshot)


def _rank_that_stands_out(window: Sequence[_Collective]) -> int | None:
    """Returns the rank that causes most of the waiting.

    Returns:
        The rank, or None if it rarely arrives last, or if another rank also causes much of the
        waiting.
    """
    waits_by_rank: dict[int, list[float]] = defaultdict(list)
    for collective in window:
        waits_by_rank[collective.last_rank].append(collective.wait_s)

    # The rank that the others waited for longest comes first.
    slowest, *other_ranks = sorted(
        waits_by_rank, key=lambda rank: sum(waits_by_rank[rank]), reverse=True
    )
    waits = sorted(waits_by_rank[slowest], reverse=True)  # the longest first
    if len(waits) < STRAGGLER_MIN_LATE_ARRIVALS:
        return None

    if _has_only_few_long_waits(waits):
        return None

    # If another rank causes much of the waiting too, the ranks may simply take turns being slow.
    if other_ranks:
        second_slowest = other_ranks[0]
        if sum(waits_by_rank[second_slowest]) > OTHER_RANK_MAX_SHARE * sum(waits):
            return None

    return slowest


def _has_only_few_long_waits(longest_first: Sequence[float]) -> bool:
    """Returns True if a rank's waits come from a few long stalls, and not from many slow steps.

    Ten slow steps cause ten waits of similar length. The two longest waits may be stalls that came
    in addition, so the tenth is compared with the third:

        9, 8, 0.5, 0.5, 0.5, 0.4, 0.4, 0.4, 0.4, 0.3    many slow steps, and two stalls
        9, 8, 7, 0.01, 0.01, ...                        three stalls

    Args:
        longest_first: the waits that the rank has caused, at least `STRAGGLER_MIN_LATE_ARRIVALS`.
    """
    third_wait = longest_first[2]
    tenth_wait = longest_first[STRAGGLER_MIN_LATE_ARRIVALS - 1]
    return tenth_wait <= MIN_RATIO_OF_TENTH_TO_THIRD_WAIT * third_wait


def _wait_by_part(window: Sequence[_Collective], rank: int, window_s: float) -> list[float]:
    """Divides the window into equal parts, and sums the waiting for a rank in each of them.

    Args:
        window: collectives of one process group, the oldest first.
        rank: the rank that the others waited for.
        window_s: the time from the first of these collectives to the last, in seconds; above 0.

    Returns:
        The seconds of waiting in each of the `NUM_WINDOW_PARTS` parts.
    """
    wait_s_by_part = [0.0] * NUM_WINDOW_PARTS
    window_began_at_s = window[0].began_at_s

    # The last rank of the first collective was delayed before the window began, so that wait is not
    # counted.
    for collective in window[1:]:
        if collective.last_rank == rank:
            part = int((collective.began_at_s - window_began_at_s) / window_s * NUM_WINDOW_PARTS)
            part = min(part, NUM_WINDOW_PARTS - 1)  # the very end belongs to the last part
            wait_s_by_part[part] += collective.wait_s

    return wait_s_by_part


def _straggler_verdict(
    rank: int, share_of_time: float, window: Sequence[_Collective], snapshot: Snapshot
) -> Verdict:
    """Writes the verdict on a straggler.

    As an example, its rows show the collective in which the others waited longest for it.

    Args:
        rank: the straggler.
        share_of_time: the share of the window that the others spent waiting for it, from 0 to 1.
        window: collectives of one process group.
        snapshot: the state of the ranks.
    """
    other_ranks = [state.rank for state in snapshot.ranks if state.rank != rank]
    headline = (
        f"rank {rank} is slower than the others, step after step: {format_ranks(other_ranks)} "
        f"{conjugate('waits', len(other_ranks))} for it {share_of_time:.0%} of the time"
    )
    late_arrivals = [collective for collective in window if collective.last_rank == rank]

    longest_wait = max(late_arrivals, key=lambda collective: collective.wait_s)
    rows = []
    for state in snapshot.ranks:
        call = longest_wait.calls.get(state.rank)
        if call is not None:
            when = "last" if state.rank == rank else "earlier"
            line = user_frame(call.frames)
            rows.append(Row(state.rank, state.host, f"comes {when} to {describe(call)}", line))

    advice = (
        "look at its host: other programs on its cores or its GPU, an older or a hotter device, "
        "slower storage; and at what it does alone in every step. Uneven `shares` give "
        "it less work, except under diloco"
    )
    return Verdict(
        kind="straggler",
        fatal=False,
        ranks=(rank,),
        headline=headline,
        rows=tuple(rows),
        advice=(advice,),
    )
