"""Comparing the collectives of the ranks: who waits for whom, and where the ranks parted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from lockstep.diagnose.activity import Activity, Kind, key, pending
from lockstep.diagnose.snapshot import Call, Snapshot, Stack
from lockstep.diagnose.stacks import is_busy, own_line

# Operations to which every rank brings the same number of elements. Of the others the sizes may
# differ by rank, or are not recorded on every rank.
_SAME_SIZE = {"all_reduce", "broadcast", "reduce", "_broadcast_oop", "_reduce_oop"}
_DEFAULT = "default_pg"


@dataclass(frozen=True)
class Parting:
    """The first collective of a group in which not all ranks called the same."""

    group: str
    """The group's description, else its name."""
    seq: int
    calls: tuple[tuple[int, Call | None], ...]
    """For each rank of the group its call; None: it has not come to this one."""
    lines_differ_since: int | None = None
    """The earliest of the matching calls just before it that came from different lines."""


Signature = tuple[str, int | None, tuple[str, ...]]


def signature(call: Call) -> Signature:
    """What must be equal on all ranks: the operation and, where it must, size and types."""
    if call.op not in _SAME_SIZE:
        return call.op, None, ()
    return call.op, sum(prod(size) for size in call.input_sizes), call.dtypes


class Table:
    """Every rank's collectives by group and number."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.calls: dict[str, dict[int, dict[int, Call]]] = {}
        """By group and number: rank to call."""
        self.last: dict[str, dict[int, int]] = {}
        """By group: rank to the number of its latest call."""
        self._first: dict[str, dict[int, int]] = {}
        self._unseen = {state.rank for state in snapshot.ranks if state.calls is None}
        self._members: dict[str, set[int]] = {}
        self._names: dict[str, str] = {}
        for state in snapshot.ranks:
            groups = {g.name: g for g in state.groups or ()}
            for call in state.calls or ():
                if call.p2p:
                    continue
                group = key(call)
                self.calls.setdefault(group, {}).setdefault(call.seq, {})[state.rank] = call
                self.last.setdefault(group, {})[state.rank] = call.seq
                self._first.setdefault(group, {}).setdefault(state.rank, call.seq)
                if call.group in groups:
                    self._members[group] = set(groups[call.group].ranks)
                    description = groups[call.group].description
                    unnamed = description in ("", "undefined")
                    self._names[group] = call.group if unnamed else description

    def members(self, group: str) -> set[int]:
        """The ranks of a group; where torch did not say, those that have used it."""
        return self._members.get(group) or set(self.last.get(group, ()))

    def name(self, group: str) -> str:
        """For people."""
        found = self._names.get(group, group.partition(":")[2])
        return "the default group" if found in (_DEFAULT, "0") else f"group {found!r}"

    def absent(self, call: Call) -> set[int]:
        """The members that have not come to a call."""
        last = self.last[key(call)]
        return {rank for rank in self.members(key(call)) if last.get(rank, 0) < call.seq}

    def contradicts(self, call: Call) -> bool:
        """Whether another rank called something else in its place."""
        others = self.calls[key(call)].get(call.seq, {}).values()
        return any(signature(other) != signature(call) for other in others)

    def known(self, group: str, seq: int, rank: int) -> bool:
        """False where a rank's recorder did not answer, or has already dropped the call."""
        if rank in self._unseen:
            return False
        first = self._first.get(group, {}).get(rank)
        return first is None or seq >= first


@dataclass(frozen=True)
class Waits:
    """Who waits for whom."""

    awaited: Mapping[int, frozenset[int]]
    """For each waiting rank those that have not come to what it waits in."""
    contradicting: frozenset[int]
    """Waiting ranks whose call some other rank answered with another one."""
    guessed: frozenset[int]
    """Waiting ranks whose partners are not known: all others are assumed."""
    doomed: frozenset[int]
    """Waiting ranks that wait, in the end, for each other alone, or in vain."""

    def __bool__(self) -> bool:
        return bool(self.awaited)


def with_other_threads(activities: Mapping[int, Activity], table: Table) -> dict[int, Activity]:
    """The same, where a rank whose main thread waits may yet do what it is waited for.

    Another of its threads does: one that saves a checkpoint and has a process group of its own for
    that. The rank then counts as what that thread is: at work.
    """
    doomed = _graph(activities, table, frozenset()).doomed
    calls = [call for rank in doomed for call in _open_calls(activities[rank])]
    found = dict(activities)
    for rank in doomed:
        missed = {key(call) for call in calls if rank in table.absent(call)}
        stack = _thread_for(activities[rank], missed)
        if stack is not None:
            state = replace(activities[rank].state, stack=stack)
            found[rank] = Activity(state, Kind.WORKING)
    return found


def _thread_for(activity: Activity, groups: set[str]) -> Stack | None:
    """The stack of a busy thread that may call one of the groups: it has, or no thread has yet."""
    state = activity.state
    for ident, stack in zip(state.thread_ids, state.threads or (), strict=True):
        for group in groups if is_busy(stack) else ():
            users = {c.thread for c in state.calls or () if key(c) == group and not c.p2p}
            if not users or ident in users:
                return stack
    return None


def who_waits(activities: Mapping[int, Activity], table: Table) -> Waits:
    """The graph of waiting."""
    waits = _graph(activities, table, frozenset())
    # A rank that is blocked in a line of its own after it called a collective may wait for that,
    # or do anything else. It is not said to be doomed unless its call is contradicted.
    own_line = {r for r, a in activities.items() if a.kind is Kind.PERHAPS_WAITING}
    doubtful = (waits.doomed & own_line) - waits.contradicting
    return _graph(activities, table, doubtful) if doubtful else waits


def _graph(activities: Mapping[int, Activity], table: Table, without: frozenset[int]) -> Waits:
    awaited: dict[int, frozenset[int]] = {}
    contradicting, guessed = set(), set()
    for rank, activity in activities.items():
        if rank in without or activity.kind not in (Kind.WAITING, Kind.PERHAPS_WAITING):
            continue
        calls = _open_calls(activity)
        contradicted = any(table.contradicts(call) for call in calls)
        if calls:
            absent = set().union(*(table.absent(call) for call in calls)) - {rank}
        else:
            absent = {r for r, a in activities.items() if activity.p2p or a.op != activity.op}
            absent.discard(rank)
            guessed.add(rank)
        if activity.kind is Kind.WAITING or absent or contradicted:
            awaited[rank] = frozenset(absent)
        if contradicted:
            contradicting.add(rank)
    doomed = _doomed(awaited, contradicting)
    return Waits(awaited, frozenset(contradicting), frozenset(guessed), doomed)


def _open_calls(activity: Activity) -> list[Call]:
    if activity.call is None or activity.p2p:
        return []
    calls = [call for call in pending(activity.state) if not call.p2p]
    return calls if activity.call in calls else [*calls, activity.call]


def _doomed(awaited: Mapping[int, frozenset[int]], contradicting: set[int]) -> frozenset[int]:
    left = set(awaited)
    while True:
        free = {r for r in left if r not in contradicting and not awaited[r] & left}
        if not free:
            return frozenset(left)
        left -= free


def find_parting(table: Table, ranks: frozenset[int]) -> Parting | None:
    """The first collective in which the ranks did not all call the same.

    Args:
        table: all calls.
        ranks: those that wait for each other.
    """
    found = [
        parting
        for group in table.calls
        if len(table.members(group) & ranks) > 0
        and (parting := _parting_of(table, group)) is not None
    ]
    return min(found, key=_time, default=None)


def _time(parting: Parting) -> float:
    return min(call.time_s for _, call in parting.calls if call is not None)


def _parting_of(table: Table, group: str) -> Parting | None:
    members = sorted(table.members(group))
    for seq, calls in sorted(table.calls[group].items()):
        complete = all(table.known(group, seq, rank) for rank in members)
        missing = any(rank not in calls for rank in members)
        if len({signature(call) for call in calls.values()}) > 1 or (complete and missing):
            named = tuple((rank, calls.get(rank)) for rank in members)
            return Parting(table.name(group), seq, named, _lines_differ(table, group, seq))
    return None


def _lines_differ(table: Table, group: str, seq: int) -> int | None:
    since = None
    while calls := table.calls[group].get(seq - 1):
        lines = {own_line(call.frames) for call in calls.values()}
        if None in lines or len(lines) == 1:
            break
        since = seq = seq - 1
    return since
