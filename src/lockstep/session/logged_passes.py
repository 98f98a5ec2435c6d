"""The passes over loaders to which values of `World.log` belong.

A *pass* is one iteration over a prepared loader, with gradients or without. The values that a
script logs while a pass is open belong to it, and are complete when it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.session.delivery import Delivery, TrainingPass, still_referenced
from lockstep.session.extension import Extensions
from lockstep.session.micro_batch import MicroBatch


class PassIdentity(NamedTuple):
    """Identifies a pass. It is the same on all ranks that take part in the pass.

    Some ranks may take part in more passes than others, for example if only rank 0 looks at some
    samples. So passes are counted from 0 again at each step, and a pass is only counted once
    something is logged in it or its loader is exhausted.
    """

    loader_number: int
    is_training: bool
    begun: int
    """See `OpenPass.begun`."""
    number: int
    """See `OpenPass.number`."""


@dataclass(eq=False)
class OpenPass:
    """A pass over a prepared loader, with or without gradients, and what was logged in it."""

    loader: Any
    training_pass: TrainingPass | None
    """None for a pass without gradients."""
    begun: int
    """The number of global batches that were trained before the pass began."""
    number: int = 0
    """The number of the pass, from 1, among those over this loader that began at the same step. It
    is 0 until something is logged in the pass, or the loader is exhausted."""
    sums: Any = None
    """The `WeightedSums` of the values that the script has logged in the pass, or None."""
    description: str = ""
    """The name of the pass, e.g. `epoch 3` or `validation`; empty if it has none."""
    is_shown: bool = False
    """True for a loop over `World.progress`."""
    only_held_batches_remain: bool = False
    """True if the loader is exhausted, but the loop holds batches that it has not trained yet. The
    pass then stays open until the script begins another one."""
    handed_out: MicroBatch = field(default_factory=MicroBatch)
    """The micro-batch that was handed out last."""
    batch_of_name: dict[str, Delivery | None] = field(default_factory=dict)
    """For each logged name, the batch that the loop computed on when it was last logged."""

    @property
    def is_training(self) -> bool:
        """True for a pass with gradients."""
        return self.training_pass is not None

    @property
    def is_counted(self) -> bool:
        """True if the pass has a number.

        A pass that was left early, with nothing logged in it, never gets one. It may have been made
        on this rank only.
        """
        return self.number > 0

    @property
    def identity(self) -> PassIdentity:
        """Identifies the pass among those of all ranks. Until it is counted, its number is 0."""
        return PassIdentity(self.loader.number, self.is_training, self.begun, self.number)

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch that the loop is computing on."""
        if self.training_pass is None or self.training_pass.batch_in_use is None:
            return self.handed_out
        return self.training_pass.batch_in_use.micro_batch

    def includes_logged_value(self, name: str) -> bool:
        """Returns True if a value that the script logs now belongs to this pass.

        A loop logs a name once for each batch. Example: the loop `for batch in list(loader):
        world.log(loss=train_on(batch))` begins when the loader has already given all 5 batches. The
        first "loss" for batch 5 belongs to the pass. A second "loss" for batch 5 does not: the loop
        is over.

        Args:
            name: name of the value, for example "loss".
        """
        loader_has_more_batches = not self.only_held_batches_remain
        if loader_has_more_batches:
            return True

        # The loader is exhausted. The loop may still train on batches that it holds, or be over.
        assert self.training_pass is not None  # only training leaves batches to train on
        is_first_value_with_name = name not in self.batch_of_name
        if is_first_value_with_name:
            return self.training_pass.holds_batches

        loop_is_at_same_batch = self.batch_of_name[name] is self.training_pass.batch_in_use
        return not loop_is_at_same_batch


class LoggedPasses:
    """The passes over loaders that are open, and those that ended last.

    Args:
        extensions: the extensions of the run, which are told when the values of a pass are
            complete.
    """

    def __init__(self, extensions: Extensions) -> None:
        self._extensions = extensions
        self.open: list[OpenPass] = []
        """The passes that are open. The one that was last to hand out a micro-batch is at the end.
        """
        self.last_ended: OpenPass | None = None
        """The pass that ended last; None if none has ended."""
        self.ended_since_last_batch: OpenPass | None = None
        """The pass that ended last, until a loop gets its next micro-batch. That may be the loop
        around it, for an evaluation within a training loop."""
        self._num_passes: Counter[PassIdentity] = Counter()
        """How many passes have a number, by the identity that they had before, with the number 0.
        """

    @contextmanager
    def opened(
        self, loader: Any, training_pass: TrainingPass | None, *, num_trained: int
    ) -> Iterator[OpenPass]:
        """Returns a context in which a pass over a loader is open.

        The pass is closed when the loop is left early, or the loader is exhausted. But if the loop
        then still holds batches of the exhausted loader on which it has not trained, the pass stays
        open until the script begins another pass.

        Args:
            loader: the loader.
            training_pass: the pass; None for one without gradients.
            num_trained: the number of global batches that were trained before it.
        """
        self._close_exhausted()
        if not self.open:
            self._forget_passes_of_earlier_steps(num_trained)
        open_pass = OpenPass(loader, training_pass, begun=num_trained)
        self.open.append(open_pass)

        try:
            yield open_pass
            self._note_exhausted(open_pass)
        finally:
            # Only `_note_exhausted` makes this True. If the loop is left early, it is not called.
            if not open_pass.only_held_batches_remain:
                self._close(open_pass)

    def _note_exhausted(self, open_pass: OpenPass) -> None:
        """Records that the loader of a pass has no more batches, and whether the loop holds some.

        If it does, `only_held_batches_remain` becomes True.
        """
        self.assign_number(open_pass)  # every rank has made this pass, so it is counted
        self.ended_since_last_batch = open_pass
        if open_pass.training_pass is not None:
            held_batches = still_referenced(open_pass.training_pass.untrained)
            open_pass.only_held_batches_remain = len(held_batches) > 0

    def hands_out(self, open_pass: OpenPass, micro_batch: MicroBatch) -> None:
        """Records that a pass, with or without gradients, hands out a micro-batch."""
        open_pass.handed_out = micro_batch
        self.ended_since_last_batch = None
        if open_pass in self.open:  # move it to the end
            self.open.remove(open_pass)
            self.open.append(open_pass)

    def assign_number(self, open_pass: OpenPass) -> None:
        """Gives a pass its number, if it has none yet.

        Called when the script logs something in the pass, or when its loader is exhausted.
        """
        if open_pass.is_counted:
            return
        identity_without_number = open_pass.identity
        self._num_passes[identity_without_number] += 1
        open_pass.number = self._num_passes[identity_without_number]

    def close_all(self) -> None:
        """Closes all open passes, because the run ends."""
        for open_pass in list(self.open):
            self._close(open_pass)

    def _close_exhausted(self) -> None:
        """Closes the passes whose loader is exhausted, and of which the loop held some batches.

        Called when another pass begins or ends, so the loops are taken to be done with them.
        """
        for open_pass in list(self.open):
            if open_pass.only_held_batches_remain:
                self._close(open_pass)

    def _close(self, open_pass: OpenPass) -> None:
        """Closes a pass that is over, or that the loop has left."""
        was_closed_at_end_of_run = open_pass not in self.open
        if was_closed_at_end_of_run:
            return

        self.open.remove(open_pass)

        # A pass without a number is not counted: the loop has left it, and has logged nothing.
        if open_pass.is_counted:
            self.last_ended = open_pass
            self.ended_since_last_batch = open_pass

        if open_pass.sums is not None:  # the values that the script has logged are complete now
            self._extensions.values_logged(open_pass.sums, open_pass)

        # As this loop is over, the script no longer trains on the batches of exhausted loaders.
        self._close_exhausted()

    def _forget_passes_of_earlier_steps(self, num_trained: int) -> None:
        """Drops the counts of passes that began at earlier steps than the current one.

        Passes are numbered among those that began at the same step, so the next one needs no
        earlier count.
        """
        counts = Counter[PassIdentity]()
        for identity, count in self._num_passes.items():
            if identity.begun == num_trained:
                counts[identity] = count
        self._num_passes = counts
