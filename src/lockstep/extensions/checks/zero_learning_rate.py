"""Warns if a training goes on with a learning rate of 0, so that its steps change nothing.

A schedule that was built for fewer steps than the training has reaches 0 too early, for example if
its length was divided by a number of accumulation steps although `loader.steps` counts optimizer
steps. Torch says nothing, and the loss merely stops falling.

A learning rate of 0 is right in warm-up, for a single step at the end of a schedule or of one of
its cycles, and for parameter groups that are frozen on purpose. So the check waits for many steps
in which no optimizer has had another rate, after some had.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.strategies.base import PreparedModule

MIN_STEPS = 10
"""At least this many steps in succession have a learning rate of 0."""
MIN_SHARE = 0.1
"""They are at least this share of the steps before, so that a schedule that was rounded down a
little is not worth a warning."""
MIN_SHARE_IF_EPOCH = 0.6
"""The share if the rate may have become 0 for a single epoch. A cosine schedule that steps once in
an epoch, and rises again, is at 0 for one epoch in three at most."""


class ZeroLearningRateCheck(Check):
    """Counts the steps since an optimizer had another learning rate than 0."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._latest_step_with_rate: int | None = None
        """The number of the latest step, from 1, in which some optimizer had another rate than 0.
        None if there was none since an optimizer was prepared."""
        self._min_share = MIN_SHARE
        """The share of the steps before that lets the check warn of the present steps at 0."""
        self._has_warned = False

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Begins anew, as another training begins, perhaps with a warm-up from 0."""
        self._latest_step_with_rate = None

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Warns, once, if the latest steps of all optimizers had a learning rate of 0."""
        if self._has_warned:
            return

        present_step = self._present_step()
        if not _all_rates_are_zero(optimizer):
            self._latest_step_with_rate = present_step
            return
        if self._latest_step_with_rate is None:  # for example in warm-up
            return

        num_steps_at_zero = present_step - self._latest_step_with_rate
        if num_steps_at_zero == 1:
            self._min_share = MIN_SHARE if self._is_within_epoch() else MIN_SHARE_IF_EPOCH

        share = num_steps_at_zero / self._latest_step_with_rate
        if num_steps_at_zero >= MIN_STEPS and share >= self._min_share:
            self._has_warned = True
            self._warn(type(optimizer).__name__, num_steps_at_zero)

    def _present_step(self) -> int:
        """Returns the number of the present step, from 1, which all optimizers make together."""
        step = self.run.step
        another_optimizer_made_it = step.in_training_loop and step.training_pass.stepped
        return step.number if another_optimizer_made_it else step.number + 1

    def _is_within_epoch(self) -> bool:
        """Returns True if the present step is certainly not the first one of an epoch."""
        step = self.run.step
        return step.in_training_loop and step.training_pass.number > 1  # counted from 1

    def _warn(self, name: str, num_steps: int) -> None:
        """Warns of steps with a learning rate of 0.

        Args:
            name: the name of the optimizer's class.
            num_steps: how many steps in succession had it.
        """
        warn(
            f"{name}.step() with a learning rate of 0",
            found=f"all parameter groups have had a learning rate of 0 in the {num_steps} steps "
            f"since step {self._latest_step_with_rate}, the last one with another rate",
            do="build the schedule for the whole training: for the number of epochs * "
            "loader.steps, which is not divided by accumulation steps, if it steps with the "
            "optimizer, or for the number of epochs if it steps once in an epoch",
        )


def _all_rates_are_zero(optimizer: Optimizer) -> bool:
    """Returns True if all parameter groups of an optimizer have a learning rate of exactly 0.

    A rate that is a tensor on a GPU counts as another one: to read it would wait for the GPU.
    """
    for group in optimizer.param_groups:
        rate = group.get("lr")  # None if the optimizer has no such option
        if isinstance(rate, Tensor) and rate.device.type != "cpu":
            return False
        if rate is None or rate != 0:
            return False
    return True
