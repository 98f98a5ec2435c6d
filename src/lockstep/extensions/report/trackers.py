"""The curves of a run's record, written through TensorBoard or Weights & Biases.

In a process of its own: what a library does with network and disk is none of the training's time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from lockstep.errors import SettingError
from lockstep.extensions.report.reading import Record, Start, evaluation_name
from lockstep.wording import count_noun

_EVERY_S = 5.0


class Scalar(NamedTuple):
    """A value of a step."""

    step: int
    name: str
    value: float
    time: float
    """As `time.time()`."""


def scalars(start: Start) -> Iterator[Scalar]:
    """All values of one start of the run, in the order of their steps."""
    main = start.main
    begun = float(main.about.get("time", start.time))
    steps = main.column("step")
    at = dict(zip(steps.tolist(), (begun + main.column("at")).tolist(), strict=True))
    found = [
        Scalar(int(step), name, float(value), at[step])
        for name, values in main.curves().items()
        for step, value in zip(steps.tolist(), values.tolist(), strict=True)
        if value == value
    ]
    found += [
        Scalar(int(step), "loss", float(value), at.get(step, begun))
        for step, value in zip(*start.loss(), strict=True)
    ]
    for told in main.logged:
        kind = "training" if told["training"] else evaluation_name(told)
        step = max((s for s in at if s <= told["step"]), default=None)
        when = begun if step is None else at[step]
        found += [
            Scalar(told["step"], f"{kind}/{name}", value, when)
            for name, value in told["logged"].items()
        ]
    return iter(sorted(found, key=lambda scalar: scalar[:2]))


def _writer(record: Record, tracker: str) -> Any:
    """What has `add_scalar` and `close`.

    Raises:
        SettingError: the library is not installed.
    """
    folder = record.folder / tracker
    try:
        if tracker == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(str(folder))
        return _Wandb(record)
    except ImportError as error:
        raise SettingError(
            f"lockstep report --to {tracker}",
            f"{error.name or tracker} is not installed",
            f"pip install {tracker}",
        ) from None


class _Wandb:
    """A run of Weights & Biases, whose own variables say where it goes (WANDB_PROJECT, ...)."""

    def __init__(self, record: Record) -> None:
        import wandb

        last = record.starts[-1]
        config = {name: value for name, value, _ in last.main.choices} | last.main.about
        self._run = wandb.init(name=record.folder.name, dir=str(record.folder), config=config)
        self._run.define_metric("*", step_metric="step")

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        """Writes a value."""
        self._run.log({name: value, "step": step})

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()


class Exporter:
    """Writes what a record has, and later what has been added to it.

    Args:
        record: of the run.
        tracker: `tensorboard` or `wandb`.

    Raises:
        SettingError: the library is not installed.
    """

    def __init__(self, record: Record, tracker: str) -> None:
        self._record, self._writer = record, _writer(record, tracker)
        self._written: Counter[tuple[str, str, int]] = Counter()

    def write(self) -> int:
        """Writes what is new; how many values that are."""
        seen: Counter[tuple[str, str, int]] = Counter()
        before = self._written.total()
        for start in self._record.starts:
            for step, name, value, when in scalars(start):
                key = start.name, name, step
                seen[key] += 1  # after a step there may be several passes that evaluate
                if seen[key] > self._written[key]:
                    self._written[key] += 1
                    self._writer.add_scalar(name, value, step, walltime=when)
        return self._written.total() - before

    def close(self) -> None:
        """Ends the library's part."""
        self._writer.close()


def write(record: Record, tracker: str) -> str:
    """Writes all curves; says how many values they have."""
    exporter = Exporter(record, tracker)
    try:
        return f"{count_noun(exporter.write(), 'value')} written through {tracker}"
    finally:
        exporter.close()


def follow(record: Record, tracker: str) -> str:
    """Writes the curves as they grow, until the run is over, or Ctrl-C."""
    exporter = Exporter(record, tracker)
    count = exporter.write()
    try:
        while not record.over:
            time.sleep(_EVERY_S)
            if record.refresh():
                count += exporter.write()
    except KeyboardInterrupt:
        pass
    finally:
        exporter.close()
    return f"{count_noun(count, 'value')} written through {tracker}"
