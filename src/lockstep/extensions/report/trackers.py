"""Writes the curves of a record through TensorBoard, Weights & Biases or MLflow.

It runs in a process of its own, after the training or beside it, so that the training does not wait
for network and disk. A record has one or several *starts*, since a run may be started again after a
failure; a *scalar* is one value of one curve.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from contextlib import closing, suppress
from typing import Any, NamedTuple

from lockstep.errors import SettingError
from lockstep.extensions.report.reading import Record, Start
from lockstep.wording import count_noun

POLL_INTERVAL_S = 5.0


class Scalar(NamedTuple):
    """The value of a curve at a step."""

    step: int
    name: str
    value: float
    time: float
    """When it was measured, as `time.time()`."""


def scalars(start: Start) -> list[Scalar]:
    """Returns all values of one start of the run, sorted by step and name.

    These are the curves of rank 0, the loss over all ranks, and the means that the script logged.
    """
    # When the record of rank 0 began. Its first line says so; without it, the start's time is used.
    record = start.main
    begin = float(record.header.get("time", start.time))

    # When each row of the record was written, by the last step of the row.
    steps = record.column("step").tolist()
    times = (begin + record.column("at")).tolist()
    time_of_step = dict(zip(steps, times, strict=True))

    # The curves of rank 0.
    found: list[Scalar] = []
    for name, values in record.curves().items():
        for step, value in zip(steps, values.tolist(), strict=True):
            if not math.isnan(value):
                found.append(Scalar(int(step), name, float(value), time_of_step[step]))

    # The loss over all ranks.
    loss_steps, losses = start.loss()
    for step, loss in zip(loss_steps, losses, strict=True):
        # Rank 0 may not have written its row of this step yet.
        loss_time = time_of_step.get(step, begin)
        found.append(Scalar(int(step), "loss", float(loss), loss_time))

    # The means that the script logged. The record does not say when it logged them, so they get the
    # time of the last row up to their step.
    for logged in start.logged:
        steps_of_rows_before = [step for step in time_of_step if step <= logged.step]
        last_step_before = max(steps_of_rows_before, default=None)
        logged_time = begin if last_step_before is None else time_of_step[last_step_before]
        title = f"{logged.kind}/{logged.name}" if logged.kind else logged.name
        found.append(Scalar(logged.step, title, logged.mean, logged_time))

    return sorted(found, key=lambda scalar: (scalar.step, scalar.name))


def _make_writer(record: Record, tracker: str) -> Any:
    """Returns an object with the methods `add_scalar` and `close` of TensorBoard's writer.

    Raises:
        SettingError: the library is not installed.
    """
    try:
        if tracker == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(str(record.folder / tracker))
        if tracker == "mlflow":
            return _MlflowWriter(record)
        return _WandbWriter(record)
    except ImportError as error:
        raise SettingError(
            f"lockstep report --to {tracker}",
            f"{error.name or tracker} is not installed",
            f"pip install {tracker}",
        ) from None


def _describe_run(record: Record) -> dict[str, Any]:
    """Returns what the last start was: the choices that it printed, and its header."""
    last = record.starts[-1]
    described: dict[str, Any] = {name: value for name, value, _ in last.main.choices}
    described.update(last.main.header)
    return described


class _MlflowWriter:
    """A run of MLflow. MLflow's own variables (MLFLOW_TRACKING_URI, ...) say where it is kept."""

    MAX_TEXT = 500
    """The longest value of a parameter that all of its stores take."""

    def __init__(self, record: Record) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        experiment_id = self._find_experiment()
        run = self._client.create_run(experiment_id, run_name=record.folder.name)
        self._run_id = run.info.run_id
        for name, value in _describe_run(record).items():
            self._client.log_param(self._run_id, _mlflow_name(name), str(value)[: self.MAX_TEXT])

    def _find_experiment(self) -> str:
        """Returns the id of the experiment that MLflow's environment variables name.

        As in MLflow itself, an id has precedence over a name. If there is no experiment of the
        name, it is created.
        """
        given_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if given_id:
            return given_id

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(name)
        if found is None:
            created: str = self._client.create_experiment(name)
            return created
        experiment_id: str = found.experiment_id
        return experiment_id

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        """Logs a value."""
        milliseconds = int(walltime * 1000)
        self._client.log_metric(self._run_id, _mlflow_name(name), value, milliseconds, step)

    def close(self) -> None:
        """Says that the run is over."""
        self._client.set_terminated(self._run_id)


def _mlflow_name(name: str) -> str:
    """Returns a name with the characters that MLflow allows."""
    return re.sub(r"[^\w./ -]", "_", name)


class _WandbWriter:
    """A run of Weights & Biases. Its own variables (WANDB_PROJECT, ...) say where it is kept."""

    def __init__(self, record: Record) -> None:
        import wandb

        self._run = wandb.init(
            name=record.folder.name, dir=str(record.folder), config=_describe_run(record)
        )
        self._run.define_metric("*", step_metric="step")

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        """Logs a value."""
        self._run.log({name: value, "step": step})

    def close(self) -> None:
        """Sends what was not sent yet."""
        self._run.finish()


class Exporter:
    """Writes the values of a record, and later those that were added to it.

    Args:
        record: the record of the run.
        tracker: `tensorboard`, `wandb` or `mlflow`.

    Raises:
        SettingError: the library is not installed.
    """

    def __init__(self, record: Record, tracker: str) -> None:
        self._record = record
        self._writer = _make_writer(record, tracker)
        # How many values were written of each start, name and step: one step may have several,
        # since several passes of evaluation may follow it.
        self._num_written: Counter[tuple[str, str, int]] = Counter()

    def write(self) -> int:
        """Writes the values that were not written yet; returns how many these are."""
        # A curve may have several values at one step, for example if the script evaluates twice
        # after it. Each call goes through the whole record, to whose end values are added. So if
        # earlier calls have written 2 values of a curve and step, the third is new.
        num_seen: Counter[tuple[str, str, int]] = Counter()
        total_before = self._num_written.total()
        for start in self._record.starts:
            for scalar in scalars(start):
                key = (start.name, scalar.name, scalar.step)
                num_seen[key] += 1
                is_new = num_seen[key] > self._num_written[key]
                if is_new:
                    self._num_written[key] += 1
                    self._writer.add_scalar(
                        scalar.name, scalar.value, scalar.step, walltime=scalar.time
                    )

        return self._num_written.total() - total_before

    def close(self) -> None:
        """Closes the writer of the library."""
        self._writer.close()


def write(record: Record, tracker: str) -> str:
    """Writes all values once; returns a line that says how many there were."""
    exporter = Exporter(record, tracker)
    try:
        return f"{count_noun(exporter.write(), 'value')} written through {tracker}"
    finally:
        exporter.close()


def follow(record: Record, tracker: str) -> str:
    """Writes the values as the record grows, until the run is over or until Ctrl-C.

    Returns a line that says how many values there were.
    """
    exporter = Exporter(record, tracker)
    num_values = exporter.write()

    # Ctrl-C ends the following, and is no error.
    with closing(exporter), suppress(KeyboardInterrupt):
        while not record.is_over:
            time.sleep(POLL_INTERVAL_S)
            if record.refresh():
                num_values += exporter.write()
    return f"{count_noun(num_values, 'value')} written through {tracker}"
