"""The record of a run: every rank writes down how its steps go, for `lockstep report`.

A folder holds one file for each rank and each start of the run, whose name tells which. A file is
lines of JSON that are only ever added to, once a second: what a killed process leaves behind is
whole but for its last line, and lacks the last second. A line is

* `{"record": 1, ...}`, the first: who writes, and what the columns of its rows are;
* a list, a row: the sums over one or several steps in a row (`COLUMNS`);
* `{"choices": ...}`, `{"logged": ...}`, `{"warning": ...}`, `{"end": ...}`.

A row is of one step in the beginning, and of twice as many after every 64 rows: a run of a million
steps writes nine hundred. The rows of all ranks are of the same steps. Nothing is sent for it,
and no device is waited for.
"""

from __future__ import annotations

import io
import json
import platform
import resource
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.batch.ledger import open_on_all_ranks
from lockstep.communication.link import traffic
from lockstep.distributed.process_group import Run
from lockstep.errors import on_warning, warn
from lockstep.extensions.report.reading import COLUMNS, FORMAT, NAME, SUFFIX
from lockstep.step import PHASES, Callback

_ROWS = 64
"""After so many rows the next ones are of twice as many steps."""
_MEMORY_EVERY_S = _WRITE_EVERY_S = 1.0


class Recorder(Callback):
    """Writes down how this rank's steps go.

    Args:
        folder: where; made when it is needed.
        run: whose steps.
        optimizers: all prepared ones, for the learning rate; the list may still grow.
        about: what else stands in the first line.

    Raises:
        SettingError: on all ranks, where one cannot write there.
    """

    def __init__(
        self, folder: str, run: Run, optimizers: Sequence[torch.optim.Optimizer], **about: Any
    ) -> None:
        topology, self._folder = run.topology, folder
        self._step, self._optimizers, self._device = run.step, optimizers, run.device
        self._is_main = topology.is_main
        self._lines: list[object] = []
        self._file: io.FileIO | None = open_on_all_ranks(
            folder, run.collectives, f"{NAME}{topology.rank}{SUFFIX}", "report"
        )
        self._write(
            {
                "record": FORMAT,
                "rank": topology.rank,
                "ranks": topology.size,
                "contributes": run.collectives.contributes,
                "host": socket.gethostname(),
                "device": str(run.device),
                "time": time.time(),
                "command": sys.argv,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "columns": COLUMNS,
                **about,
            }
        )
        self._began = self._last = self._since = time.perf_counter()
        self._blocked, self._phase = traffic.blocked_s, "other"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._every, self._rows = 1, 0
        self._steps = self._samples = self._losses = 0
        self._loss: float | Tensor = 0.0
        self._longest_s = 0.0
        self._memory, self._memory_at = 0, -_MEMORY_EVERY_S
        self._written_at = 0.0
        self._means: dict[str, Any] | None = None
        self._copied: _Row | None = None
        run.step.enter_phase = self._wait_for_training
        run.at_end.append(self.close)
        if self._is_main:
            on_warning.append(self._warned)

    def close(self, failed: bool) -> None:
        """Writes the last row, and how the run has ended on this rank; then nothing more."""
        if self._warned in on_warning:
            on_warning.remove(self._warned)
        if self._file is not None and not self._file.closed:
            # What has broken the device may make it wait for ever.
            if self._steps and not (failed and self._device.type == "cuda"):
                self._end_row(self._step.number - 1)
            self._write_copied(wait=not failed)
            self._write({"end": "failed" if failed else "ok", "time": time.time()})
            self._close_file()
        self._step.enter_phase = lambda phase: "other"

    def stepped(self, number: int) -> None:
        """Counts the step, and writes a row when it is time."""
        now = time.perf_counter()
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
        running = self._step.running
        self._steps += 1
        self._samples += running.micro_batch.count
        loss = running.loss
        if isinstance(loss, Tensor):
            self._loss = self._loss + (loss if loss.is_cuda else loss.item())
            self._losses += 1
        if self._steps == self._every:
            self._end_row(number)

    def announced(self, choices: Sequence[tuple[str, str, str]]) -> None:
        """Writes down what was chosen."""
        self._write({"choices": choices})

    def logged(self, description: str, means: Mapping[str, float], *, complete: bool) -> None:
        """Writes down what `world.log` was given: once a row, and at the end of a pass."""
        if self._is_main and means:
            self._means = {
                "logged": dict(means),
                "pass": description,
                "training": torch.is_grad_enabled(),
                "step": self._step.number,
                "complete": complete,
            }
            if complete:
                self._write(self._means)
                self._means = None

    def _warned(self, text: str) -> None:
        self._write({"warning": text, "step": self._step.number, "time": time.time()})

    def _wait_for_training(self, phase: str) -> str:
        """What comes before the first batch belongs to no step."""
        if phase in ("data", "backward", "optimizer"):
            self._last = self._since = time.perf_counter()
            self._blocked, self._phase = traffic.blocked_s, phase
            self._step.enter_phase = self._enter
        return "other"

    def _enter(self, phase: str) -> str:
        now, before, since = time.perf_counter(), self._phase, self._since
        if self._blocked != traffic.blocked_s:
            waited = traffic.blocked_s - self._blocked
            self._seconds["communication"] += waited
            self._blocked += waited
            since += waited
        self._seconds[before] += now - since
        self._phase, self._since = phase, now
        return before

    def _end_row(self, number: int) -> None:
        self._step.enter_phase(self._phase)
        self._write_copied(wait=True)
        at = self._since - self._began
        if at - self._memory_at >= _MEMORY_EVERY_S:
            self._memory, self._memory_at = self._peak_memory(), at
        values = [
            number + 1, self._steps, at, self._longest_s, None, self._learning_rate(),
            self._samples, self._memory, traffic.sent, traffic.shared, *self._seconds.values(),
        ]  # fmt: skip
        self._copied = _Row(values, *self._loss_on_host())
        self._write_copied(wait=False)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._steps = self._samples = self._losses = 0
        self._loss, self._longest_s = 0.0, 0.0
        self._rows += 1
        if self._rows % _ROWS == 0:
            self._every *= 2
        if self._means is not None:
            self._lines.append(self._means)
            self._means = None
        if at - self._written_at >= _WRITE_EVERY_S:
            self._written_at = at
            self._write()

    def _loss_on_host(self) -> tuple[float | Tensor | None, Any]:
        """The mean of the row's losses, and what tells when it has come from the device."""
        if not self._losses:
            return None, None
        mean = self._loss / self._losses
        if not isinstance(mean, Tensor):
            return mean, None
        host = torch.empty((), dtype=mean.dtype, pin_memory=True)
        host.copy_(mean.reshape(()), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(mean.device))
        return host, event

    def _write_copied(self, *, wait: bool) -> None:
        """Writes the row whose loss was on its way, if it has come."""
        row = self._copied
        if row is None or (row.event is not None and not row.event.query() and not wait):
            return
        if row.event is not None:
            row.event.synchronize()
        row.values[_LOSS] = None if row.loss is None else float(row.loss)
        self._copied = None
        self._lines.append(row.values)

    def _learning_rate(self) -> float | None:
        """That of the first parameter group; one that is a tensor on a device is left there."""
        for optimizer in self._optimizers:
            rate = optimizer.param_groups[0].get("lr")
            if isinstance(rate, Tensor):
                return rate.item() if rate.device.type == "cpu" else None
            return None if rate is None else float(rate)
        return None

    def _peak_memory(self) -> int:
        """Bytes: the most that tensors took on a GPU, or this process in main memory."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        unit = 1 if sys.platform == "darwin" else 1024  # see getrusage(2)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # a network's file system may say only now that it is full
                self._file.close()

    def _write(self, *added: object) -> None:
        """Writes the lines that wait, and some more."""
        lines, self._lines = [*self._lines, *added], []
        if self._file is None or self._file.closed or not lines:
            return
        try:
            data = "".join([f"{_text(line)}\n" for line in lines]).encode()
            if self._file.write(data) == len(data):
                return
            problem = "the disk is full"
        except OSError as error:
            problem = str(error)
        self._close_file()
        warn(
            f"report={self._folder!r}",
            f"it cannot be written any more: {problem}",
            "make room; the training goes on, and its record ends here",
        )


_LOSS = COLUMNS.index("loss")


def _text(line: object) -> str:
    """A line as JSON; a row with no more digits than anybody reads."""
    if isinstance(line, list):
        shown = [f"{value:.7g}" if isinstance(value, float) else str(value) for value in line]
        text = f"[{','.join(shown)}]"
        if "n" not in text:  # of None, nan or inf
            return text
    # A loss may be NaN or infinite, which is no JSON elsewhere; Python reads it.
    return json.dumps(line)


class _Row(NamedTuple):
    """One that is complete but for its loss."""

    values: list[Any]
    loss: float | Tensor | None
    event: Any
