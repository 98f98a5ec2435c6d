"""Tells the user what a launcher waits for, without repeating it all the time."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_ANNOUNCEMENT_S = 5.0
NEXT_ANNOUNCEMENT_S = 60.0


class WaitAnnouncer:
    """Announces the reason for a wait after 5 s, when it changes, and then once a minute.

    Args:
        say: function that shows a line to the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._wait_started = time.monotonic()
        self._next_announcement = self._wait_started + FIRST_ANNOUNCEMENT_S
        self._announced_reasons = ""

    def say_waiting(self, reasons: str) -> None:
        """Says what is waited for, if it is time to. Call it again and again while waiting.

        The first time is `FIRST_ANNOUNCEMENT_S` after the wait began. The next one is when the
        reasons change, or `NEXT_ANNOUNCEMENT_S` later.
        """
        now = time.monotonic()
        has_announced = self._announced_reasons != ""
        announced_reasons_have_changed = has_announced and reasons != self._announced_reasons
        if now >= self._next_announcement or announced_reasons_have_changed:
            waited_s = now - self._wait_started
            self._say(f"{reasons} (waiting for {waited_s:.0f} s)")
            self._announced_reasons = reasons
            self._next_announcement = now + NEXT_ANNOUNCEMENT_S
