"""Shows whether the run that has a folder's lock is alive, if the file system has no locks.

That run, the *holder*, changes the time of the lock file every few seconds: that is a *sign of
life*. A run on another machine that wants the lock watches the file for such a change. If there is
none for `MAX_SILENCE_S`, it considers the holder lost. The time itself says nothing to it, so the
clocks of the two machines may differ.

A holder that was stopped for that long, by SIGSTOP or because its laptop slept, may wake up after
another run has taken the lock. It gives no more signs of life then, as the text of the file is no
longer its own, and learns before its next save that it has lost the lock. A sign of life never
changes the text, so one that comes late does no harm to the other run.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

INTERVAL_S = 15.0
"""Time between two signs of life of the holder."""
LOOK_INTERVAL_S = 1.0
"""Time between two looks of a run that watches the file."""
MAX_SILENCE_S = 180.0
"""A holder without a sign of life for this long is considered lost. A network file system may show
a change a minute late, and a C extension may keep Python's threads from running for another one."""
MAX_WAIT_FOR_THREAD_S = 2.0
"""How long `end` waits for the thread, which a file server that is away may hold up."""
MAX_TEXT_BYTES = 10_000


class SignsOfLife:
    """Gives signs of life of this process, the holder, from a thread until `end` is called.

    Args:
        path: the lock file.
        text: what this process writes into it.

    Raises:
        RuntimeError: the system allows no more threads.
    """

    def __init__(self, path: Path, text: bytes) -> None:
        self._path = path
        self.text = text
        self._ended = threading.Event()
        # A daemon thread, so that a program which never closes its run can end.
        self._thread = threading.Thread(target=self._run, name="lockstep-lock", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Runs in the thread."""
        while not self._ended.wait(INTERVAL_S):
            self.give()

    def give(self) -> None:
        """Changes the time of the lock file, if the file is still that of this process."""
        with suppress(OSError):  # the file or its server is away: the next attempt may do better
            text, _ = look_at(self._path)
            if text == self.text:
                os.utime(self._path)

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join(MAX_WAIT_FOR_THREAD_S)


def look_at(path: Path) -> tuple[bytes, int]:
    """Returns the text of a lock file, and the time of its last change in nanoseconds.

    The file is opened anew, because a network file system then asks its server what others have
    changed.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    with path.open("rb") as file:
        return file.read(MAX_TEXT_BYTES), os.fstat(file.fileno()).st_mtime_ns


def stays_silent(path: Path) -> bool:
    """Watches the lock file of a holder on another machine for `MAX_SILENCE_S`.

    Returns:
        True if the file has not changed. False as soon as it changes.

    Raises:
        OSError: the file was removed meanwhile, or cannot be read.
    """
    # Looks are counted, not seconds by the clock. While this process is stopped or the file server
    # is away, the clock runs on, although no sign of life could be seen.
    num_looks = round(MAX_SILENCE_S / LOOK_INTERVAL_S)
    first = look_at(path)
    for _ in range(num_looks):
        time.sleep(LOOK_INTERVAL_S)
        if look_at(path) != first:
            return False
    return True
