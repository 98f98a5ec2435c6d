"""Job control: at Ctrl-Z, `fg` and `bg` of the shell, ranks stop and go on with the launcher.

A terminal sends the signals of its keys to one *process group*, the foreground group, and only that
group may read its keyboard. Ranks have process groups of their own, so Ctrl-Z does not reach them:
the launcher stops them. The only rank of a run is put in the foreground instead, so that pdb and
`input()` work; then Ctrl-Z does not reach the launcher, for which the shell waits.

See "Job Control" in the manual of the GNU C library, and setpgid(2), tcsetpgrp(3).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping

from lockstep.run.watch.process_status import read_process

_PYTHON_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
_STANDARD_INPUT = 0


@contextlib.contextmanager
def handled(handlers: Mapping[int, Callable[[int], object]]) -> Iterator[None]:
    """Lets these functions answer signals within the block.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored; and a handler that the user
    has set stays. Python sets handlers in the main thread only, so elsewhere nothing is changed.

    Args:
        handlers: for each signal number, the function that is called with the number.
    """
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        for number in handlers:
            handler = signal.getsignal(number)
            if handler in _PYTHON_DEFAULT_HANDLERS:
                replaced[number] = handler

    try:
        for number in replaced:
            signal.signal(number, lambda received, frame: handlers[received](received))
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def stop_this_process() -> None:
    """Stops this process as Ctrl-Z would; returns when it goes on."""
    # With its default action the signal stops this process, which goes on in the next line.
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def in_foreground() -> bool:
    """Returns True if the terminal's keys reach this process."""
    return _foreground_group() == os.getpgrp()


def pass_keyboard(group: int, signal_ranks: Callable[[int], object]) -> None:
    """Keeps the only rank and the launcher in step; to be called often while the rank runs.

    When the shell has put the launcher in the foreground (`fg`), the rank gets the keyboard and
    goes on. When the user has stopped the rank by Ctrl-Z, the launcher takes the keyboard back and
    stops too, so that the shell shows its prompt.

    Args:
        group: the rank's process group.
        signal_ranks: sends the rank a signal.
    """
    # While the rank has the keyboard it is the rank that is in the foreground.
    if in_foreground():
        give_keyboard(group)
        signal_ranks(signal.SIGCONT)
        return

    process = read_process(group)
    is_stopped = process is not None and process.state == "T"
    if is_stopped:
        take_keyboard(group)
        os.killpg(os.getpgrp(), signal.SIGTSTP)  # as Ctrl-Z would: the whole job of the shell


def give_keyboard(group: int) -> None:
    """Puts a process group in the foreground, if this process is there now."""
    if in_foreground():
        set_foreground_group(_STANDARD_INPUT, group)


def take_keyboard(group: int) -> None:
    """Puts this process's group in the foreground, if `group` is there now."""
    if _foreground_group() == group:
        set_foreground_group(_STANDARD_INPUT, os.getpgrp())


def set_foreground_group(terminal: int, group: int) -> None:
    """Puts a process group in the foreground of a terminal; does nothing if it is no terminal.

    Args:
        terminal: a file descriptor.
        group: id of the process group.
    """
    # A process in the background that asks for this is stopped by SIGTTOU unless it ignores it.
    handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.tcsetpgrp(terminal, group)
    signal.signal(signal.SIGTTOU, handler)


def _foreground_group() -> int | None:
    """Returns the process group that the terminal's keys reach; None: there is no terminal."""
    try:
        return os.tcgetpgrp(_STANDARD_INPUT) if os.isatty(_STANDARD_INPUT) else None
    except OSError:  # it is not our terminal, or it is gone
        return None
