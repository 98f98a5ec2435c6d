"""Decides how long to wait for a process that should end but does not.

SIGKILL ends a process only when the kernel allows it. A process that waits in the kernel for a lost
GPU, or for a file server that does not respond, is in state D and may stay there until the machine
is restarted. A process that has much memory to free ends late, but it does end: freeing memory
takes processor time, which the kernel counts.
"""

from __future__ import annotations

import time

from lockstep.run.watch.process_status import read_process

GIVE_UP_IDLE_AFTER_S = 10.0
"""The launcher gives up on a process that has used no processor time for this long."""
GIVE_UP_BUSY_AFTER_S = 60.0
"""A process that does use processor time gets longer, though it may loop in a driver forever."""


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

    @property
    def is_late(self) -> bool:
        """True if the process takes so long that the user should know."""
        return self.waited_s >= GIVE_UP_IDLE_AFTER_S

    def check_given_up(self) -> bool:
        """Checks the process again, and returns True if it should no longer be waited for.

        A process that uses no processor time is given up after 10 s, and any process after 60 s,
        even if it is still busy.
        """
        now = time.monotonic()
        status = read_process(self._pid)  # None if it cannot be read; it then counts as idle
        if status is not None and status.cpu_s != self._cpu_s:
            self._cpu_s = status.cpu_s
            self._last_change = now

        has_taken_too_long = now - self._began >= GIVE_UP_BUSY_AFTER_S
        has_been_idle_for_too_long = now - self._last_change >= GIVE_UP_IDLE_AFTER_S
        return has_taken_too_long or has_been_idle_for_too_long
