"""Decides how long to wait for a process that should end but does not.

SIGKILL ends a process only when the kernel allows it. A process that waits in the kernel for a lost
GPU, or for a file server that does not respond, is in state D and may stay there until the machine
is restarted. A process that has much memory to free ends late, but it does end: freeing memory
takes processor time, which the kernel counts.
"""

from __future__ import annotations

import time
from enum import Enum, auto

from lockstep.run.watch.process_status import read_process

GIVE_UP_IDLE_AFTER_S = 10.0
"""The launcher gives up on a process that has used no processor time for this long."""
GIVE_UP_BUSY_AFTER_S = 60.0
"""A process that does use processor time gets longer, though it may loop in a driver forever."""
LATE_AFTER_S = 10.0
"""After this long, the user is told that a process which uses processor time ends late."""


class Progress(Enum):
    """What to think of a process that should have ended."""

    IN_TIME = auto()
    """It may still end in time."""
    LATE = auto()
    """It is still busy, but takes so long that the user should know."""
    GIVEN_UP = auto()
    """It should no longer be waited for."""


class LateEnd:
    """A process that should have ended.

    Args:
        pid: process id of the process.
    """

    def __init__(self, pid: int) -> None:
        self.is_announced = False
        """True once the user has been told that the process ends late."""
        self._pid = pid
        self._began = time.monotonic()
        self._cpu_s = -1.0  # so that the first look is a change
        self._last_change = self._began

    @property
    def waited_s(self) -> float:
        """The seconds since the process should have ended."""
        return time.monotonic() - self._began

    def check(self) -> Progress:
        """Looks at the process again, and returns what to think of it.

        A process that uses no processor time is given up after 10 s. A busy process is late after
        10 s, and given up after 60 s.
        """
        now = time.monotonic()
        status = read_process(self._pid)  # None if it cannot be read; it then counts as idle
        if status is not None and status.cpu_s != self._cpu_s:
            self._cpu_s = status.cpu_s
            self._last_change = now

        has_taken_too_long = now - self._began >= GIVE_UP_BUSY_AFTER_S
        has_been_idle_for_too_long = now - self._last_change >= GIVE_UP_IDLE_AFTER_S
        if has_taken_too_long or has_been_idle_for_too_long:
            return Progress.GIVEN_UP

        is_late = now - self._began >= LATE_AFTER_S
        return Progress.LATE if is_late else Progress.IN_TIME
