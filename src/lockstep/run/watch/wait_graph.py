"""What each rank does, from two snapshots; who waits for whom, and the first call that differs.

Pure: `RankState` values go in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from math import prod

from lockstep.run.watch import stacks
from lockstep.run.watch.snapshot import CollectiveCall, NewGroup, RankState, Snapshot

_IDLE = 0.1
"""Share of the time between two snapshots below which a thread counts as not computing. Answering
a request takes up to 60 ms, of another thread."""

_NCCL_TIMEOUT_S, _TIMEOUT_S = 600.0, 1800.0
"""Of a torch group that was given none, and with other backends."""

_POINT_TO_POINT = {
    "recv", "irecv", "send", "isend", "batch_isend_irecv", "recv_object_list", "send_object_list",
    "_wait_batch_p2p",
}  # fmt: skip
_NOT_RECORDED = _POINT_TO_POINT | {
    "monitored_barrier", "init_process_group", "new_group", "split_group", "new_subgroups",
    "new_subgroups_by_enumeration", "destroy_process_group", "exchange",
}  # fmt: skip
"""Functions that wait for other ranks and that Gloo's Flight Recorder does not record; `exchange`
is ours."""


class Kind(Enum):
    """What a rank does, in the words of a verdict."""

    EXITED = "has ended"
    STOPPED = "is stopped by a signal or a debugger"
    MOVING = "moves on"
    WAITING = "waits for other ranks"
    PERHAPS_WAITING = "is blocked in its main thread, after it called a collective"
    LOADING = "waits for data"
    WORKING = "works on"
    LIMITED = "waits for other ranks, until the timeout of a group that has one of its own"
    MAY_COME = "may yet come in another thread"
    CHILDREN = "is blocked while threads or processes that it has started compute"
    BLOCKED = "is blocked outside any collective, without computing"
    SILENT = "is in C code that holds Python's lock"
    UNKNOWN = "cannot be seen"


@dataclass(frozen=True)
class Activity:
    """What one rank does, by two snapshots."""

    state: RankState
    """In the later snapshot."""
    kind: Kind
    wait: stacks.Wait = field(default_factory=stacks.Wait)
    """What its stack says of it; without words where it does not wait, or that cannot be seen."""
    call: CollectiveCall | None = None
    """The collective it waits in, where the Flight Recorder knows it."""

    @property
    def line(self) -> stacks.Frame | None:
        """The user's own line that it is at; at its end that of a thread it waits for."""
        threads = self.state.threads if stacks.is_leaving(self.state.stack) else None
        return stacks.own_line(next(iter(threads or ()), self.state.stack))

    @property
    def op(self) -> str:
        """The function of torch.distributed that it waits in, as the user knows it."""
        return self.wait.op or ("" if self.call is None else self.call.op)

    @property
    def making(self) -> NewGroup | None:
        """The process group that it waits to make, where that is known."""
        return self.state.making if self.kind is Kind.WAITING and self.call is None else None

    @property
    def p2p(self) -> bool:
        """It waits for one other rank, and which one is not known."""
        if self.call is not None:
            return self.call.p2p
        in_pipeline = any("pipelining" in frame.file for frame in (self.state.stack or ())[:1])
        return self.wait.op in _POINT_TO_POINT or in_pipeline


def pending(state: RankState) -> list[CollectiveCall]:
    """The collectives that have not been completed as far as is known, oldest first.

    Gloo says of a group which call was completed last, and may say an earlier one than is true.
    """
    completed = state.completed or {}
    return [
        call
        for call in state.calls or ()
        if call.state != "completed" and (call.p2p or call.seq > completed.get(call.key, 0))
    ]


def classify(earlier: RankState, later: RankState, seconds: float) -> Activity:
    """Judges what a rank does.

    Args:
        earlier: the rank in the first snapshot.
        later: the second.
        seconds: between them.
    """
    if not later.alive:
        ended = later.code is not None and not earlier.alive
        return Activity(later, Kind.EXITED if ended else Kind.MOVING)
    if later.stopped and earlier.stopped:
        return Activity(later, Kind.STOPPED)
    if later.stopped or earlier.stopped or _moved(earlier, later):
        return Activity(later, Kind.MOVING)
    if later.stack is None or earlier.stack is None:
        return Activity(later, Kind.UNKNOWN)
    kind, wait = _by_stack(earlier, later, seconds)
    return Activity(later, kind, wait or stacks.Wait(), _current(later, wait, kind))


def on_its_gpu(earlier: RankState, activity: Activity, table: CallTable) -> Activity:
    """A rank that seems to work, but in truth waits for what its GPU waits for.

    NCCL's recorder knows which calls a GPU has started only where torch takes their times, at the
    cost of overlap. But a GPU takes the calls of a group in order, and gets past the oldest one
    when all ranks have come to it: where that was the oldest in both snapshots, it is waited for.

    Args:
        earlier: the rank in the first snapshot.
        activity: by both snapshots.
        table: all calls.
    """
    if activity.kind is not Kind.WORKING or _place(earlier) != _place(activity.state):
        return activity
    before = _oldest_on_gpu(earlier)
    for key, call in _oldest_on_gpu(activity.state).items():
        is_old = key in before and before[key].seq == call.seq
        if is_old and (table.absent(call) or table.contradicts(call)):
            return replace(activity, kind=Kind.WAITING, call=call)
    return activity


def _oldest_on_gpu(state: RankState) -> dict[str, CollectiveCall]:
    """Of each group that communicates by NCCL the oldest call that is not completed."""
    found: dict[str, CollectiveCall] = {}
    for call in pending(state):
        if call.backend == "nccl" and not call.p2p:
            found.setdefault(call.key, call)
    return found


def _moved(earlier: RankState, later: RankState) -> bool:
    if None not in (earlier.steps, later.steps) and earlier.steps != later.steps:
        return True
    if earlier.calls is None or later.calls is None:
        return False
    before, after = (
        {(call.key, call.p2p): (call.seq, call.state) for call in calls}
        for calls in (earlier.calls, later.calls)
    )
    return before != after


def _by_stack(
    earlier: RankState, later: RankState, seconds: float
) -> tuple[Kind, stacks.Wait | None]:
    wait = stacks.waits_in(later.stack)
    same = _place(earlier) == _place(later)
    idle = _is_idle(earlier, later, seconds)
    calls = pending(later)
    waits = wait is not None and (wait.sure or (idle and bool(calls or later.calls is None)))
    if same and (waits or any(call.state == "started" for call in calls)):
        return Kind.WAITING, wait
    # A kernel that waits in a queue behind it, or does not end, keeps the device busy.
    queued = any(call.backend == "nccl" for call in calls)
    if earlier.answered is False and later.answered is False:
        return Kind.SILENT, None
    if not idle or not same or queued:
        return Kind.WORKING, None
    if stacks.is_loading(later.stack):
        return Kind.LOADING, None
    if calls:
        return Kind.PERHAPS_WAITING, None
    return (Kind.CHILDREN if _children_compute(earlier, later, seconds) else Kind.BLOCKED), None


def _children_compute(earlier: RankState, later: RankState, seconds: float) -> bool:
    """Whether its other threads or processes that it has started compute, as far as is known."""
    for before, after in (
        (earlier.cpu_s, later.cpu_s),
        (earlier.children_cpu_s, later.children_cpu_s),
    ):
        known = before is not None and after is not None
        if known and not _is_little(before, after, seconds):
            return True
    return False


def _place(state: RankState) -> tuple[stacks.Frame, ...]:
    """The stack down to the user's own line."""
    line = stacks.own_line(state.stack)
    stack = state.stack or ()
    return stack if line is None else stack[: stack.index(line) + 1]


def _is_idle(earlier: RankState, later: RankState, seconds: float) -> bool:
    """Whether its main thread has not computed; False where that is not known.

    On a busy machine one that can run may get little of the processor's time.
    """
    if "R" in (earlier.state, later.state):
        return False
    if None in (earlier.main_cpu_s, later.main_cpu_s):
        return _is_little(earlier.cpu_s, later.cpu_s, seconds)
    return _is_little(earlier.main_cpu_s, later.main_cpu_s, seconds)


def is_still(earlier: RankState, later: RankState, seconds: float) -> bool:
    """Whether nothing of it computes or copies, nor may go on by itself, as far as can be seen."""
    idle = _is_little(earlier.cpu_s, later.cpu_s, seconds)
    return idle and not any(map(stacks.may_go_on, later.threads or ()))


def _is_little(before: float | None, after: float | None, seconds: float) -> bool:
    """Processor time; False where it is not known."""
    if before is None or after is None or seconds <= 0:
        return False
    return (after - before) / seconds < _IDLE


def _current(state: RankState, wait: stacks.Wait | None, kind: Kind) -> CollectiveCall | None:
    if kind not in (Kind.WAITING, Kind.PERHAPS_WAITING) or not state.calls:
        return None
    outside = wait is not None and wait.op in _NOT_RECORDED
    candidates: Iterable[CollectiveCall] = pending(state)
    if wait is not None and wait.sure and wait.op and not outside:
        # Gloo says too early a completed call, never too late a one.
        own = [call for call in state.calls if call.thread == state.main_thread]
        candidates = own or state.calls
    last = None
    for call in candidates:
        if call.state == "started":
            return call
        if not outside or call.p2p:
            last = call
    return last


# Operations to which every rank brings the same number of elements. Of the others the sizes may
# differ by rank, or are not recorded on every rank.
_SAME_SIZE = {"all_reduce", "broadcast", "reduce", "_broadcast_oop", "_reduce_oop"}


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a group in which not all ranks called the same."""

    group: str
    """The group's description, else its name."""
    seq: int
    calls: tuple[tuple[int, CollectiveCall | None], ...]
    """For each rank of the group its call; None: it has not come to this one."""
    lines_differ_since: int | None = None
    """The earliest of the matching calls just before it that came from different lines."""


def signature(call: CollectiveCall) -> tuple[str, int | None, tuple[str, ...]]:
    """What must be equal on all ranks: the operation and, where it must, size and types."""
    if call.op not in _SAME_SIZE:
        return call.op, None, ()
    return call.op, sum(prod(size) for size in call.input_sizes), call.dtypes


class CallTable:
    """Every rank's collectives by group and number."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.calls: dict[str, dict[int, dict[int, CollectiveCall]]] = {}
        """By group and number: rank to call."""
        self._numbers: dict[tuple[str, int], list[int]] = {}
        """By group and rank the numbers of its known calls, the oldest first."""
        self._absent: dict[tuple[str, int], set[int]] = {}
        self._groups = {group.name: group for s in snapshot.ranks for group in s.groups or ()}
        self._timeouts: dict[str, float] = {}
        """By backend the longest timeout of its groups, in s."""
        self._unseen = {state.rank for state in snapshot.ranks if state.calls is None}
        for state in snapshot.ranks:
            for call in state.calls or ():
                longest = max(self._timeouts.get(call.backend, 0.0), call.timeout_s or 0.0)
                self._timeouts[call.backend] = longest
                if not call.p2p:
                    by_rank = self.calls.setdefault(call.key, {}).setdefault(call.seq, {})
                    by_rank[state.rank] = call
                    self._numbers.setdefault((call.key, state.rank), []).append(call.seq)

    def members(self, key: str) -> set[int]:
        """The ranks of a group; where torch did not say, those that have used it."""
        group = self._groups.get(key.partition(":")[2])
        if group and group.ranks:
            return set(group.ranks)
        return {rank for known, rank in self._numbers if known == key}

    def name(self, key: str) -> str:
        """For people."""
        name = key.partition(":")[2]
        if name in self._groups and self._groups[name].description not in ("", "undefined"):
            name = self._groups[name].description
        return "the default group" if name in ("default_pg", "0") else f"group {name!r}"

    def absent(self, call: CollectiveCall) -> set[int]:
        """The members that have not come to a call; found once, as it is asked for every rank."""
        key, seq = call.key, call.seq
        if (key, seq) not in self._absent:
            last = {r: self._numbers.get((key, r), [0])[-1] for r in self.members(key)}
            self._absent[key, seq] = {r for r, number in last.items() if number < seq}
        return self._absent[key, seq]

    def contradicts(self, call: CollectiveCall) -> bool:
        """Whether another rank called something else in its place."""
        return (call.key, call.seq) in self.contradicted

    @cached_property
    def contradicted(self) -> set[tuple[str, int]]:
        """Group and number of the calls in which not all ranks called the same.

        Found once: thousands may be open on a GPU, and each is asked for by every rank.
        """
        return {
            (group, seq)
            for group, numbered in self.calls.items()
            for seq, calls in numbered.items()
            if len(set(map(signature, calls.values()))) > 1
        }

    def is_limited(self, call: CollectiveCall) -> bool:
        """Whether its group has a shorter timeout than others, and than torch's default."""
        default = _NCCL_TIMEOUT_S if call.backend == "nccl" else _TIMEOUT_S
        limit = min(default, self._timeouts[call.backend])
        return call.timeout_s is not None and call.timeout_s < limit

    def known(self, key: str, seq: int, rank: int) -> bool:
        """False where a rank's recorder did not answer, or has already dropped the call."""
        return rank not in self._unseen and seq >= self._numbers.get((key, rank), [0])[0]


class WaitGraph:
    """Who waits for whom.

    Args:
        activities: what each rank does.
        table: all calls.
        without: ranks of which it is not said that they wait.
    """

    def __init__(
        self, activities: Mapping[int, Activity], table: CallTable, without: Collection[int] = ()
    ) -> None:
        self.waits_for: dict[int, frozenset[int]] = {}
        """For each waiting rank those that have not come to what it waits in. Ranks that wait for
        the same have one set: no rank waits for itself, also where it is in its own."""
        self.contradicting: set[int] = set()
        """Waiting ranks whose call some other rank answered with another one."""
        self.guessed: set[int] = set()
        """Waiting ranks whose partners are not known: all others are assumed."""
        known: dict[object, frozenset[int]] = {}
        for rank, activity in activities.items():
            if rank in without or activity.kind not in (Kind.WAITING, Kind.PERHAPS_WAITING):
                continue
            calls = _open_calls(activity)
            if not calls:
                self.guessed.add(rank)
            numbers = tuple((call.key, call.seq) for call in calls)
            what = numbers or activity.p2p or activity.making or activity.op
            if what not in known:
                found = frozenset(_awaited(activity, activities, table))
                known[what] = known.setdefault(found, found)  # equal sets are one
            absent = known[what]
            contradicted = any(map(table.contradicts, calls))
            if contradicted:
                self.contradicting.add(rank)
            if activity.kind is Kind.WAITING or _others(absent, rank) or contradicted:
                self.waits_for[rank] = absent
        self.awaited = set[int]().union(*{*self.waits_for.values()})
        """The ranks that some rank waits for."""
        self.deadlocked = left = set(self.waits_for)
        """Waiting ranks that wait, in the end, for each other alone, or in vain."""
        while free := self._free(left):
            left -= free

    def _free(self, left: set[int]) -> set[int]:
        """Those of some ranks that wait for none of these."""
        among = {absent: absent & left for absent in {*self.waits_for.values()}}
        waiting = left - self.contradicting
        return {rank for rank in waiting if not _others(among[self.waits_for[rank]], rank)}


def with_other_threads(activities: Mapping[int, Activity], table: CallTable) -> dict[int, Activity]:
    """The same, where a rank whose main thread waits may yet do what it is waited for.

    Another of its threads can: one that uploads, saves a checkpoint, or sends. The rank then counts
    as what that thread is. But where ranks have called what does not match, no thread can help.
    And the program may expect that a call fails, in a group that it has given a shorter timeout.
    """
    graph = WaitGraph(activities, table)
    may_be_awaited = _may_be_awaited(activities, graph, table)
    found = dict(activities)
    for rank in graph.deadlocked:
        state = activities[rank].state
        if (call := activities[rank].call) is not None and table.is_limited(call):
            found[rank] = replace(activities[rank], kind=Kind.LIMITED)
            continue
        stack = next(filter(stacks.may_go_on, state.threads or ()), None)
        if stack is not None and rank in may_be_awaited:
            found[rank] = Activity(replace(state, stack=stack), Kind.MAY_COME)
    return found


def _may_be_awaited(
    activities: Mapping[int, Activity], graph: WaitGraph, table: CallTable
) -> set[int]:
    """The ranks of which another may wait for what they have not called, and can still call."""
    guesses: dict[frozenset[int], list[int]] = {}
    awaited: dict[tuple[str, int], CollectiveCall] = {}
    for rank in graph.deadlocked:
        if rank in graph.guessed:
            guesses.setdefault(graph.waits_for[rank], []).append(rank)
            continue
        calls = _open_calls(activities[rank])
        spoiled = {call.key: call.seq for call in reversed(calls) if table.contradicts(call)}
        awaited |= {(c.key, c.seq): c for c in calls if c.seq < spoiled.get(c.key, c.seq + 1)}
    found = set[int]().union(*map(table.absent, awaited.values()))
    for absent, ranks in guesses.items():  # no rank waits for itself
        found |= absent if len(ranks) > 1 else absent - {*ranks}
    return found


def _awaited(activity: Activity, activities: Mapping[int, Activity], table: CallTable) -> set[int]:
    """Whom a waiting rank waits for; where its calls do not tell, all that do something else."""
    if calls := _open_calls(activity):
        return set[int]().union(*map(table.absent, calls))
    if activity.p2p:
        return set(activities)
    group = activity.making
    found = {rank for rank, other in activities.items() if not _come_together(activity, other)}
    return found & set(group.ranks) if group is not None and group.members_only else found


def _come_together(one: Activity, other: Activity) -> bool:
    """Whether two ranks are in the same function, and if they make a group there, in the same."""
    if one.making is None or other.making is None:
        return one.op == other.op
    return one.making.is_same(other.making)


def _others(ranks: Collection[int], rank: int) -> int:
    """How many there are besides one."""
    return len(ranks) - (rank in ranks)


def build_wait_graph(activities: Mapping[int, Activity], table: CallTable) -> WaitGraph:
    """The graph of waiting."""
    graph = WaitGraph(activities, table)
    # A rank that is blocked in a line of its own after it called a collective may wait for that,
    # or do anything else. It is not said to be deadlocked unless its call is contradicted.
    blocked = {r for r, a in activities.items() if a.kind is Kind.PERHAPS_WAITING}
    doubtful = (graph.deadlocked & blocked) - graph.contradicting
    return WaitGraph(activities, table, doubtful) if doubtful else graph


def _open_calls(activity: Activity) -> list[CollectiveCall]:
    if activity.call is None or activity.p2p:
        return []
    calls = [call for call in pending(activity.state) if not call.p2p]
    return calls if activity.call in calls else [*calls, activity.call]


def find_mismatch(table: CallTable, ranks: set[int]) -> Mismatch | None:
    """The first collective in which the ranks did not all call the same.

    Args:
        table: all calls.
        ranks: those that wait for each other.
    """

    def time_s(mismatch: Mismatch) -> float:
        return min(call.time_s for _, call in mismatch.calls if call is not None)

    groups = [group for group in table.calls if table.members(group) & ranks]
    found = [_mismatch_of(table, group) for group in groups]
    return min(filter(None, found), key=time_s, default=None)


def _mismatch_of(table: CallTable, group: str) -> Mismatch | None:
    members = sorted(table.members(group))
    for seq, calls in sorted(table.calls[group].items()):
        complete = all(table.known(group, seq, rank) for rank in members)
        missing = any(rank not in calls for rank in members)
        if (group, seq) in table.contradicted or (complete and missing):
            named = tuple((rank, calls.get(rank)) for rank in members)
            return Mismatch(table.name(group), seq, named, _lines_differ(table, group, seq))
    return None


def _lines_differ(table: CallTable, group: str, seq: int) -> int | None:
    since = None
    while calls := table.calls[group].get(seq - 1):
        lines = {stacks.own_line(call.frames) for call in calls.values()}
        if None in lines or len(lines) == 1:
            break
        since = seq = seq - 1
    return since
