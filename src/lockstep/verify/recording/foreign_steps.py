"""Records updates of a rank that no optimizer of this rank makes.

An *update* is one change of the parameters with all that led to it. `state.update` is the record of
the current one. A rank may have no optimizer because another rank steps and sends the parameters,
or because the script updates them by hand: then an update is complete when the parameters are no
longer those of its first forward pass. A rank that has joined (`torch.distributed.algorithms.Join`)
has an optimizer, but no samples are left for it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from lockstep.distributed.torch_compat import is_sharded
from lockstep.verify.recording.gradients import GradientRecorder
from lockstep.verify.recording.sample_coupling import nodes_behind
from lockstep.verify.recording.state import RecorderState, guarded
from lockstep.verify.recording.tensor_values import copy_arrays, storage_of, summarize
from lockstep.verify.training_record import RankUpdate


class ForeignStepRecorder:
    """Notices that parameters have changed without a step of this rank, and records the update."""

    def __init__(self, state: RecorderState, gradients: GradientRecorder) -> None:
        self.state = state
        self._gradients = gradients

    def record_if_parameters_changed(self) -> None:
        """Records an update if parameters have changed since its first forward pass.

        On a rank with an optimizer, its step ends an update. Without a backward pass nothing was
        trained.
        """
        state = self.state
        if state.has_optimizer or not state.update.losses:
            return
        at_start = state.notes.parameters_at_start
        for name, parameter in state.models.parameters():
            if name in at_start and not np.array_equal(summarize(parameter), at_start[name]):
                self._record_update()
                return

    def record_if_loss_parameters_changed(self, loss: Tensor) -> None:
        """Records an update if parameters have changed since the loss before this one.

        This is for a rank that calls no module, but functions such as `F.linear` with parameters.
        These are found in the autograd graph of the loss, where leaves have a `variable`.
        """
        state = self.state
        calls_modules = bool(list(state.models.parameters()))
        if state.has_optimizer or calls_modules:
            return
        summaries_before = state.notes.parameters_of_loss
        summaries = {}
        has_changed = False
        for node in nodes_behind(loss.grad_fn):
            parameter = getattr(node, "variable", None)
            if not isinstance(parameter, Tensor) or is_sharded(parameter):
                continue
            summary = summarize(parameter)
            # The parameter itself is kept too: another one must not get its id.
            summaries[id(parameter)] = (parameter, summary)
            if id(parameter) in summaries_before:
                _, summary_before = summaries_before[id(parameter)]
                if not np.array_equal(summary, summary_before):
                    has_changed = True
        if has_changed:
            self._record_update()
        state.notes.parameters_of_loss = summaries

    @guarded
    def record_gradient_of_write(self, storage: int) -> None:
        """Records the gradient of a parameter that the script writes to by hand.

        Args:
            storage: of the tensor that the script writes to.
        """
        state = self.state
        update = state.update
        if state.has_optimizer or not update.losses:
            return
        for name, parameter in state.models.parameters():
            if parameter.grad is None or storage_of(parameter) != storage:
                continue
            if name in update.gradients:  # the first write of an update counts
                continue
            gradient = copy_arrays([(name, parameter.grad)])
            update.gradients = {**update.gradients, **gradient}
            update.unclipped = update.gradients

    def _record_update(self) -> None:
        """Records what led to a change of the parameters that no optimizer of this rank made."""
        state = self.state
        update = state.update
        # Later batches were handed out after the last backward pass of this update.
        count = state.notes.batches_at_last_backward
        batches = update.batches[:count]
        later_batches = update.batches[count:]
        if not batches:  # no loader was used: the inputs of models are all that is known
            batches = update.model_inputs
        complete = replace(
            update,
            batches=batches,
            stepped=False,
            step=state.foreign_steps,
            dtype=str(state.mode.lowest_dtype),
            parameter_sums=state.notes.parameters_at_start,
            frozen=state.frozen_parameters(),
            unwrapped=state.models.unwrapped_parameters(),
            local_gradients=self._gradients.local_gradients(),
            branch_outcomes=state.branches.pop_outcomes(),
        )
        state.foreign_steps += 1
        state.finish_update(complete, later_batches)
        state.end_script_if_enough()

    @guarded
    def record_shadowed_iteration(self) -> None:
        """Records that the others make an iteration without this rank, which has joined."""
        state = self.state
        state.has_joined = True
        for number, optimizer in enumerate(state.steps_of):
            missed = RankUpdate(
                optimizer=number,
                optimizer_class=type(optimizer).__name__,
                step=state.steps_of[optimizer],
                stepped=False,
                dtype=str(state.mode.lowest_dtype),
                # Those of its last step, so that no other ones are found here.
                learning_rates=state.last_update.learning_rates,
                group_options=state.last_update.group_options,
                contributes=False,
            )
            state.writer.write(missed)
            state.steps_of[optimizer] += 1
            state.updates_until_step_of[optimizer] = state.writer.count
