"""Decides how long to wait for a process that must end and does not.

SIGKILL ends a process only when the kernel lets it. A process that waits in the kernel for a lost
GPU, or for a file server that does not answer, is in state D and may stay there until the machine
is restarted. A process that has much memory to free ends late, but it ends: to free memory takes
processor time, which the kernel counts.
"""

from __future__ import annotations

import time

from lockstep.run.watch.process_status import read_process

GIVE_UP_AFTER_S = 10.0
"""A process that must end is given up if it has used no processor time for this long."""
GIVE_UP_BUSY_AFTER_S = 60.0
"""A process that does use processor time is given up later: it may loop in a driver for ever."""


class LateEnd:
    """One process that must end.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int) -> None:
        self.is_announced = False
        """True once the user has been told that it ends late."""
        self._pid = pid
        self._began = time.monotonic()
        self._cpu_s = -1.0  # so that the first look is a change
        self._last_change = self._began

    @property
    def waited_s(self) -> float:
        """Seconds since the process was to end."""
        return time.monotonic() - self._began

    @property
    def is_late(self) -> bool:
        """True if it takes so long that the user should know."""
        return self.waited_s >= GIVE_UP_AFTER_S

    def is_given_up(self) -> bool:
        """Looks at the process again, and returns True if it is waited for no longer."""
        now = time.monotonic()
        status = read_process(self._pid)
        if status is not None and status.cpu_s != self._cpu_s:
            self._cpu_s = status.cpu_s
            self._last_change = now
        if now - self._began >= GIVE_UP_BUSY_AFTER_S:
            return True
        return now - self._last_change >= GIVE_UP_AFTER_S
