"""Measures how long this rank spends in each phase of its steps, for the record of the run.

A step passes through phases such as "data", "backward" and "optimizer". `phase_entered` is called
about six times a step, more often than anything else in the record, so it has to be fast. That is
why it has a small class of its own: Python finds the attributes of large objects more slowly.
"""

from __future__ import annotations

import time

from lockstep.communication.traffic import traffic
from lockstep.session.extension import PHASES, Extension

FIRST_PHASES = ("data", "backward", "optimizer")
"""The training has begun when it enters one of these phases. An evaluation or a checkpoint may come
before them."""


class PhaseTimes(Extension):
    """Adds up the seconds spent in each phase since the last call of `take`.

    The time before the first batch belongs to no step, so it is left out. If this rank waits for
    other ranks during a phase, the time of the wait is added to "communication" instead. It is
    known from `traffic.blocked_s`, the sum of all such waits since the start.
    """

    def __init__(self) -> None:
        self.phase_begin_s = time.perf_counter()
        """When the present phase began, on the clock of `time.perf_counter`."""
        self.last_step_end_s = self.phase_begin_s
        """When the last step ended, or when the training began. The recorder sets it."""
        self._has_begun = False
        self._phase = "other"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._blocked_before_phase_s = traffic.blocked_s

    def phase_entered(self, phase: str) -> None:
        """Ends the present phase, adds its time to the sums, and begins another phase."""
        now = time.perf_counter()
        if self._has_begun:
            seconds = now - self.phase_begin_s
            if traffic.blocked_s != self._blocked_before_phase_s:
                # The time that this rank waited for others in this phase is communication.
                blocked_s = self._take_blocked_time()
                self._seconds["communication"] += blocked_s
                seconds -= blocked_s
            self._seconds[self._phase] += seconds

        elif phase in FIRST_PHASES:
            self._has_begun = True
            self.last_step_end_s = now
            self._blocked_before_phase_s = traffic.blocked_s

        self.phase_begin_s = now
        self._phase = phase

    def _take_blocked_time(self) -> float:
        """Returns the seconds that this rank was blocked since the last call."""
        total_blocked_s = traffic.blocked_s
        blocked_s = total_blocked_s - self._blocked_before_phase_s
        self._blocked_before_phase_s = total_blocked_s
        return blocked_s

    def take(self) -> dict[str, float]:
        """Returns the seconds spent in each phase, in the order of `PHASES`, and resets the sums.

        They include the time spent so far in the present phase, which goes on.
        """
        self.phase_entered(self._phase)  # adds the time of the present phase
        seconds = self._seconds
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return seconds
