"""Counts the epochs of a training, for `World.epochs`.

From what the loaders did it sees whether the current epoch is done, so that a checkpoint saved at
the end of an epoch resumes with the next one.
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.batch.loader import Loader
from lockstep.session.step import Step


class Epochs:
    """Counts epochs.

    Args:
        loaders: all prepared loaders. More may be added to the list later.
        step: of the run.
    """

    def __init__(self, loaders: list[Loader], step: Step) -> None:
        self.present = 0
        """The current epoch."""
        self._loaders = loaders
        self._step = step
        self._passes_at_begin: dict[Loader, int] | None = None
        """How many passes each loader was trained on before the current epoch; None outside of a
        loop over epochs."""
        self._step_at_begin = 0
        """The optimizer steps before the current epoch."""
        self._loaders_of_every_epoch: list[Loader] = []
        """Loaders that were trained on in the epoch before. The current one is not done without."""

    def run(self, total: int) -> Iterator[int]:
        """Yields the epochs from the current one to `total` - 1."""
        while self.present < total:
            self._begin()
            try:
                yield self.present
            except GeneratorExit:
                # The loop was left with `break`. Another loop continues with `next`: with this
                # epoch if it is not done, and otherwise with the one after it.
                self.present = self.next
                self._passes_at_begin = None
                raise

            self.present += 1

        self._passes_at_begin = None

    @property
    def next(self) -> int:
        """The epoch to continue with: the current one, or the next one if it is done."""
        return self.present + 1 if self._is_done() else self.present

    def _begin(self) -> None:
        """Notes what was trained before the epoch that begins.

        `trained` of a loader is the number of passes over it that were trained on. If it grew in
        the epoch that has ended, the new epoch needs that loader too: it is not done without.
        """
        passes_before = self._passes_at_begin or {}  # None before the first epoch
        self._loaders_of_every_epoch = []
        for loader in self._loaders:
            if loader in passes_before and loader.trained > passes_before[loader]:
                self._loaders_of_every_epoch.append(loader)
        self._passes_at_begin = {loader: loader.trained for loader in self._loaders}
        self._step_at_begin = self._step.number

    def _is_done(self) -> bool:
        """Returns True if the current epoch is done.

        It is done when some loader was trained on in it, and each loader that was trained on in the
        epoch before. `trained` of a loader counts the passes over it that were trained on.
        """
        passes_before = self._passes_at_begin
        if passes_before is None:  # no loop over epochs is running
            return False
        if any(loader.mid_epoch for loader in self._loaders):  # a pass over it is not at its end
            return False
        if not any(loader.trained for loader in self._loaders):
            # The training uses no prepared loader. Then one step in an epoch is enough.
            return self._step.number > self._step_at_begin

        trained_in_epoch = []
        for loader in self._loaders:
            # A loader that was prepared inside the epoch had no pass before.
            if loader.trained > passes_before.get(loader, 0):
                trained_in_epoch.append(loader)

        if not trained_in_epoch:
            return False

        return all(loader in trained_in_epoch for loader in self._loaders_of_every_epoch)
