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

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lockstep.run.watch import stacks
from lockstep.run.watch.activity import Activity, Kind, frames_to_user_line
from lockstep.run.watch.call_table import CallTable, first_batch
from lockstep.run.watch.snapshot import CollectiveCall, RankState

# The key shared by all ranks in a send or receive whose partner is unknown: they are all assumed to
# wait for the same ranks.
_SEND_OR_RECEIVE = object()


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
            if not calls and sender is None:
                self.partners_unknown.add(rank)

            call_cannot_complete = any(table.is_mismatched(call) for call in calls)
            if call_cannot_complete:
                self.mismatched.add(rank)

            # The set may contain this rank, as ranks share it. But no rank waits for itself.
            awaited = shared_sets.awaited_ranks(activity, calls, sender)
            another_rank_is_missing = _has_other_rank(awaited, rank)

            # A rank that is PERHAPS_WAITING may be blocked by something else. It is treated as
            # waiting if there is a reason for that.
            certainly_waits = activity.kind is Kind.WAITING
            if certainly_waits or call_cannot_complete or another_rank_is_missing:
                self.waits_for[rank] = awaited

    def _free_ranks(self, remaining: set[int]) -> set[int]:
        """Returns the remaining ranks that wait for no other remaining rank.

        A rank in a mismatched call is never among them.

        Args:
            remaining: the waiting ranks that have not been found free so far.
        """
        # Many ranks share one set of awaited ranks, so each set is looked at once.
        remaining_awaited = {}
        for awaited in set(self.waits_for.values()):
            remaining_awaited[awaited] = awaited & remaining

        free_ranks = set()
        for rank in remaining - self.mismatched:
            # A set that several ranks share may contain the rank itself, which does not count.
            still_awaited = remaining_awaited[self.waits_for[rank]]
            if not _has_other_rank(still_awaited, rank):
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
        self._set_of_wait: dict[object, frozenset[int]] = {}
        """The set for each key of `_identify_wait`."""
        self._unique_sets: dict[frozenset[int], frozenset[int]] = {}
        """The first of all sets that are equal, by itself."""

    def awaited_ranks(
        self, activity: Activity, calls: Sequence[CollectiveCall], sender: int | None
    ) -> frozenset[int]:
        """Returns the ranks that a waiting rank waits for; see `_identify_wait` for the arguments.

        The set is computed once for all ranks in the same wait. It may contain the rank itself.
        """
        key = _identify_wait(activity, calls, sender)
        if key not in self._set_of_wait:
            new_set = frozenset(_awaited_ranks(activity, self._activities, self._table))

            # Ranks in different waits may wait for the same ranks. Of equal sets, keep the first.
            self._set_of_wait[key] = self._unique_sets.setdefault(new_set, new_set)
        return self._set_of_wait[key]


def build_wait_graph(activities: Mapping[int, Activity], table: CallTable) -> WaitGraph:
    """Builds the graph of which rank waits for which.

    A rank that is `PERHAPS_WAITING` is blocked in a line of the user's code after it called a
    collective. It may wait for that collective or for anything else, so it is not called deadlocked
    unless its call is mismatched. If such ranks seem deadlocked, the graph is built again as if
    they did not wait: others may still wait for them, but they wait for nobody. Once is enough:
    with fewer waits, no rank becomes deadlocked that was not deadlocked before.
    """
    graph = WaitGraph(activities, table)
    doubtful_ranks = set()
    for rank in graph.deadlocked - graph.mismatched:
        if activities[rank].kind is Kind.PERHAPS_WAITING:
            doubtful_ranks.add(rank)
    if doubtful_ranks:
        return WaitGraph(activities, table, never_waiting=doubtful_ranks)
    return graph


def _calls_waited_in(activity: Activity) -> list[CollectiveCall]:
    """Returns the collectives that a waiting rank may be waiting in.

    A rank may have started several asynchronous ones, any of which may be the one that does not
    complete.

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
    # If the process waits, and not its GPU, it may do so in another call than the recorded one:
    # sends and receives over Gloo are not recorded.
    process_waits = activity.wait.op != ""
    if not activity.waits_in_p2p or activity.call is None or process_waits:
        return None
    return table.awaited_sender(activity.state.rank, activity.call)


def _identify_wait(
    activity: Activity, calls: Sequence[CollectiveCall], sender: int | None
) -> object:
    """Returns a key that is equal for all ranks that wait for the same ranks.

    Keys of different kinds of waits are never equal: they are of different types, and
    `_SEND_OR_RECEIVE` is an object of its own.

    Args:
        activity: what a waiting rank does.
        calls: the collectives that it waits in; empty if they are not known.
        sender: the rank whose send it waits for; None if it waits in another call, or if the sender
            is not known.
    """
    if calls:  # a call is identified by the key of its group and its number in the group
        return tuple((call.key, call.seq) for call in calls)

    if sender is not None:
        return (_SEND_OR_RECEIVE, sender)
    if activity.waits_in_p2p:  # all such ranks are assumed to wait for the same ranks
        return _SEND_OR_RECEIVE

    if activity.created_group is not None:  # the process group that it waits to create
        return activity.created_group
    return activity.op  # the name of the function that it waits in


def _awaited_ranks(
    activity: Activity, activities: Mapping[int, Activity], table: CallTable
) -> set[int]:
    """Returns the ranks that a waiting rank waits for.

    If that is not known, these are all ranks that do something else.

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

    # 3. In a send or receive with an unknown partner, it waits for one rank, which may be any of
    # them. The result includes the rank itself: all ranks in such a wait share one set, and each of
    # them may be the partner of another.
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
    """Returns True if two ranks are in the same function and, if known, create the same group."""
    if activity.created_group is None or other.created_group is None:
        return activity.op == other.op
    return activity.created_group.is_same(other.created_group)


def _has_other_rank(ranks: Collection[int], rank: int) -> bool:
    """Returns True if `ranks` contains any rank other than `rank`."""
    if rank in ranks:
        return len(ranks) > 1
    return len(ranks) > 0


# --- Ranks that seem to wait, or to work, and do not


def recognize_gpu_wait(earlier: RankState, activity: Activity, table: CallTable) -> Activity:
    """Corrects the activity of a rank that seems to work, but waits for a collective on its GPU.

    NCCL's recorder knows which calls a GPU has started only if torch measures their times, which
    slows training down. But a GPU executes the calls of a group in order, and completes the oldest
    one only when all ranks have made it. So the rank waits if its oldest pending call is the same
    in both snapshots and cannot complete yet. Of sends and receives, only receives are examined: a
    GPU may compute while it sends, so a pending send does not show that it waits.

    Args:
        earlier: the rank's state in the first snapshot.
        activity: what the rank does, judged from both snapshots.
        table: the calls of all ranks in the second snapshot.

    Returns:
        The activity, as `Kind.WAITING` in that call if the rank waits.
    """
    if activity.kind is not Kind.WORKING:
        return activity
    has_moved = frames_to_user_line(earlier) != frames_to_user_line(activity.state)
    if has_moved:
        return activity

    # Collectives.
    oldest_before = _oldest_nccl_calls(earlier)
    for key, call in _oldest_nccl_calls(activity.state).items():
        is_the_same = key in oldest_before and oldest_before[key].seq == call.seq
        if is_the_same and (table.missing_ranks(call) or table.is_mismatched(call)):
            return replace(activity, kind=Kind.WAITING, call=call)

    # Receives.
    p2p_before = _oldest_nccl_p2p(earlier)
    for key, batch in _oldest_nccl_p2p(activity.state).items():
        batch_number = batch[0].seq  # which all calls of a batch share
        is_the_same = key in p2p_before and p2p_before[key][0].seq == batch_number
        if not is_the_same:
            continue
        for call in batch:
            # For a send, and for a receive whose sender has come, there is no awaited sender.
            sender = table.awaited_sender(activity.state.rank, call)
            if sender is not None:
                return replace(activity, kind=Kind.WAITING, call=call)

    return activity


def _oldest_nccl_calls(state: RankState) -> dict[str, CollectiveCall]:
    """Returns the oldest pending NCCL collective of each group, by the key of the group."""
    oldest: dict[str, CollectiveCall] = {}
    for call in state.pending_calls():
        if call.backend == "nccl" and not call.p2p and call.key not in oldest:
            oldest[call.key] = call
    return oldest


def _oldest_nccl_p2p(state: RankState) -> dict[str, list[CollectiveCall]]:
    """Returns the oldest pending batch of NCCL sends and receives of each group, by its key."""
    pending: dict[str, list[CollectiveCall]] = defaultdict(list)
    for call in state.pending_calls():
        if call.backend == "nccl" and call.p2p:
            pending[call.key].append(call)
    return {key: first_batch(calls) for key, calls in pending.items()}


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
        # The timeout ends the wait whether or not another rank helps, so this case comes first.
        if activity.call is not None and table.has_short_timeout(activity.call):
            result[rank] = replace(activity, kind=Kind.LIMITED)
            continue

        if rank not in helpful_ranks:
            continue
        for thread_stack in activity.state.threads or ():
            # A thread that does not wait for others may go on until it makes the call.
            if stacks.may_continue_alone(thread_stack):
                state = replace(activity.state, stack=thread_stack)
                result[rank] = Activity(state, Kind.MAY_COME)
                break

    return result


def _ranks_whose_call_would_help(
    activities: Mapping[int, Activity], graph: WaitGraph, table: CallTable
) -> set[int]:
    """Returns the ranks that could free a deadlocked rank by making a call that it waits for.

    No rank can help those that wait in a mismatched call, as it can never complete.

    Args:
        activities: what each rank does.
        graph: which rank waits for which.
        table: the calls of all ranks.
    """
    # 1. Some deadlocked ranks wait in a known call, so their partners are known. The ranks that
    # have not made the call yet may help. Each call is looked up once, even if many ranks wait in
    # it.
    completable_calls: dict[tuple[str, int], CollectiveCall] = {}
    for rank in graph.deadlocked - graph.partners_unknown:
        for call in _completable_calls(activities[rank], table):
            completable_calls[call.key, call.seq] = call

    helpful_ranks: set[int] = set()
    for call in completable_calls.values():
        helpful_ranks |= table.missing_ranks(call)

    # 2. The partners of the other deadlocked ranks are not known. All ranks that these ranks are
    # assumed to wait for may help.
    return helpful_ranks | _assumed_partners(graph)


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

    A mismatched call cannot complete, and neither can the later calls of its group.
    """
    calls = _calls_waited_in(activity)

    # `calls` begins with the oldest call, so the first mismatched one of each group is found first.
    first_mismatched_seq: dict[str, int] = {}  # by the key of the group
    for call in calls:
        if call.key not in first_mismatched_seq and table.is_mismatched(call):
            first_mismatched_seq[call.key] = call.seq

    completable = []
    for call in calls:
        group_has_mismatch = call.key in first_mismatched_seq
        if not group_has_mismatch or call.seq < first_mismatched_seq[call.key]:
            completable.append(call)
    return completable
