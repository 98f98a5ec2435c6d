"""What one rank does, from two looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from lockstep.diagnose.snapshot import Call, Frame, RankState
from lockstep.diagnose.stacks import Wait, is_busy, is_leaving, is_loading, own_line, waits_in

_IDLE = 0.1
"""Share of the time between two looks below which a thread counts as not computing. Answering the
Flight Recorder takes up to 60 ms, of another thread."""

OUTSIDE_THE_RECORDER = {
    "monitored_barrier", "recv", "irecv", "send", "isend", "batch_isend_irecv", "recv_object_list",
    "send_object_list", "init_process_group", "new_group", "split_group", "destroy_process_group",
    "new_subgroups", "new_subgroups_by_enumeration", "_wait_batch_p2p",
}  # fmt: skip
"""Functions that wait for other ranks and that Gloo's Flight Recorder does not record."""
_POINT_TO_POINT = {
    "recv", "irecv", "send", "isend", "batch_isend_irecv", "recv_object_list", "send_object_list",
    "_wait_batch_p2p",
}  # fmt: skip


class Kind(Enum):
    """What a rank does."""

    EXITED = "has ended"
    STOPPED = "is stopped"
    MOVING = "moves on"
    WAITING = "waits for other ranks"
    PERHAPS_WAITING = "has called a collective and is blocked"
    LOADING = "waits for data"
    WORKING = "works"
    BLOCKED = "is blocked"
    SILENT = "does not answer"
    UNKNOWN = "cannot be seen"


@dataclass(frozen=True)
class Activity:
    """What one rank does between two looks."""

    state: RankState
    """The later look."""
    kind: Kind
    wait: Wait | None = None
    call: Call | None = None
    """The collective it waits in, where the Flight Recorder knows it."""

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.state.rank

    @property
    def line(self) -> Frame | None:
        """The user's own line that it is at; at its end that of a thread it waits for."""
        threads = self.state.threads if is_leaving(self.state.stack) else None
        return own_line(next(iter(threads or ()), self.state.stack))

    @property
    def op(self) -> str:
        """The function of torch.distributed that it waits in, as the user knows it."""
        if self.wait is not None and self.wait.op:
            return self.wait.op
        return "" if self.call is None else self.call.op

    @property
    def p2p(self) -> bool:
        """It waits for one other rank, and which one is not known."""
        if self.call is not None:
            return self.call.p2p
        if self.wait is None:
            return False
        return self.wait.op in _POINT_TO_POINT or "pipelining" in _file(self.state)


def key(call: Call) -> str:
    """Calls with equal keys are numbered together."""
    return f"{call.backend}:{call.group}"


def pending(state: RankState) -> list[Call]:
    """The collectives that have not been completed as far as is known, oldest first.

    Gloo says of a group which call was completed last, and may say an earlier one than is true.
    """
    completed = state.completed or {}
    return [
        call
        for call in state.calls or ()
        if call.state != "completed" and (call.p2p or call.seq > completed.get(key(call), 0))
    ]


def observe(earlier: RankState, later: RankState, seconds: float) -> Activity:
    """Judges what a rank does.

    Args:
        earlier: the first look at the rank.
        later: the second.
        seconds: between them.
    """
    if not later.alive:
        ended = (later.exit_code, later.signal) != (None, None) and not earlier.alive
        return Activity(later, Kind.EXITED if ended else Kind.MOVING)
    if later.stopped and earlier.stopped:
        return Activity(later, Kind.STOPPED)
    if later.stopped or earlier.stopped or _moved(earlier, later):
        return Activity(later, Kind.MOVING)
    if later.stack is None or earlier.stack is None:
        return Activity(later, Kind.UNKNOWN)
    kind, wait = _by_stack(earlier, later, seconds)
    return Activity(later, kind, wait, _current(later, wait, kind))


def on_its_gpu(
    earlier: RankState, activity: Activity, held_up: Callable[[Call], object]
) -> Activity:
    """A rank that seems to work, but in truth waits for what its GPU waits for.

    NCCL's recorder knows which calls a GPU has started only where torch takes their times, at the
    cost of overlap. But a GPU takes the calls of a group in order, and gets past the oldest one
    when all ranks have come to it: where that was the oldest in both looks, it is waited for.

    Args:
        earlier: the first look at the rank.
        activity: by both looks.
        held_up: whether some rank has not come to a call, or called something else in its place.
    """
    if activity.kind is not Kind.WORKING or _place(earlier) != _place(activity.state):
        return activity
    before = {(key(call), call.seq) for call in _oldest_on_gpu(earlier)}
    for call in _oldest_on_gpu(activity.state):
        if (key(call), call.seq) in before and held_up(call):
            return replace(activity, kind=Kind.WAITING, call=call)
    return activity


def _oldest_on_gpu(state: RankState) -> list[Call]:
    """Of each group that communicates by NCCL the oldest call that is not completed."""
    found: dict[str, Call] = {}
    for call in pending(state):
        if call.backend == "nccl" and not call.p2p:
            found.setdefault(key(call), call)
    return list(found.values())


def _moved(earlier: RankState, later: RankState) -> bool:
    if None not in (earlier.steps, later.steps) and earlier.steps != later.steps:
        return True
    if earlier.calls is None or later.calls is None:
        return False
    return _progress(earlier.calls) != _progress(later.calls)


def _progress(calls: tuple[Call, ...]) -> object:
    return {(key(call), call.p2p): (call.seq, call.state) for call in calls}


def _by_stack(earlier: RankState, later: RankState, seconds: float) -> tuple[Kind, Wait | None]:
    wait = waits_in(later.stack)
    same = _place(earlier) == _place(later)
    idle = _is_idle(earlier, later, seconds)
    stuck = [call for call in pending(later) if call.state == "started"]
    if same and (stuck or _waits(wait, later, idle)):
        return Kind.WAITING, wait
    # A kernel that waits in a queue behind it, or does not end, keeps the device busy.
    queued = any(call.backend == "nccl" for call in pending(later))
    if earlier.answered is False and later.answered is False:
        return Kind.SILENT, None
    if not idle or not same or queued:
        return Kind.WORKING, None
    if is_loading(later.stack):
        return Kind.LOADING, None
    return (Kind.PERHAPS_WAITING if pending(later) else Kind.BLOCKED), None


def _waits(wait: Wait | None, later: RankState, idle: bool | None) -> bool:
    if wait is None:
        return False
    return wait.sure or bool(idle and (pending(later) or later.calls is None))


def _place(state: RankState) -> tuple[Frame, ...]:
    """The stack down to the user's own line."""
    line = own_line(state.stack)
    stack = state.stack or ()
    return stack if line is None else stack[: stack.index(line) + 1]


def _is_idle(earlier: RankState, later: RankState, seconds: float) -> bool:
    """Whether its main thread has not computed; False where that cannot be told."""
    used = _difference(earlier.main_cpu_s, later.main_cpu_s)
    if used is None:
        used = _difference(earlier.cpu_s, later.cpu_s)
    return _is_little(used, seconds)


def is_still(earlier: RankState, later: RankState, seconds: float) -> bool:
    """Whether nothing of it computes or copies, nor may go on by itself, as far as can be seen."""
    used = _difference(earlier.cpu_s, later.cpu_s)
    return _is_little(used, seconds) and not any(map(is_busy, later.threads or ()))


def _is_little(used: float | None, seconds: float) -> bool:
    """Processor time; False where it is not known."""
    return used is not None and seconds > 0 and used / seconds < _IDLE


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _current(state: RankState, wait: Wait | None, kind: Kind) -> Call | None:
    if kind not in (Kind.WAITING, Kind.PERHAPS_WAITING) or not state.calls:
        return None
    outside = wait is not None and wait.op in OUTSIDE_THE_RECORDER
    candidates: Iterable[Call] = pending(state)
    if wait is not None and wait.sure and wait.op and not outside:
        candidates = state.calls  # Gloo says too early a completed call, never too late a one
    last = None
    for call in candidates:
        if call.state == "started":
            return call
        if not outside or call.p2p:
            last = call
    return last


def _file(state: RankState) -> str:
    return state.stack[0].file if state.stack else ""
