"""Looks on at a script's training in one rank, and records every update of every optimizer.

The recorder only sees calls and values. It listens to Lockstep's steps as an `Extension`;
torch's hooks and the functions that `patches` replaces call its parts, each of which records one
subject: `inputs`, `forwards`, `losses`, `gradients`, `optimizers`, `calls`, and `foreign_steps`.
"""

from __future__ import annotations

from torch import Tensor

from lockstep.session.extension import DeliveredBatch, Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule
from lockstep.verify.rank_files import UpdateWriter
from lockstep.verify.recording.calls import CallRecorder
from lockstep.verify.recording.foreign_steps import ForeignStepRecorder
from lockstep.verify.recording.forwards import ForwardRecorder
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.gradients import GradientRecorder
from lockstep.verify.recording.inputs import InputRecorder
from lockstep.verify.recording.losses import LossRecorder
from lockstep.verify.recording.optimizers import OptimizerRecorder
from lockstep.verify.recording.state import RecorderState, guarded
from lockstep.verify.run_config import RunConfig
from lockstep.verify.tolerance import Array


class Recorder(Extension):
    """The recorder of one rank.

    Args:
        writer: writes the updates of this rank.
        config: how the script is run, and after how many steps it ends.
        mode: sees every call of torch's functions.
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

        self.by_choice = ""
        """What the script has chosen that changes its results, and that is left out."""
        self.own_process_line = ""
        """The line that started the first process of the script's own; empty if none was."""
        self.line_of_loader_not_enlarged = ""
        """The line of a DataLoader whose batches could not be made larger; empty without one."""

    # What Lockstep's steps tell

    @guarded
    def module_prepared(self, wrapped: PreparedModule) -> None:
        """Adds a module that `World.prepare` has wrapped to the models that are recorded."""
        module = wrapped.module
        # A strategy sets this attribute on its module if the user has chosen something that changes
        # the results, such as compressed gradients. The first one is reported.
        if not self.by_choice:
            self.by_choice = vars(module).get("by_choice", "")
        self.forwards.add_prepared(module)

    def delivered(self, batch: DeliveredBatch) -> None:
        """Records a micro-batch that a loader of Lockstep's hands out."""
        self.inputs.record_lockstep_batch(batch)

    @guarded
    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Records a loss whose backward pass `World.backward` is about to run.

        Args:
            weighted_loss: the loss times the scale of the micro-batch.
            micro_batch: from which it was computed.
        """
        loss = weighted_loss
        # A micro-batch that only keeps this rank in step with others has the scale 0. Its loss
        # counts as 0, but may be NaN, as the mean over no samples is.
        if micro_batch.scale == 0:
            loss = weighted_loss.new_zeros(())
        self.losses.record_weighted(loss)

    # What patches tell

    def note_own_process(self, line: str) -> None:
        """Notes the line at which the script has started a process; the first one is kept."""
        self.own_process_line = self.own_process_line or line

    def note_loader_not_enlarged(self, line: str) -> None:
        """Notes the line of a DataLoader whose batches cannot be made larger; the first is kept."""
        self.line_of_loader_not_enlarged = self.line_of_loader_not_enlarged or line

    # What is told when the script has ended

    @property
    def backward_passes(self) -> int:
        """Backward passes since the last optimizer step of this rank."""
        return len(self.state.update.losses)

    @property
    def backward_passes_without_step(self) -> int:
        """Backward passes since the parameters of a rank without an optimizer changed last."""
        return 0 if self.state.has_optimizer else len(self.state.update.losses)

    @guarded
    def final_parameters(self) -> dict[str, Array]:
        """Returns summaries of the parameters that the next update begins with.

        Empty on a rank that has joined (`Join`): it gets the parameters of the others later.
        """
        if self.state.has_joined:
            return {}
        # The next update may have begun: then it began with the parameters of that moment.
        if self.state.update.began_with_forward:
            return self.state.notes.parameters_at_start
        return self.state.models.whole_parameters()
