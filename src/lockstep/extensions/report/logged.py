"""What the script gives to `World.log`: to which pass over a loader a value belongs.

A value that is logged inside a loop over a prepared loader belongs to that pass: it counts as the
mean over the samples of the present micro-batch. If the loop is shown (`World.progress`), the means
over all ranks are computed while the pass goes on, for the display. Otherwise nothing is exchanged:
every rank writes its own weighted means into its record, and whoever reads the record adds them up.

A value that is logged outside of any loop is written as it is. So `World.log` never waits for other
ranks, and a script in which rank 0 alone logs does not hang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.process_group import Run
from lockstep.extensions.report.metrics import RunningMeans
from lockstep.extensions.report.progress import reduce_every
from lockstep.session.extension import LoggedMeans
from lockstep.session.step import OpenPass


class PassLog:
    """Keeps what is logged in one pass that is not shown, and tells the record of it.

    Args:
        run: of this process.
        open_pass: the pass.
        description: of the pass, such as `epoch 3`.
    """

    def __init__(self, run: Run, open_pass: OpenPass, description: str) -> None:
        self.means = RunningMeans(run.collectives, over_ranks=False)
        self._run = run
        self._training = open_pass.training
        self._description = description
        self._interval = reduce_every(open_pass.loader.steps)
        self._next_reading = run.step.number + self._interval
        self._last_values: Mapping[str, float] = self.means.values

    def add(self, weight: float, values: Mapping[str, float | Tensor]) -> None:
        """Adds values of the present micro-batch; now and then the means so far are recorded."""
        self.means.add(weight, **values)
        if not self._run.extensions.listeners["means_logged"]:
            return
        if self._training and self._run.step.number >= self._next_reading:
            self._next_reading = self._run.step.number + self._interval
            self.means.start_reduce()
        self.means.read_arrived()
        if self.means.values is not self._last_values:  # each reading makes a new dict
            self._tell(complete=False)

    def end(self) -> None:
        """Records the means of the whole pass."""
        if self._run.extensions.listeners["means_logged"]:
            self.means.finish()
            self._tell(complete=True)

    def _tell(self, *, complete: bool) -> None:
        self._last_values = self.means.values
        self._run.extensions.means_logged(
            LoggedMeans(
                self.means.values,
                self.means.weights,
                self._description,
                training=self._training,
                complete=complete,
            )
        )


def log(run: Run, epoch: int, values: Mapping[str, float | Tensor]) -> None:
    """Adds values to the means of the pass that they belong to; see the top of this file.

    Args:
        run: of this process.
        epoch: the present epoch.
        values: by name, a number or a tensor with one element each.
    """
    open_pass = find_pass(run.step.open_passes)
    if open_pass is None:
        _record_values(run, values)
        return
    weight = run.step.micro_batch_in_use.counted_rows
    if isinstance(open_pass.means, RunningMeans):  # the pass is shown
        open_pass.means.add(weight, **values)
        return
    if open_pass.means is None:
        description = f"epoch {epoch}" if open_pass.training else ""
        open_pass.means = PassLog(run, open_pass, description)
        open_pass.on_end = open_pass.means.end
    open_pass.means.add(weight, values)


def find_pass(open_passes: list[OpenPass]) -> OpenPass | None:
    """Returns the pass that values logged now belong to; None outside of any loop.

    It is the innermost. But a loop over `zip(world.progress(one), other)` is two passes of one
    kind, and what is logged in it is shown.
    """
    if not open_passes:
        return None
    innermost = open_passes[-1]
    for open_pass in reversed(open_passes):
        is_shown = isinstance(open_pass.means, RunningMeans)
        if is_shown and open_pass.training == innermost.training:
            return open_pass
    return innermost


def means_over_ranks(run: Run) -> dict[str, float]:
    """Returns the means of the present pass, or of the one that ended last; all ranks call it.

    The ranks need not have logged the same names: each mean is over those that have.
    """
    open_pass = find_pass(run.step.open_passes) or run.step.last_pass
    means: Any = None if open_pass is None else open_pass.means
    if isinstance(means, PassLog):
        means = means.means
    own_sums = {} if means is None else means.own_sums()
    totals: dict[str, list[float]] = {}
    for sums in run.collectives.exchange(own_sums):
        for name, (total, weight) in sums.items():
            so_far = totals.setdefault(name, [0.0, 0.0])
            so_far[0] += total
            so_far[1] += weight
    return {name: total / weight for name, (total, weight) in totals.items() if weight != 0}


def _record_values(run: Run, values: Mapping[str, float | Tensor]) -> None:
    """Records values that belong to no pass, as this rank has them."""
    means = RunningMeans(run.collectives, over_ranks=False)
    means.add(1.0, **values)
    if not run.extensions.listeners["means_logged"]:
        return
    means.finish()
    run.extensions.means_logged(
        LoggedMeans(
            means.values,
            means.weights,
            "",
            training=torch.is_grad_enabled(),
            complete=True,
            in_pass=False,
        )
    )
