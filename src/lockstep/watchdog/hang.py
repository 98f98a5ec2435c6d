"""The verdict on ranks that wait: a deadlock, or patience.

What to do about a hang.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.errors import name_ranks
from lockstep.watchdog.messages import Row, Verdict, VerdictKind, describe, verb
from lockstep.watchdog.snapshot import Call, Snapshot
from lockstep.watchdog.stacks import IN_BUFFERS, IN_PIPELINE, Wait, is_leaving, own_line
from lockstep.watchdog.wait_graph import (
    Activity,
    CallTable,
    Kind,
    Mismatch,
    WaitGraph,
    build_wait_graph,
    classify,
    find_mismatch,
    is_still,
    key,
    on_its_gpu,
    pending,
    signature,
    with_other_threads,
)

_PATIENCE: dict[Kind, tuple[VerdictKind, str]] = {
    Kind.SILENT: ("gil", "is in C code that holds Python's lock"),
    Kind.LOADING: ("loading", "waits for data"),
    Kind.BLOCKED: ("blocked", "is blocked outside any collective, without computing"),
    Kind.PERHAPS_WAITING: ("blocked", "is blocked without computing"),
    Kind.WORKING: ("working", "works on"),
    Kind.UNKNOWN: ("unknown", "cannot be seen"),
}
_PAIRS_S = 10.0
"""For which ranks that send and receive must be still: only then are they said to be deadlocked."""
_GONE = (Kind.STOPPED, Kind.EXITED)
_STILL = (Kind.BLOCKED, Kind.PERHAPS_WAITING, Kind.LOADING, Kind.STOPPED)


def find(earlier: Snapshot, later: Snapshot, waited_s: float) -> Verdict | None:
    """What keeps a run from moving.

    Args:
        earlier: the first look at all ranks.
        later: the second, 1 to 3 s after it.
        waited_s: how long nothing has moved, in s.

    Returns:
        None where something moves, or nobody waits.
    """
    seconds = later.time - earlier.time
    before = {state.rank: state for state in earlier.ranks}
    activities = {
        state.rank: classify(before[state.rank], state, seconds)
        for state in later.ranks
        if state.rank in before
    }
    if any(activity.kind is Kind.MOVING for activity in activities.values()):
        return None
    table = CallTable(later)
    activities = {
        rank: on_its_gpu(before[rank], a, lambda c: table.absent(c) or table.contradicts(c))
        for rank, a in activities.items()
    }
    activities = with_other_threads(activities, table)
    waits = build_wait_graph(activities, table)
    # Bytes on their way between two machines leave no trace in either.
    still = later.one_host and all(
        is_still(before[rank], a.state, seconds)
        for rank, a in activities.items()
        if a.kind is not Kind.EXITED
    )
    ages = _ages(later, activities, waits)
    case = _Case(later, activities, table, waits, ages, waited_s, still and waited_s >= _PAIRS_S)
    if not waits.waits_for:
        return _nobody_waits(case)
    case = replace(case, waited_s=max([waited_s, *case.ages.values()]))
    return _gone(case) or _deadlock(case) or _patience(case) or _transport(case)


@dataclass(frozen=True)
class _Case:
    """What a verdict is made from."""

    later: Snapshot
    activities: Mapping[int, Activity]
    table: CallTable
    waits: WaitGraph
    ages: Mapping[int, float]
    """For a waiting rank the seconds since it called what it waits in."""
    waited_s: float
    still: bool
    """Nothing is under way between any two ranks, so that those that send and receive do it in
    vain."""

    @property
    def roots(self) -> dict[int, Activity]:
        """Those that wait for none and that others wait for; else all that wait for none."""
        free = {r: a for r, a in self.activities.items() if r not in self.waits.waits_for}
        everyone = frozenset[int]().union(*self.waits.waits_for.values())
        return {r: a for r, a in free.items() if r in everyone} or free

    def rows(self, mismatch: Mismatch | None = None) -> tuple[Row, ...]:
        parted = {} if mismatch is None else dict(mismatch.calls)
        return tuple(self._row(a, parted.get(rank)) for rank, a in self.activities.items())

    def _row(self, activity: Activity, parted: Call | None) -> Row:
        state = activity.state
        if activity.rank in self.waits.waits_for:
            call = parted if parted is not None and _is_open(parted, activity) else activity.call
            does = f"waits in {_named(call, activity.op)}"
            if call is not None and (name := self.table.name(key(call))).startswith("group"):
                does += f" of {name}"
            if activity.wait is not None and activity.wait.where:
                does += f", {activity.wait.where}"
        else:
            does = _does(activity)
        if state.steps:
            does += f" (step {state.steps})"
        return Row(activity.rank, state.host, does, activity.line, self.ages.get(activity.rank))

    def told(self, what: str, ranks: Collection[int]) -> str:
        """`rank 1 works on; ranks 0, 2 have waited for it for 5 s`."""
        waiting = self.waits.waits_for
        have = f"{name_ranks(waiting)} {verb('has', len(waiting))}"
        it = "it" if len(ranks) == 1 else "them"
        return (
            f"{name_ranks(ranks)} {verb(what, len(ranks))}; {have} waited for {it} for "
            f"{self.waited_s:.0f} s"
        )


def _ages(
    later: Snapshot, activities: Mapping[int, Activity], waits: WaitGraph
) -> dict[int, float]:
    if not later.one_host:
        return {}
    calls = {rank: activities[rank].call for rank in waits.waits_for}
    return {r: max(0.0, later.time - c.time_s) for r, c in calls.items() if c is not None}


def _gone(case: _Case) -> Verdict | None:
    gone = {rank: a for rank, a in case.roots.items() if a.kind in _GONE}
    everyone = frozenset[int]().union(*case.waits.waits_for.values())
    gone = {rank: a for rank, a in gone.items() if rank in everyone}
    if not gone:
        return None
    known = [a for rank, a in case.waits.waits_for.items() if rank not in case.waits.guessed]
    # Where it is not known whom a rank waits for, it may be one of those that go on.
    others = [
        a for r, a in case.activities.items() if r not in case.waits.waits_for and r not in gone
    ]
    # Taking a group down takes its time, and waits for nobody who has gone.
    leaving = all(
        case.activities[r].op == "destroy_process_group" and r in case.waits.guessed
        for r in case.waits.waits_for
    )
    fatal = bool(frozenset[int]().union(*known) & set(gone)) or not (others or leaving)
    ended = [a.state for a in gone.values() if a.kind is Kind.EXITED]
    kind: VerdictKind = "stopped"
    if ended:
        kind = "left" if all(state.exit_code == 0 for state in ended) else "lost"
    what = {"stopped": "is stopped by a signal", "left": "has ended without an error"}
    headline = case.told(what.get(kind, "has died"), gone)
    rows = case.rows()
    return Verdict(
        kind, fatal, tuple(sorted(gone)), headline, rows, None, advise(kind, rows), case.waited_s
    )


def _deadlock(case: _Case) -> Verdict | None:
    deadlocked = {rank: case.activities[rank] for rank in sorted(case.waits.deadlocked)}
    mismatch = _with_lines(find_mismatch(case.table, case.waits.deadlocked), deadlocked)
    pairs = any(a.p2p for a in deadlocked.values())
    one_op = mismatch is None and len({a.op for a in deadlocked.values()}) == 1
    if not deadlocked or (one_op and not (pairs and case.still)):
        return None
    alive = [a for a in case.activities.values() if a.kind is not Kind.EXITED]
    # Of a send or receive it is not known what it waits for; a transfer may be under way.
    proven = not pairs or (case.still and not any(_on_gpu(a) for a in deadlocked.values()))
    fatal = proven and all(a.rank in case.waits.waits_for for a in alive)
    headline = (
        f"deadlock: {name_ranks(deadlocked)} {verb('waits', len(deadlocked))} in "
        f"{_how(deadlocked, mismatch)}, and nothing has moved for {case.waited_s:.0f} s"
    )
    rows = case.rows(mismatch)
    several = len({key(a.call) for a in deadlocked.values() if a.call is not None}) > 1
    waits = [a.wait for a in deadlocked.values()]
    new_line = _from_a_new_line([a for a in deadlocked.values() if _in_buffers(a)])
    advice = advise(
        "deadlock", rows, waits, mismatch, several_groups=several, new_line=new_line, p2p=pairs
    )
    ranks = _odd_ones(deadlocked, mismatch)
    return Verdict("deadlock", fatal, ranks, headline, rows, mismatch, advice, case.waited_s)


def _on_gpu(activity: Activity) -> bool:
    """What it waits for is moved by a GPU, of whose work the processor's time says nothing."""
    return activity.call is not None and activity.call.backend == "nccl"


def _in_buffers(activity: Activity) -> bool:
    """It broadcasts the buffers of a DDP model that it has called."""
    return activity.wait is not None and activity.wait.where == IN_BUFFERS


def _from_a_new_line(activities: list[Activity]) -> bool | None:
    """Whether a rank is at a line from which none of its earlier collectives came."""
    for activity in activities:
        earlier = [c for c in activity.state.calls or () if c not in pending(activity.state)]
        if not earlier or any(call.frames is None for call in earlier):
            return None
        if any(own_line(call.frames) == activity.line for call in earlier):
            return False
    return True if activities else None


def _with_lines(mismatch: Mismatch | None, waiting: Mapping[int, Activity]) -> Mismatch | None:
    """A call that a rank waits in has the line the rank is at, where its own was not obtained."""
    if mismatch is None:
        return None
    calls = []
    for rank, call in mismatch.calls:
        activity = waiting.get(rank)
        if call is not None and call.frames is None and activity and _is_open(call, activity):
            call = replace(call, frames=activity.state.stack)
        calls.append((rank, call))
    return replace(mismatch, calls=tuple(calls))


def _is_open(call: Call, activity: Activity) -> bool:
    """Among what a rank may wait in, by its number: the call may carry lines of another look."""
    numbers = {(key(c), c.seq) for c in (*pending(activity.state), activity.call) if c}
    return (key(call), call.seq) in numbers


def _how(deadlocked: Mapping[int, Activity], mismatch: Mismatch | None) -> str:
    if any(activity.p2p for activity in deadlocked.values()):
        return f"{_ops(deadlocked)}, for each other"
    calls = [] if mismatch is None else [call for _, call in mismatch.calls if call is not None]
    ops = {call.op for call in calls}
    if len(ops) == 1 and len({signature(call) for call in calls}) > 1:
        return f"{next(iter(ops))} with different sizes or types"
    if len({activity.op for activity in deadlocked.values()}) > 1 or len(ops) > 1:
        return "collectives that do not match"
    return "collectives that the others never come to"


def _odd_ones(deadlocked: Mapping[int, Activity], mismatch: Mismatch | None) -> tuple[int, ...]:
    """Those that did what the others did not: the fewer at the call where the ranks parted."""
    lone = [rank for rank, activity in deadlocked.items() if _in_buffers(activity)]
    if 0 < len(lone) < len(deadlocked):
        return tuple(lone)
    if mismatch is None:
        return tuple(deadlocked)
    sides: dict[object, list[int]] = {}
    for rank, call in mismatch.calls:
        sides.setdefault(None if call is None else signature(call), []).append(rank)
    most = max(sides.values(), key=len)
    if sum(len(side) == len(most) for side in sides.values()) > 1:
        return tuple(sorted(rank for rank, _ in mismatch.calls))
    return tuple(sorted(rank for side in sides.values() if side is not most for rank in side))


def _patience(case: _Case) -> Verdict | None:
    for kind, (kind_of_verdict, what) in _PATIENCE.items():
        found = sorted(rank for rank, a in case.roots.items() if a.kind is kind)
        if found:
            rows = case.rows()
            headline = case.told(what, found)
            advice = advise(kind_of_verdict, rows)
            return Verdict(
                kind_of_verdict, False, tuple(found), headline, rows, None, advice, case.waited_s
            )
    return None


def _transport(case: _Case) -> Verdict:
    waiting = {rank: case.activities[rank] for rank in case.waits.waits_for}
    p2p = any(a.p2p for a in waiting.values())
    match = "for each other" if p2p else "which match on all"
    moved = f"nothing has moved for {case.waited_s:.0f} s"
    headline = f"all ranks wait in {_ops(waiting)}, {match}; {moved}"
    rows = case.rows()
    ranks = tuple(sorted(waiting))
    advice = advise("transport", rows, [a.wait for a in waiting.values()], p2p=p2p)
    return Verdict("transport", False, ranks, headline, rows, None, advice, case.waited_s)


def _ops(waiting: Mapping[int, Activity]) -> str:
    return " and ".join(sorted({activity.op or "a collective" for activity in waiting.values()}))


def _nobody_waits(case: _Case) -> Verdict | None:
    """All of several ranks blocked at once is worth a word; where one computes, none is."""
    alive = {r: a for r, a in case.activities.items() if a.kind is not Kind.EXITED}
    ended = case.activities.keys() - alive.keys()
    unseen = [a for a in alive.values() if a.kind is Kind.UNKNOWN and a.state.answered is False]
    if len(unseen) == len(alive) > 1:
        return _nothing_seen(case, tuple(sorted(alive)))
    # At a script's end a thread of torch's may want the lock that the interpreter waits with.
    still = (*_STILL, Kind.SILENT) if ended else _STILL
    if len(case.activities) < 2 or any(a.kind not in still for a in alive.values()):
        return None
    headline = (
        "no rank computes in its main thread, and none waits for another in a collective, for "
        f"{case.waited_s:.0f} s"
    )
    kind: VerdictKind = "blocked"
    if not ended and all(activity.kind is Kind.LOADING for activity in alive.values()):
        kind, headline = "loading", f"all ranks wait for data, for {case.waited_s:.0f} s"
    if ended:
        headline = (
            f"{name_ranks(ended)} {verb('has', len(ended))} ended; {name_ranks(alive)} "
            f"{verb('has', len(alive))} not, and nothing has been seen of "
            f"{'it' if len(alive) == 1 else 'them'} for {case.waited_s:.0f} s"
        )
    ranks, rows = tuple(sorted(alive)), case.rows()
    return Verdict(kind, False, ranks, headline, rows, None, advise(kind, rows), case.waited_s)


def _nothing_seen(case: _Case, ranks: tuple[int, ...]) -> Verdict:
    """All have been asked, and none has given an answer or a stack."""
    headline = (
        f"nothing can be seen of {name_ranks(ranks)}, and no step has been made for "
        f"{case.waited_s:.0f} s"
    )
    rows = case.rows()
    advice = advise("unknown", rows)
    return Verdict("unknown", False, ranks, headline, rows, None, advice, case.waited_s)


def _named(call: Call | None, op: str) -> str:
    if call is None:
        return op or "a collective"
    if op in ("", call.op):
        return describe(call)
    return f"{op} ({describe(call)})"


def _does(activity: Activity) -> str:
    state = activity.state
    if activity.kind is Kind.EXITED:
        if state.signal is not None:
            return f"was ended by signal {state.signal}"
        return f"has ended with exit code {state.exit_code}"
    if activity.kind is Kind.BLOCKED and state.state == "D":
        return "is blocked in the kernel, on a disk or a network file system"
    if is_leaving(state.stack):
        return "has come to its end, and waits for a thread of its own"
    told = {
        Kind.STOPPED: "is stopped by a signal (SIGSTOP)",
        Kind.SILENT: "is in C code that holds Python's lock",
        Kind.LOADING: "waits for the next batch of a DataLoader",
        Kind.WORKING: "works",
        Kind.UNKNOWN: "cannot be seen: no stack was obtained",
    }
    return told.get(activity.kind, "is blocked without computing")


_GENERAL: dict[VerdictKind, str] = {
    "stopped": "find out who has stopped it: a scheduler, a debugger, Ctrl-Z, or `kill -STOP`",
    "left": "every rank must come to every collective: look why it returned early (fewer batches, "
    "a `return`, a condition on the rank)",
    "lost": "look at its own output first: the others wait for it as a consequence",
    "loading": "look at its DataLoader: slow storage, a worker that is stuck",
    "gil": "wait if the call in its line may take that long; a library that holds the lock can "
    "often be told to use a process of its own",
    "unknown": "look whether the run's folder is there and its disk has room: what a rank is asked "
    "for it writes there",
    "transport": "look at the network between the machines (interface, firewall, cable) or at the "
    "GPUs; for broadcast, reduce, gather and scatter, look whether all ranks name the same rank",
}


_PAIRS = (
    "every send needs its receive, in the same order on both ranks: where both send or receive "
    "first, change the order on one of them, or use `batch_isend_irecv`"
)
_TURNS = (
    "every rank of a pipeline must make the same turns of the loop: look for a `continue`, a "
    "`break`, an exception that was caught, or a collective such as `world.sum` that only some "
    "ranks come to; those without the last stage get NaN for a loss"
)
_EVALUATION = (
    "where one rank alone evaluates, call `model.module(...)` there, or let all ranks evaluate"
)
_STEPS = (
    "give each rank the same number of batches (DistributedSampler, drop_last), or use `Join`; do "
    "not skip a step on one rank alone"
)


def advise(
    kind: VerdictKind,
    rows: Iterable[Row],
    waits: Sequence[Wait | None] = (),
    mismatch: Mismatch | None = None,
    *,
    several_groups: bool = False,
    new_line: bool | None = None,
    p2p: bool = False,
) -> tuple[str, ...]:
    """What to do, most likely first; empty where waiting is all there is to do.

    Args:
        kind: the verdict.
        rows: what the ranks do.
        waits: what the stacks of the waiting ranks say.
        mismatch: where the ranks parted.
        several_groups: the waiting ranks wait in different process groups.
        new_line: a DDP model is called from a line from which no collective came before; None: not
            known.
        p2p: some of the ranks wait in sends and receives.
    """
    if p2p:
        in_pipeline = any(wait is not None and wait.where == IN_PIPELINE for wait in waits)
        return (_TURNS if in_pipeline else _PAIRS,)
    if kind != "deadlock":
        text = _GENERAL.get(kind)
        if kind == "transport" and any("init_process_group" in row.does for row in rows):
            text = "look whether all ranks were given the same address, port and number of ranks"
        return () if text is None else (text,)
    return _for_deadlock(waits, mismatch, several_groups, new_line)


def _for_deadlock(
    waits: Sequence[Wait | None],
    mismatch: Mismatch | None,
    several_groups: bool,
    new_line: bool | None,
) -> tuple[str, ...]:
    places = [wait.where for wait in waits if wait is not None]
    names = {wait.op for wait in waits if wait is not None}
    calls = [] if mismatch is None else [call for _, call in mismatch.calls if call is not None]
    kinds = {signature(call) for call in calls}
    if 0 < places.count(IN_BUFFERS) < len(waits):
        return {True: (_EVALUATION,), False: (_STEPS,), None: (_EVALUATION, _STEPS)}[new_line]
    if "new_group" in names:
        return ("`new_group` must be called by all ranks of the run, in the same order, also by "
                "those outside the group",)  # fmt: skip
    if "while DDP is constructed" in places:
        return ("construct DistributedDataParallel on all ranks, at the same point",)
    if 0 < places.count("in backward") < len(waits):
        return (_STEPS,)
    if len(kinds) > 1 and len({call.op for call in calls}) == 1:
        return (
            "bring tensors of the same size and type on all ranks: pad them, or exchange the "
            "sizes first",
        )
    if several_groups:
        return ("use the same process groups in the same order on all their ranks",)
    return (
        "every rank must call the same collectives in the same order: look for one that only some "
        "ranks reach (`if rank == 0`, an exception that was caught, `continue`)",
    )
