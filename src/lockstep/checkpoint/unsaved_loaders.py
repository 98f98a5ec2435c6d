"""Warns of a loader that a run trains on and that its checkpoints lack.

When the run is resumed, such a loader begins with its first epoch, so samples are trained on twice.
The first start says so as soon as it trains on after a save, and a resumed run at its first step.

A loader is left alone if its position does not matter, or if the script makes it go on: it saves
and loads the state of the loader or of its sampler itself, or sets the epochs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from lockstep.batch.loader import Loader
from lockstep.errors import warn
from lockstep.session.extension import Extension
from lockstep.user_code import Location, user_location


def loaders_that_need_state(
    loaders: Sequence[Loader], saved_ids: Collection[int]
) -> dict[int, Loader]:
    """Returns the loaders that cannot go on in a resumed run without a state, by their numbers.

    Left out are those whose position does not matter, and those with a sampler, or a stream, that
    is saved as an object with a state of its own.

    Args:
        loaders: all prepared loaders of the run, in the order of their numbers in the summary.
        saved_ids: the ids of the objects that are saved.
    """
    found = {}
    for number, loader in enumerate(loaders):
        parts_with_position = loader.source.samplers
        is_stream = loader.source.sharding is not None
        if is_stream:
            parts_with_position.append(loader.dataset)
        position_is_saved = any(id(part) in saved_ids for part in parts_with_position)
        if loader.position_matters and not position_is_saved:
            found[number] = loader
    return found


class WarningAfterResume(Extension):
    """Warns at the first step of a resumed run if it trains on a loader that was not resumed.

    There is no warning for a loop that skips the first batches.

    Args:
        folder: the folder of the checkpoints.
        loaders: all prepared loaders of the run.
        saved_ids: the ids of the objects that are saved.
    """

    def __init__(self, folder: Path, loaders: Sequence[Loader], saved_ids: Collection[int]) -> None:
        self._folder = folder
        self._unresumed_loaders: list[tuple[int, Loader]] = []
        for number, loader in loaders_that_need_state(loaders, saved_ids).items():
            if not loader.is_resumed:
                self._unresumed_loaders.append((number, loader))
        self._line = user_location()  # of `resume`

    def step_finished(self, number: int) -> None:
        """Warns of each loader that begins anew with the first step."""
        loaders = self._unresumed_loaders
        self._unresumed_loaders = []
        for loader_number, loader in loaders:
            if loader.batch_in_training == (0, 0):
                warn(
                    f"resuming from {self._folder} without loader {loader_number}",
                    found="it is trained on and not saved in the checkpoint, so it begins with its "
                    "first epoch, and samples are trained on twice",
                    do="name it from the first start on: world.checkpoint(..., loader=loader)",
                    code="LS113",
                    at=self._line,
                )


class WarningAfterSave(Extension):
    """Warns once if the run trains on after a save with a loader that was not saved.

    A loader that was used up before the save is trained on no more, and need not be saved. Nor is
    any loader trained on after a save at the end of the run.

    Args:
        folder: the folder of the checkpoints.
        loaders: the prepared loaders of the run, to which more may be added later.
        saved_ids: the ids of the objects that are saved.
        line: the line of `world.checkpoint`.
    """

    def __init__(
        self,
        folder: Path,
        loaders: Sequence[Loader],
        saved_ids: Collection[int],
        line: Location | None,
    ) -> None:
        self._folder = folder
        self._loaders = loaders
        self._saved_ids = saved_ids
        self._line = line
        self._has_warned = False
        self._batch_before_save: dict[int, tuple[int, int] | None] = {}
        """The loaders that were trained on and not saved, by their numbers. For each, the batch of
        the last step before the save, or None if the loop has begun another one since."""

    def saved(self) -> None:
        """Called after each save: notes which loaders were trained on and not saved."""
        self._batch_before_save.clear()
        if self._has_warned:
            return
        for number, loader in loaders_that_need_state(self._loaders, self._saved_ids).items():
            if loader.was_trained_on:
                self._batch_before_save[number] = loader.batch_with_step

    def step_finished(self, number: int) -> None:
        """Warns of each of these loaders with which the training goes on."""
        goes_on = []
        for loader_number, batch_before_save in self._batch_before_save.items():
            loader = self._loaders[loader_number]
            is_made_to_go_on = loader.is_saved or loader.epoch_was_set
            batch = loader.batch_in_training
            if not is_made_to_go_on and batch is not None and batch != batch_before_save:
                goes_on.append(loader_number)
        if not goes_on:
            return

        self._has_warned = True
        self._batch_before_save.clear()
        for loader_number in goes_on:
            warn(
                f"world.checkpoint({str(self._folder)!r}) without loader {loader_number}",
                found="it is trained on and not saved in the checkpoint, so a resumed run begins "
                "with its first epoch, and trains on samples twice unless the script skips them",
                do="start anew with world.checkpoint(..., loader=loader): a checkpoint without the "
                "loader cannot be resumed with it",
                code="LS113",
                at=self._line,
            )
