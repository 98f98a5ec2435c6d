"""Reads what Linux knows about a rank's process from `/proc`, see proc(5).

*Processor time* is user and system time together. The *main thread* of a process is the one that
has the same number as the process. A *stack signal* makes a rank write its Python stacks to a file,
see `lockstep.run.watch.probe`.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
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
        state_of_process, cpu_s = _state_and_cpu_s(folder / "stat")
        status_text = (folder / "status").read_text()
    except (OSError, ValueError, IndexError):
        return None

    # The main thread may have ended before the process. Then the state of the process stands for
    # that of the main thread, whose processor time and context switches are not known.
    main_state = state_of_process
    main_cpu_s = None
    main_context_switches = None
    main_thread_folder = folder / "task" / str(pid)  # the main thread has the process's number
    with contextlib.suppress(OSError, ValueError, IndexError):
        main_state, main_cpu_s = _state_and_cpu_s(main_thread_folder / "stat")
        main_status_text = (main_thread_folder / "status").read_text()
        main_context_switches = int(_status_field(main_status_text, "voluntary_ctxt_switches"))

    return ProcessStatus(
        main_state, cpu_s, main_cpu_s, main_context_switches, _can_take_stack_signals(status_text)
    )


def _can_take_stack_signals(status_text: str) -> bool:
    """Returns True if a process may be sent a stack signal, as its `/proc/PID/status` says."""
    # The masks are written in hexadecimal. `SigBlk` is that of the main thread.
    caught_signals = int(_status_field(status_text, "SigCgt") or "0", 16)
    blocked_signals = int(_status_field(status_text, "SigBlk") or "0", 16)

    # A signal that the process does not handle would end it.
    for stack_signal in (MAIN_THREAD_SIGNAL, ALL_THREADS_SIGNAL):
        if not _has_signal(caught_signals, stack_signal):
            return False

    # The main thread must take its own signal. It blocks the other one, which another thread takes.
    return not _has_signal(blocked_signals, MAIN_THREAD_SIGNAL)


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

    Each thread of a process has a state. The text is about the thread that keeps the process from
    ending.

    Args:
        pid: number of the process.
        root: the folder `/proc`.
    """
    process_folder = root / str(pid)
    threads = _list_threads(process_folder)
    if not threads:
        return "gone by now"

    thread = _thread_that_keeps_process(threads)
    state = thread.state
    meanings = []
    tracer = _tracer(process_folder)
    if state == "Z" and tracer:
        meanings.append(f"ended, but held by process {tracer}, which traces it")
    elif state in _STATE_MEANINGS:
        meanings.append(_STATE_MEANINGS[state])

    kernel_function = _kernel_function(thread.folder)
    if kernel_function:
        meanings.append(f"in {kernel_function}")

    return f"state {state} ({', '.join(meanings)})" if meanings else f"state {state}"


def _list_threads(process_folder: Path) -> list[_Thread]:
    """Returns the threads of a process, the main thread first; none if the process is gone.

    Args:
        process_folder: the folder of the process in `/proc`, which has its number as its name.
    """
    threads: list[_Thread] = []
    with contextlib.suppress(OSError, IndexError):  # a thread that has just ended: no file, no text
        for folder in (process_folder / "task").iterdir():
            thread = _Thread(folder, _stat_fields(folder / "stat")[_STATE])
            is_main = folder.name == process_folder.name
            if is_main:
                threads.insert(0, thread)
            else:
                threads.append(thread)
    return threads


class _Thread(NamedTuple):
    """A thread of a process."""

    folder: Path
    """The folder of the thread in `/proc`."""
    state: str
    """R, S, D, T, t, Z, ..."""


def _thread_that_keeps_process(threads: Sequence[_Thread]) -> _Thread:
    """Returns the thread that keeps a process from ending.

    Args:
        threads: the threads of the process, the main thread first.
    """
    # 1. A thread in a system call that nothing can interrupt. If there are several, any will do.
    uninterruptible = [thread for thread in threads if thread.state == "D"]
    if uninterruptible:
        return uninterruptible[-1]

    # 2. The main thread or, if it has ended (Z), the first one that has not.
    not_ended = [thread for thread in threads if thread.state != "Z"]
    if not_ended:
        return not_ended[0]

    # 3. All have ended, so any will do.
    return threads[-1]


def _kernel_function(thread: Path) -> str:
    """Returns the kernel function that a thread sleeps in; empty if in none, or if not known."""
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


class _Ticks(NamedTuple):
    """The processor time of a process, in clock ticks."""

    own: int
    of_ended_children: int
    """The ticks of the children that have ended and that the process has waited for."""


def _read_ticks(fields: Sequence[str]) -> _Ticks:
    """Reads the processor time of a process from the fields of its `stat` file."""
    user_ticks_of_children = int(fields[_ENDED_CHILDREN_USER_TICKS])
    system_ticks_of_children = int(fields[_ENDED_CHILDREN_SYSTEM_TICKS])
    return _Ticks(_own_ticks(fields), user_ticks_of_children + system_ticks_of_children)


def _own_ticks(fields: Sequence[str]) -> int:
    """Reads the processor time of a process without its children, or that of a thread."""
    return int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])


def cpu_of_descendants(pids: Collection[int], root: Path = _PROC) -> dict[int, float]:
    """Sums the processor time of all descendants of each process, including those that have ended.

    Args:
        pids: numbers of the processes.
        root: the folder `/proc`.

    Returns:
        The seconds, by process. Processes that are gone are left out. Without `/proc` it is empty.
    """
    # Read all processes of the machine. One that has ended since it was listed raises an OSError,
    # and is left out.
    children: dict[int, list[int]] = defaultdict(list)
    ticks_of_process: dict[int, _Ticks] = {}
    for path in root.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat_fields(path)
            pid = int(path.parent.name)
            parent = int(fields[_PARENT])
            ticks_of_process[pid] = _read_ticks(fields)
            children[parent].append(pid)

    # The own time of a process does not count, but that of each descendant does.
    cpu_s: dict[int, float] = {}
    existing_pids = ticks_of_process.keys() & set(pids)
    for pid in existing_pids:
        sum_of_ticks = ticks_of_process[pid].of_ended_children
        for descendant in _descendants(pid, children):
            ticks = ticks_of_process[descendant]
            sum_of_ticks += ticks.own + ticks.of_ended_children
        cpu_s[pid] = sum_of_ticks / os.sysconf("SC_CLK_TCK")

    return cpu_s


def _descendants(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    """Returns the children of a process, their children, and so on.

    Args:
        pid: number of the process.
        children: the children of each process that has some.
    """
    descendants: list[int] = []
    not_visited = list(children.get(pid, ()))
    while not_visited:
        descendant = not_visited.pop()
        descendants.append(descendant)
        not_visited += children.get(descendant, ())
    return descendants


def harmless_stack_signal(
    pid: int, earlier_context_switches: int | None, *, answers: bool, root: Path = _PROC
) -> int | None:
    """Chooses a stack signal that a rank can be sent now without harm, if there is one.

    A signal makes `poll`, `sleep`, `sem_timedwait` and other calls of the thread that handles it
    fail with EINTR, see signal(7), and C code seldom expects that.

        signal               is handled by                      is safe if
        ALL_THREADS_SIGNAL   the thread that answers requests   all threads sleep
        MAIN_THREAD_SIGNAL   the main thread                    it is in no call that would fail

    The first one shows the stacks of all threads, which cannot be read while they run.

    Args:
        pid: number of the rank's process.
        earlier_context_switches: the context switches of the main thread, counted some tenths of a
            second ago (`ProcessStatus.main_context_switches`). If there were none since, it has
            slept, or has computed, all the time. None if they are not known.
        answers: True if the rank has a thread that answers requests.
        root: the folder `/proc`.

    Returns:
        The number of the signal, or None if neither is safe now.
    """
    threads = _read_threads(pid, earlier_context_switches, root)
    if threads is None:
        return None

    if answers and _all_go_on_sleeping(threads):
        return ALL_THREADS_SIGNAL
    if _main_is_not_disturbed_by_signal(threads):
        return MAIN_THREAD_SIGNAL

    return None


class _ThreadsOfRank(NamedTuple):
    """What the threads of a rank do."""

    states: set[str]
    """The states of all threads: R, S, D, ..."""
    main_state: str
    main_is_in_futex: bool
    """True if the main thread sleeps in a futex, which locks and `sem_wait` are made of."""
    main_may_time_out: bool
    """True if that futex has a timeout, or if this is not known."""
    main_has_not_switched: bool
    """True if the main thread has not given up its processor for some tenths of a second: it has
    computed all the time, or has slept all the time."""


def _read_threads(
    pid: int, earlier_context_switches: int | None, root: Path
) -> _ThreadsOfRank | None:
    """Reads what the threads of a rank do, or returns None if it is gone.

    Args:
        pid: number of the rank's process.
        earlier_context_switches: the main thread's count of context switches, as it was read some
            tenths of a second ago; None if that is not known.
        root: the folder `/proc`.
    """
    threads_folder = root / str(pid) / "task"
    main_thread_folder = threads_folder / str(pid)  # the main thread has the process's number
    states = set()
    try:
        for thread in threads_folder.iterdir():
            state, _cpu_s = _state_and_cpu_s(thread / "stat")
            states.add(state)
        kernel_function = (main_thread_folder / "wchan").read_text()
    except (OSError, ValueError, IndexError):
        return None
    status = read_process(pid, root)
    if status is None:
        return None

    return _ThreadsOfRank(
        states=states,
        main_state=status.state,
        main_is_in_futex=kernel_function.startswith("futex"),
        main_may_time_out=_may_have_timeout(main_thread_folder),
        main_has_not_switched=(
            earlier_context_switches is not None
            and status.main_context_switches == earlier_context_switches
        ),
    )


def _all_go_on_sleeping(threads: _ThreadsOfRank) -> bool:
    """Returns True if all threads of a rank sleep, and go on sleeping while their stacks are read.

    The main thread goes on sleeping if it has slept the whole time. In a futex it may wake up now
    and then, every 5 ms if it waits for Python's own lock, but it sleeps again at once.
    """
    all_sleep = threads.states.issubset({"S", "D"})
    return all_sleep and (threads.main_has_not_switched or threads.main_is_in_futex)


def _main_is_not_disturbed_by_signal(threads: _ThreadsOfRank) -> bool:
    """Returns True if the main thread of a rank does something that a signal cannot disturb.

    A signal does not disturb a thread that has computed for a while, or has slept in a futex
    without a timeout: the kernel continues such a sleep after the signal.
    """
    computes = threads.main_state == "R"
    waits_without_timeout = threads.main_is_in_futex and not threads.main_may_time_out
    return threads.main_has_not_switched and (computes or waits_without_timeout)


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
    return fields[_STATE], _own_ticks(fields) / os.sysconf("SC_CLK_TCK")
