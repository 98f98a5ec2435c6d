"""Warns of learning-rate schedules that do not have the length of the training.

- `len(loader)` of a prepared loader is the number of iterations of the loop, which are
micro-batches. But a prepared scheduler steps once per global batch. If it was built for `epochs *
len(loader)` steps, it is still near the beginning of its schedule when the training ends.
- If a CosineAnnealingLR was built for as many steps as there are epochs, but steps once per global
batch, it reaches its end within the first epochs, and then the rate goes up and down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim.lr_scheduler import CosineAnnealingLR

from lockstep.batch.loader import Loader
from lockstep.checkpoint.checks import LENGTH_ATTRIBUTES
from lockstep.errors import warn
from lockstep.session.extension import Extension
from lockstep.training.epoch_loop import epochs_of_loop, may_become_argument
from lockstep.training.scheduler import PreparedScheduler
from lockstep.user_code import Location, user_stack


@dataclass(frozen=True)
class _EndOfPass:
    """What was recorded at the end of a pass over a loader."""

    num_passes: int
    """The number of passes over the loader that have ended, with this one."""
    stack: tuple[Location, ...]
    """The lines of the script that were running."""
    steps_of_scheduler: dict[PreparedScheduler, int]
    """How many steps each scheduler had made."""


class ScheduleLengths(Extension):
    """Compares the lengths of the prepared schedules with the length of the training.

    The number of epochs is known if the script uses `World.epochs`. Otherwise it is found out after
    two epochs, if both passes ended at the same line of the same functions: then the loop makes one
    pass in each of its iterations, whose number is read from the script.

    Each scheduler is compared with each loader once, at the first two ends of passes after the
    scheduler was prepared.

    Args:
        schedulers: the prepared schedulers; more may be added later.
        loaders: the prepared loaders; more may be added later.
    """

    def __init__(self, schedulers: Sequence[PreparedScheduler], loaders: Sequence[Loader]) -> None:
        self._schedulers = schedulers
        self._loaders = loaders
        self._latest_ends: dict[Loader, _EndOfPass] = {}
        """For each loader, the end of its latest training pass."""
        self._compared: set[tuple[PreparedScheduler, Loader]] = set()
        """The schedulers that were compared with two training passes over a loader."""
        self._warned_of: set[PreparedScheduler] = set()
        self._num_epochs: int | None = None
        """The number of epochs that the script gave to `World.epochs`; None if it did not."""
        self._line_of_length: dict[tuple[PreparedScheduler, Loader], Location] = {}
        """The line of the script that used the length of a loader before the scheduler was
        prepared."""

    def note_prepared(self, scheduler: PreparedScheduler) -> None:
        """Records which lengths of loaders the script had used when a scheduler was prepared.

        A length that is used later, or only printed, cannot be the length of the schedule.
        """
        for loader in self._loaders:
            for line in loader.lines_that_asked_length:
                if may_become_argument(line):
                    self._line_of_length[scheduler, loader] = line

    def check_epochs(self, num_epochs: int) -> None:
        """Warns of schedules that are as long as the micro-batches of all epochs.

        With several loaders it is not known yet which ones are trained on, so they are checked at
        the end of the first epoch.

        Args:
            num_epochs: the number of epochs of the training.
        """
        self._num_epochs = num_epochs
        if len(self._loaders) == 1:
            self._check_all(self._loaders[0], num_epochs)

    def _check_all(self, loader: Loader, num_epochs: int) -> None:
        """Checks all schedules against the length of one loader."""
        for scheduler in self._schedulers:
            self._check_micro_batches(scheduler, loader, num_epochs)

    def pass_ended(self) -> None:
        """Checks the schedules against the loaders over which a pass has ended."""
        for loader in self._loaders:
            was_trained_on = loader.training_passes.num_ended_in_run > 0
            if was_trained_on and not self._all_are_compared_with(loader):
                # If the script uses `World.epochs`, the length of the training is known already.
                if self._num_epochs is not None:
                    self._check_all(loader, self._num_epochs)
                # Two ends of passes show how often the schedulers step.
                self._compare_with_previous_end(loader)

    def _all_are_compared_with(self, loader: Loader) -> bool:
        """Returns True if every scheduler was compared with two passes over a loader."""
        return all((scheduler, loader) in self._compared for scheduler in self._schedulers)

    def _compare_with_previous_end(self, loader: Loader) -> None:
        """Compares the ends of two successive passes over a loader.

        They show how often the schedulers step, and the length of the training if it is not known.
        This is called for each loader when a pass over any of them ends.
        """
        latest_end = self._latest_ends.get(loader)
        num_passes = loader.training_passes.num_ended_in_run
        no_pass_has_ended_since = latest_end is not None and latest_end.num_passes == num_passes
        if no_pass_has_ended_since:  # the pass that has ended now was over another loader
            return

        present_end = _EndOfPass(
            num_passes=num_passes,
            stack=user_stack(),
            steps_of_scheduler={each: each.num_steps for each in self._schedulers},
        )
        self._latest_ends[loader] = present_end
        if latest_end is not None:
            self._compare(loader, latest_end, present_end)

    def _compare(self, loader: Loader, first: _EndOfPass, second: _EndOfPass) -> None:
        """Checks the schedulers that stepped once for each global batch of an epoch.

        The loop of the epochs is the one around the line at which both passes have ended. If they
        have ended at different lines, as in a script that trains in two loops one after the other,
        nothing is checked.

        Args:
            loader: the loader that was trained on.
            first: the end of an earlier pass over it.
            second: the end of a later pass.
        """
        steps_in_epoch = self._steps_of_new_schedulers(loader, first, second)
        ended_at_same_line = first.stack == second.stack
        if not ended_at_same_line:
            return

        num_epochs = epochs_of_loop()  # of the loop in which the script is now
        if num_epochs is None:
            return

        for scheduler, steps in steps_in_epoch.items():
            stepped_in_each_global_batch = steps == loader.steps
            if stepped_in_each_global_batch:
                self._check_micro_batches(scheduler, loader, num_epochs)
                self._check_epochs_as_steps(scheduler, loader, num_epochs)

    def _steps_of_new_schedulers(
        self, loader: Loader, first: _EndOfPass, second: _EndOfPass
    ) -> dict[PreparedScheduler, int]:
        """Returns how often schedulers have stepped between two ends of passes over a loader.

        Each scheduler is in the result once in a training. One that was prepared after `first` is
        left out, and is in the next result: nothing tells how often it has stepped in this epoch.
        """
        steps_of_scheduler = {}
        for scheduler, steps_before in first.steps_of_scheduler.items():
            if (scheduler, loader) not in self._compared:
                self._compared.add((scheduler, loader))
                steps_of_scheduler[scheduler] = second.steps_of_scheduler[scheduler] - steps_before
        return steps_of_scheduler

    def _check_micro_batches(
        self, scheduler: PreparedScheduler, loader: Loader, num_epochs: int
    ) -> None:
        """Warns if a schedule is as long as the number of micro-batches in the training."""
        # If the script had not used `len(loader)` before it prepared the scheduler, this is None:
        # the schedule was not computed from the length of this loader.
        line_of_length = self._line_of_length.get((scheduler, loader))
        if line_of_length is None or loader.steps is None or scheduler in self._warned_of:
            return

        num_micro_batches_of_epoch = loader.num_micro_batches_of_epoch()
        num_global_batches_of_epoch = loader.steps
        if num_micro_batches_of_epoch == num_global_batches_of_epoch:
            return

        num_micro_batches = num_epochs * num_micro_batches_of_epoch
        # Then the schedule may be meant for that loader.
        if self._some_loader_has_global_batches(num_micro_batches, num_epochs):
            return

        state = scheduler.state_dict()
        for name in LENGTH_ATTRIBUTES:
            if state.get(name) != num_micro_batches:
                continue

            self._warned_of.add(scheduler)
            num_global_batches = num_epochs * num_global_batches_of_epoch
            warn(
                f"{type(scheduler.inner).__name__} with {name}={num_micro_batches} in a training "
                f"of {num_epochs} epochs",
                found=f"len(loader) is {num_micro_batches_of_epoch}, the micro-batches of an "
                "epoch, but the scheduler steps once for each global batch: it makes at most "
                f"{num_global_batches} of its {num_micro_batches} steps",
                do="compute its length before world.prepare, where len(loader) counts global "
                "batches, or from loader.steps",
                at=line_of_length,
            )

    def _some_loader_has_global_batches(self, num_global_batches: int, num_epochs: int) -> bool:
        """Returns True if some loader has this number of global batches in the training."""
        for loader in self._loaders:
            if loader.steps is not None and num_epochs * loader.steps == num_global_batches:
                return True
        return False

    def _check_epochs_as_steps(
        self, scheduler: PreparedScheduler, loader: Loader, num_epochs: int
    ) -> None:
        """Warns of a cosine schedule that has as many steps as the training has epochs.

        The scheduler has stepped once for each global batch of an epoch. So the schedule is wrong
        if an epoch has several global batches.
        """
        steps = loader.steps
        is_cosine = type(scheduler.inner) is CosineAnnealingLR
        if not is_cosine or steps is None or steps < 2 or scheduler in self._warned_of:
            return
        if scheduler.state_dict()["T_max"] != num_epochs:
            return

        self._warned_of.add(scheduler)
        warn(
            f"CosineAnnealingLR with T_max={num_epochs} in a training of {num_epochs} epochs",
            found=f"it has stepped {steps} times in an epoch, and its rate rises again after "
            f"{num_epochs} steps",
            do="call scheduler.step() once in an epoch, after the loop over the loader, or build "
            "it for all steps: T_max = the number of epochs * loader.steps",
        )
