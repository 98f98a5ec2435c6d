"""Ends processes that ranks have started and that have outlived them.

Such a process is *left behind*. A worker of a DataLoader, for example, looks for its parent every
5 s only, and until then keeps what it has inherited from it. Some processes do not end at any
signal, see `late_end`; those are not waited for.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

KILL_TIMEOUT_S = 2.0
"""How long a process may take to end after SIGKILL."""
MAX_POLL_S = 0.02
_RECHECK_S = 0.1


def end_with_descendants(
    find_processes: Callable[[], list[psutil.Process]], term_grace_s: float
) -> list[int]:
    """Ends processes and all their descendants, first by SIGTERM, then by SIGKILL.

    The processes are children of this process, or of ranks that it has given up. They are listed
    again and again, as they may start others in the meantime.

    Args:
        find_processes: function that lists the processes to end, without their descendants.
        term_grace_s: time between SIGTERM and SIGKILL, in seconds.

    Returns:
        The ids of processes that have not ended some seconds after SIGKILL. A zombie has ended,
        though its parent has not collected its exit status.
    """
    kill_at = time.monotonic() + term_grace_s
    deadline = kill_at + KILL_TIMEOUT_S
    terminated: set[psutil.Process] = set()
    processes: list[psutil.Process] = []
    while time.monotonic() < deadline:
        roots = find_processes()
        processes = _with_descendants(roots)
        if not processes:
            break

        if time.monotonic() >= kill_at:
            _kill(processes)
        else:
            _ask_to_end(process for process in processes if process not in terminated)
            terminated.update(processes)

        # A process can only wait for its own children. Grandchildren become children of this
        # process when their parents have ended, as it is a subreaper (see `parent_death`).
        wait_for_ends({root.pid for root in roots}, _RECHECK_S)

        # This returns at once if all roots are children of given-up ranks. Avoid a busy loop.
        time.sleep(MAX_POLL_S)

    return [process.pid for process in processes if not _has_ended_completely(process)]


def end_process_groups(leaders: Iterable[int]) -> list[int]:
    """Kills the process groups of ranks whose fork server is gone, and waits until they have ended.

    The kernel kills these ranks, but not the processes that they have started, which keep what they
    have inherited, such as the connection to the launcher's store.

    This is called right after the end of the fork server, so no other process has been given the id
    of a rank yet.

    Args:
        leaders: the process ids of ranks that were running when the fork server ended. Each
            rank leads a process group of its own.

    Returns:
        The ids of processes that have not ended although they were killed.
    """
    groups = set(leaders)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while True:
        # They are listed again each time, as they may have started others in the meantime.
        processes = _running_members(groups)
        _kill(processes)
        if not processes or time.monotonic() >= deadline:
            return [process.pid for process in processes]
        time.sleep(MAX_POLL_S)


def _with_descendants(children: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Returns the given processes and all processes below them."""
    import psutil

    processes = list(children)
    for child in children:
        with contextlib.suppress(psutil.Error):  # it has just ended
            processes += child.children(recursive=True)
    return processes


def _ask_to_end(processes: Iterable[psutil.Process]) -> None:
    """Sends processes SIGTERM, and continues those that are stopped, so that they handle it."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            process.terminate()
            process.resume()


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Sends processes SIGKILL."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            process.kill()


def running_children(process: psutil.Process) -> list[psutil.Process]:
    """Returns the children of a process without the zombies, which it may never collect."""
    import psutil

    running = []
    with contextlib.suppress(psutil.Error):
        for child in process.children():
            if not _has_ended_completely(child):
                running.append(child)
    return running


def _running_members(groups: set[int]) -> list[psutil.Process]:
    """Returns the processes in the given process groups that are still running."""
    import psutil

    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.Error):  # it has just ended
            if os.getpgid(pid) in groups:
                process = psutil.Process(pid)
                if not _has_ended_completely(process):
                    members.append(process)
    return members


def wait_for_ends(pids: set[int], timeout: float) -> set[int]:
    """Waits for children of this process to end, for at most `timeout` seconds.

    `psutil.wait_procs` is not used, as it waits without limit for a process that a debugger holds.

    Returns:
        The ids of those that have not ended.
    """
    deadline = time.monotonic() + timeout
    while True:
        pids = {pid for pid in pids if not _has_ended(pid)}
        if not pids or time.monotonic() >= deadline:
            return pids
        time.sleep(MAX_POLL_S)


def _has_ended_completely(process: psutil.Process) -> bool:
    """Returns True if a process has ended, whether or not its parent has collected its exit status.

    The kernel shows a process as a zombie as soon as its main thread has ended:

        there is no such process                   True
        it is a zombie with a single thread        True
        it is a zombie with further threads        False: one still runs, or waits for a device
        it is running                              False
    """
    import psutil

    try:
        # `is_running` notices if another process has been given the process id. It comes after
        # `status`, so the status is not that of another process.
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        if not process.is_running():
            return True

        has_single_thread = process.num_threads() <= 1
        return bool(is_zombie and has_single_thread)
    except psutil.NoSuchProcess:
        return True


def _has_ended(pid: int) -> bool:
    """Returns True if a child of this process has ended, after collecting its exit status."""
    try:
        ended_pid, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # it was collected before, or is not a child of this process
        return True
    return ended_pid == pid
