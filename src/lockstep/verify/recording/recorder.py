"""Observes a script's training on one rank, and records every update of every optimizer.

The recorder is an `Extension` that listens to Lockstep's steps. In addition, torch's hooks and the
functions that `patches` replaces call its parts, each of which records one subject: `inputs`,
`forwards`, `losses`, `gradients`, `optimizers`, `calls` and `foreign_steps`. An *update* is one
step of one optimizer.
"""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

from lockstep.session.extension import DeliveredBatch, Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule
from lockstep.verify.rank_files import RankEnd, UpdateWriter
from lockstep.verify.recording.calls import CallRecorder
from lockstep.verify.recording.foreign_steps import ForeignStepRecorder
from lockstep.verify.recording.forwards import ForwardRecorder
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.gradients import GradientRecorder
from lockstep.verify.recording.guard import ExitByRecorder, guarded
from lockstep.verify.recording.inputs import InputRecorder
from lockstep.verify.recording.losses import LossRecorder
from lockstep.verify.recording.optimizers import OptimizerRecorder
from lockstep.verify.recording.state import RecorderState
from lockstep.verify.run_config import RunConfig
from lockstep.verify.tolerance import Array


class Recorder(Extension):
    """Records the training on one rank.

    Args:
        writer: writer for the updates of this rank.
        config: settings of the run, including the number of steps after which it ends.
        mode: function mode, which sees every call of torch's functions.
    """

    def __init__(self, writer: UpdateWriter, config: RunConfig, mode: FunctionMode) -> None:
        self.state = RecorderState(writer, config, mode)
        self.calls = CallRecorder(self.state)
        self.inputs = InputRecorder(self.state)
        self.gradients = GradientRecorder(self.state, self.calls)
        self.foreign_steps = ForeignStepRecorder(self.state, self.gradients)
        self.forwards = ForwardRecorder(self.state, self.inputs, self.gradients, self.foreign_steps)
        self.losses = LossRecorder(self.state, self.gradients, self.foreign_steps)
        self.optimizers = OptimizerRecorder(self.state, self.inputs, self.gradients)
        mode.writes.on_write_by_hand = self.foreign_steps.record_gradient_of_write

        self.chosen_difference = ""
        """Option of the script that changes results on purpose, such as compressed gradients."""
        self.own_process_line = ""
        """The line of the script that started the first process of its own; empty if none did."""
        self.line_of_loader_without_batch_size = ""
        """The line of the first DataLoader whose batches could not be enlarged; empty if none."""

    # Events of Lockstep's steps

    @guarded
    def module_prepared(self, wrapped: PreparedModule) -> None:
        """Adds a module that `World.prepare` has wrapped to the recorded models."""
        # The first option that changes the results is reported.
        if not self.chosen_difference:
            self.chosen_difference = wrapped.chosen_difference
        self.forwards.add_prepared(wrapped.module)

    def delivered(self, batch: DeliveredBatch) -> None:
        """Records a micro-batch that one of Lockstep's loaders hands out."""
        self.inputs.record_lockstep_batch(batch)

    @guarded
    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Records the loss of a micro-batch, before `World.backward` runs the backward pass.

        Args:
            weighted_loss: loss multiplied by the scale of the micro-batch.
            micro_batch: micro-batch that the loss was computed from.
        """
        loss = weighted_loss
        # A micro-batch with the scale 0 has no samples and only keeps this rank in step with the
        # others. Its loss may be NaN, as the mean over no samples, but contributes 0.
        if micro_batch.scale == 0:
            loss = weighted_loss.new_zeros(())
        self.losses.record_weighted(loss)

    # Called by patches

    def note_own_process(self, line: str) -> None:
        """Records the line at which the script first started a process of its own."""
        self.own_process_line = self.own_process_line or line

    def note_loader_without_batch_size(self, line: str) -> None:
        """Records the line of the first DataLoader whose batches cannot be enlarged."""
        self.line_of_loader_without_batch_size = self.line_of_loader_without_batch_size or line

    # The end of the script

    def end(self, script_failed: bool) -> RankEnd:
        """Records the last update, and returns what is only known at the end of the script.

        Args:
            script_failed: True if an error has ended the script. The last update is then recorded
                only if it was complete.
        """
        # An error of the recorder's own is kept in `internal_error`, which is a part of the result.
        with suppress(ExitByRecorder):
            if not script_failed:
                # A rank without an optimizer, whose parameters another rank changes, notices each
                # update at its next forward pass. After the last update there is none.
                self.foreign_steps.record_last_update()

        final_parameters: dict[str, Array] = {}
        with suppress(ExitByRecorder):
            final_parameters = self._final_parameters()

        state = self.state
        num_backward_passes = len(state.update.losses)
        return RankEnd(
            uses_lockstep=bool(state.models.prepared_ids),
            stopped_at=state.stopped_at,
            chosen_difference=self.chosen_difference,
            own_process_line=self.own_process_line,
            internal_error=state.internal_error,
            line_of_loader_without_batch_size=self.line_of_loader_without_batch_size,
            num_loaders=self.inputs.number_of_torch_loaders,
            num_backward_passes=num_backward_passes,
            num_passes_without_step=0 if state.has_optimizer else num_backward_passes,
            branch_outcomes=list(state.branches.pop_outcomes().items()),
            final_sums={name: array.tolist() for name, array in final_parameters.items()},
        )

    @guarded
    def _final_parameters(self) -> dict[str, Array]:
        """Returns summaries of the parameters that the next update would start with, by name.

        The result is empty on a rank that has joined (`Join`), because it receives the parameters
        of the other ranks later.
        """
        if self.state.has_joined:
            return {}
        # The next update has already begun, with the parameters at its first forward pass.
        if self.state.update.began_with_forward:
            return self.state.notes.summaries_at_start
        return self.state.models.summaries_of_parameters()
