"""Writes the record of a run: every rank notes how its steps go, for `lockstep report`.

A *row* is a JSON list with what this rank measured in one or several optimizer steps in a row (see
`record_format`); choices, logged means, warnings and the end of the run are JSON objects. A row
covers one step at first, and twice as many after every 64 rows, so that a run of a million steps
writes nine hundred. The rows of all ranks cover the same steps.

The means of `World.log` in a pass are written when the pass is over. Those of a training that goes
on are written once for each row, as they are when the next global batch begins: so the ranks write
them at the same steps, whenever their devices get that far.

Each rank and each start of the run has a file of its own, to which lines are only ever added, once
a second. A process that is killed leaves a file that lacks the last second, and perhaps a part of
its last line. No rank sends anything for the record, and no rank waits for its device: losses and
means are copied from a GPU, and rows and means wait in their order until they have arrived. The
steps of these lines never go back, so a reader knows what a rank has not logged.
"""

from __future__ import annotations

import io
import json
import os
import platform
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep import masking
from lockstep.communication.traffic import traffic
from lockstep.distributed.process_group import Run
from lockstep.distributed.rank_files import append_or_end, close_rank_file, open_rank_file
from lockstep.distributed.streams import start_copy_to_host
from lockstep.errors import on_warning
from lockstep.extensions.report.gpu_use import device_name, measure_gpu
from lockstep.extensions.report.metrics import SumsCopy
from lockstep.extensions.report.phase_times import PhaseTimes
from lockstep.extensions.report.record_format import (
    COLUMN_INDEX,
    COLUMNS,
    FORMAT_VERSION,
    RECORD_SUFFIX,
)
from lockstep.extensions.report.source_code import describe_commit
from lockstep.session.extension import PHASES, Extension
from lockstep.session.micro_batch import MicroBatch

ROWS_BEFORE_DOUBLING = 64
"""After this number of rows, the next rows cover twice as many steps each."""
WRITE_INTERVAL_S = 1.0
MEMORY_INTERVAL_S = 1.0
GPU_INTERVAL_S = 5.0
"""The use of the GPU is asked for this often at first."""
MEASUREMENTS_BEFORE_DOUBLING = 256
"""After this number of them, the GPU is asked for its use half as often."""
MAX_KEPT_LOSSES = 64
MIN_STACKED_LOSSES = 16
"""So many losses on a CPU are summed up faster by torch than one after the other."""

# The format of each column. Bytes, steps and samples are whole numbers, however large.
_FORMAT_OF_COLUMN = {
    "step": "%d",
    "steps": "%d",
    "samples": "%d",
    "memory": "%d",
    "sent": "%d",
    "shared": "%d",
}
_ROW_FORMAT = "[" + ",".join([_FORMAT_OF_COLUMN.get(name, "%.7g") for name in COLUMNS]) + "]"


class Recorder(Extension):
    """Writes down how this rank's steps go.

    Args:
        folder: the folder of the record, which is made if it does not exist.
        run: the run whose steps are recorded.
        optimizers: all prepared optimizers, whose first gives the learning rate. More may be added
            to the list later.
        phase_times: measures the phases of the steps.
        header: more fields for the first line of the file.

    Raises:
        SettingError: some rank cannot write there; raised on all ranks.
    """

    def __init__(
        self,
        folder: str,
        run: Run,
        optimizers: Sequence[torch.optim.Optimizer],
        phase_times: PhaseTimes,
        **header: Any,
    ) -> None:
        topology = run.topology
        self._folder = folder
        self._step = run.step
        self._optimizers = optimizers
        self._device = run.device
        self._is_main = topology.is_main
        self._file: io.FileIO | None = open_rank_file(
            folder, run.collectives, topology.rank, RECORD_SUFFIX, "report"
        )
        self._unwritten_lines: list[object] = []
        self._write(
            {
                "record": FORMAT_VERSION,
                "rank": topology.rank,
                "ranks": topology.size,
                "contributes": run.collectives.contributes,
                "host": socket.gethostname(),
                "device": str(run.device),
                "device_name": device_name(run.device),
                "seed": run.settings.seed,
                "precision": run.settings.precision,
                "git": describe_commit(sys.argv[0]) if topology.is_main else None,
                "time": time.time(),
                "command": masking.mask_secrets(sys.argv),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "columns": COLUMNS,
                **header,
            }
        )
        self._begin_s = time.perf_counter()
        self._written_at_s = 0.0  # as all times with "at", in seconds since _begin_s
        self._peak_memory_bytes = 0
        self._memory_measured_at_s = -MEMORY_INTERVAL_S
        self._gpu_measured_at_s = 0.0
        self._gpu_interval_s = GPU_INTERVAL_S
        self._num_gpu_measurements = 0
        self._measures_gpu = run.device.type == "cuda"
        self._phase_times = phase_times

        # What the next row will have.
        self._longest_step_s = 0.0
        self._num_steps = 0
        self._num_samples = 0
        self._losses: list[float | Tensor] = []
        """The latest losses, which are not in the sum yet. Reading each would take longer than
        all together, or wait for a GPU."""
        self._loss_sum: float | Tensor = 0.0
        self._num_losses = 0
        self._steps_per_row = 1
        self._num_ended_rows = 0
        self._means_are_due = False
        """True if a row has ended and the next global batch has not begun."""
        self._pending: deque[_PendingLine] = deque()
        """Rows and means in the order of their steps, of which the first one has not arrived from
        the GPU."""
        self._has_lost_lines = False
        """True if the device failed before means had arrived."""
        if self._is_main:
            on_warning.append(self._write_warning)

    def close(self, failed: bool) -> None:
        """Writes the last row and how the run ended on this rank; nothing is written after it."""
        # From now on, warnings are not written into the record.
        if self._write_warning in on_warning:
            on_warning.remove(self._write_warning)
        if self._file is None or self._file.closed:
            return

        # After a failure a GPU may never finish its work, so nothing waits for it. The last row is
        # not written then, and the lines whose loss or means have not arrived are lost.
        gpu_may_hang = failed and self._device.type == "cuda"
        if self._num_steps > 0 and not gpu_may_hang:
            last_step = self._step.number - 1  # counted from 0
            self._end_row(last_step)
        self._finish_pending(wait=not failed)

        end: dict[str, Any] = {"end": "failed" if failed else "ok", "time": time.time()}
        if self._pending or self._has_lost_lines:
            end["lost"] = True
        self._write(end)
        close_rank_file(self._file)

    def step_finished(self, number: int) -> None:
        """Adds the step to the present row, and ends the row if it covers enough steps."""
        step_s = self._phase_times.end_step()
        if step_s > self._longest_step_s:
            self._longest_step_s = step_s

        training_pass = self._step.training_pass
        self._num_steps += 1
        self._num_samples += training_pass.micro_batch.global_samples
        self._losses.append(training_pass.loss)
        if self._num_steps == self._steps_per_row:
            self._end_row(number)
        elif len(self._losses) == MAX_KEPT_LOSSES:  # each keeps memory
            self._sum_up_losses()

    def _sum_up_losses(self) -> None:
        """Adds the latest losses to the sum of the row, `_loss_sum`.

        This is a float on the CPU. On a GPU it is a tensor, as reading values would wait for the
        GPU.
        """
        # The loss is no tensor if the script gave none to World.backward.
        losses = [loss for loss in self._losses if isinstance(loss, Tensor)]
        self._losses.clear()
        if not losses:
            return

        self._num_losses += len(losses)
        if losses[0].is_cuda:
            # A new tensor, not `+=`: a sum that was made under `torch.inference_mode()` could not
            # be changed in place outside of it.
            self._loss_sum = self._loss_sum + torch.stack(losses).sum(dtype=torch.float64)
        elif len(losses) < MIN_STACKED_LOSSES:
            # Few losses are read one by one faster than they are stacked.
            self._loss_sum += sum([loss.item() for loss in losses])
        else:
            self._loss_sum += torch.stack(losses).sum(dtype=torch.float64).item()

    def choices_made(self, choices: Sequence[tuple[str, str, str]]) -> None:
        """Writes down the choices that the run printed."""
        self._write({"choices": choices})

    def begin(self, micro_batch: MicroBatch) -> None:
        """Writes down the means of the training that goes on, if a row has ended before."""
        if not self._means_are_due:
            return
        self._means_are_due = False
        for open_pass in self._step.logged_passes.open:
            if open_pass.is_training and open_pass.sums is not None:
                self._add_means(open_pass.sums, open_pass, is_complete=False)

    def values_logged(self, sums: Any, open_pass: Any) -> None:
        """Writes down what was given to `World.log` in a pass, or outside of any loop."""
        if self._file is not None and not self._file.closed:
            self._add_means(sums, open_pass, is_complete=True)
            self._write()

    def _add_means(self, sums: Any, open_pass: Any, *, is_complete: bool) -> None:
        """Adds a line with what this rank has logged in a pass, or outside of any loop.

        The sums are on the device. From a GPU, their copy to the host is started here, and the line
        is pending until the copy has arrived.

        Args:
            sums: the `WeightedSums` of the values.
            open_pass: the `OpenPass` that they belong to; None outside of any loop.
            is_complete: False for a pass that goes on.
        """
        line: dict[str, Any] = {"logged": {}, "weights": {}, "step": self._step.number}
        if open_pass is not None:
            identity = open_pass.identity  # the same on all ranks
            line["pass"] = open_pass.description
            line["training"] = identity.is_training
            line["complete"] = is_complete
            line["loader"] = identity.loader_number
            line["begun"] = identity.begun  # how many steps were made before the pass
            line["number"] = identity.number  # of the passes over this loader at that step

        try:
            copy = sums.start_copy()
        except RuntimeError:  # the device has failed, and the training's next CUDA call says so
            self._has_lost_lines = True  # `close` writes this down
            return

        add_means = partial(_line_of_means, line, copy)  # called when the copy has arrived
        self._pending.append(_PendingLine(arrival_event=copy.arrived, make_line=add_means))
        self._finish_pending(wait=False)

    def path_beside(self, suffix: str) -> Path | None:
        """Returns the path of another file of this rank and start; None if the record has ended.

        Args:
            suffix: what its name ends with, in place of `.record`.
        """
        if self._file is None or self._file.closed:
            return None
        path = Path(os.fsdecode(self._file.name))
        return path.with_name(path.name.removesuffix(RECORD_SUFFIX) + suffix)

    def trace_written(self, file_name: str, step: int) -> None:
        """Notes that a step was traced into a file beside the record."""
        self._write({"trace": file_name, "step": step})

    def _write_warning(self, text: str) -> None:
        self._write({"warning": text, "step": self._step.number, "time": time.time()})

    def _end_row(self, number: int) -> None:
        """Ends the present row with the step of this number, counted from 0.

        The row waits for its loss, and the next row begins with all sums at 0. Once a second, lines
        that are ready are written.
        """
        present_time_s, phase_seconds = self._phase_times.take()
        now_s = present_time_s - self._begin_s

        self._sum_up_losses()
        row = self._make_row(number, now_s, phase_seconds)
        self._pending.append(self._start_copying_loss(row))
        self._finish_pending(wait=False)  # on the CPU the loss is there already
        self._begin_next_row()

        self._means_are_due = True  # `begin` adds what the script logs until the next global batch
        self._do_what_is_due(number, now_s)

    def _do_what_is_due(self, number: int, now_s: float) -> None:
        """Asks for the use of the GPU, and writes the lines that are ready, if it is time to."""
        if self._measures_gpu and now_s - self._gpu_measured_at_s >= self._gpu_interval_s:
            self._gpu_measured_at_s = now_s
            self._note_gpu_use(number, now_s)
        if now_s - self._written_at_s >= WRITE_INTERVAL_S:
            self._written_at_s = now_s
            self._write()

    def _note_gpu_use(self, number: int, now_s: float) -> None:
        """Notes how busy the GPU is; after an error it is not asked again.

        Args:
            number: the number of the step that has ended, counted from 0. The record counts from 1.
            now_s: seconds since the record began.
        """
        use = measure_gpu(self._device)
        if use is None:
            self._measures_gpu = False
            return
        self._unwritten_lines.append(
            {"gpu": use.percent, "gpu_memory": use.memory_bytes, "step": number + 1, "at": now_s}
        )
        self._num_gpu_measurements += 1
        if self._num_gpu_measurements % MEASUREMENTS_BEFORE_DOUBLING == 0:
            self._gpu_interval_s *= 2  # so that a long run writes few of these lines

    def _make_row(self, number: int, now_s: float, phase_seconds: Mapping[str, float]) -> list[Any]:
        """Returns the present row, a value for each of `COLUMNS`. The loss is not known yet.

        Args:
            number: the number of its last step, counted from 0.
            now_s: seconds since the record began.
            phase_seconds: how long this rank was in each phase.
        """
        if now_s - self._memory_measured_at_s >= MEMORY_INTERVAL_S:
            self._peak_memory_bytes = self._measure_peak_memory()
            self._memory_measured_at_s = now_s

        # In the order of `COLUMNS`.
        return [
            number + 1,
            self._num_steps,
            now_s,
            self._longest_step_s,
            None,  # the loss
            self._learning_rate(),
            self._num_samples,
            self._peak_memory_bytes,
            traffic.sent,
            traffic.shared,
            *[phase_seconds[phase] for phase in PHASES],
        ]

    def _begin_next_row(self) -> None:
        """Counts the row that has ended, and sets all sums to 0 for the next one.

        After each `ROWS_BEFORE_DOUBLING` rows, a row covers twice as many steps as before, so that
        the record of a long run stays small.
        """
        self._num_steps = 0
        self._num_samples = 0
        self._loss_sum = 0.0
        self._num_losses = 0
        self._longest_step_s = 0.0

        self._num_ended_rows += 1
        if self._num_ended_rows % ROWS_BEFORE_DOUBLING == 0:
            self._steps_per_row *= 2

    def _start_copying_loss(self, row: list[Any]) -> _PendingLine:
        """Returns the row as a pending line, into which the mean loss of its steps is put later.

        If the loss is on a GPU, its copy to the host is started here and arrives later.

        Args:
            row: a value for each of `COLUMNS`, without the loss.
        """
        loss = None if self._num_losses == 0 else self._loss_sum / self._num_losses
        arrival_event = None  # a loss on the CPU is a float, and there already
        if isinstance(loss, Tensor):
            loss, arrival_event = start_copy_to_host(loss)
        return _PendingLine(arrival_event, make_line=partial(_row_with_loss, row, loss))

    def _finish_pending(self, *, wait: bool) -> None:
        """Appends the pending lines that have arrived to `_unwritten_lines`, in their order.

        Args:
            wait: wait for those that have not arrived, so that none stays pending.
        """
        while self._pending:
            pending = self._pending[0]
            if not _has_arrived(pending, wait=wait):
                return

            self._pending.popleft()
            line = pending.make_line()
            if line is not None:  # None: nothing was logged, or everything with weight 0
                self._unwritten_lines.append(line)

    def _learning_rate(self) -> float | None:
        """Returns the learning rate of the first parameter group of the first optimizer.

        A rate that is a tensor on a GPU is not read, since that would wait for the GPU.
        """
        if not self._optimizers:
            return None
        rate = self._optimizers[0].param_groups[0].get("lr")
        if rate is None:
            return None
        if isinstance(rate, Tensor):
            return rate.item() if rate.device.type == "cpu" else None
        return float(rate)

    def _measure_peak_memory(self) -> int:
        """Returns the peak memory in bytes: of the tensors on a GPU, or else of the process."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        # getrusage(2) counts in kilobytes, but in bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _write(self, *new_lines: object) -> None:
        """Writes the lines that were collected since the last call, and then the new ones.

        If that fails the record ends here with a warning, and the training goes on.
        """
        lines = [*self._unwritten_lines, *new_lines]
        self._unwritten_lines = []
        if self._file is None or self._file.closed:  # the record has ended
            return

        text = "".join([f"{line_as_json(line)}\n" for line in lines])
        append_or_end(
            self._file, text.encode(), setting="report", folder=self._folder, content="record"
        )


def line_as_json(line: object) -> str:
    """Returns a line of the record as JSON; the floats of a row (a list) have seven digits."""
    return _row_as_json(line) if isinstance(line, list) else json.dumps(line)


def _row_as_json(row: list[Any]) -> str:
    """Returns a row as JSON, with all digits of its floats if one is None, NaN or infinite."""
    # `%` is faster than `json.dumps`, but it cannot write None, and the reader understands NaN and
    # infinity only as `json.dumps` writes them: "NaN" and "Infinity", not "nan" and "inf".
    if None not in row:
        text = _ROW_FORMAT % tuple(row)
        has_nan_or_infinity = "n" in text  # other numbers, such as 1.5e-05, have no "n"
        if not has_nan_or_infinity:
            return text

    return json.dumps(row)


class _PendingLine(NamedTuple):
    """A line that is complete except for numbers which may still be on their way from the GPU."""

    arrival_event: Any
    """A CUDA event that tells when they have arrived; None if they are there already."""
    make_line: Callable[[], object]
    """Returns the line when they have arrived; None if there is nothing to write."""


def _row_with_loss(row: list[Any], loss: float | Tensor | None) -> list[Any]:
    """Returns a row with its loss; None if the script gave no loss to `World.backward`."""
    row[COLUMN_INDEX["loss"]] = None if loss is None else float(loss)
    return row


def _line_of_means(line: dict[str, Any], copy: SumsCopy) -> dict[str, Any] | None:
    """Returns a line with the means that this rank has logged; None if there are none."""
    line["logged"] = copy.means()
    line["weights"] = copy.weights
    return line if line["logged"] else None


def _has_arrived(pending: _PendingLine, *, wait: bool) -> bool:
    """Returns True if all numbers of a line are on the host; False also if the device has failed.

    Args:
        pending: the line.
        wait: True to wait until they are.
    """
    if pending.arrival_event is None:
        return True
    try:
        if wait:
            pending.arrival_event.synchronize()
            return True
        return bool(pending.arrival_event.query())
    except RuntimeError:  # the training's next CUDA call says that the device has failed
        return False
