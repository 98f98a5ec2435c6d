"""Counts the epochs of a training, for `World.epochs`.

It also finds out whether the current epoch is done, from what the loaders have handed out, so that
a training that was saved at the end of an epoch resumes with the next one.
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.batch.loader import Loader
from lockstep.session.step import Step


class Epochs:
    """Counts epochs.

    Args:
        loaders: list of all prepared loaders, to which more may be added later.
        step: the state of the run's optimizer steps.
    """

    def __init__(self, loaders: list[Loader], step: Step) -> None:
        self.present = 0
        """The current epoch."""
        self._loaders = loaders
        self._step = step
        self._is_running = False
        """True while a loop over epochs runs."""
        self._step_at_begin = 0
        """The number of optimizer steps before the current epoch."""
        self._loaders_of_previous_epoch: list[Loader] = []
        """Loaders that were trained on in the previous epoch. The current epoch is not done before
        they have been trained on again."""

    def run(self, total: int) -> Iterator[int]:
        """Yields the epochs from the current one to `total` - 1.

        At the beginning of each epoch, this notes how often the loaders and the optimizer have been
        used so far; by that it recognises whether the epoch is done. After the last one, or if the
        loop is left, it forgets these notes.
        """
        while self.present < total:
            self._note_beginning()
            try:
                yield self.present
            except GeneratorExit:  # the loop was left, by `break` or by an exception in it
                # Another loop will continue with this epoch if it is not done, and otherwise with
                # the next one. (This must be asked before the notes are forgotten.)
                self.present = self.epoch_to_resume
                self._forget_beginning()
                raise

            self.present += 1

        self._forget_beginning()

    @property
    def epoch_to_resume(self) -> int:
        """The epoch to resume with: the next one if the current one is done, else the current."""
        return self.present + 1 if self._is_done() else self.present

    def _note_beginning(self) -> None:
        """Notes the state at the beginning of an epoch, by which `_is_done` recognises its end.

        It also notes which loaders were trained on in the previous epoch. The new epoch is done
        only after each of them has been trained on again.
        """
        # Until `begin_epoch` is called below, `passes` tells of the epoch that has just ended. A
        # loader that was prepared in the middle of that epoch may not be used in the new one.
        self._loaders_of_previous_epoch = []
        for loader in self._loaders:
            passes = loader.training_passes
            if passes.was_prepared_before_epoch and passes.any_ended_in_epoch:
                self._loaders_of_previous_epoch.append(loader)

        self._is_running = True
        for loader in self._loaders:
            loader.training_passes.begin_epoch()
        self._step_at_begin = self._step.number

    def _forget_beginning(self) -> None:
        """Forgets the beginning of the epoch: no loop over epochs is running any more."""
        self._is_running = False
        for loader in self._loaders:
            loader.training_passes.end_epochs()

    def _is_done(self) -> bool:
        """Returns True if the current epoch is done.

        It is done when at least one loader was trained on in this epoch, and every loader that was
        trained on in the previous epoch was trained on again. A training that uses no prepared
        loader has done an epoch after a single optimizer step.
        """
        if not self._is_running:
            return False
        if any(loader.mid_epoch for loader in self._loaders):  # a pass has not ended yet
            return False

        uses_loaders = any(loader.training_passes.num_ended_in_run > 0 for loader in self._loaders)
        if not uses_loaders:
            return self._step.number > self._step_at_begin

        trained_in_epoch = [
            loader for loader in self._loaders if loader.training_passes.any_ended_in_epoch
        ]
        if not trained_in_epoch:
            return False
        return all(loader in trained_in_epoch for loader in self._loaders_of_previous_epoch)
