"""The verdict on ranks that wait: a deadlock, or patience; and what to do about it.

Pure: two snapshots go in, one verdict comes out; for a straggler one snapshot is enough. Each
function of `VERDICTS` knows one case; to add one is to add a function, its line in `VERDICTS`, and
its name in `messages.VerdictKind`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from lockstep.run.watch.messages import Row, Verdict, VerdictKind, describe, verb
from lockstep.run.watch.snapshot import CollectiveCall, Snapshot, with_groups_apart
from lockstep.run.watch.stacks import IN_BUFFERS, IN_PIPELINE, is_leaving, own_line
from lockstep.run.watch.wait_graph import (
    Activity,
    CallTable,
    Kind,
    Mismatch,
    WaitGraph,
    build_wait_graph,
    classify,
    find_mismatch,
    is_still,
    on_its_gpu,
    pending,
    signature,
    with_other_threads,
)
from lockstep.wording import format_ranks, group_by_key

_PAIRS_S = 10.0
"""For which ranks that send and receive must be still: only then are they said to be deadlocked."""


def find(earlier: Snapshot, later: Snapshot, waited_s: float) -> Verdict | None:
    """What keeps a run from moving.

    Args:
        earlier: the first snapshot of all ranks.
        later: the second, 1 to 3 s after it.
        waited_s: how long nothing has moved, in s.

    Returns:
        None where something moves, or nobody waits.
    """
    seconds = later.time - earlier.time
    # All of what is compared below is compared by the names of groups.
    earlier = with_groups_apart(earlier)
    later = with_groups_apart(later)
    before = {state.rank: state for state in earlier.ranks}
    both = [(before[state.rank], state) for state in later.ranks if state.rank in before]
    activities = {state.rank: classify(first, state, seconds) for first, state in both}
    if any(activity.kind is Kind.MOVING for activity in activities.values()):
        return None
    table = CallTable(later)
    activities = {rank: on_its_gpu(before[rank], a, table) for rank, a in activities.items()}
    activities = with_other_threads(activities, table)
    graph = build_wait_graph(activities, table)
    alive = [a.state for a in activities.values() if a.kind is not Kind.EXITED]
    still = all(is_still(before[state.rank], state, seconds) for state in alive)
    # Bytes on their way between two machines leave no trace in either.
    still = still and waited_s >= _PAIRS_S and later.one_host
    ages = {
        rank: max(0.0, later.time - call.time_s)
        for rank in graph.waits_for
        if later.one_host and (call := activities[rank].call) is not None
    }
    waited_s = max([waited_s, *ages.values()])
    case = Case(activities, table, graph, ages, waited_s, still)
    return next((v for verdict in VERDICTS if (v := verdict(case)) is not None), None)


@dataclass(frozen=True)
class Case:
    """What a verdict is made from: what each rank does, and who waits for whom."""

    activities: Mapping[int, Activity]
    table: CallTable
    graph: WaitGraph
    ages: Mapping[int, float]
    """For a waiting rank the seconds since it called what it waits in."""
    waited_s: float
    still: bool
    """Nothing is under way between any two ranks, so that those that send and receive do it in
    vain."""

    @property
    def since_call(self) -> float:
        """Seconds since the last of the waiting ranks called: that was a move too."""
        return min(self.ages.values(), default=self.waited_s)

    @property
    def waiting(self) -> dict[int, Activity]:
        """The ranks that wait for others."""
        return {rank: self.activities[rank] for rank in self.graph.waits_for}

    @property
    def alive(self) -> dict[int, Activity]:
        """The ranks that have not ended."""
        return {r: a for r, a in self.activities.items() if a.kind is not Kind.EXITED}

    @property
    def roots(self) -> dict[int, Activity]:
        """Those that wait for none and that others wait for; else all that wait for none."""
        free = {r: a for r, a in self.activities.items() if r not in self.graph.waits_for}
        return {r: a for r, a in free.items() if r in self.graph.awaited} or free

    def verdict(
        self,
        kind: VerdictKind,
        ranks: Iterable[int],
        headline: str,
        advice: tuple[str, ...] | None = None,
        *,
        fatal: bool = False,
        mismatch: Mismatch | None = None,
    ) -> Verdict:
        """A verdict with what each rank does; `advice`: by default that for its kind."""
        if advice is None:
            advice = (_ADVICE[kind],) if kind in _ADVICE else ()
        calls = {} if mismatch is None else dict(mismatch.calls)
        rows = tuple(self._row(a, calls.get(rank)) for rank, a in self.activities.items())
        at_fault = tuple(sorted(ranks))
        return Verdict(kind, fatal, at_fault, headline, rows, mismatch, advice, self.waited_s)

    def _row(self, activity: Activity, mismatched: CollectiveCall | None) -> Row:
        state = activity.state
        does = _does(activity)
        if state.rank in self.graph.waits_for:
            is_open = mismatched is not None and _is_open(mismatched, activity)
            call = mismatched if is_open else activity.call
            does = f"waits in {_named(call, activity.op)}"
            if call is not None and (name := self.table.name(call.key)).startswith("group"):
                does += f" of {name}"
            if activity.making is not None:
                does += f" for {activity.making.describe()}"
            if activity.wait.where:
                does += f", {activity.wait.where}"
        if state.steps:
            does += f" (step {state.steps})"
        return Row(state.rank, state.host, does, activity.line, self.ages.get(state.rank))

    def awaited(self, what: str, ranks: Collection[int]) -> str:
        """`rank 1 works on; ranks 0, 2 have waited for it for 5 s`."""
        waiting = self.graph.waits_for
        if not waiting:
            return f"{format_ranks(ranks)} {verb(what, len(ranks))}, for {self.waited_s:.0f} s"
        have = f"{format_ranks(waiting)} {verb('has', len(waiting))}"
        it = "it" if len(ranks) == 1 else "them"
        return (
            f"{format_ranks(ranks)} {verb(what, len(ranks))}; {have} waited for {it} for "
            f"{self.waited_s:.0f} s"
        )


def _nothing_seen(case: Case) -> Verdict | None:
    """All of several ranks have been asked, and none has given an answer or a stack."""
    alive = case.alive
    # Of a program that is not Python nothing can be expected: it has never told of its steps.
    unseen = all(
        a.kind is Kind.UNKNOWN and not a.state.answered and a.state.steps is not None
        for a in alive.values()
    )
    if case.waiting or len(alive) < 2 or not unseen:
        return None
    headline = (
        f"nothing can be seen of {format_ranks(sorted(alive))}, and no step has been made for "
        f"{case.waited_s:.0f} s"
    )
    return case.verdict("unknown", alive, headline)


def _all_blocked(case: Case) -> Verdict | None:
    """All of several ranks blocked at once is worth a word; where one computes, none is."""
    alive = case.alive
    ended = case.activities.keys() - alive.keys()
    kinds = {activity.kind for activity in alive.values()}
    blocked = {Kind.BLOCKED, Kind.PERHAPS_WAITING, Kind.LOADING, Kind.STOPPED}
    if ended:
        # At a script's end a thread of torch's may want the lock that the interpreter waits with.
        blocked.add(Kind.SILENT)
    if case.waiting or len(case.activities) < 2 or not kinds <= blocked:
        return None
    seconds = f"{case.waited_s:.0f} s"
    kind: VerdictKind = "blocked"
    if ended:
        headline = (
            f"{format_ranks(ended)} {verb('has', len(ended))} ended; {format_ranks(alive)} "
            f"{verb('has', len(alive))} not, and no step or call has been seen for {seconds}"
        )
    elif kinds == {Kind.LOADING}:
        kind, headline = "loading", f"all ranks wait for data, for {seconds}"
    else:
        headline = (
            "no rank computes in its main thread, and none waits for another in a collective, for "
            f"{seconds}"
        )
    return case.verdict(kind, alive, headline)


def _gone(case: Case) -> Verdict | None:
    """The others wait for a rank that was stopped, has ended or has died."""
    gone = {
        rank: a
        for rank, a in case.roots.items()
        if a.kind in (Kind.STOPPED, Kind.EXITED) and rank in case.graph.awaited
    }
    if not gone:
        return None
    waiting, guessed = case.waiting, case.graph.guessed
    known = [a for rank, a in case.graph.waits_for.items() if rank not in guessed]
    # Where it is not known whom a rank waits for, it may be one of those that go on.
    others = case.activities.keys() - waiting.keys() - gone.keys()
    # Taking a group down takes its time, and waits for nobody who has gone.
    leaving = all(a.op == "destroy_process_group" and r in guessed for r, a in waiting.items())
    ended = {rank: a.state for rank, a in gone.items() if a.kind is Kind.EXITED}
    if not ended:  # it may be continued; if it is not, the others' timeouts end the run
        return case.verdict("stopped", gone, case.awaited(Kind.STOPPED.value, gone))
    fatal = bool(set[int]().union(*known) & ended.keys()) or not (others or leaving)
    kind: VerdictKind = "left" if all(state.code == 0 for state in ended.values()) else "lost"
    what = "has ended without an error" if kind == "left" else "has died"
    return case.verdict(kind, ended, case.awaited(what, ended), fatal=fatal)


def _deadlock(case: Case) -> Verdict | None:
    """Ranks wait for each other, in collectives that can never match."""
    waiting = {rank: case.activities[rank] for rank in sorted(case.graph.deadlocked)}
    mismatch = _with_lines(find_mismatch(case.table, case.graph.deadlocked), waiting)
    pairs = any(a.p2p for a in waiting.values())
    differ = mismatch is not None or _make_different_groups(waiting)
    differ = differ or len({a.op for a in waiting.values()}) > 1
    # Of a send or receive it is not known what it waits for, and a transfer may be under way.
    seen = case.still or case.graph.contradicting & waiting.keys() if pairs else differ
    if not waiting or not seen:
        return None
    # Of a GPU's work the processor's time says nothing.
    on_gpu = any(a.call is not None and a.call.backend == "nccl" for a in waiting.values())
    proven = not pairs or (case.still and not on_gpu)
    headline = (
        f"deadlock: {format_ranks(waiting)} {verb('waits', len(waiting))} in "
        f"{_how(waiting, mismatch)}, and nothing has moved for {case.since_call:.0f} s"
    )
    return case.verdict(
        "deadlock",
        _odd_ones(waiting, mismatch),
        headline,
        _for_pairs(waiting) if pairs else _for_deadlock(waiting, mismatch),
        fatal=proven and all(rank in case.graph.waits_for for rank in case.alive),
        mismatch=mismatch,
    )


def _with_lines(mismatch: Mismatch | None, waiting: Mapping[int, Activity]) -> Mismatch | None:
    """A call that a rank waits in has the line the rank is at, where its own was not obtained."""
    if mismatch is None:
        return None
    calls = dict(mismatch.calls)
    for rank in calls.keys() & waiting.keys():
        call, activity = calls[rank], waiting[rank]
        if call is not None and call.frames is None and _is_open(call, activity):
            calls[rank] = replace(call, frames=activity.state.stack)
    return replace(mismatch, calls=tuple(calls.items()))


def _is_open(call: CollectiveCall, activity: Activity) -> bool:
    """Among what a rank may wait in, by its number: the call may carry lines of a later one."""
    numbers = {(c.key, c.seq) for c in (*pending(activity.state), activity.call) if c}
    return (call.key, call.seq) in numbers


def _how(waiting: Mapping[int, Activity], mismatch: Mismatch | None) -> str:
    if any(activity.p2p for activity in waiting.values()):
        return f"{_ops(waiting)}, for each other"
    if _make_different_groups(waiting):
        return f"{_ops(waiting)}, for process groups that differ"
    ops = {call.op for call in _calls(mismatch)}
    if _sizes_differ(mismatch):
        return f"{next(iter(ops))} with different sizes or types"
    if len({activity.op for activity in waiting.values()}) > 1 or len(ops) > 1:
        return "collectives that do not match"
    return "collectives that the others never come to"


def _make_different_groups(waiting: Mapping[int, Activity]) -> bool:
    """All wait to make a process group, and not the same one."""
    groups = [activity.making for activity in waiting.values()]
    known = [group for group in groups if group is not None]
    return len(known) == len(groups) > 0 and not all(map(known[0].is_same, known))


def _sizes_differ(mismatch: Mismatch | None) -> bool:
    """All called the same operation, and not in the same way."""
    calls = _calls(mismatch)
    return len({call.op for call in calls}) == 1 < len({signature(call) for call in calls})


def _calls(mismatch: Mismatch | None) -> list[CollectiveCall]:
    return [] if mismatch is None else [call for _, call in mismatch.calls if call is not None]


def _odd_ones(waiting: Mapping[int, Activity], mismatch: Mismatch | None) -> Iterable[int]:
    """Those that did what the others did not: the fewer at the first mismatch."""
    calls = () if mismatch is None else mismatch.calls
    sides = group_by_key((call and signature(call), rank) for rank, call in calls)
    most = max(sides.values(), key=len, default=[])
    if sum(len(side) == len(most) for side in sides.values()) == 1:
        return [rank for side in sides.values() if side is not most for rank in side]
    lone = [rank for rank, activity in waiting.items() if activity.wait.where == IN_BUFFERS]
    return lone if 0 < len(lone) < len(waiting) else [rank for rank, _ in calls] or waiting


def _patience(case: Case) -> Verdict | None:
    """The others wait for a rank that still does something, or cannot be seen."""
    verdicts: dict[Kind, VerdictKind] = {
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
    for kind, verdict in verdicts.items():
        found = sorted(rank for rank, a in case.roots.items() if a.kind is kind)
        if found and (case.waiting or kind in (Kind.MAY_COME, Kind.LIMITED)):
            return case.verdict(verdict, found, case.awaited(kind.value, found))
    return None


def _transport(case: Case) -> Verdict | None:
    """All wait in what matches, so what should move the data does not."""
    waiting = case.waiting
    if not waiting:
        return None
    pairs = any(a.p2p for a in waiting.values())
    match = "for each other" if pairs else "which match on all"
    moved = f"nothing has moved for {case.since_call:.0f} s"
    advice = _for_pairs(waiting) if pairs else None
    if not pairs and any("init_process_group" in a.op for a in waiting.values()):
        advice = ("look whether all ranks were given the same address, port and number of ranks",)
    headline = f"all ranks wait in {_ops(waiting)}, {match}; {moved}"
    return case.verdict("transport", waiting, headline, advice)


VERDICTS: tuple[Callable[[Case], Verdict | None], ...] = (
    _nothing_seen,
    _all_blocked,
    _gone,
    _deadlock,
    _patience,
    _transport,
)
"""The first that has something to say is right."""


def _ops(waiting: Mapping[int, Activity]) -> str:
    return " and ".join(sorted({activity.op or "a collective" for activity in waiting.values()}))


def _named(call: CollectiveCall | None, op: str) -> str:
    if call is None:
        return op or "a collective"
    if op in ("", call.op):
        return describe(call)
    return f"{op} ({describe(call)})"


def _does(activity: Activity) -> str:
    state = activity.state
    if activity.kind is Kind.EXITED:
        if state.code is not None and state.code < 0:
            return f"was ended by signal {-state.code}"
        return f"has ended with exit code {state.code}"
    if activity.kind is Kind.BLOCKED and state.state == "D":
        return "is blocked in the kernel, on a disk or a network file system"
    if activity.kind is Kind.LIMITED and activity.call is not None:
        return (
            f"waits in {_named(activity.call, activity.op)}, of a group with a timeout of its own"
        )
    if is_leaving(state.stack):
        return "has come to its end, and waits for a thread of its own"
    return str(activity.kind.value)


_ADVICE: dict[VerdictKind, str] = {
    "stopped": "find out who has stopped it: a scheduler, a debugger, Ctrl-Z, or `kill -STOP`; "
    "`kill -CONT` lets it go on",
    "left": "every rank must come to every collective: look why it returned early (fewer batches, "
    "a `return`, a condition on the rank)",
    "lost": "look at its own output first: the others wait for it as a consequence",
    "loading": "look at its DataLoader: slow storage, a worker that is stuck",
    "gil": "wait if the call in its line may take that long; a library that holds the lock can "
    "often be told to use a process of its own",
    "unknown": "`py-spy dump` shows its stack. A rank that has executed another program in its "
    "place (`os.execv`) cannot be asked for it; one that sleeps in C while a thread holds Python's "
    "lock is not asked, as its call could be cut short",
    "transport": "look at the network between the machines (interface, firewall, cable) or at the "
    "GPUs; for broadcast, reduce, gather and scatter, look whether all ranks name the same rank",
}
"""By the kind of the verdict; of the others waiting is all there is to do."""
_EVALUATION = (
    "where one rank alone evaluates, call `model.module(...)` there, or let all ranks evaluate"
)
_CONDITION = (
    "every rank must call the same collectives in the same order: look for one that only some "
    "ranks reach (`if rank == 0`, an exception that was caught, `continue`)"
)
_STEPS = (
    "give each rank the same number of batches (DistributedSampler, drop_last), or use `Join`; do "
    "not skip a step on one rank alone"
)


def _for_pairs(waiting: Mapping[int, Activity]) -> tuple[str, ...]:
    """What to do about ranks that send and receive for each other."""
    if any(a.wait.where == IN_PIPELINE for a in waiting.values()):
        return (
            "every rank of a pipeline must make the same turns of the loop: look for a `continue`, "
            "a `break`, an exception that was caught, or a collective such as `world.sum` that "
            "only some ranks come to; those without the last stage get NaN for a loss",
        )
    return (
        "every send needs its receive, in the same order on both ranks: where both send or receive "
        "first, change the order on one of them, or use `batch_isend_irecv`",
    )


def _for_deadlock(waiting: Mapping[int, Activity], mismatch: Mismatch | None) -> tuple[str, ...]:
    """What to do about collectives that do not match, most likely first."""
    places = [activity.wait.where for activity in waiting.values()]
    if 0 < places.count(IN_BUFFERS) < len(waiting):
        new_line = _from_a_new_line([a for a in waiting.values() if a.wait.where == IN_BUFFERS])
        return {True: (_EVALUATION,), False: (_STEPS,), None: (_EVALUATION, _STEPS)}[new_line]
    if any(a.making is not None or a.op == "new_group" for a in waiting.values()):
        return (
            "`new_group`, and what calls it, such as `init_device_mesh`, must be called by all "
            "ranks of the run, also by those outside the group, in the same order and with the "
            "same ranks and backend; with use_local_synchronization by all ranks of the group",
        )
    if "while DDP is constructed" in places:
        return ("construct DistributedDataParallel on all ranks, at the same point",)
    if 0 < places.count("in backward") < len(waiting):
        return (_STEPS, _CONDITION)
    if _sizes_differ(mismatch):
        return (
            "bring tensors of the same size and type on all ranks: pad them, or exchange the "
            "sizes first",
        )
    if len({a.call.key for a in waiting.values() if a.call is not None}) > 1:
        return ("use the same process groups in the same order on all their ranks",)
    return (_CONDITION,)


def _from_a_new_line(activities: list[Activity]) -> bool | None:
    """Whether a rank is where none of its earlier collectives came from; None: not known."""
    for activity in activities:
        earlier = [c for c in activity.state.calls or () if c not in pending(activity.state)]
        if not earlier or any(call.frames is None for call in earlier):
            return None
        if any(own_line(call.frames) == activity.line for call in earlier):
            return False
    return True


# One rank later than the others, step after step

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
    calls: dict[int, CollectiveCall]


def find_straggler(snapshot: Snapshot) -> Verdict | None:
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
    snapshot = with_groups_apart(snapshot)
    table = CallTable(snapshot)
    for group in table.calls:
        matched = _matched(table, group)
        length = matched[-1].start_s - matched[0].start_s if matched else 0.0
        # The later half as well: a stall before it must not hide what has come since.
        for since in (_LONGEST_S, min(_LONGEST_S, length) / 2):
            window = [late for late in matched if matched[-1].start_s - late.start_s <= since]
            verdict = _by_window(window, snapshot)
            if verdict is not None:
                return verdict
    return None


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


def _by_window(window: list[_Late], snapshot: Snapshot) -> Verdict | None:
    length = window[-1].start_s - window[0].start_s if window else 0.0
    if length < _SHORTEST_S:
        return None
    waits = group_by_key((late.rank, late.wait_s) for late in window)
    *others, rank = sorted(waits, key=lambda r: sum(waits[r]))
    longest = sorted(waits[rank], reverse=True)
    regular = len(longest) >= _AT_LEAST and longest[_AT_LEAST - 1] > _ALIKE * longest[2]
    if not regular or (others and sum(waits[others[-1]]) > _OTHERS * sum(longest)):
        return None
    slices = [0.0] * _SLICES
    for late in window[1:]:  # the wait in the first is of the time before it
        if late.rank == rank:
            place = int((late.start_s - window[0].start_s) / length * _SLICES)
            slices[min(place, _SLICES - 1)] += late.wait_s
    if min(slices) <= _SHARE * length / _SLICES:
        return None
    waiting = [state.rank for state in snapshot.ranks if state.rank != rank]
    headline = (
        f"rank {rank} is slower than the others, step after step: {format_ranks(waiting)} "
        f"{verb('waits', len(waiting))} for it {sum(slices) / length:.0%} of the time"
    )
    longest_wait = max((late for late in window if late.rank == rank), key=lambda late: late.wait_s)
    rows = []
    for state in snapshot.ranks:
        call = longest_wait.calls.get(state.rank)
        if call is not None:
            when = "last" if state.rank == rank else "earlier"
            line = own_line(call.frames)
            rows.append(Row(state.rank, state.host, f"comes {when} to {describe(call)}", line))
    advice = (
        "look at its host: other programs on its cores or its GPU, an older or a hotter device, "
        "slower storage; and at what it does alone in every step. Uneven `shares` give "
        "it less work, except under diloco",
    )
    return Verdict("straggler", False, (rank,), headline, tuple(rows), None, advice)
