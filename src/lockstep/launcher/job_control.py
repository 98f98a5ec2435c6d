"""Ctrl-Z, `fg` and `bg` of the shell: the ranks stop and go on together with the launcher.

Ranks are process groups of their own, which the terminal's Ctrl-Z does not reach; a rank that is
alone has the keys instead of the launcher, and then Ctrl-Z does not reach the launcher, for which
the shell waits. See "Job Control" in the manual of the GNU C library, and setpgid(2), tcsetpgrp(3).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from lockstep.watchdog.snapshot import read_process


@contextlib.contextmanager
def stops_with(
    signal_ranks: Callable[[int], object], before_going_on: Callable[[], object]
) -> Iterator[None]:
    """Within it SIGTSTP stops the ranks and this process, and SIGCONT lets both go on.

    A handler that the user has set is left in place, and elsewhere than in the main thread nothing
    can be done.

    Args:
        signal_ranks: sends a signal to all ranks.
        before_going_on: called when this process goes on, before the ranks do.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        # Not SIGTSTP: the kernel does not stop groups by it that no shell could let go on.
        signal_ranks(signal.SIGSTOP)
        # Not by its name: a function that refers to itself keeps the run's sockets open until a
        # garbage collection.
        this = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, this)
        before_going_on()
        signal_ranks(signal.SIGCONT)

    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def in_foreground() -> bool:
    """Whether the terminal's keys reach this process."""
    return _holder() == os.getpgrp()


def follow(group: int, signal_ranks: Callable[[int], object]) -> None:
    """To be called often while a rank that is alone has, or should have, the terminal's keys.

    Args:
        group: the rank's process group.
        signal_ranks: sends it a signal.
    """
    if in_foreground():  # the shell's fg has given them to us
        give_keys(group)
        signal_ranks(signal.SIGCONT)
        return
    process = read_process(group)
    if process is not None and process.state == "T":
        take_keys(group)
        os.killpg(os.getpgrp(), signal.SIGTSTP)  # as Ctrl-Z would: all of the shell's job


def give_keys(group: int) -> None:
    """Lets the terminal's keys reach a group, if they reach ours now."""
    if in_foreground():
        _set_holder(group)


def take_keys(group: int) -> None:
    """Lets them reach ours, if they reach the group now."""
    if _holder() == group:
        _set_holder(os.getpgrp())


def _holder() -> int | None:
    try:
        return os.tcgetpgrp(0) if os.isatty(0) else None
    except OSError:  # not our terminal, or it is gone
        return None


def _set_holder(group: int) -> None:
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else asking would stop us
    with contextlib.suppress(OSError):
        os.tcsetpgrp(0, group)
    signal.signal(signal.SIGTTOU, before)
