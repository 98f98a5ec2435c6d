"""Decides why a run makes no progress: a deadlock, a lost rank, or a wait that may still end.

The launcher takes two snapshots of all ranks, and `find` turns them into at most one verdict. It
tries the *rules* in `RULES` one after the other. Each rule knows one cause: it takes a `Case` (what
each rank does, and which rank waits for which) and returns a verdict, or None if its cause does not
apply. The first rule that returns a verdict decides.

To add a rule, write a function, add it to `RULES`, and add its name to `verdict.VerdictKind`. Slow
ranks are found by `straggler`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from lockstep.run.watch.activity import Activity, Kind, classify, is_still
from lockstep.run.watch.call_table import CallTable
from lockstep.run.watch.case import Case
from lockstep.run.watch.deadlock import advice_on_p2p, deadlock, name_ops
from lockstep.run.watch.snapshot import RankState, Snapshot, with_unique_group_names
from lockstep.run.watch.stacks import LOCKSTEP_INIT
from lockstep.run.watch.verdict import Verdict, VerdictKind
from lockstep.run.watch.wait_graph import (
    build_wait_graph,
    recognize_gpu_wait,
    recognize_possible_progress,
)
from lockstep.wording import conjugate, format_ranks

P2P_MIN_STILL_S = 10.0
"""Ranks in sends and receives are called deadlocked only if nothing has moved for this long."""


def find(earlier: Snapshot, later: Snapshot, waited_s: float) -> Verdict | None:
    """Decides what keeps a run from making progress.

    Args:
        earlier: the first snapshot of all ranks.
        later: the second snapshot, taken 1 to 3 s after the first.
        waited_s: how long the run has made no progress, in seconds.

    Returns:
        The verdict, or None if a rank makes progress or if no rank waits.
    """
    # Calls are compared by the names of their groups, so a name must not stand for two groups.
    earlier = with_unique_group_names(earlier)
    later = with_unique_group_names(later)
    states_before = {state.rank: state for state in earlier.ranks}
    seconds_between = later.time - earlier.time

    first_guesses = _classify_ranks(states_before, later, seconds_between)
    if first_guesses is None:
        return None

    # The first guesses are corrected: a rank that seems to work may be waiting for its GPU, and one
    # that seems deadlocked may yet be freed by a timeout or by another of its threads.
    table = CallTable(later)
    activities = {
        rank: recognize_gpu_wait(states_before[rank], activity, table)
        for rank, activity in first_guesses.items()
    }
    activities = recognize_possible_progress(activities, table)
    graph = build_wait_graph(activities, table)
    since_call_s = _seconds_since_calls(graph.waits_for, activities, later)

    # Between two machines, data may be in transit that neither of them knows about.
    alive = [a.state for a in activities.values() if a.kind is not Kind.EXITED]
    nothing_in_transit = (
        later.one_host
        and waited_s >= P2P_MIN_STILL_S
        and all(is_still(states_before[state.rank], state, seconds_between) for state in alive)
    )

    case = Case(
        activities=activities,
        table=table,
        graph=graph,
        since_call_s=since_call_s,
        waited_s=max([waited_s, *since_call_s.values()]),
        nothing_in_transit=nothing_in_transit,
    )
    for rule in RULES:
        verdict = rule(case)
        if verdict is not None:
            return verdict
    return None


def _classify_ranks(
    states_before: Mapping[int, RankState], later: Snapshot, seconds_between: float
) -> dict[int, Activity] | None:
    """Judges what each rank does, by its own two states alone; returns None if a rank moves.

    Args:
        states_before: the state of each rank in the first snapshot.
        later: the second snapshot.
        seconds_between: the time between them.
    """
    activities = {}
    for state in later.ranks:
        if state.rank not in states_before:  # one snapshot does not show whether a rank moves
            continue
        activity = classify(states_before[state.rank], state, seconds_between)
        if activity.kind is Kind.MOVING:
            return None
        activities[state.rank] = activity
    return activities


def _seconds_since_calls(
    waiting_ranks: Iterable[int], activities: Mapping[int, Activity], snapshot: Snapshot
) -> dict[int, float]:
    """Returns the seconds since each waiting rank made the call that it waits in, where known.

    The time of a call is that of its host's clock. So with several hosts the result is empty.
    """
    since_call_s: dict[int, float] = {}
    if snapshot.one_host:
        for rank in waiting_ranks:
            call = activities[rank].call
            if call is not None:
                since_call_s[rank] = max(0.0, snapshot.time - call.time_s)
    return since_call_s


def _nothing_is_visible(case: Case) -> Verdict | None:
    """Reports that the state of no rank could be read: no rank answered or showed a stack.

    A run with a single rank gets no such verdict.
    """
    alive = case.alive
    if len(alive) < 2:
        return None

    if any(_is_visible(activity) for activity in alive.values()):
        return None

    # A rank without a heartbeat may be a program that is not Python. Such a program never answers,
    # so its silence does not mean that anything is wrong.
    if not all(_has_heartbeat(activity) for activity in alive.values()):
        return None

    headline = (
        f"nothing can be seen of {format_ranks(sorted(alive))}, and no step has been made for "
        f"{case.waited_s:.0f} s"
    )
    return case.make_verdict("unknown", alive, headline)


_KINDS_BLOCKED_OUTSIDE_COLLECTIVES = {
    Kind.BLOCKED,
    Kind.LOADING,  # blocked until a DataLoader delivers a batch
    Kind.STOPPED,  # blocked by a signal or a debugger
    # Blocked after it called a collective. As the graph does not list it as waiting, it has found
    # no other rank that this one might wait for.
    Kind.PERHAPS_WAITING,
}


def _is_visible(activity: Activity) -> bool:
    """Returns True if a rank has answered, or if enough was seen of it to know its kind."""
    return activity.kind is not Kind.UNKNOWN or activity.state.answered is True


def _has_heartbeat(activity: Activity) -> bool:
    return activity.state.steps is not None  # the steps are read from the heartbeat


def _all_are_blocked(case: Case) -> Verdict | None:
    """Reports that every rank is blocked outside any collective, for example on a lock or a disk.

    While one rank computes, it is normal for others to be blocked. So this rule only applies if no
    rank computes.
    """
    # If ranks wait for others, the rules that follow say for whom.
    ranks_wait_for_others = bool(case.waiting)
    if ranks_wait_for_others:
        return None
    if len(case.activities) < 2:
        return None

    alive = case.alive
    ended_ranks = case.activities.keys() - alive.keys()
    blocked_kinds = set(_KINDS_BLOCKED_OUTSIDE_COLLECTIVES)
    if ended_ranks:
        # While no rank has ended, a SILENT rank probably computes in C code. Afterwards it may hang
        # while it ends itself: it waits for a thread that needs Python's lock, and keeps the lock.
        blocked_kinds.add(Kind.SILENT)

    kinds = {activity.kind for activity in alive.values()}
    all_are_blocked = kinds.issubset(blocked_kinds)
    if not all_are_blocked:
        return None
    return _verdict_on_blocked_ranks(case, ended_ranks)


def _verdict_on_blocked_ranks(case: Case, ended_ranks: Collection[int]) -> Verdict:
    """Returns the verdict if all ranks that have not ended are blocked outside any collective."""
    alive = case.alive
    duration = f"{case.waited_s:.0f} s"
    if ended_ranks:
        have_ended = f"{format_ranks(ended_ranks)} {conjugate('has', len(ended_ranks))} ended"
        have_not = f"{format_ranks(alive)} {conjugate('has', len(alive))} not"
        headline = f"{have_ended}; {have_not}, and no step or call has been seen for {duration}"
        return case.make_verdict("blocked", alive, headline)

    if all(activity.kind is Kind.LOADING for activity in alive.values()):
        return case.make_verdict("loading", alive, f"all ranks wait for data, for {duration}")

    headline = (
        "no rank computes in its main thread, and none waits for another in a collective, for "
        f"{duration}"
    )
    return case.make_verdict("blocked", alive, headline)


def _awaited_rank_is_gone(case: Case) -> Verdict | None:
    """Reports that ranks wait for a rank that has ended, has died, or was stopped by a signal.

    The kind of the verdict is "left" if all awaited ranks that have ended did so without an error,
    and "lost" if one of them has died. If other awaited ranks are stopped, the verdict does not
    name these, as they may come back.
    """
    stopped: dict[int, RankState] = {}  # by rank
    ended: dict[int, RankState] = {}
    for rank, activity in case.awaited_but_not_waiting.items():
        if activity.kind is Kind.STOPPED:
            stopped[rank] = activity.state
        elif activity.kind is Kind.EXITED:
            ended[rank] = activity.state

    if ended:
        kind: VerdictKind = "lost"
        what = "has died"
        all_ended_without_error = all(state.code == 0 for state in ended.values())
        if all_ended_without_error:
            kind = "left"
            what = "has ended without an error"
        is_fatal = _cannot_go_on(case, ended=ended, stopped=stopped)
        return case.make_verdict(kind, ended, case.waiting_text(what, ended), fatal=is_fatal)

    if stopped:
        # A stopped rank may be continued, so this is not fatal. If it is not, a timeout ends the
        # run.
        headline = case.waiting_text(Kind.STOPPED.value, stopped)
        return case.make_verdict("stopped", stopped, headline)

    return None


def _cannot_go_on(
    case: Case, *, ended: Mapping[int, RankState], stopped: Mapping[int, RankState]
) -> bool:
    """Returns True if a rank waits in vain for ranks that have ended, so that the run cannot go on.

    Args:
        case: what is known about the run.
        ended: the ranks that others wait for and that have ended.
        stopped: the ranks that others wait for and that are stopped.
    """
    ranks_that_may_come = (
        case.activities.keys() - case.waiting.keys() - ended.keys() - stopped.keys()
    )
    return any(
        _waits_in_vain(case, rank, ended.keys(), ranks_that_may_come) for rank in case.waiting
    )


def _waits_in_vain(
    case: Case, rank: int, ended_ranks: Collection[int], ranks_that_may_come: Collection[int]
) -> bool:
    """Returns True if a waiting rank certainly waits for a rank that has ended.

    Examples, where rank 1 has ended, and rank 2 computes and so may come:

        rank 0 is known to wait for rank 1            True
        it is assumed to wait for rank 1 or 2         False: rank 2 may be the one that it waits for
        it is assumed to wait for rank 1 alone        True

    Args:
        case: what is known about the run.
        rank: the waiting rank.
        ended_ranks: the ranks that have ended.
        ranks_that_may_come: the ranks that may still make the call that another one waits for.
    """
    awaited_ranks = case.graph.waits_for[rank]
    if awaited_ranks.isdisjoint(ended_ranks):
        return False

    # A rank that is known to wait needs all the ranks that it waits for, and one has ended.
    partners_are_known = rank not in case.graph.partners_unknown
    if partners_are_known:
        return True

    # A rank that only destroys its process group goes on by itself, even if other ranks are gone.
    if case.activities[rank].op == "destroy_process_group":
        return False
    return awaited_ranks.isdisjoint(ranks_that_may_come)


# The verdict on an awaited rank, by the kind of its activity. What explains most comes first.
_VERDICT_BY_KIND: dict[Kind, VerdictKind] = {
    Kind.SILENT: "gil",
    Kind.LOADING: "loading",
    Kind.BLOCKED: "blocked",
    Kind.PERHAPS_WAITING: "blocked",
    Kind.WORKING: "working",
    Kind.CHILDREN: "working",
    Kind.MAY_COME: "working",
    Kind.LIMITED: "blocked",
    Kind.UNKNOWN: "unknown",
}
# A rank of one of these kinds waits itself: MAY_COME until another of its threads makes a call,
# LIMITED until the timeout of its group.
_KINDS_THAT_WAIT_THEMSELVES = {Kind.MAY_COME, Kind.LIMITED}


def _awaited_rank_is_busy(case: Case) -> Verdict | None:
    """Reports that the run waits for ranks that may still go on, or whose state cannot be seen.

    If no rank waits, it is normal that ranks compute or load data: nothing is reported. If ranks
    that others wait for do different things, the verdict names those whose kind of activity comes
    first in `_VERDICT_BY_KIND`.
    """
    for kind, verdict_kind in _VERDICT_BY_KIND.items():
        some_rank_waits = bool(case.waiting) or kind in _KINDS_THAT_WAIT_THEMSELVES
        ranks = sorted(rank for rank, activity in case.roots.items() if activity.kind is kind)
        if ranks and some_rank_waits:
            headline = case.waiting_text(kind.value, ranks)
            return case.make_verdict(verdict_kind, ranks, headline)

    return None


def _matching_calls_do_not_complete(case: Case) -> Verdict | None:
    """Reports that all ranks wait in matching calls, so the network or the GPUs must be at fault.

    This is the last rule, as the rules before it have ruled out every other reason for the wait.
    """
    waiting = case.waiting
    if not waiting:
        return None

    duration = f"{case.since_last_call_s:.0f} s"
    some_wait_in_p2p = any(activity.waits_in_p2p for activity in waiting.values())
    if some_wait_in_p2p:
        headline = (
            f"all ranks wait in {name_ops(waiting)}, for each other; nothing has moved for "
            f"{duration}"
        )
        return case.make_verdict("transport", waiting, headline, advice_on_p2p(waiting))

    # In collectives: all ranks have made the same calls.
    headline = (
        f"all ranks wait in {name_ops(waiting)}, which match on all; nothing has moved for "
        f"{duration}"
    )
    ops = {activity.op for activity in waiting.values()}
    some_wait_to_join = bool(ops & {"init_process_group", LOCKSTEP_INIT})
    if some_wait_to_join:
        advice = ("look whether all ranks were given the same address, port and number of ranks",)
        return case.make_verdict("transport", waiting, headline, advice)
    return case.make_verdict("transport", waiting, headline)  # with the usual advice


RULES: tuple[Callable[[Case], Verdict | None], ...] = (
    _nothing_is_visible,
    _all_are_blocked,
    _awaited_rank_is_gone,
    deadlock,
    _awaited_rank_is_busy,
    _matching_calls_do_not_complete,
)
"""The first rule that returns a verdict decides."""
