"""Traces one step with `torch.profiler`, on every rank, into files that ui.perfetto.dev opens.

The trace shows the phases of the step (`session.extension.PHASES`) above its operators. Other steps
are not slowed down: the profiler starts after the step before, and once the step is traced, this
extension is removed from the run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.extensions.report.record import Recorder
from lockstep.session.extension import Extension
from lockstep.torch_compat import profiler_is_running

TRACE_SUFFIX = ".trace.json.gz"
_PHASES_BETWEEN_STEPS = ("evaluation", "checkpoint")


class StepTrace(Extension):
    """Traces the step of a given number.

    Args:
        run: the run whose step is traced.
        recorder: writes the record of the run. The trace goes into its folder, and it notes the
            name of the file.
        step: the number of the step, counted from 1.
    """

    def __init__(self, run: Run, recorder: Recorder, step: int) -> None:
        self._run = run
        self._recorder = recorder
        self._step_to_trace = step
        self._profiler: Any = None
        self._phase: Any = None
        """The range in the trace that marks the present phase, while the profiler runs."""

    def phase_entered(self, phase: str) -> None:
        """Starts or ends the trace if it is time, and marks the new phase in it.

        If step 5 is traced, the phases from its first one on are, for example:

            data, forward, backward   4 steps are made: traced
            optimizer                 4 steps are made: traced
            other                     5 steps are made: traced, as step 6 has not begun
            data                      5 steps are made: step 6 begins, so the trace is written
        """
        if self._profiler is None:
            self._start_if_step_begins(phase)
            return

        if self._traced_step_has_ended(phase):
            self._write_trace()
        elif phase in _PHASES_BETWEEN_STEPS:
            # The loop asked for a batch, but the loader was at its end. The step comes after the
            # evaluation, which may be long. So this trace is dropped, and another one is started
            # when the step begins again.
            self._stop_profiler()
        else:
            self._enter(phase)

    def _traced_step_has_ended(self, phase: str) -> bool:
        """Returns True if the new phase comes after the step that is traced."""
        num_steps_made = self._run.step.number
        if num_steps_made < self._step_to_trace:
            return False

        # Without a prepared loader no phase shows the end of the step, but the next one is made.
        if num_steps_made > self._step_to_trace:
            return True

        # After the optimizer, the step goes on until the loop asks for another batch, or pauses.
        return phase == "data" or phase in _PHASES_BETWEEN_STEPS

    def _start_if_step_begins(self, phase: str) -> None:
        """Starts the trace if the new phase begins the step that is to be traced.

        Steps are counted from 1: step 5 begins when 4 steps are made, and is made with 5.
        """
        num_steps_made = self._run.step.number
        step_is_made = num_steps_made >= self._step_to_trace
        if step_is_made:  # the run was resumed from a checkpoint after it
            self._run.extensions.remove(self)
            return

        # A step begins when the loop asks for a batch ("data"). A script without a prepared loader
        # has no such phase, so its step begins with the backward pass or the optimizer.
        step_is_next = num_steps_made == self._step_to_trace - 1
        begins_step = phase in ("data", "backward", "optimizer")
        if not (step_is_next and begins_step):
            return

        if profiler_is_running():
            self._give_up_for_profiler_of_script()
            return

        self._start()
        self._enter(phase)  # marks the phase in the trace

    def close(self, failed: bool) -> None:
        """Ends a trace that is still going on; warns if the step to be traced was never made.

        A trace ends when the phase after the step begins. If the traced step is the last one of the
        run, no such phase comes, and the trace is written here.
        """
        if failed:  # a device that has failed may never finish what is traced
            return

        steps_made = self._run.step.number
        step_is_made = steps_made >= self._step_to_trace
        is_tracing = self._profiler is not None

        if is_tracing and step_is_made:
            self._write_trace()
        elif is_tracing:
            self._stop_profiler()  # and drop the trace of a step that did not end

        if not step_is_made:
            warn(
                f"trace_step={self._step_to_trace}",
                found=f"the run has ended after step {steps_made}",
                do="choose a step that the run makes",
            )

    def _give_up_for_profiler_of_script(self) -> None:
        """Warns that the step is not traced, since the script's own profiler runs in it."""
        self._run.extensions.remove(self)
        warn(
            f"trace_step={self._step_to_trace}",
            found="a profiler of the script's own is running in that step, and torch runs one at a "
            "time",
            do="read its trace, or choose a step that it does not record",
        )

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def _enter(self, phase: str) -> None:
        """Ends the range of the present phase in the trace, and begins one for another phase."""
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = record_function(phase)
        self._phase.__enter__()

    def _stop_profiler(self) -> Any:
        """Stops the profiler and returns it, with everything it has traced."""
        # End the range of the present phase, which `_enter` has begun in the trace.
        self._phase.__exit__(None, None, None)
        self._phase = None

        # The trace must include kernels of the step that are still running.
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)

        profiler = self._profiler
        self._profiler = None
        profiler.stop()
        return profiler

    def _write_trace(self) -> None:
        """Stops the profiler, writes the trace to a file, and names the file in the record."""
        profiler = self._stop_profiler()
        self._run.extensions.remove(self)

        path = self._recorder.path_beside(f".step{self._step_to_trace}{TRACE_SUFFIX}")
        if path is None:
            # The record could not be written any more, for example because the disk is full. Then
            # there is no record that could name the trace.
            return

        try:
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            warn(
                f"trace_step={self._step_to_trace}",
                found=f"the trace cannot be written: {error}",
                do="make room; the training goes on without the trace",
            )
            return

        self._recorder.trace_written(path.name, self._step_to_trace)
