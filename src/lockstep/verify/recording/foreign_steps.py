"""Records *foreign steps*: updates of a rank's parameters that no optimizer of this rank makes.

An *update* is one change of the parameters with all that led to it; `state.update` is the record of
the current one. A rank without an optimizer gets its parameters from a rank that steps, or changes
them by hand. Its update is complete when the parameters are no longer those of the update's first
forward pass. A rank that has joined (`torch.distributed.algorithms.Join`) has an optimizer, but no
samples are left for it.
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
    """Notices that parameters have changed without a step of this rank, and records the update.

    It compares *summaries* of the parameters: two numbers that change with any value.
    """

    def __init__(self, state: RecorderState, gradients: GradientRecorder) -> None:
        self.state = state
        self._gradients = gradients

    def record_if_parameters_changed(self) -> None:
        """Records an update if parameters have changed since its first forward pass.

        On a rank with an optimizer, its step ends an update. Without a backward pass nothing was
        trained.
        """
        state = self.state
        had_backward_pass = bool(state.update.losses)
        if state.has_optimizer or not had_backward_pass:
            return

        # Summaries by name, from the update's first forward pass.
        at_start = state.notes.parameters_at_start
        for name, parameter in state.models.parameters():
            if name in at_start and not np.array_equal(summarize(parameter), at_start[name]):
                self._record_update()
                return

    def record_if_loss_parameters_changed(self, loss: Tensor) -> None:
        """Records an update if parameters have changed since the loss before this one.

        This is for a rank that calls no module, but functions such as `F.linear` with parameters.
        They are found in the autograd graph of the loss: a node that accumulates the gradient of a
        parameter has it as its `variable`. Their summaries are kept in `state.notes` for the next
        loss.
        """
        state = self.state
        calls_modules = bool(list(state.models.parameters()))
        if state.has_optimizer or calls_modules:
            return

        # By the id of a parameter, the parameter and its summary.
        summaries_before = state.notes.parameters_of_loss
        summaries = {}
        has_changed = False
        for node in nodes_behind(loss.grad_fn):
            parameter = getattr(node, "variable", None)
            if not isinstance(parameter, Tensor) or is_sharded(parameter):
                continue

            summary = summarize(parameter)
            # As long as the parameter itself is kept, no other tensor can get its id.
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
        """Adds to the update the gradient of a parameter that the script writes to by hand.

        Without an optimizer, as in `weight -= 0.1 * weight.grad`, the write is the step, and this
        is the gradient that it uses.

        Args:
            storage: the address of the values of the tensor that the script writes to.
        """
        state = self.state
        update = state.update
        had_backward_pass = bool(update.losses)
        if state.has_optimizer or not had_backward_pass:
            return

        for name, parameter in state.models.parameters():
            if parameter.grad is None or storage_of(parameter) != storage:
                continue
            if name in update.gradients:  # the first write of an update counts
                continue
            gradient = copy_arrays([(name, parameter.grad)])
            update.gradients = {**update.gradients, **gradient}
            update.unclipped = update.gradients  # clipping is not seen without an optimizer

    def _record_update(self) -> None:
        """Writes the current update, a foreign step, and begins the next one.

        It may end the script, if enough updates are recorded.
        """
        state = self.state
        update = state.update

        # The update ended at some time after its last backward pass. Batches that loaders handed
        # out since then belong to the next update.
        num_batches = state.notes.batches_at_last_backward
        batches = update.batches[:num_batches]
        later_batches = update.batches[num_batches:]

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
        """Writes updates without values, since the other ranks make a step without this rank.

        Torch calls this on a rank that has joined, at each step of the other ranks. One update is
        written for each optimizer of this rank, since it is not known which one the others step
        with.
        """
        state = self.state
        state.has_joined = True

        for number, optimizer in enumerate(state.steps_of):
            missed_update = RankUpdate(
                optimizer=number,
                optimizer_class=type(optimizer).__name__,
                step=state.steps_of[optimizer],
                stepped=False,
                dtype=str(state.mode.lowest_dtype),
                # These are compared between the ranks, so those of the last step are repeated.
                learning_rates=state.last_update.learning_rates,
                group_options=state.last_update.group_options,
                contributes=False,
            )
            state.writer.write(missed_update)
            state.steps_of[optimizer] += 1
            state.updates_until_step_of[optimizer] = state.writer.count  # updates written so far
