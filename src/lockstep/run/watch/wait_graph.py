"""Which rank waits for which, and which ranks are deadlocked.

A waiting rank points at the ranks that have not made the call it waits in. It is *deadlocked* if it
waits, in the end, only for deadlocked ranks, or if its call is *mismatched*: another rank made a
different call in its place. If it is not known whom a rank waits for, its *partners are unknown*,
and it is assumed to wait for every rank that does something else.

    0 --> 1 --> 2 (works)          3 --> 4
                                   ^     |
                                   +-----+

A collective ends only when *all* of its ranks have come. So a rank can go on, sooner or later, if
it waits for nobody, or only for ranks that can go on: it is *free*. Free ranks are removed until
none is left to remove, and the deadlocked ones remain. Above, 2 waits for nobody, so 1 is removed,
and then 0; 3 and 4 wait for each other and remain. A rank in a mismatched call is never free.

This is deadlock detection in the AND model: Knapp, "Deadlock detection in distributed databases",
ACM Computing Surveys 19 (4), 1987.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lockstep.run.watch import stacks
from lockstep.run.watch.activity import Activity, Kind, place
from lockstep.run.watch.call_table import CallTable, first_batch
from lockstep.run.watch.snapshot import CollectiveCall, RankState

# Ranks in a send or receive of which it is not known for whom they wait are all assumed to wait for
# the same ranks: they share this one key.
_SEND_OR_RECEIVE = object()


class WaitGraph:
    """Which rank waits for which.

    Args:
        activities: what each rank does.
        table: all calls.
        excluded: ranks that are not to count as waiting.
    """

    def __init__(
        self, activities: Mapping[int, Activity], table: CallTable, excluded: Collection[int] = ()
    ) -> None:
        self.waits_for: dict[int, frozenset[int]] = {}
        """For each waiting rank, the ranks that it waits for. Ranks that wait for the same share
        one set, which may contain themselves: no rank waits for itself."""
        self.mismatched: set[int] = set()
        """Waiting ranks whose call is mismatched."""
        self.partners_unknown: set[int] = set()
        """Waiting ranks of which it is not known whom they wait for."""
        self._add_ranks(activities, table, excluded)
        self.awaited: set[int] = set()
        """The ranks that some rank waits for."""

        for awaited_ranks in set(self.waits_for.values()):
            self.awaited |= awaited_ranks

        self.deadlocked: set[int] = set(self.waits_for)
        """Waiting ranks that wait, in the end, only for each other, or in a mismatched call."""

        free_ranks = self._free_ranks(self.deadlocked)
        while free_ranks:
            self.deadlocked -= free_ranks
            free_ranks = self._free_ranks(self.deadlocked)

    def _add_ranks(
        self, activities: Mapping[int, Activity], table: CallTable, excluded: Collection[int]
    ) -> None:
        """Adds the waiting ranks to `waits_for`, `mismatched` and `partners_unknown`.

        Args:
            activities: what each rank does.
            table: all calls.
            excluded: ranks that are not to count as waiting.
        """
        # Of thousands of ranks most wait for the same ranks. Their set is computed once, under a
        # key that is equal for all of them. Of equal sets only one is kept.
        awaited_by_key: dict[object, frozenset[int]] = {}
        unique_sets: dict[frozenset[int], frozenset[int]] = {}
        for rank, activity in activities.items():
            if rank in excluded or activity.kind not in (Kind.WAITING, Kind.PERHAPS_WAITING):
                continue

            calls = _calls_waited_in(activity)  # the call it waits in is one of them, if known
            sender = _sender_waited_for(activity, table)
            if not calls and sender is None:
                self.partners_unknown.add(rank)

            key = _identify_wait(activity, calls, sender)
            if key not in awaited_by_key:
                awaited = frozenset(_awaited_ranks(activity, activities, table))
                if awaited not in unique_sets:
                    unique_sets[awaited] = awaited
                awaited_by_key[key] = unique_sets[awaited]

            awaited = awaited_by_key[key]
            is_mismatched = any(table.is_mismatched(call) for call in calls)
            if is_mismatched:
                self.mismatched.add(rank)

            # A rank that only perhaps waits (`PERHAPS_WAITING`: it may be blocked by something
            # else) counts as waiting if some other rank has not come to its call yet.
            is_waiting = activity.kind is Kind.WAITING
            if is_waiting or is_mismatched or _has_other_rank(awaited, rank):
                self.waits_for[rank] = awaited

    def _free_ranks(self, remaining: set[int]) -> set[int]:
        """Returns those of the remaining ranks that wait for no other remaining rank.

        A rank in a mismatched call is never among them.

        Args:
            remaining: the waiting ranks that have not been found free so far.
        """
        remaining_awaited = {}
        for awaited in set(self.waits_for.values()):  # many ranks share one set
            remaining_awaited[awaited] = awaited & remaining

        free_ranks = set()
        for rank in remaining - self.mismatched:
            still_awaited = remaining_awaited[self.waits_for[rank]]
            if not _has_other_rank(still_awaited, rank):
                free_ranks.add(rank)

        return free_ranks


def build_wait_graph(activities: Mapping[int, Activity], table: CallTable) -> WaitGraph:
    """Builds the graph of a run's waiting ranks.

    A rank that is blocked in a line of its own after it called a collective (`PERHAPS_WAITING`) may
    wait for that collective, or do anything else. It is not called deadlocked unless its call is
    mismatched: the graph is then built again without it.
    """
    graph = WaitGraph(activities, table)
    doubtful_ranks = set()
    for rank in graph.deadlocked - graph.mismatched:
        if activities[rank].kind is Kind.PERHAPS_WAITING:
            doubtful_ranks.add(rank)
    if doubtful_ranks:
        return WaitGraph(activities, table, excluded=doubtful_ranks)
    return graph


def _calls_waited_in(activity: Activity) -> list[CollectiveCall]:
    """Returns the pending collectives of a rank, if it waits in one of them.

    It may have started several, and each of them may be the one that does not end. The list is
    empty if the call it waits in is not known, or is a send or receive.
    """
    if activity.call is None or activity.p2p:
        return []
    calls = [call for call in activity.state.pending_calls() if not call.p2p]
    if activity.call not in calls:  # its stack shows that it waits, though the call has completed
        calls.append(activity.call)
    return calls


def _sender_waited_for(activity: Activity, table: CallTable) -> int | None:
    """Returns the rank for whose send a waiting rank's GPU waits; None if it is not known.

    If the stack shows that the rank itself waits, not its GPU, it may do so in another call than
    the recorded one: what travels over Gloo is not recorded.
    """
    process_waits = activity.wait.op != ""
    if not activity.p2p or activity.call is None or process_waits:
        return None
    return table.awaited_sender(activity.state.rank, activity.call)


def _identify_wait(
    activity: Activity, calls: Sequence[CollectiveCall], sender: int | None
) -> object:
    """Returns a key that is equal for all ranks that wait for the same ranks.

    Args:
        activity: what a waiting rank does.
        calls: the calls that it waits in; empty if they are not known.
        sender: the rank for whose send it waits; None if it waits in another call, or if that is
            not known.
    """
    if calls:  # a call is known by its group's key and its number in the group
        return tuple((call.key, call.seq) for call in calls)
    if sender is not None:
        return (_SEND_OR_RECEIVE, sender)
    if activity.p2p:  # one key for all, as they are all assumed to wait for the same ranks
        return _SEND_OR_RECEIVE
    if activity.created_group is not None:  # it waits to create this process group
        return activity.created_group
    return activity.op  # the name of the function that it waits in


def _awaited_ranks(
    activity: Activity, activities: Mapping[int, Activity], table: CallTable
) -> set[int]:
    """Returns the ranks that a waiting rank waits for; if unknown, all that do something else.

    Args:
        activity: what the waiting rank does.
        activities: what each rank does, this one included.
        table: all calls.
    """
    calls = _calls_waited_in(activity)
    if calls:
        awaited = set()
        for call in calls:
            awaited |= table.missing_ranks(call)
        return awaited

    sender = _sender_waited_for(activity, table)
    if sender is not None:
        return {sender}
    if activity.p2p:
        return set(activities)  # it waits for one of them, and it is not known for which

    awaited = {
        rank for rank, other in activities.items() if not _wait_for_the_same(activity, other)
    }

    # By default all ranks of the run wait for each other while one of them creates a group. With
    # `use_local_synchronization=True` only the group's members do.
    new_group = activity.created_group
    if new_group is not None and new_group.members_only:
        awaited &= set(new_group.ranks)

    return awaited


def _wait_for_the_same(activity: Activity, other: Activity) -> bool:
    """Returns True if two ranks are in the same function and, if it creates a group, in the same
    group.
    """
    if activity.created_group is None or other.created_group is None:
        return activity.op == other.op
    return activity.created_group.is_same(other.created_group)


def _has_other_rank(ranks: Collection[int], rank: int) -> bool:
    """Returns True if there is a rank besides this one."""
    if rank in ranks:
        return len(ranks) > 1
    return len(ranks) > 0


# --- Ranks that seem to wait, or to work, and do not


def recognize_gpu_wait(earlier: RankState, activity: Activity, table: CallTable) -> Activity:
    """Returns the activity of a rank that seems to work, but waits for its GPU's collective.

    NCCL's recorder knows which calls a GPU has started only if torch measures their times, which
    slows training down. But a GPU executes the calls of a group in order, and completes the oldest
    one when all ranks have come to it. So the rank waits if its oldest pending call is the same in
    both snapshots, and cannot complete yet. Of sends and receives only the latter are looked at: a
    GPU may compute while it sends.

    Args:
        earlier: the rank's state in the first snapshot.
        activity: what it does, judged by both snapshots.
        table: all calls of the second snapshot.
    """
    if activity.kind is not Kind.WORKING:
        return activity
    if place(earlier) != place(activity.state):  # its Python code has gone on meanwhile
        return activity

    oldest_before = _oldest_nccl_calls(earlier)
    for key, call in _oldest_nccl_calls(activity.state).items():
        is_the_same = key in oldest_before and oldest_before[key].seq == call.seq
        if is_the_same and (table.missing_ranks(call) or table.is_mismatched(call)):
            return replace(activity, kind=Kind.WAITING, call=call)

    p2p_before = _oldest_nccl_p2p(earlier)
    for key, batch in _oldest_nccl_p2p(activity.state).items():
        is_the_same = key in p2p_before and p2p_before[key][0].seq == batch[0].seq
        for call in batch:
            sender = table.awaited_sender(activity.state.rank, call)
            if is_the_same and sender is not None:
                return replace(activity, kind=Kind.WAITING, call=call)

    return activity


def _oldest_nccl_calls(state: RankState) -> dict[str, CollectiveCall]:
    """Returns the oldest pending NCCL collective of each group, by key."""
    oldest: dict[str, CollectiveCall] = {}
    for call in state.pending_calls():
        if call.backend == "nccl" and not call.p2p and call.key not in oldest:
            oldest[call.key] = call
    return oldest


def _oldest_nccl_p2p(state: RankState) -> dict[str, list[CollectiveCall]]:
    """Returns the oldest pending batch of NCCL sends and receives of each group, by key."""
    pending: dict[str, list[CollectiveCall]] = defaultdict(list)
    for call in state.pending_calls():
        if call.backend == "nccl" and call.p2p:
            pending[call.key].append(call)
    return {key: first_batch(calls) for key, calls in pending.items()}


def recognize_possible_progress(
    activities: Mapping[int, Activity], table: CallTable
) -> dict[int, Activity]:
    """Returns the activities, with another kind for deadlocked ranks whose deadlock may yet end.

    There are two such cases.

    - `Kind.LIMITED`: the rank waits in a group to which the program has given a short timeout. The
      timeout may end the wait.
    - `Kind.MAY_COME`: others wait for a call of the rank, which another of its threads may make
      (one that uploads, saves or sends). The rank's stack is then that of this thread.
    """
    graph = WaitGraph(activities, table)

    # Calls that do not match cannot complete, so nobody can help those that wait in them.
    helpful_ranks = _ranks_whose_call_would_help(activities, graph, table)
    result = dict(activities)
    for rank in graph.deadlocked:
        activity = activities[rank]
        if activity.call is not None and table.has_short_timeout(activity.call):
            result[rank] = replace(activity, kind=Kind.LIMITED)
            continue

        if rank not in helpful_ranks:
            continue

        for thread_stack in activity.state.threads or ():
            if stacks.may_continue_alone(thread_stack):
                state = replace(activity.state, stack=thread_stack)
                result[rank] = Activity(state, Kind.MAY_COME)
                break

    return result


def _ranks_whose_call_would_help(
    activities: Mapping[int, Activity], graph: WaitGraph, table: CallTable
) -> set[int]:
    """Returns the ranks that could free a deadlocked rank by making a call that it waits for.

    Args:
        activities: what each rank does.
        graph: which rank waits for which.
        table: all calls.
    """
    helpful_ranks: set[int] = set()

    # Ranks that wait in a known call: whoever has not made that call may help.
    completable_calls: dict[tuple[str, int], CollectiveCall] = {}
    for rank in graph.deadlocked - graph.partners_unknown:
        for call in _completable_calls(activities[rank], table):
            completable_calls[call.key, call.seq] = call  # once, also if many ranks wait in it

    for call in completable_calls.values():
        helpful_ranks |= table.missing_ranks(call)

    return helpful_ranks | _assumed_partners(graph)


def _assumed_partners(graph: WaitGraph) -> set[int]:
    """Returns the ranks that deadlocked ranks with unknown partners are assumed to wait for.

    It is the union of `graph.waits_for[rank] - {rank}` over these ranks. But thousands of ranks may
    share one set, so each set is looked at once, with all the ranks that wait for it.
    """
    ranks_by_awaited_set: dict[frozenset[int], list[int]] = defaultdict(list)
    for rank in graph.deadlocked & graph.partners_unknown:
        ranks_by_awaited_set[graph.waits_for[rank]].append(rank)

    partners: set[int] = set()
    for awaited, waiting_ranks in ranks_by_awaited_set.items():
        if len(waiting_ranks) == 1:
            partners |= awaited - set(waiting_ranks)
        else:  # without the first rank, or without the second: together that is the whole set
            partners |= awaited

    return partners


def _completable_calls(activity: Activity, table: CallTable) -> list[CollectiveCall]:
    """Returns the calls a rank waits in that can still complete.

    A mismatched call cannot, and after it none of its group's later calls can.
    """
    calls = _calls_waited_in(activity)
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
