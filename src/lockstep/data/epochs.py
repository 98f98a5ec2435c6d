"""The epochs of a training: which one it is, and whether it is done when a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.data.loader import Loader
from lockstep.step import Step


class Epochs:
    """Counts epochs and sees, from what the loaders did, whether the present one is done.

    Args:
        loaders: all prepared loaders; the list may still grow.
        step: of the run.
    """

    def __init__(self, loaders: list[Loader], step: Step) -> None:
        self.present = 0
        self._loaders = loaders
        self._step = step
        self._begun: dict[Loader, int] | None = None
        """Passes with steps of each loader when the present epoch began; None between loops."""
        self._begun_at = 0
        self._regular: list[Loader] = []
        """Those that were trained on in the epoch before belong to every epoch."""

    def run(self, total: int) -> Iterator[int]:
        """The epochs from the present one to `total` - 1."""
        while self.present < total:
            self._begin()
            try:
                yield self.present
            except GeneratorExit:  # the loop was left with `break`
                self.present = self.next
                self._begun = None
                raise
            self.present += 1
        self._begun = None

    @property
    def next(self) -> int:
        """The epoch to continue with: the present one, or the next if it is done."""
        return self.present + int(self._done())

    def _begin(self) -> None:
        before = self._begun or {}
        self._regular = [x for x in self._loaders if x.trained > before.get(x, x.trained)]
        self._begun = {loader: loader.trained for loader in self._loaders}
        self._begun_at = self._step.number

    def _done(self) -> bool:
        if self._begun is None or any(loader.mid_epoch for loader in self._loaders):
            return False
        if not any(loader.trained for loader in self._loaders):
            return self._step.number > self._begun_at
        now = [x for x in self._loaders if x.trained > self._begun.get(x, 0)]
        return bool(now) and all(loader in now for loader in self._regular)
