"""The progress of `lockstep verify`, which runs a script several times.

It is printed on standard error: which of the runs it is, its optimizer step, and the time left. On
a terminal that is one line, which disappears when the run has ended. Elsewhere a line is printed
when a run starts, after its first step, and every half minute.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from lockstep.verify.run_config import RunConfig

PRINT_INTERVAL_S = 30.0  # if it is no terminal
CLEAR_LINE = "\r\x1b[K"


class VerifyProgress:
    """Starts the runs one after the other, and prints how far they are.

    Args:
        num_runs: how many runs there will be.
    """

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._run_number = 0  # of the present run, from 1
        self._on_terminal = sys.stderr.isatty()
        self._begin_s = time.monotonic()
        self._expected_run_s: float | None = None
        """The estimated seconds of a whole run, by the present run or the one before it; None until
        a first step has ended."""

        # Of the present run:
        self._run_begin_s = 0.0
        self._num_steps = -1  # nothing is known of the run yet
        self._first_step_end_s = 0.0  # from the begin of the run
        self._next_print_s = 0.0  # if standard error is no terminal

    def expect_more_runs(self, number: int) -> None:
        """Notes that there will be more runs than it seemed."""
        self._num_runs += number

    def run(self, folder: Path, config: RunConfig) -> str:
        """Runs the script once while the progress is printed, and returns what the script printed.

        Args:
            folder: where the run puts what it records.
            config: on how many processes, with which settings.
        """
        from lockstep.verify.run_processes import run_by_command

        self._run_number += 1
        self._run_begin_s = time.monotonic()
        self._num_steps = -1  # so the first update, which tells of 0 steps, tells something new
        try:
            return run_by_command(folder, config, partial(self._update, config))
        finally:
            # The next run is expected to take as long, until it tells more itself.
            self._expected_run_s = time.monotonic() - self._run_begin_s
            if self._on_terminal:
                click.echo(CLEAR_LINE, nl=False, err=True)

    def _update(self, config: RunConfig, num_steps: int) -> None:
        """Prints the progress of the present run. It is called several times a second.

        Args:
            config: of the run.
            num_steps: how many steps it has made so far.
        """
        now = time.monotonic()
        num_steps = min(num_steps, config.steps)
        if num_steps > self._num_steps:
            self._note_steps(config, num_steps, now)

        if self._on_terminal:
            click.echo(f"\r{self._line(config, now)}\x1b[K", nl=False, err=True)
        elif now >= self._next_print_s:
            self._next_print_s = now + PRINT_INTERVAL_S
            click.echo(self._line(config, now), err=True)

    def _note_steps(self, config: RunConfig, num_steps: int, now: float) -> None:
        """Notes that the present run has made more steps, and estimates how long it will take.

        Args:
            config: of the run.
            num_steps: how many steps it has made; 0 when the run begins.
            now: the time.
        """
        elapsed_s = now - self._run_begin_s
        first_step_was_over = self._num_steps >= 1
        if not first_step_was_over:
            # The run has just begun (`num_steps` is 0), or its first step has ended. It has ended
            # at the latest now: if more steps have ended since the last call, nobody knows when.
            self._first_step_end_s = elapsed_s
            self._next_print_s = now  # both are printed at once

        if num_steps > 0:
            self._expected_run_s = elapsed_s + self._remaining_s(config, num_steps, elapsed_s)

        self._num_steps = num_steps

    def _remaining_s(self, config: RunConfig, num_steps: int, elapsed_s: float) -> float:
        """Estimates how many seconds the rest of the present run will take.

        The first step takes longer than the others and does not count, so after it alone the
        estimate is 0.

        Args:
            config: of the run.
            num_steps: how many steps it has made, at least one.
            elapsed_s: how long it has taken so far.
        """
        seconds_per_step = (elapsed_s - self._first_step_end_s) / max(1, num_steps - 1)
        remaining_s = seconds_per_step * (config.steps - num_steps)
        if config.seconds:  # a limit of time, after which the run makes no further step
            remaining_s = min(remaining_s, config.seconds)
        return remaining_s

    def _line(self, config: RunConfig, now: float) -> str:
        """Returns the line of the present run: its number, its step, and the time left."""
        max_steps = f"at most {config.steps}" if config.seconds else str(config.steps)
        run = f"run {self._run_number} of {self._num_runs}, {config.name}"
        return f"{run}: step {self._num_steps} of {max_steps}, {self._time_left(now)}"

    def _time_left(self, now: float) -> str:
        """Returns a text that says how long all runs together will still take."""
        from lockstep.extensions.report.console import clock

        if self._expected_run_s is None:
            return "how long it takes is known after the first step"

        rest_of_run_s = max(0.0, self._run_begin_s + self._expected_run_s - now)
        later_runs_s = (self._num_runs - self._run_number) * self._expected_run_s

        left_s = rest_of_run_s + later_runs_s
        if left_s < 1.0:  # perhaps it takes longer than expected, which no number could say
            return "about to end"

        total_s = now - self._begin_s + left_s
        return f"{clock(left_s)} left of about {clock(total_s)}"
