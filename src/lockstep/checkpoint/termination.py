"""Calls clean-up functions before a signal such as SIGTERM ends this process.

By default SIGTERM ends a process at once, and a checkpoint that it was writing remains half
written. A signal handler in Python is not enough: Python calls it in the main thread, once this
thread has returned from C++. Launchers send SIGTERM when a rank has failed. The other ranks then
wait in C++ for the failed one, and do not return. But Python also writes the number of each signal
to a pipe at once (`signal.set_wakeup_fd`), and a thread of this module reads the pipe.

If the program handles these signals itself, nothing is changed.
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
"""Launchers and schedulers send SIGTERM to end a run; a terminal that is closed sends SIGHUP."""


class _Watcher:
    """A thread that notices signals at once, whatever the main thread is doing.

    Python calls a signal handler in the main thread, which may take long. But it writes the number
    of the signal to a pipe at once, and this thread reads the pipe. There is only one such pipe in
    a process: if the program uses it, there must be no watcher, and only the handler is left.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        # A daemon thread, so that a program which never closes its run can end.
        self._thread = threading.Thread(target=self._watch, name="lockstep-signals", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Runs in the thread. Ends the process on the first signal that has our handler."""
        while True:
            # Python writes one byte for each signal: its number.
            number = os.read(self._read_end, 1)[0]

            # No signal has the number 0: `close` writes it to end this thread.
            was_closed = number == 0
            if was_closed:
                return
            if signal.getsignal(number) is _handle:
                end_by(number)

    def close(self) -> None:
        """Ends the thread, and closes its pipe."""
        # `set_wakeup_fd` returns the pipe that was set before. If that is not ours, because the
        # program has set a pipe of its own meanwhile, it is put back.
        current_fd = signal.set_wakeup_fd(-1)
        if current_fd != self._write_end:
            signal.set_wakeup_fd(current_fd)

        os.write(self._write_end, b"\0")  # ends the thread: no signal has the number 0
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)


_cleanups: list[Callable[[], object]] = []
"""The functions that are called before a signal ends this process."""
_handled_signals: list[int] = []
"""The signals that have our handler in place of their default action."""
_watcher: _Watcher | None = None
_ending_lock = threading.RLock()
"""Held by the thread that ends the process, so that clean-ups run only once."""


def protect(cleanup: Callable[[], object]) -> None:
    """Makes sure that `cleanup` is called before a signal ends this process.

    In any thread but the main thread this does nothing, because only the main thread can install
    signal handlers.
    """
    global _watcher
    if threading.current_thread() is not threading.main_thread():
        return

    if cleanup not in _cleanups:
        _cleanups.append(cleanup)
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _handle)
            _handled_signals.append(number)

    # The watcher ends the process even while the main thread is in C++.
    if _handled_signals and _watcher is None and not _program_uses_wakeup_fd():
        _watcher = _Watcher()


def unprotect(cleanup: Callable[[], object]) -> None:
    """Undoes `protect` for one function. After the last one, signals act as they did before.

    In any thread but the main thread this does nothing, as `protect` does nothing there: only the
    main thread can install signal handlers.
    """
    global _watcher
    if threading.current_thread() is not threading.main_thread():
        return

    if cleanup in _cleanups:
        _cleanups.remove(cleanup)
    if _cleanups:
        return

    _restore_actions()
    if _watcher is not None:
        _watcher.close()
        _watcher = None


@contextmanager
def cleaned_up_on_failure(cleanup: Callable[[], object]) -> Iterator[None]:
    """Calls `cleanup` if the block raises an error, or if a signal ends the process during it."""
    protect(cleanup)
    try:
        yield
    except BaseException:  # also Ctrl-C
        cleanup()
        raise
    finally:
        # The block is over, so a signal need not call `cleanup` any more.
        unprotect(cleanup)


def is_default(number: int) -> bool:
    """Returns True if a signal ends this process, by its default action or through our handler."""
    return signal.getsignal(number) in (signal.SIG_DFL, _handle)


def end_by(number: int) -> None:
    """Calls the clean-up functions, then ends this process by the signal's default action."""
    with _ending_lock:  # until the process has ended
        for cleanup in list(_cleanups):
            with suppress(Exception):  # the process must end even if a clean-up fails
                cleanup()

        # Python's `signal.signal` raises an error outside of the main thread, so the C function is
        # called. SIG_DFL is a null pointer in C.
        default_action = ctypes.c_void_p(0)
        ctypes.CDLL(None).signal(number, default_action)
        os.kill(os.getpid(), number)


def _handle(number: int, frame: FrameType | None) -> None:
    end_by(number)


def _program_uses_wakeup_fd() -> bool:
    """Returns True if the program uses the wake-up pipe itself, as asyncio does.

    A process has only one such pipe. Python can only tell which it is when it is replaced.
    """
    current_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(current_fd)
    return current_fd != -1


def _restore_actions() -> None:
    """Gives the signals that still have our handler the default action, which they had before."""
    while _handled_signals:
        number = _handled_signals.pop()
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


def _forget_in_child() -> None:
    """Undoes everything in a forked process, for example a worker of a DataLoader."""
    global _watcher, _ending_lock
    # A thread that the child does not have may hold the parent's lock.
    _ending_lock = threading.RLock()
    _cleanups.clear()
    _restore_actions()

    # Otherwise the child would write its signals to the pipe of its parent, and so end the parent.
    if _watcher is not None:
        signal.set_wakeup_fd(-1)
        _watcher = None


os.register_at_fork(after_in_child=_forget_in_child)
