"""Runs clean-ups before a signal such as SIGTERM ends this process.

By default SIGTERM ends a process where it is, and a checkpoint that it was writing stays half
written. A handler in Python is not enough: Python runs it in the main thread, once that has come
back from C++. A rank that waits there for another one, which has failed, does not come back, and
that is when launchers send SIGTERM. But Python writes the signal's number to a pipe at once
(signal.set_wakeup_fd), and a thread of ours reads it there.

Where the program handles these signals itself, nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Launchers and schedulers end a run by the first, a terminal that is closed by the second."""


class _Watcher:
    """A thread that hears of signals at once, whatever the main thread does."""

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        # A daemon: a program that never closes its run must be able to end.
        self._thread = threading.Thread(target=self._watch, name="lockstep-signals", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            number = os.read(self._reads, 1)[0]
            if number == 0:
                return
            if signal.getsignal(number) is _handle:
                end_by(number)

    def close(self) -> None:
        """Ends the thread."""
        present = signal.set_wakeup_fd(-1)
        if present != self._writes:
            signal.set_wakeup_fd(present)  # of somebody who has come after us
        os.write(self._writes, b"\0")
        self._thread.join()
        os.close(self._reads)
        os.close(self._writes)


_cleanups: list[Callable[[], object]] = []
_handled: list[int] = []
"""The signals for which our handler stands in the place of their default action."""
_watcher: _Watcher | None = None
_ending = threading.RLock()


def protect(cleanup: Callable[[], object]) -> None:
    """Has `cleanup` called before a signal ends this process; only the main thread can do that."""
    global _watcher
    if threading.current_thread() is not threading.main_thread():
        return
    if cleanup not in _cleanups:
        _cleanups.append(cleanup)
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _handle)
            _handled.append(number)
    if _handled and _watcher is None and not _program_hears_signals():
        _watcher = _Watcher()


def unprotect(cleanup: Callable[[], object]) -> None:
    """Undoes `protect`."""
    global _watcher
    if threading.current_thread() is not threading.main_thread():
        return
    with suppress(ValueError):  # it was not protected
        _cleanups.remove(cleanup)
    if _cleanups:
        return
    _restore_default_actions()
    if _watcher is not None:
        _watcher.close()
        _watcher = None


@contextmanager
def undone_unless_finished(cleanup: Callable[[], object]) -> Iterator[None]:
    """Calls `cleanup` if the block raises, or if a signal ends this process in it."""
    protect(cleanup)
    try:
        yield
    except BaseException:
        cleanup()
        raise
    finally:
        unprotect(cleanup)


def is_default(number: int) -> bool:
    """Whether a signal ends this process, with or without clean-ups."""
    return signal.getsignal(number) in (signal.SIG_DFL, _handle)


def end_by(number: int) -> None:
    """Runs the clean-ups, then ends this process as the signal's default action does."""
    with _ending:
        for cleanup in list(_cleanups):
            with suppress(Exception):
                cleanup()
        # Not signal.signal, which works in the main thread alone.
        default_action = ctypes.c_void_p(0)
        ctypes.CDLL(None).signal(number, default_action)
        os.kill(os.getpid(), number)


def _handle(number: int, frame: FrameType | None) -> None:
    end_by(number)


def _program_hears_signals() -> bool:
    """Whether the program uses the only such pipe that a process has, as asyncio does."""
    present = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(present)
    return present != -1


def _restore_default_actions() -> None:
    while _handled:
        number = _handled.pop()
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


def _forget_in_child() -> None:
    """In a forked process, such as a worker of a DataLoader, signals do what they did before.

    Its numbers would otherwise be written to the pipe of this process, which would end.
    """
    global _watcher, _ending
    _ending = threading.RLock()
    _cleanups.clear()
    _restore_default_actions()
    if _watcher is not None:
        signal.set_wakeup_fd(-1)
        _watcher = None


os.register_at_fork(after_in_child=_forget_in_child)
