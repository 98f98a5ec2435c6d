"""Finds out which rank waits for which, and which ranks are deadlocked.

A waiting rank waits for the ranks that have not made the call it is in. A rank is *deadlocked* if,
in the end, it waits only for deadlocked ranks, or if its call is *mismatched*: another rank made a
different call in its place. If it is not known which ranks a rank waits for, its *partners are
unknown*, and it is assumed to wait for every rank that does something else.

    0 --> 1 --> 2 (works)          3 --> 4
                                   ^     |
                                   +-----+

A collective ends only when *all* of its ranks have come. So a rank can go on, sooner or later, if
it waits for nobody, or only for ranks that can go on: it is *free*. Free ranks are removed until
there are none left, and the deadlocked ranks remain. Above, 2 waits for nobody, so 1 is removed,
and then 0; 3 and 4 wait for each other and remain. A rank in a mismatched call is never free.

This is deadlock detection in the AND model: Knapp, "Deadlock detection in distributed databases",
ACM Computing Surveys 19 (4), 1987.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lockstep.run.watch import stacks
from lockstep.run.watch.activity import Activity, Kind, frames_to_user_line
from lockstep.run.watch.call_table import CallTable, oldest_batch
from lockstep.run.watch.snapshot import CollectiveCall, RankState

_WAITING_KINDS = (Kind.WAITING, Kind.PERHAPS_WAITING, Kind.LIMITED)
"""The kinds of activities that have a function in which the rank waits for other ranks."""


class WaitGraph:
    """Which rank waits for which.

    Args:
        activities: what each rank does.
        table: the calls of all ranks.
        never_waiting: ranks that are treated as if they did not wait, whatever they do.
    """

    def __init__(
        self,
        activities: Mapping[int, Activity],
        table: CallTable,
        never_waiting: Collection[int] = (),
    ) -> None:
        self.waits_for: dict[int, frozenset[int]] = {}
        """The ranks that each waiting rank waits for. Ranks that wait for the same ranks share one
        set, which may contain themselves, although no rank waits for itself."""
        self.mismatched: set[int] = set()
        """The waiting ranks whose call is mismatched."""
        self.partners_unknown: set[int] = set()
        """The waiting ranks whose partners are unknown."""
        self._add_ranks(activities, table, never_waiting)

        self.awaited: set[int] = set()
        """The ranks that some rank waits for."""
        for awaited_ranks in set(self.waits_for.values()):
            self.awaited |= awaited_ranks

        self.deadlocked: set[int] = set(self.waits_for)
        """The waiting ranks that, in the end, wait only for each other or in a mismatched call."""
        free_ranks = self._free_ranks(self.deadlocked)
        while free_ranks:
            self.deadlocked -= free_ranks
            free_ranks = self._free_ranks(self.deadlocked)

    def _add_ranks(
        self, activities: Mapping[int, Activity], table: CallTable, never_waiting: Collection[int]
    ) -> None:
        """Fills `waits_for`, `mismatched` and `partners_unknown` with the waiting ranks.

        Args:
            activities: what each rank does.
            table: the calls of all ranks.
            never_waiting: ranks that are treated as if they did not wait.
        """
        shared_sets = _SharedSets(activities, table)
        for rank, activity in activities.items():
            may_wait = activity.kind in (Kind.WAITING, Kind.PERHAPS_WAITING)
            if not may_wait or rank in never_waiting:
                continue

            calls = _calls_waited_in(activity)
            sender = _sender_waited_for(activity, table)
            is_mismatched = any(table.is_mismatched(call) for call in calls)

            # The ranks that this one waits for. Ranks in one call share the set, so it may contain
            # the rank itself.
            awaited = shared_sets.awaited_ranks(activity, calls, sender)

            # A rank that is PERHAPS_WAITING may be blocked by something else. It is treated as
            # waiting if there is a reason for that.
            has_reason_to_wait = is_mismatched or _has_other_rank(awaited, rank)
            if activity.kind is Kind.PERHAPS_WAITING and not has_reason_to_wait:
                continue

            self.waits_for[rank] = awaited
            if is_mismatched:
                self.mismatched.add(rank)
            partners_are_known = bool(calls) or sender is not None
            if not partners_are_known:
                self.partners_unknown.add(rank)

    def _free_ranks(self, remaining: set[int]) -> set[int]:
        """Returns the remaining ranks that wait for no other remaining rank.

        A rank in a mismatched call is never among them.

        Args:
            remaining: the waiting ranks that have not been found free so far.
        """
        # Thousands of ranks may share one set of awaited ranks, so each set is looked at once.
        still_awaited: dict[frozenset[int], frozenset[int]] = {}  # by the whole set
        for awaited in {self.waits_for[rank] for rank in remaining}:
            still_awaited[awaited] = awaited & remaining

        free_ranks = set()
        for rank in remaining - self.mismatched:
            still_waits = _has_other_rank(still_awaited[self.waits_for[rank]], rank)
            if not still_waits:
                free_ranks.add(rank)
        return free_ranks


class _SharedSets:
    """Computes the sets of awaited ranks, of which ranks that wait for the same ranks share one.

    Among thousands of ranks, most wait for the same ranks.

    Args:
        activities: what each rank does.
        table: the calls of all ranks.
    """

    def __init__(self, activities: Mapping[int, Activity], table: CallTable) -> None:
        self._activities = activities
        self._table = table
        self._awaited_by_wait: dict[object, frozenset[int]] = {}
        """The awaited ranks in each wait, by the key that `_identify_wait` returns."""
        self._unique_sets: dict[frozenset[int], frozenset[int]] = {}
        """Every set so far, by itself: looking up an equal set finds the one to share."""

    def awaited_ranks(
        self, activity: Activity, calls: Sequence[CollectiveCall], sender: int | None
    ) -> frozenset[int]:
        """Returns the ranks that a waiting rank waits for.

        The set is computed once for all ranks in the same wait. It may contain the rank itself.

        Args:
            activity: what the waiting rank does.
            calls: the collectives that it waits in; empty if they are not known.
            sender: the rank whose send it waits for; None if it waits in another call, or if the
                sender is not known. Like `calls`, it serves to recognize ranks in the same wait.
        """
        key = _identify_wait(activity, calls, sender)
        if key not in self._awaited_by_wait:
            awaited = frozenset(_find_awaited_ranks(activity, self._activities, self._table))

            # Ranks in different waits may wait for the same ranks. Of equal sets, keep the first.
            self._awaited_by_wait[key] = self._unique_sets.setdefault(awaited, awaited)
        return self._awaited_by_wait[key]


def build_wait_graph(activities: Mapping[int, Activity], table: CallTable) -> WaitGraph:
    """Builds the graph of which rank waits for which.

    A rank that is only `PERHAPS_WAITING` must not be called deadlocked, unless its call is
    mismatched. If such ranks seem deadlocked, the graph is built again without their waits.
    """
    graph = WaitGraph(activities, table)
    doubtful_ranks = set()
    for rank in graph.deadlocked - graph.mismatched:
        if activities[rank].kind is Kind.PERHAPS_WAITING:
            doubtful_ranks.add(rank)
    if not doubtful_ranks:
        return graph

    # The second graph has fewer waits, so no further rank becomes deadlocked in it.
    return WaitGraph(activities, table, never_waiting=doubtful_ranks)


def _calls_waited_in(activity: Activity) -> list[CollectiveCall]:
    """Returns the collectives that a waiting rank may be waiting in.

    A rank may have started several asynchronous collectives. Any of them may fail to complete.

    Returns:
        The calls. Empty if they are not known, or if the rank waits in a send or receive.
    """
    if activity.call is None or activity.waits_in_p2p:
        return []

    calls = [call for call in activity.state.pending_calls() if not call.p2p]

    # The stack may show that the rank still waits in a call that is recorded as completed.
    if activity.call not in calls:
        calls.append(activity.call)
    return calls


def _sender_waited_for(activity: Activity, table: CallTable) -> int | None:
    """Returns the rank whose send the GPU of a waiting rank waits for.

    Returns:
        The sender, or None if it is not known.
    """
    # If the process waits, and not its GPU, it may wait in another call than the recorded one:
    # sends and receives over Gloo are not recorded.
    process_waits = activity.wait.op != ""
    if not activity.waits_in_p2p or activity.call is None or process_waits:
        return None
    return table.awaited_sender(activity.state.rank, activity.call)


def _identify_wait(
    activity: Activity, calls: Sequence[CollectiveCall], sender: int | None
) -> object:
    """Returns a key that is equal for all ranks that wait for the same ranks.

    The key begins with the kind of the wait, and says what the rank waits in.

    Args:
        activity: what the waiting rank does.
        calls: the collectives that it waits in; empty if they are not known.
        sender: the rank whose send it waits for in a receive. None in every other wait, also in a
            send, and in a receive from an unknown rank.
    """
    if calls:
        # ("calls", (("nccl:0", 6),)): call 6 of the default group
        return ("calls", tuple((call.key, call.seq) for call in calls))

    if sender is not None:
        return ("send of", sender)  # ("send of", 3)
    if activity.waits_in_p2p:  # all such ranks are assumed to wait for the same ranks
        return ("send or receive", None)

    if activity.created_group is not None:
        return ("creation of", activity.created_group)
    return ("function", activity.op)  # ("function", "barrier")


def _find_awaited_ranks(
    activity: Activity, activities: Mapping[int, Activity], table: CallTable
) -> set[int]:
    """Returns the ranks that a waiting rank waits for.

    If that is not known, these are all ranks that do something else. The rank itself may be among
    them, since all ranks in the same wait share the result. Callers leave it out.

    Args:
        activity: what the waiting rank does.
        activities: what each rank does, including this one.
        table: the calls of all ranks.
    """
    # 1. In known calls, it waits for the ranks that have not made them yet.
    calls = _calls_waited_in(activity)
    if calls:
        awaited = set()
        for call in calls:
            awaited |= table.missing_ranks(call)
        return awaited

    # 2. In a receive from a known sender, it waits for that rank.
    sender = _sender_waited_for(activity, table)
    if sender is not None:
        return {sender}

    # 3. In a send or receive with an unknown partner, it may wait for any other rank.
    if activity.waits_in_p2p:
        return set(activities)

    # 4. Without a recorded call, the rank is assumed to wait for those that are in another
    # function, or that create another group.
    awaited = {
        rank for rank, other in activities.items() if not _wait_for_the_same(activity, other)
    }

    # While a group is created, all ranks of the run wait for each other, but with
    # `use_local_synchronization=True` only the members of the group do.
    new_group = activity.created_group
    if new_group is not None and new_group.members_only:
        awaited &= set(new_group.ranks)
    return awaited


def _wait_for_the_same(activity: Activity, other: Activity) -> bool:
    """Returns True if two ranks wait in the same function and, if known, create the same group.

    Args:
        activity: what a waiting rank does.
        other: what any rank does.
    """
    # The function of a rank that waits in `backward` may not be known: its `op` is empty. So is
    # that of a rank that has ended or computes, which must not count as equal.
    if other.kind not in _WAITING_KINDS:
        return False
    if activity.created_group is None or other.created_group is None:
        return activity.op == other.op
    return activity.created_group.may_be_same(other.created_group)


def _has_other_rank(ranks: Collection[int], rank: int) -> bool:
    """Returns True if `ranks` contains any rank other than `rank`."""
    if rank in ranks:
        return len(ranks) > 1
    return len(ranks) > 0


# --- Ranks that seem to wait, or to work, and do not


def recognize_gpu_wait(earlier: RankState, activity: Activity, table: CallTable) -> Activity:
    """Corrects the activity of a rank that seems to work, but waits for other ranks on its GPU.

    A GPU executes the calls of a group in order, and completes the oldest one only when all ranks
    have made it. So the rank waits if its CPU has not moved, and if the oldest pending call of a
    group is the same in both snapshots and cannot complete yet. (NCCL's recorder could tell which
    calls a GPU has started, but only if torch measures their times, which slows training down.)

    Args:
        earlier: the rank's state in the first snapshot.
        activity: what the rank does, judged from both snapshots.
        table: the calls of all ranks in the second snapshot.

    Returns:
        The activity, as `Kind.WAITING` in that call if the rank waits.
    """
    if activity.kind is not Kind.WORKING:
        return activity
    cpu_has_moved = frames_to_user_line(earlier) != frames_to_user_line(activity.state)
    if cpu_has_moved:
        return activity

    call = _collective_waited_in_by_gpu(earlier, activity.state, table)
    if call is None:
        call = _receive_waited_in_by_gpu(earlier, activity.state, table)
    if call is None:
        return activity
    return replace(activity, kind=Kind.WAITING, call=call)


def _collective_waited_in_by_gpu(
    earlier: RankState, later: RankState, table: CallTable
) -> CollectiveCall | None:
    """Returns the collective that the GPU of a rank waits in, or None if it waits in none.

    For each group the oldest pending collective is looked at. The GPU waits in it if it was the
    oldest one of this group in the first snapshot too, and cannot complete yet.
    """
    oldest_before = _oldest_nccl_collectives(earlier)
    for group_key, call in _oldest_nccl_collectives(later).items():
        call_before = oldest_before.get(group_key)
        has_not_advanced = call_before is not None and call_before.seq == call.seq
        cannot_complete = bool(table.missing_ranks(call)) or table.is_mismatched(call)
        if has_not_advanced and cannot_complete:
            return call
    return None


def _receive_waited_in_by_gpu(
    earlier: RankState, later: RankState, table: CallTable
) -> CollectiveCall | None:
    """Returns the receive that the GPU of a rank waits in, or None if it waits in none.

    For each group the oldest pending batch is looked at. The GPU waits in it if it has not advanced
    since the first snapshot, and has a receive whose sender has not come to its send. A pending
    send does not show that a GPU waits, as the GPU may compute while it sends.
    """
    for batch in _oldest_batches_in_both(earlier, later):
        for call in batch:
            awaited_sender = table.awaited_sender(later.rank, call)
            if awaited_sender is not None:
                return call
    return None


def _oldest_batches_in_both(earlier: RankState, later: RankState) -> list[list[CollectiveCall]]:
    """Returns the oldest pending NCCL batch of each group that has not advanced meanwhile.

    A *batch* is the sends and receives that a GPU executes together. A group has not advanced if
    the batch that was the oldest one in the first snapshot still is.
    """
    batches_before = _oldest_nccl_batches(earlier)
    batches = []
    for group_key, batch in _oldest_nccl_batches(later).items():
        batch_before = batches_before.get(group_key)
        # All calls of a batch have the same `seq`.
        if batch_before is not None and batch_before[0].seq == batch[0].seq:
            batches.append(batch)
    return batches


def _oldest_nccl_collectives(state: RankState) -> dict[str, CollectiveCall]:
    """Returns the oldest pending NCCL collective of each group, by the key of the group."""
    oldest: dict[str, CollectiveCall] = {}
    for call in state.pending_calls():
        if call.backend == "nccl" and not call.p2p and call.key not in oldest:
            oldest[call.key] = call
    return oldest


def _oldest_nccl_batches(state: RankState) -> dict[str, list[CollectiveCall]]:
    """Returns the oldest pending batch of NCCL sends and receives of each group, by its key."""
    pending: dict[str, list[CollectiveCall]] = defaultdict(list)
    for call in state.pending_calls():
        if call.backend == "nccl" and call.p2p:
            pending[call.key].append(call)
    return {key: oldest_batch(calls) for key, calls in pending.items()}


def recognize_possible_progress(
    activities: Mapping[int, Activity], table: CallTable
) -> dict[int, Activity]:
    """Corrects the activities of ranks that seem deadlocked, but whose wait may still end.

    There are two such cases.

    - `Kind.LIMITED`: the rank waits in a group for which the program chose a short timeout. The
      timeout may end the wait.
    - `Kind.MAY_COME`: others wait for a call of this rank, and another of its threads may still
      make it: for example a thread that saves a checkpoint, and then calls a collective. The
      activity then shows the stack of this thread.
    """
    # The ranks that could free a deadlocked rank by making a call.
    graph = WaitGraph(activities, table)
    helpful_ranks = _ranks_whose_call_would_help(activities, graph, table)

    result = dict(activities)
    for rank in graph.deadlocked:
        activity = activities[rank]
        # LIMITED: the timeout ends the wait whether or not another rank helps, so it comes first.
        if activity.call is not None and table.has_short_timeout(activity.call):
            result[rank] = replace(activity, kind=Kind.LIMITED)
            continue

        # MAY_COME: a call of this rank would help others, and a thread of it may still make one.
        stack_of_thread = _stack_that_may_continue(activity.state)
        if rank in helpful_ranks and stack_of_thread is not None:
            state_of_thread = replace(activity.state, stack=stack_of_thread)
            result[rank] = Activity(state_of_thread, Kind.MAY_COME)

    return result


def _stack_that_may_continue(state: RankState) -> stacks.Stack | None:
    """Returns the stack of a thread of a rank that may go on until it makes a call.

    Only other threads than the main thread are looked at, as the main thread waits.

    Returns:
        The stack of the first such thread; None if there is none.
    """
    for thread_stack in state.threads or ():
        if stacks.may_continue_alone(thread_stack):
            return thread_stack
    return None


def _ranks_whose_call_would_help(
    activities: Mapping[int, Activity], graph: WaitGraph, table: CallTable
) -> set[int]:
    """Returns the ranks that could free a deadlocked rank by making a call that it waits for.

    Args:
        activities: what each rank does.
        graph: which rank waits for which.
        table: the calls of all ranks.
    """
    return _missing_in_known_calls(activities, graph, table) | _assumed_partners(graph)


def _missing_in_known_calls(
    activities: Mapping[int, Activity], graph: WaitGraph, table: CallTable
) -> set[int]:
    """Returns the ranks that are missing from calls in which deadlocked ranks wait.

    Example: ranks 0 and 1 wait in call 6 of a group, and rank 2 has not made it: the result is
    rank 2. If rank 1 made a different call 6, the result is empty: nothing can complete the call.
    """
    # Many ranks wait in the same call, so each call is looked at once.
    call_by_number: dict[tuple[str, int], CollectiveCall] = {}  # by group and number
    for rank in graph.deadlocked - graph.partners_unknown:
        for call in _completable_calls(activities[rank], table):
            call_by_number[call.key, call.seq] = call

    missing_ranks: set[int] = set()
    for call in call_by_number.values():
        missing_ranks |= table.missing_ranks(call)
    return missing_ranks


def _assumed_partners(graph: WaitGraph) -> set[int]:
    """Returns the ranks that deadlocked ranks with unknown partners are assumed to wait for.

    A rank does not wait for itself, even if the set that it shares with others contains it:

        rank 0 waits for {0, 1, 2}          -> {1, 2}
        ranks 0 and 1 wait for {0, 1, 2}    -> {0, 1, 2}, as each waits for the other

    As thousands of ranks may share one set, each set is looked at once, together with all ranks
    that wait for it.
    """
    ranks_by_awaited_set: dict[frozenset[int], list[int]] = defaultdict(list)
    for rank in graph.deadlocked & graph.partners_unknown:
        ranks_by_awaited_set[graph.waits_for[rank]].append(rank)

    partners: set[int] = set()
    for awaited, waiting_ranks in ranks_by_awaited_set.items():
        if len(waiting_ranks) == 1:
            partners |= awaited - set(waiting_ranks)
        else:
            partners |= awaited
    return partners


def _completable_calls(activity: Activity, table: CallTable) -> list[CollectiveCall]:
    """Returns the collectives a rank waits in that can still complete.

    A mismatched call cannot complete, and neither can the later calls of its group. For example, if
    the rank waits in calls 3, 4 and 5 of a group, and call 4 is mismatched, only call 3 remains.
    """
    calls = _calls_waited_in(activity)

    # `calls` begins with the oldest call, so the first mismatched one of each group is found first.
    first_mismatched_seq: dict[str, int] = {}  # by the key of the group
    for call in calls:
        if table.is_mismatched(call):
            first_mismatched_seq.setdefault(call.key, call.seq)

    # In a group without a mismatch, all calls can complete.
    return [call for call in calls if call.seq < first_mismatched_seq.get(call.key, math.inf)]
