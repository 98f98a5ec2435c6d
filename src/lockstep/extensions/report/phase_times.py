"""Measures how long this rank spends in each phase of its steps, for the record of the run.

`PhaseTimes.phase_entered` is called half a dozen times a step, and nothing else of the record costs
as much. So this is a small object of its own: Python finds the attributes of an object with many of
them more slowly.
"""

from __future__ import annotations

import time

from lockstep.communication.traffic import traffic
from lockstep.session.extension import PHASES, Extension

FIRST_PHASES = ("data", "backward", "optimizer")
"""A training begins with one of these. An evaluation or a checkpoint may come before it."""


class PhaseTimes(Extension):
    """The seconds in each phase since the last call of `take`.

    The time before the first batch belongs to no step, so it is left out. The time in which this
    rank waited for others counts as communication, in whichever phase it waited:
    `traffic.blocked_s` is the sum of all such times since the start.
    """

    def __init__(self) -> None:
        self.phase_begin_s = time.perf_counter()
        """When the phase that goes on has begun, on the clock of `time.perf_counter`."""
        self.last_step_end_s = self.phase_begin_s
        """When the last step has ended, or when the training has begun. The recorder sets it."""
        self._has_begun = False
        self._phase = "other"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._blocked_before_phase_s = traffic.blocked_s

    def phase_entered(self, phase: str) -> None:
        """Ends the present phase and begins another."""
        now = time.perf_counter()
        if self._has_begun:
            seconds = now - self.phase_begin_s
            if traffic.blocked_s != self._blocked_before_phase_s:
                seconds -= self._count_blocked_time()
            self._seconds[self._phase] += seconds
        elif phase in FIRST_PHASES:
            self._has_begun = True
            self.last_step_end_s = now
            self._blocked_before_phase_s = traffic.blocked_s
        self.phase_begin_s = now
        self._phase = phase

    def _count_blocked_time(self) -> float:
        """Counts the time for which this rank was blocked in the present phase, and returns it."""
        total_blocked_s = traffic.blocked_s
        blocked_s = total_blocked_s - self._blocked_before_phase_s
        self._blocked_before_phase_s = total_blocked_s
        self._seconds["communication"] += blocked_s
        return blocked_s

    def take(self) -> dict[str, float]:
        """Returns the seconds by phase, in the order of `PHASES`, and begins to count anew.

        The present phase goes on, but its time up to now is in what is returned.
        """
        self.phase_entered(self._phase)
        seconds = self._seconds
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return seconds
