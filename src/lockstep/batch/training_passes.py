"""Counts the training passes over a loader, in the whole run and in the current epoch."""

from __future__ import annotations


class TrainingPasses:
    """The passes over a loader in which an optimizer has stepped, and which have ended.

    A pass counts, too, if the run was resumed after the last step of its epoch.
    """

    def __init__(self) -> None:
        self.num_ended_in_run = 0
        """The number of passes that have ended in the whole run."""
        self._ended_before_epoch: int | None = None
        """The value of `num_ended_in_run` when the current epoch of `World.epochs` began; None if
        no such loop runs, and for a loader that was prepared during the epoch."""

    def begin_epoch(self) -> None:
        """Notes that an epoch of `World.epochs` begins."""
        self._ended_before_epoch = self.num_ended_in_run

    def end_epochs(self) -> None:
        """Notes that no loop over `World.epochs` runs any more."""
        self._ended_before_epoch = None

    @property
    def was_prepared_before_epoch(self) -> bool:
        """True if the loader was prepared before the current epoch of `World.epochs` began."""
        return self._ended_before_epoch is not None

    @property
    def any_ended_in_epoch(self) -> bool:
        """True if a pass has ended in the current epoch.

        A loader that was prepared during the epoch had no passes before it.
        """
        ended_before = 0 if self._ended_before_epoch is None else self._ended_before_epoch
        return self.num_ended_in_run > ended_before
