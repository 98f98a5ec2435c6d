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
        """When the last step ended, or when the training began."""
        self._has_begun = False
        self._phase = "other"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._total_blocked_at_phase_begin_s = traffic.blocked_s
        """The value of `traffic.blocked_s` when the present phase began."""

    def phase_entered(self, phase: str) -> None:
        """Ends the present phase, adds its time to the sums, and begins another phase.

        Before the first step, the present phase is noted, but its time is not added.

        For example, a backward pass of 100 ms in which this rank waits for other ranks for 30 ms
        adds 70 ms to "backward" and 30 ms to "communication".
        """
        now = time.perf_counter()
        total_blocked_s = traffic.blocked_s  # all waits for other ranks since the start

        if self._has_begun:
            seconds_in_phase = now - self.phase_begin_s
            if total_blocked_s != self._total_blocked_at_phase_begin_s:  # tested to save time
                blocked_in_phase_s = total_blocked_s - self._total_blocked_at_phase_begin_s
                self._seconds["communication"] += blocked_in_phase_s
                seconds_in_phase -= blocked_in_phase_s
            self._seconds[self._phase] += seconds_in_phase
        elif phase in FIRST_PHASES:
            # The first step begins now.
            self._has_begun = True
            self.last_step_end_s = now

        self._phase = phase
        self.phase_begin_s = now
        self._total_blocked_at_phase_begin_s = total_blocked_s

    def end_step(self) -> float:
        """Returns the seconds since the last step ended; called when the optimizer has stepped.

        To save a reading of the clock, the step is taken to end when its phase "optimizer" began,
        just before the optimizer stepped. So a step lasts from one such time to the next.
        """
        step_end_s = self.phase_begin_s  # of the phase "optimizer"
        step_s = step_end_s - self.last_step_end_s
        self.last_step_end_s = step_end_s
        return step_s

    def take(self) -> tuple[float, dict[str, float]]:
        """Returns the seconds spent in each phase, and resets the sums.

        Returns:
            The present time on the clock of `time.perf_counter`; and the seconds by phase, in the
            order of `PHASES`. They include those spent so far in the present phase, which goes on.
        """
        self.phase_entered(self._phase)  # adds the time of the present phase, which begins anew
        seconds = self._seconds
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return self.phase_begin_s, seconds
