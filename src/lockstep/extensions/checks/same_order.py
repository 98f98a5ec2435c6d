"""Warns if a script prepares its training loader anew in each epoch, which repeats one order.

A loader counts its own epochs and shuffles anew in each of them. A new loader over the same dataset
begins with epoch 0, so a loop that calls `world.prepare(DataLoader(...))` or `world.loader(...)` in
each epoch trains on the same order each time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from lockstep.batch.loader import Loader
from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.strategies.base import PreparedModule

LOADERS_UNTIL_WARNING = 3
"""Two loaders in one training may be meant: one for each of two phases."""


class SameOrderCheck(Check):
    """Compares the loaders on which the script has trained since it prepared an optimizer."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._has_warned = False
        self._num_loaders = 0
        """The number of loaders when the latest pass ended."""
        self._loaders_of_earlier_trainings: set[Loader] = set()
        """The loaders of folds or trials before the present one, which may well repeat an order."""

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Leaves the loaders of earlier trainings out, as another training begins."""
        self._loaders_of_earlier_trainings = {
            loader for loader in self.run.loaders if loader.training_passes.num_ended_in_run > 0
        }

    def pass_ended(self) -> None:
        """Warns, once, if several loaders were trained on in the same order, once each."""
        # The mistake is to prepare a new loader in each epoch. A script that trains on the same
        # loaders in each epoch, one after the other, is right.
        num_loaders_before = self._num_loaders
        self._num_loaders = len(self.run.loaders)
        some_loader_is_new = self._num_loaders > num_loaders_before
        if self._has_warned or not some_loader_is_new:
            return

        loaders = self._loaders_of_first_epochs()
        if len(loaders) < LOADERS_UNTIL_WARNING:
            return

        latest = loaders[-1]
        in_same_order = [loader for loader in loaders if _has_order_of(loader, latest)]
        if len(in_same_order) < LOADERS_UNTIL_WARNING:
            return

        self._has_warned = True
        warn(
            "a loader that is prepared anew in each epoch",
            found=f"{len(in_same_order)} loaders over the same dataset were each trained on for "
            "one epoch; each begins with its own epoch 0, so these epochs had the same order",
            do="prepare the loader once, before the loop over the epochs: it shuffles anew in each",
            code="LS103",
        )

    def _loaders_of_first_epochs(self) -> list[Loader]:
        """Returns the shuffled loaders of this training that have trained their epoch 0 alone."""
        loaders = []
        for loader in self.run.loaders:
            is_of_this_training = loader not in self._loaders_of_earlier_trainings
            has_ended_once = loader.training_passes.num_ended_in_run == 1
            # `epoch` is now the next epoch. It is another one if the script calls `set_epoch`.
            has_trained_epoch_0 = has_ended_once and loader.epoch == 1
            if is_of_this_training and loader.source.shuffle and has_trained_epoch_0:
                loaders.append(loader)
        return loaders


def _has_order_of(loader: Loader, other: Loader) -> bool:
    """Returns True if two shuffled loaders have the same global batches in their epoch 0."""
    return (
        loader.dataset is other.dataset
        and loader.source.length == other.source.length
        and loader.batch_size == other.batch_size
    )
