"""Implements job control: ranks stop and continue together with the launcher at Ctrl-Z, `fg` and
`bg`.

A terminal sends the signals of its keys to one *process group*, the foreground group, and only that
group may read the keyboard. Ranks have process groups of their own, so Ctrl-Z does not reach them,
and the launcher stops them. If a run has only one rank, its group is put in the foreground, so that
pdb and `input()` work. Then Ctrl-Z does not reach the launcher, for which the shell waits.

See "Job Control" in the manual of the GNU C library, and setpgid(2), tcsetpgrp(3).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from lockstep.run.watch.process_status import read_process

if TYPE_CHECKING:
    from lockstep.run.start.process import Process

_PYTHON_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
_STANDARD_INPUT = 0


@contextlib.contextmanager
def handled(handlers: Mapping[int, Callable[[int], object]]) -> Iterator[None]:
    """Handles signals with the given functions within the block.

    A signal that is ignored, such as SIGHUP under nohup, stays ignored, and a handler that the user
    has set stays in place. Python allows handlers to be set only in the main thread, so in other
    threads nothing is changed.

    Args:
        handlers: the function for each signal number. It is called with the number.
    """

    def dispatch(number: int, frame: object) -> None:
        """Calls the function of the signal that has come, without the interrupted frame."""
        handlers[number](number)

    default_handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in handlers:
            handler = signal.getsignal(number)
            is_default = handler in _PYTHON_DEFAULT_HANDLERS  # not SIG_IGN, not set by the user
            if is_default:
                default_handlers[number] = handler

    try:
        for number in default_handlers:
            signal.signal(number, dispatch)
        yield
    finally:
        for number, handler in default_handlers.items():
            signal.signal(number, handler)


class Keyboard:
    """The terminal's keyboard, which the only rank of a run may read, for pdb and `input()`."""

    def __init__(self) -> None:
        self.rank: Process | None = None
        """The rank that reads it; None if the launcher's group stays in the foreground."""

    def pass_on_ctrl_z(self, signal_ranks: Callable[[int], object]) -> None:
        """Stops this process after the user has stopped the rank by Ctrl-Z, and continues the rank
        after the user has entered `fg`. It is called often.

        Args:
            signal_ranks: function that sends a signal to the rank.
        """
        pid = self._pid_of_running_rank()
        if pid is not None:
            pass_keyboard(pid, signal_ranks)

    def give_again(self) -> None:
        """Gives the rank the keyboard again, after the user has continued this process."""
        pid = self._pid_of_running_rank()
        if pid is not None:
            give_keyboard(pid)

    def take_back(self) -> None:
        """Puts this process back in the foreground, after the rank has ended."""
        if self.rank is not None and self.rank.pid:
            take_keyboard_from(self.rank.pid)

    def _pid_of_running_rank(self) -> int | None:
        """Returns the process id of the rank; None if there is no such rank, or if it has not been
        started yet or has ended.
        """
        rank = self.rank
        if rank is None or not rank.pid or rank.code is not None:
            return None
        return rank.pid


def stop_this_process() -> None:
    """Stops this process as Ctrl-Z would, and returns when it is continued."""
    # With its default action, the signal stops this process at the second line below.
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def in_foreground() -> bool:
    """Returns True if this process is in the foreground, so that the terminal's keys reach it."""
    return _foreground_group() == os.getpgrp()


def pass_keyboard(group: int, signal_ranks: Callable[[int], object]) -> None:
    """Keeps the only rank and the launcher in step. It is called often while the rank is running.

    If the shell has put the launcher in the foreground (`fg`), the rank gets the keyboard and is
    continued. If the user has stopped the rank by Ctrl-Z, the launcher takes the keyboard back and
    stops too, so that the shell shows its prompt.

    Args:
        group: the process group of the rank.
        signal_ranks: function that sends a signal to the rank.
    """
    # While the rank has the keyboard, the rank is in the foreground, and not this process. If this
    # process is there now, the user has entered `fg`.
    if in_foreground():
        give_keyboard(group)
        signal_ranks(signal.SIGCONT)
        return

    process = read_process(group)
    is_stopped = process is not None and process.state == "T"
    if is_stopped:
        take_keyboard_from(group)
        os.killpg(os.getpgrp(), signal.SIGTSTP)  # stops the whole job of the shell, as Ctrl-Z does


def give_keyboard(group: int) -> None:
    """Puts a process group in the foreground, if this process is in the foreground now."""
    if in_foreground():
        set_foreground_group(_STANDARD_INPUT, group)


def take_keyboard_from(group: int) -> None:
    """Puts the group of this process in the foreground, if `group` is in the foreground now."""
    if _foreground_group() == group:
        set_foreground_group(_STANDARD_INPUT, os.getpgrp())


def set_foreground_group(terminal: int, group: int) -> None:
    """Puts a process group in the foreground of a terminal.

    Does nothing if the descriptor is not that of a terminal.

    Args:
        terminal: a file descriptor.
        group: id of the process group.
    """
    # If a process in the background does this, SIGTTOU stops it unless the signal is ignored.
    handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.tcsetpgrp(terminal, group)
    signal.signal(signal.SIGTTOU, handler)


def _foreground_group() -> int | None:
    """Returns the process group in the foreground of the terminal, or None if there is no
    terminal.
    """
    try:
        return os.tcgetpgrp(_STANDARD_INPUT) if os.isatty(_STANDARD_INPUT) else None
    except OSError:  # the terminal belongs to another session, or is gone
        return None
