"""Reads what Linux knows about a rank's process from `/proc`, see proc(5).

*Processor time* is user and system time together. The *main thread* of a process is the one that
has the same number as the process. A *stack signal* makes a rank write its Python stacks to a file,
see `lockstep.run.watch.probe`.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from lockstep.run.watch.probe import ALL_THREADS_SIGNAL, MAIN_THREAD_SIGNAL

_PROC = Path("/proc")

# Indices of the fields of /proc/PID/stat, counted from the state (the third field).
_STATE = 0
_PARENT = 1
_FLAGS = 6
_USER_TICKS = 11
_SYSTEM_TICKS = 12
_ENDED_CHILDREN_USER_TICKS = 13
_ENDED_CHILDREN_SYSTEM_TICKS = 14
_EXIT_CODE = 49

_PF_EXITING = 0x4
"""A flag of the kernel (include/linux/sched.h): the thread has begun to end."""
_STATE_MEANINGS = {
    "D": "in the kernel, where no signal reaches it",
    "R": "computing",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended, but its parent has not been told",
}


class ProcessStatus(NamedTuple):
    """What the kernel knows about a process."""

    state: str
    """The main thread's state: R, S, D, T, t, Z, ..."""
    cpu_s: float
    """Processor time of all its threads."""
    main_cpu_s: float | None
    """Processor time of its main thread."""
    main_context_switches: int | None
    """How often its main thread has given up its processor by itself, to wait or to sleep."""
    shows_stacks: bool
    """True if it handles the stack signals. A process that does not would be ended by them, and one
    whose main thread blocks its own signal would show another thread's stack."""


def read_process(pid: int, root: Path = _PROC) -> ProcessStatus | None:
    """Reads the state of a process, and of its main thread.

    Args:
        pid: number of the process.
        root: the folder `/proc`.

    Returns:
        The state, or None if there is no such process or the system has no `/proc`.
    """
    folder = root / str(pid)
    try:
        state, cpu_s = _state_and_cpu_s(folder / "stat")
        status_text = (folder / "status").read_text()
    except (OSError, ValueError, IndexError):
        return None

    # The main thread may have ended before the process.
    main_cpu_s = None
    main_context_switches = None
    main_folder = folder / "task" / str(pid)  # the main thread has the number of its process
    with contextlib.suppress(OSError, ValueError, IndexError):
        # This file has the state of the main thread, too. It replaces the one above, as it is read
        # later and so is newer.
        state, main_cpu_s = _state_and_cpu_s(main_folder / "stat")
        main_status_text = (main_folder / "status").read_text()
        main_context_switches = int(_status_field(main_status_text, "voluntary_ctxt_switches"))

    # The process may be sent a stack signal under two conditions. It handles both signals, as one
    # that it does not handle would end it. And its main thread, whose mask `SigBlk` is, does not
    # block the signal that shows its stack. The masks are written in hexadecimal.
    caught_signals = int(_status_field(status_text, "SigCgt") or "0", 16)
    blocked_signals = int(_status_field(status_text, "SigBlk") or "0", 16)
    shows_stacks = (
        _has_signal(caught_signals, MAIN_THREAD_SIGNAL)
        and _has_signal(caught_signals, ALL_THREADS_SIGNAL)
        and not _has_signal(blocked_signals, MAIN_THREAD_SIGNAL)
    )
    return ProcessStatus(state, cpu_s, main_cpu_s, main_context_switches, shows_stacks)


def _has_signal(mask: int, number: int) -> bool:
    """Returns True if a signal is set in a mask, whose lowest bit stands for signal 1."""
    return (mask >> (number - 1)) & 1 == 1


def exit_code_of_ending_process(pid: int, root: Path = _PROC) -> int | None:
    """Returns the exit code of a process that has begun to end, but may not be gone yet.

    Args:
        pid: number of the process.
        root: the folder `/proc`.

    Returns:
        The exit code, or minus the number of the signal that ends the process. None if it is still
        running, is gone, or the kernel does not show the code.
    """
    try:
        # If a thread has not begun to end, the process is still running. For a running process the
        # kernel shows the exit code 0, which says nothing.
        for thread in (root / str(pid) / "task").iterdir():
            flags = int(_stat_fields(thread / "stat")[_FLAGS])
            if not flags & _PF_EXITING:
                return None

        wait_status = int(_stat_fields(root / str(pid) / "stat")[_EXIT_CODE])
        return os.waitstatus_to_exitcode(wait_status)
    except (OSError, ValueError, IndexError):
        return None


def describe_state(pid: int, root: Path = _PROC) -> str:
    """Describes the state of a process: `state D (in the kernel, ..., in nfs_wait)`.

    A process has one state for each of its threads. The one that keeps the process from ending is
    described: that of a thread in state D if there is one, and otherwise that of the main thread
    or, if the main thread has ended (Z), of another thread that has not.

    Args:
        pid: number of the process.
        root: the folder `/proc`.
    """
    state = ""
    kernel_function = ""
    with contextlib.suppress(OSError, IndexError):
        threads = list((root / str(pid) / "task").iterdir())
        threads.sort(key=lambda thread: thread.name != str(pid))  # the main thread comes first
        for thread in threads:
            state_of_thread = _stat_fields(thread / "stat")[_STATE]

            # Begin with the main thread. While only ended threads (Z) have been found, the next
            # thread replaces them, and a thread in state D replaces any other.
            is_first_thread = state == ""
            all_before_have_ended = state == "Z"
            if is_first_thread or all_before_have_ended or state_of_thread == "D":
                state = state_of_thread
                kernel_function = _kernel_function(thread)

    if not state:
        return "gone by now"

    meanings = []
    tracer = _tracer(root / str(pid))
    if state == "Z" and tracer:
        meanings.append(f"ended, but held by process {tracer}, which traces it")
    elif state in _STATE_MEANINGS:
        meanings.append(_STATE_MEANINGS[state])

    if kernel_function:
        meanings.append(f"in {kernel_function}")

    return f"state {state} ({', '.join(meanings)})" if meanings else f"state {state}"


def _kernel_function(thread: Path) -> str:
    """Returns the kernel function that a thread sleeps in; empty if there is none or it is not
    known.
    """
    with contextlib.suppress(OSError):
        name = (thread / "wchan").read_text().strip()
        if name != "0":
            return name
    return ""


def _tracer(process: Path) -> int:
    """Returns the process id of the debugger that traces a process, or 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_status_field((process / "status").read_text(), "TracerPid"))
    return 0


def cpu_of_descendants(pids: Collection[int], root: Path = _PROC) -> dict[int, float]:
    """Sums the processor time of all descendants of each process, including those that have ended.

    Args:
        pids: numbers of the processes.
        root: the folder `/proc`.

    Returns:
        The seconds, by process. Processes that are gone are left out. Without `/proc` it is empty.
    """
    # Read all processes of the machine into three tables. The times are in clock ticks. A process
    # that has ended since it was listed raises an OSError, and is in none of the tables.
    children: dict[int, list[int]] = defaultdict(list)
    own_ticks: dict[int, int] = {}
    ended_children_ticks: dict[int, int] = {}  # of children that the process has waited for
    for path in root.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat_fields(path)
            pid = int(path.parent.name)
            parent = int(fields[_PARENT])
            ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
            ticks_of_ended_children = int(fields[_ENDED_CHILDREN_USER_TICKS]) + int(
                fields[_ENDED_CHILDREN_SYSTEM_TICKS]
            )
            children[parent].append(pid)
            own_ticks[pid] = ticks
            ended_children_ticks[pid] = ticks_of_ended_children

    # Follow the children of each process. Its own time does not count.
    cpu_s: dict[int, float] = {}
    for pid in own_ticks.keys() & set(pids):
        ticks = ended_children_ticks[pid]
        descendants = list(children.get(pid, ()))
        while descendants:
            descendant = descendants.pop()
            ticks += own_ticks[descendant] + ended_children_ticks[descendant]
            descendants += children.get(descendant, ())
        cpu_s[pid] = ticks / os.sysconf("SC_CLK_TCK")

    return cpu_s


def harmless_stack_signal(
    pid: int, earlier_context_switches: int | None, *, answers: bool, root: Path = _PROC
) -> int | None:
    """Chooses a stack signal that a rank can be sent now without harm, if there is one.

    A signal makes `poll`, `sleep`, `sem_timedwait` and other calls of the thread that handles it
    fail with EINTR, see signal(7), and C code seldom expects that. Two cases are safe:

    1. All threads sleep, and the main thread does so for long. Then the signal that shows the
       stacks of all threads is safe: it is handled by the thread that answers the launcher's
       requests, and no other thread is interrupted.
    2. The main thread has computed for some tenths of a second, or has slept in a futex without a
       timeout, which locks and `sem_wait` are made of: the kernel continues such a sleep after the
       signal. Then the signal that shows the main thread's own stack is safe.

    Args:
        pid: number of the rank's process.
        earlier_context_switches: how often the main thread had given up its processor some tenths
            of a second ago (`ProcessStatus.main_context_switches`); None if that is not known. If
            the number is still the same, the main thread has computed all the time, or has slept
            all the time.
        answers: True if the rank has a thread that answers requests.
        root: the folder `/proc`.

    Returns:
        The number of the signal, or None if neither is safe now.
    """
    threads = root / str(pid) / "task"
    try:
        thread_states = set()
        for thread in threads.iterdir():
            thread_state, _ = _state_and_cpu_s(thread / "stat")
            thread_states.add(thread_state)
        kernel_function = (threads / str(pid) / "wchan").read_text()
        status = read_process(pid, root)
    except (OSError, ValueError, IndexError):
        return None
    if status is None:
        return None

    # If the number is the same, the main thread has slept, or has computed, all the time since.
    main_switches_unchanged = (
        earlier_context_switches is not None
        and status.main_context_switches == earlier_context_switches
    )
    main_is_in_futex = kernel_function.startswith("futex")

    # 1. All threads sleep. A main thread that has slept the whole time goes on sleeping while its
    # stack is read. One that waits for a lock in a futex may wake up now and then, every 5 ms if it
    # is Python's own lock, but it sleeps again at once.
    all_sleep = thread_states.issubset({"S", "D"})
    main_goes_on_sleeping = main_switches_unchanged or main_is_in_futex
    if answers and all_sleep and main_goes_on_sleeping:
        return ALL_THREADS_SIGNAL

    # 2. The main thread does something that a signal does not disturb, and has done so for a while.
    main_computes = status.state == "R"
    main_waits_without_timeout = main_is_in_futex and not _may_have_timeout(threads / str(pid))
    if main_switches_unchanged and (main_computes or main_waits_without_timeout):
        return MAIN_THREAD_SIGNAL

    return None


def _may_have_timeout(thread: Path) -> bool:
    """Returns True if a thread sleeps in a futex with a timeout, or if that cannot be read.

    Args:
        thread: the folder of the thread in `/proc`.
    """
    try:
        # `202 0x7f5c 0x189 0x0 0x0 ...`: the number of the system call, then its arguments. The
        # fourth argument points at the timeout, see futex(2).
        _, *arguments = (thread / "syscall").read_text().split()
        pointer_to_timeout = arguments[3]
        return pointer_to_timeout != "0x0"
    except (OSError, IndexError):  # reading it may be forbidden
        return True


def _status_field(text: str, name: str) -> str:
    """Reads one field of `/proc/PID/status`, such as `SigCgt: 0000000180014202`.

    Returns:
        The value, or an empty string if there is no such field.
    """
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    return ""


def _stat_fields(path: Path) -> list[str]:
    """Reads the fields of `/proc/PID/stat`, beginning with the state of the process."""
    # They follow the program's name in parentheses, which may itself contain any character.
    _, _, after_name = path.read_text().rpartition(")")
    return after_name.split()


def _state_and_cpu_s(path: Path) -> tuple[str, float]:
    """Reads the state of a process or thread, and its processor time in seconds."""
    fields = _stat_fields(path)
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return fields[_STATE], ticks / os.sysconf("SC_CLK_TCK")
