"""Judges what each rank does, from two snapshots of its process taken a second or two apart.

An *activity* is the kind of thing a rank does ("waits for other ranks", "works on") and, if it
waits, the call it waits in. A rank has *moved* if it made a step or a call between the snapshots.
Its main thread is *idle* if it used almost no processor time between them. It is at the same
*place* if its stack is the same from the innermost frame to the user's own line.

The functions are pure: they take two `RankState`s and return one `Activity`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from lockstep.run.watch import stacks
from lockstep.run.watch.snapshot import CollectiveCall, NewGroup, RankState

IDLE_MAX_CPU_SHARE = 0.1
"""A thread is idle if it used less than this share of the time between two snapshots. Answering the
launcher's request takes up to 60 ms, in another thread."""

_POINT_TO_POINT_FUNCTIONS = {
    "recv", "irecv", "send", "isend", "batch_isend_irecv", "recv_object_list", "send_object_list",
    "_wait_batch_p2p",
}  # fmt: skip
# Functions that wait for other ranks, but that Gloo's Flight Recorder does not record. The last
# three are Lockstep's own.
_UNRECORDED_FUNCTIONS = _POINT_TO_POINT_FUNCTIONS | {
    "monitored_barrier", "init_process_group", "new_group", "split_group", "new_subgroups",
    "new_subgroups_by_enumeration", "destroy_process_group", "exchange",
    "main_process_first", stacks.LOCKSTEP_INIT,
}  # fmt: skip


class Kind(Enum):
    """What a rank does. The values are used in the texts of verdicts."""

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
    """What one rank does."""

    state: RankState
    """The rank's state in the later snapshot."""
    kind: Kind
    wait: stacks.Wait = field(default_factory=stacks.Wait)
    """What the stack says about the wait; an empty `Wait` if it says nothing."""
    call: CollectiveCall | None = None
    """The call that the rank waits in, if the Flight Recorder has recorded it."""

    @property
    def line(self) -> stacks.Frame | None:
        """The line of the user's script that the rank is at."""
        stack = self.state.stack
        other_threads = self.state.all_threads
        if stacks.is_at_exit(stack) and other_threads:
            # The script has ended, and Python waits for its remaining threads. So the line of
            # interest is the one that such a thread is at. There is rarely more than one, beside
            # those that do housekeeping, for which Python does not wait.
            waited_for = [each for each in other_threads if not stacks.is_housekeeping(each)]
            stack = (waited_for or other_threads)[0]
        return stacks.user_frame(stack)

    @property
    def op(self) -> str:
        """The function of torch.distributed that the user called and that the rank waits in.

        Empty if the rank waits in none, or if the function is not known.
        """
        if self.wait.op:
            return self.wait.op
        # The record may name a function inside the one that the user called: `broadcast` for
        # `broadcast_object_list`.
        return "" if self.call is None else self.call.op

    @property
    def created_group(self) -> NewGroup | None:
        """The process group that the rank waits to create, if it does and the group is known."""
        # A recorded call runs on a group that exists already.
        waits_outside_calls = self.kind is Kind.WAITING and self.call is None
        return self.state.making if waits_outside_calls else None

    @property
    def waits_in_p2p(self) -> bool:
        """True if the rank waits in a send or receive.

        If the call was recorded, the record says so. Otherwise the stack does.
        """
        if self.call is not None:
            return self.call.p2p
        if self.wait.op in _POINT_TO_POINT_FUNCTIONS:
            return True

        # The stages of torch.distributed.pipelining exchange nothing but sends and receives.
        if not self.state.stack:
            return False
        innermost_frame = self.state.stack[0]
        return "pipelining" in innermost_frame.file


def classify(earlier: RankState, later: RankState, seconds: float) -> Activity:
    """Judges what a rank does: its `Kind` and, if it waits, the call it waits in.

    Args:
        earlier: the rank's state in the first snapshot.
        later: the rank's state in the second snapshot.
        seconds: the time between the snapshots.
    """
    if not later.alive:
        # A rank that has just ended, or whose exit code the launcher does not know yet, counts as
        # moving: others may be about to notice its end.
        has_just_ended = earlier.alive or later.code is None
        return Activity(later, Kind.MOVING if has_just_ended else Kind.EXITED)

    if later.stopped and earlier.stopped:
        return Activity(later, Kind.STOPPED)

    # If only one snapshot shows the rank stopped, it was stopped or continued in between.
    was_stopped_or_continued = bool(later.stopped or earlier.stopped)
    if was_stopped_or_continued or has_moved(earlier, later):
        return Activity(later, Kind.MOVING)

    if later.stack is None or earlier.stack is None:
        return Activity(later, Kind.UNKNOWN)

    kind = _kind_by_stack(earlier, later, seconds)
    if kind not in (Kind.WAITING, Kind.PERHAPS_WAITING):
        return Activity(later, kind)

    wait = stacks.find_wait(later.stack)
    if wait is None:
        # The rank is only PERHAPS_WAITING: it has a pending call, but its stack shows no wait.
        wait = stacks.Wait()
    return Activity(later, kind, wait, _current_call(later, wait))


def has_moved(earlier: RankState, later: RankState) -> bool:
    """Returns True if a rank is known to have made progress between two snapshots.

    It has if it made an optimizer step or a call, or if the state of its latest call has changed.
    """
    steps_are_known = earlier.steps is not None and later.steps is not None
    if steps_are_known and earlier.steps != later.steps:
        return True
    if earlier.calls is None or later.calls is None:
        return False
    return _latest_calls(earlier.calls) != _latest_calls(later.calls)


def _latest_calls(calls: Sequence[CollectiveCall]) -> dict[tuple[str, bool], tuple[int, str]]:
    """Returns the number and state of the latest call of each kind, to see whether they change.

    The kind is the key of the group, and whether the call is a send or receive: those of one group
    have the same key as its collectives, but are numbered separately.

    Args:
        calls: a rank's calls, the oldest first.
    """
    latest = {}
    for call in calls:  # a later call replaces an earlier one
        latest[call.key, call.p2p] = (call.seq, call.state)
    return latest


def _kind_by_stack(earlier: RankState, later: RankState, seconds: float) -> Kind:
    """Judges a rank that is running, has not moved, and whose stack is known in both snapshots.

    Args:
        earlier: the rank's state in the first snapshot.
        later: the rank's state in the second snapshot.
        seconds: the time between the snapshots.
    """
    pending = later.pending_calls()  # the calls that are not known to have completed
    is_idle = is_main_thread_idle(earlier, later, seconds)
    at_same_place = frames_to_user_line(earlier) == frames_to_user_line(later)

    # 1. Does it wait for other ranks?
    if at_same_place and _is_seen_to_wait(later, pending, is_idle=is_idle):
        return Kind.WAITING

    # 2. Does it work? Its answering thread did not get to run, as C code holds Python's lock.
    was_asked_in_vain = earlier.answered is False and later.answered is False  # None: not asked
    if was_asked_in_vain:
        return Kind.SILENT

    # A kernel that was queued before a pending NCCL call may keep the GPU busy while the CPU idles.
    gpu_may_work = any(call.backend == "nccl" for call in pending)
    if not is_idle or not at_same_place or gpu_may_work:
        return Kind.WORKING

    # 3. The main thread is idle, and does not wait for other ranks in any known way.
    if stacks.waits_for_data_loader(later.stack):
        return Kind.LOADING
    if pending:
        return Kind.PERHAPS_WAITING
    if _threads_or_children_compute(earlier, later, seconds):
        return Kind.CHILDREN
    return Kind.BLOCKED


def _is_seen_to_wait(state: RankState, pending: Sequence[CollectiveCall], *, is_idle: bool) -> bool:
    """Returns True if a rank, which has stayed at the same place, waits for other ranks there.

    Args:
        state: the state of the rank in the second snapshot.
        pending: its calls that are not known to have completed.
        is_idle: True if its main thread used almost no processor time since the first snapshot.
    """
    # NCCL marks a call as "started" when the GPU executes it, and there it waits for the other
    # ranks.
    if any(call.state == "started" for call in pending):
        return True

    wait = stacks.find_wait(state.stack)
    if wait is None:
        return False
    if wait.certain:
        return True

    # Otherwise torch may be computing or waiting at this place. The rank waits if it uses no
    # processor time and a call has not completed. If its calls could not be read, there may be
    # such a call.
    may_have_pending_call = bool(pending) or state.calls is None
    return is_idle and may_have_pending_call


def frames_to_user_line(state: RankState) -> tuple[stacks.Frame, ...]:
    """Returns a rank's stack from its innermost frame to the user's own line.

    While the rank waits and looks again and again for the others, the frames of that are left out.
    If no frame is the user's, the whole stack is returned. The result is empty if the stack is not
    known.
    """
    stack = stacks.without_polling(state.stack or ())
    line = stacks.user_frame(stack)
    if line is None:
        return stack
    return stack[: stack.index(line) + 1]


def _current_call(state: RankState, wait: stacks.Wait) -> CollectiveCall | None:
    """Returns the recorded call that a waiting rank is in.

    A call that a GPU has started and not completed is the one. Otherwise it depends on the function
    that the stack shows, as torch's recorder records some functions and not others:

        ""              no function      the latest pending call
        "recv"          not recorded     the latest pending send or receive
        "all_reduce"    recorded         the latest call, even if it is recorded as completed: the
                                         rank has not returned from it yet

    Args:
        state: the state of the rank.
        wait: what its stack says about the wait. Its `op` is the function that the rank waits in;
            empty if the stack shows none.

    Returns:
        The call, or None if it was not recorded.
    """
    pending = state.pending_calls()  # the calls that are not known to have completed
    if wait.op == "":
        return _started_call(pending) or _latest_call(pending)

    if wait.op in _UNRECORDED_FUNCTIONS:
        # Another thread may have started a pending collective, so it does not explain such a wait.
        pending_p2p = [call for call in pending if call.p2p]
        return _started_call(pending) or _latest_call(pending_p2p)

    # The rank's main thread is in its own latest call. Some records do not say which thread made a
    # call; then it is the latest call of all.
    all_calls = state.calls or ()
    calls_of_main_thread = [call for call in all_calls if call.thread == state.main_thread]
    candidates = calls_of_main_thread or all_calls
    return _started_call(candidates) or _latest_call(candidates)


def _started_call(calls: Sequence[CollectiveCall]) -> CollectiveCall | None:
    """Returns the call that a GPU has started and has not completed, or None.

    Only NCCL's record shows this. Calls over Gloo are never recorded as started.
    """
    for call in calls:
        if call.state == "started":
            return call
    return None


def _latest_call(calls: Sequence[CollectiveCall]) -> CollectiveCall | None:
    """Returns the last of a rank's calls, which are in the order of time; None if there is none."""
    return calls[-1] if calls else None


# --- Processor time


def is_main_thread_idle(earlier: RankState, later: RankState, seconds: float) -> bool:
    """Returns True if a rank's main thread did not compute between two snapshots.

    Returns False if the processor time of neither the thread nor the process is known.

    Args:
        earlier: the rank's state in the first snapshot.
        later: the rank's state in the second snapshot.
        seconds: the time between the snapshots.
    """
    # State R means running or ready to run. On a busy machine, a thread that is ready may get
    # little processor time, so this counts as computing.
    if earlier.state == "R" or later.state == "R":
        return False

    if earlier.main_cpu_s is None or later.main_cpu_s is None:
        # Only the time of the whole process is known. If the process is idle, so is the thread.
        return _is_idle(earlier.cpu_s, later.cpu_s, seconds)
    return _is_idle(earlier.main_cpu_s, later.main_cpu_s, seconds)


def is_still(earlier: RankState, later: RankState, seconds: float) -> bool:
    """Returns True if no thread of a rank computes or copies data, and none may go on by itself."""
    if not _is_idle(earlier.cpu_s, later.cpu_s, seconds):
        return False
    other_threads = later.threads or ()
    return not any(stacks.may_continue_alone(stack) for stack in other_threads)


def _threads_or_children_compute(earlier: RankState, later: RankState, seconds: float) -> bool:
    """Returns True if other threads of a rank, or processes that it started, are known to compute.

    This is only asked for a rank whose main thread is idle.
    """
    # `cpu_s` is the time of all threads. The idle main thread has used almost nothing of it, so the
    # rest is the time of the others.
    threads_are_known = earlier.cpu_s is not None and later.cpu_s is not None
    if threads_are_known and not _is_idle(earlier.cpu_s, later.cpu_s, seconds):
        return True

    children_before_s = earlier.children_cpu_s
    children_after_s = later.children_cpu_s
    children_are_known = children_before_s is not None and children_after_s is not None
    return children_are_known and not _is_idle(children_before_s, children_after_s, seconds)


def _is_idle(before_s: float | None, after_s: float | None, seconds: float) -> bool:
    """Returns True if little processor time was used between two snapshots; False if not known."""
    if before_s is None or after_s is None or seconds <= 0:
        return False
    return (after_s - before_s) / seconds < IDLE_MAX_CPU_SHARE
