"""Warns of learning-rate schedules that do not have the length of the training.

- `len(loader)` of a prepared loader counts the iterations of the loop, which are micro-batches. A
  prepared scheduler steps once per global batch. One that was built for `epochs * len(loader)`
  steps is still near the beginning of its schedule when the training ends.
- A CosineAnnealingLR that was built for as many steps as there are epochs, and steps once per
  global batch, is at its end within the first epochs, and its rate goes up and down from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim.lr_scheduler import CosineAnnealingLR

from lockstep.batch.loader import Loader
from lockstep.checkpoint.checks import LENGTH_ATTRIBUTES
from lockstep.errors import warn
from lockstep.session.extension import Extension
from lockstep.training.epoch_loop import epochs_of_loop, may_pass_value_on
from lockstep.training.optimizer import PreparedScheduler
from lockstep.user_code import Location, user_stack


@dataclass(frozen=True)
class _EndOfPass:
    """The end of a pass over a loader."""

    stack: tuple[Location, ...]
    """The lines of the script that were running."""
    steps_of_scheduler: dict[PreparedScheduler, int]


class ScheduleLengths(Extension):
    """Compares the lengths of the prepared schedules with that of the training.

    `World.epochs` says how many epochs there are. Of another loop it is known after two epochs, if
    both passes ended at the same line of the same functions: the loop makes one pass in each of its
    iterations, whose number is read from the script.

    Args:
        schedulers: the prepared ones; more may be added later.
        loaders: the prepared ones; more may be added later.
    """

    def __init__(self, schedulers: Sequence[PreparedScheduler], loaders: Sequence[Loader]) -> None:
        self._schedulers = schedulers
        self._loaders = loaders
        self._first_ends: dict[Loader, _EndOfPass] = {}
        self._compared: set[Loader] = set()
        self._warned_of: set[PreparedScheduler] = set()
        self._num_epochs: int | None = None
        """What the script has given `World.epochs`."""
        self._line_of_length: dict[tuple[PreparedScheduler, Loader], Location] = {}
        """The line that asked for the length of a loader, before the scheduler was prepared."""

    def note_prepared(self, scheduler: PreparedScheduler) -> None:
        """Notes which lengths the script knew when it built a scheduler, which is now prepared.

        A length that was asked for later, or only to print it, is not that of the schedule.
        """
        for loader in self._loaders:
            for line in loader.lines_that_asked_length:
                if may_pass_value_on(line):
                    self._line_of_length[scheduler, loader] = line

    def check_epochs(self, num_epochs: int) -> None:
        """Warns of schedules that are as long as the micro-batches of so many epochs.

        Of several loaders it is seen in the first epoch which ones are trained on.
        """
        self._num_epochs = num_epochs
        if len(self._loaders) == 1:
            self._check_all(self._loaders[0], num_epochs)

    def _check_all(self, loader: Loader, num_epochs: int) -> None:
        for scheduler in self._schedulers:
            self._check_micro_batches(scheduler, loader, num_epochs)

    def pass_ended(self) -> None:
        """Compares the schedules when a loader was trained on twice."""
        if not self._schedulers:
            return

        for loader in self._loaders:
            if loader in self._compared or loader.trained == 0:
                continue
            if self._num_epochs is not None:
                self._check_all(loader, self._num_epochs)

            end = _EndOfPass(
                user_stack(),
                {scheduler: scheduler.last_epoch for scheduler in self._schedulers},
            )
            if loader not in self._first_ends:
                self._first_ends[loader] = end
            elif loader.trained > 1:
                self._compared.add(loader)
                self._compare(loader, self._first_ends.pop(loader), end)

    def _compare(self, loader: Loader, first: _EndOfPass, second: _EndOfPass) -> None:
        """Checks the schedulers that have stepped once for each global batch of an epoch."""
        if first.stack != second.stack:
            return

        num_epochs = epochs_of_loop()
        if num_epochs is None:
            return

        for scheduler, steps in second.steps_of_scheduler.items():
            steps_in_epoch = steps - first.steps_of_scheduler.get(scheduler, steps)
            if steps_in_epoch == loader.steps:
                self._check_micro_batches(scheduler, loader, num_epochs)
                self._check_epochs_as_steps(scheduler, loader, num_epochs)

    def _check_micro_batches(
        self, scheduler: PreparedScheduler, loader: Loader, num_epochs: int
    ) -> None:
        """Warns if a schedule is as long as the micro-batches of the training.

        Loaders whose length the script did not know when it built the schedule do not count.
        """
        line_of_length = self._line_of_length.get((scheduler, loader))
        if line_of_length is None or loader.steps is None or scheduler in self._warned_of:
            return

        length_of_epoch = loader.num_micro_batches_of_epoch()
        if length_of_epoch == loader.steps:
            return

        length = num_epochs * length_of_epoch
        for other in self._loaders:
            if other.steps is not None and num_epochs * other.steps == length:
                return  # it is as long as the steps on another loader, and may be meant so

        state = scheduler.state_dict()
        for name in LENGTH_ATTRIBUTES:
            if state.get(name) != length:
                continue

            self._warned_of.add(scheduler)
            steps = num_epochs * loader.steps
            warn(
                f"{type(scheduler.inner).__name__} with {name}={length} in a training of "
                f"{num_epochs} epochs",
                f"len(loader) is {length_of_epoch}, the micro-batches of an epoch, but the "
                "scheduler steps once for each global batch: it makes at most "
                f"{steps} of its {length} steps",
                "compute its length before world.prepare, where len(loader) counts global "
                "batches, or from loader.steps",
                at=line_of_length,
            )

    def _check_epochs_as_steps(
        self, scheduler: PreparedScheduler, loader: Loader, num_epochs: int
    ) -> None:
        """Warns if a cosine has as many steps as there are epochs, and more are made in each."""
        steps = loader.steps
        is_cosine = type(scheduler.inner) is CosineAnnealingLR
        if not is_cosine or steps is None or steps < 2 or scheduler in self._warned_of:
            return
        if scheduler.state_dict()["T_max"] != num_epochs:
            return

        self._warned_of.add(scheduler)
        warn(
            f"CosineAnnealingLR with T_max={num_epochs} in a training of {num_epochs} epochs",
            f"it has stepped {steps} times in an epoch, and its rate rises again after "
            f"{num_epochs} steps",
            "call scheduler.step() once in an epoch, after the loop over the loader, or build it "
            "for all steps: T_max = the number of epochs * loader.steps",
        )
