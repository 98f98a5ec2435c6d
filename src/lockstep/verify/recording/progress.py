"""How far the recorded run has come: its current update, and how many steps were made.

An *update* is one step of one optimizer, with everything that led to it since the last step; it is
recorded as a `RankUpdate`. The script is ended once enough steps are recorded.
"""

from __future__ import annotations

import time

from torch.optim import Optimizer

from lockstep.session.micro_batch import MicroBatch
from lockstep.verify.rank_files import UpdateWriter
from lockstep.verify.recording.models import Models
from lockstep.verify.run_config import MIN_STEPS, RunConfig
from lockstep.verify.training_record import Batch, RankUpdate


class Finished(SystemExit):
    """Ends the script as `sys.exit(0)` would, because enough steps have been recorded."""


class RunProgress:
    """The progress of the run in one process, which every recorder needs.

    Args:
        writer: writer for the updates of this rank.
        config: settings of the run, including the number of steps after which it ends.
    """

    internal_error = ""
    """The traceback of an error in the recorder itself; empty if there was none."""

    def __init__(self, writer: UpdateWriter, config: RunConfig) -> None:
        self.writer = writer
        self.models = Models()
        self._config = config

        self.update = RankUpdate()
        """The update that is being recorded."""
        self.steps_of: dict[Optimizer, int] = {}
        """Number of steps of each optimizer, in the order of first steps."""
        self.foreign_steps = 0
        """Number of updates on a rank without an optimizer, whose parameters others change."""

        self.micro_batch = MicroBatch()
        """The last micro-batch that one of Lockstep's loaders has handed out."""
        self.last_batch_text = ""
        """The position of the last batch, such as `, batch 3 of 4 of epoch 1`."""
        self.stopped_at = ""
        """The position at which the script was stopped; empty if it ran to its end."""
        self._first_step_time: float | None = None

    @property
    def update_number(self) -> int:
        """Number of the update that is being recorded, from 0."""
        return self.writer.count  # the number of updates written so far

    @property
    def is_first_update(self) -> bool:
        """True until this rank has written an update."""
        return self.update_number == 0

    @property
    def trains_replicas(self) -> bool:
        """True if this process trains several replicas of the model in turn, as with DiLoCo.

        Then each micro-batch of a replica has a step of its own.
        """
        return self.micro_batch.has_own_step

    def finish_update(
        self, update: RankUpdate, later_batches: list[Batch], replica: int | None = None
    ) -> int:
        """Writes a complete update, and begins the next one.

        Args:
            update: the complete update.
            later_batches: batches that were fetched ahead for the next update.
            replica: number of the virtual rank whose model was updated; None unless each virtual
                rank has a model of its own.

        Returns:
            The number of the next update.
        """
        # This also counts the update: `update_number` becomes that of the next one.
        self.writer.write(update, replica)

        # The time limit of the run starts with the first step.
        if self._first_step_time is None:
            self._first_step_time = time.monotonic()

        # `contributes` says whether the losses of this rank count. It keeps its value in the next
        # update, until Lockstep tells the recorder otherwise.
        self.update = RankUpdate(contributes=self.update.contributes, batches=later_batches)
        return self.update_number

    def end_script_if_enough(self) -> None:
        """Ends the script by raising `Finished`, once all steps to be compared are recorded.

        The number of steps is that of the optimizer with the most steps, because others may only
        have pretrained something. On a rank without optimizers, updates made by other ranks are
        counted.
        """
        steps = max(self.steps_of.values(), default=self.foreign_steps)
        if self._is_inside_global_batch() or not self._is_enough(steps):
            return

        self.stopped_at = f"step {steps}{self.last_batch_text}"
        raise Finished(0)

    def _is_enough(self, steps: int) -> bool:
        """True if the given number of steps is enough, or if the time limit is over.

        At least `MIN_STEPS` steps are recorded, no matter how long they take.
        """
        if steps >= self._config.steps:
            return True
        time_limit_s = self._config.seconds
        if time_limit_s is None or self._first_step_time is None or steps < MIN_STEPS:
            return False
        return time.monotonic() > self._first_step_time + time_limit_s

    def _is_inside_global_batch(self) -> bool:
        """True if some virtual ranks have not yet stepped for the current global batch.

        A process that computes several virtual ranks steps once for each of them, in turn.
        """
        if self.micro_batch.virtual_rank is None:
            return False

        # Batches in the current update were handed out, but no step has used them yet.
        has_pending_batch = bool(self.update.batches)
        return has_pending_batch or not self.micro_batch.last

    def add_pending_batch(self, batch: Batch) -> None:
        """Adds a batch to the current update. The script is not ended before a step has used it."""
        self.update.batches.append(batch)
