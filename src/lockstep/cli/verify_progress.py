"""Shows the progress of `lockstep verify`, which runs a script several times.

The progress is printed on standard error: the number of the run, its optimizer step, and the time
left. On a terminal this is one line, which disappears when the run has ended. Otherwise a line is
printed when a run starts, after its first step, and then every half minute.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.language import translate

if TYPE_CHECKING:
    from lockstep.verify.run_config import RunConfig

PRINT_INTERVAL_S = 30.0  # without a terminal
CLEAR_LINE = "\r\x1b[K"


class VerifyProgress:
    """Starts the runs one after the other, and prints their progress.

    Args:
        num_runs: the number of runs.
    """

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._on_terminal = sys.stderr.isatty()
        self._begin_s = time.monotonic()
        self._expected_run_s: float | None = None
        """The estimated seconds that a run takes, from the present run or the one before; None
        until the first step of the first run has ended.
        """

        # The present run:
        self._run_number = 0  # counted from 1
        self._run_begin_s = 0.0
        self._num_steps: int | None = None  # None: the run has not reported anything yet
        self._first_step_took_s = 0.0  # counted from the beginning of the run
        self._next_print_s = 0.0  # without a terminal

    def expect_more_runs(self, number: int) -> None:
        """Increases the expected number of runs."""
        self._num_runs += number

    def run(self, folder: Path, config: RunConfig) -> str:
        """Runs the script once, and prints the progress meanwhile.

        Args:
            folder: folder in which the run records what it computes.
            config: the number of processes and the settings of the run.

        Returns:
            The output of the script.
        """
        from lockstep.verify.run_processes import run_by_command

        self._run_number += 1
        self._run_begin_s = time.monotonic()
        self._num_steps = None
        try:
            return run_by_command(folder, config, partial(self._update, config))
        finally:
            # The next run is expected to take as long, until its own steps show more.
            self._expected_run_s = time.monotonic() - self._run_begin_s
            if self._on_terminal:
                click.echo(CLEAR_LINE, nl=False, err=True)

    def _update(self, config: RunConfig, num_steps: int) -> None:
        """Prints the progress of the present run. This is called several times a second.

        Args:
            config: the configuration of the run.
            num_steps: the number of steps that it has made so far.
        """
        now = time.monotonic()

        # The script may make more steps than are compared. The line never says "step 51 of 50".
        num_steps = min(num_steps, config.steps)
        if self._num_steps is None or num_steps > self._num_steps:
            self._note_steps(config, num_steps, now)

        if self._on_terminal:
            # Go to the beginning of the line, write, and erase what is left of a longer text.
            click.echo(f"\r{self._line(config, now)}\x1b[K", nl=False, err=True)
        elif now >= self._next_print_s:
            self._next_print_s = now + PRINT_INTERVAL_S
            click.echo(self._line(config, now), err=True)

    def _note_steps(self, config: RunConfig, num_steps: int, now: float) -> None:
        """Notes that the present run has made more steps, and estimates how long it will take.

        The estimate becomes `_expected_run_s`, from which the printed line says how much time is
        left.

        Args:
            config: the configuration of the run.
            num_steps: the number of steps that the run has made; 0 when it begins.
            now: the present time.
        """
        elapsed_s = now - self._run_begin_s
        had_made_a_step = bool(self._num_steps)  # at the last call
        self._num_steps = num_steps

        # The run has just begun: print a line at once. There is no step to estimate from.
        if num_steps == 0:
            self._next_print_s = now
            return

        # The first step has ended: print a line at once. If the run has made several steps since
        # the last call, the time at which the first of them ended is not known, so it is taken to
        # be now.
        if not had_made_a_step:
            self._first_step_took_s = elapsed_s
            self._next_print_s = now

        self._expected_run_s = elapsed_s + self._remaining_s(config, num_steps, elapsed_s)

    def _remaining_s(self, config: RunConfig, num_steps: int, elapsed_s: float) -> float:
        """Estimates how many seconds the rest of the present run will take.

        The first step takes longer than the others and is not counted. So after the first step, the
        estimate is 0.

        Args:
            config: the configuration of the run.
            num_steps: the number of steps that it has made, at least one.
            elapsed_s: the seconds that it has taken so far.
        """
        seconds_per_step = (elapsed_s - self._first_step_took_s) / max(1, num_steps - 1)
        remaining_s = seconds_per_step * (config.steps - num_steps)
        if config.seconds:  # the time limit, after which the run makes no further step
            remaining_s = min(remaining_s, config.seconds)
        return remaining_s

    def _line(self, config: RunConfig, now: float) -> str:
        """Describes the progress: `run 1 of 3, 2 processes: step 5 of 50, 0:20 left of about
        1:00`.
        """
        max_steps = f"at most {config.steps}" if config.seconds else str(config.steps)
        run = f"run {self._run_number} of {self._num_runs}"
        step = f"step {self._num_steps} of {max_steps}"
        return translate(f"{run}, {config.name}: {step}, {self._time_left(now)}")

    def _time_left(self, now: float) -> str:
        """Describes how long all remaining runs together will take."""
        from lockstep.extensions.report.console import clock

        if self._expected_run_s is None:
            return "how long it takes is known after the first step"

        rest_of_run_s = max(0.0, self._run_begin_s + self._expected_run_s - now)
        later_runs_s = (self._num_runs - self._run_number) * self._expected_run_s
        left_s = rest_of_run_s + later_runs_s
        if left_s < 1.0:  # it may also take longer than expected
            return "about to end"

        total_s = now - self._begin_s + left_s
        return f"{clock(left_s)} left of about {clock(total_s)}"
