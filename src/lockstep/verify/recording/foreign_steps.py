"""Records *foreign steps*: updates of parameters that this rank's optimizers do not make.

A rank without an optimizer gets its parameters from another rank, or changes them by hand. Such an
update is complete when the parameters differ from those at the first forward pass of the update.
`state.update` is the record of the current update: one change of the parameters, with everything
that led to it. A rank that has joined (`torch.distributed.algorithms.Join`) has an optimizer, but
no samples left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from lockstep.torch_compat import is_sharded
from lockstep.verify.recording.gradients import GradientRecorder
from lockstep.verify.recording.guard import guarded
from lockstep.verify.recording.sample_coupling import nodes_behind
from lockstep.verify.recording.state import RecorderState, SummarizedParameter
from lockstep.verify.recording.tensor_values import copy_arrays, storage_address, summarize
from lockstep.verify.training_record import RankUpdate


class ForeignStepRecorder:
    """Detects that parameters have changed without a step of this rank, and records the update.

    Parameters are compared by *summaries*: two numbers that change with any value of the tensor.
    """

    def __init__(self, state: RecorderState, gradients: GradientRecorder) -> None:
        self.state = state
        self._gradients = gradients

    def end_update_if_parameters_changed(self) -> None:
        """Records the current update if it has changed the parameters, which completes it.

        Called before each forward pass. The parameters are compared with those at the first forward
        pass of the current update. Nothing is recorded on a rank with an optimizer, whose step
        completes the update, or if there was no backward pass, as nothing was trained then.
        """
        if self._parameters_have_changed():
            self._record_update()
            self.state.end_script_if_enough()

    @guarded
    def record_last_update(self) -> None:
        """Records the current update if it has changed the parameters, when the script has ended.

        After the last update there is no forward pass, and no loss, before which it would be
        noticed.
        """
        if self._parameters_have_changed() or self._parameters_of_loss_have_changed():
            self._record_update()

    def _parameters_have_changed(self) -> bool:
        """True if a module's parameters have changed since the first forward pass of the update.

        False on a rank with an optimizer, and if there was no backward pass.
        """
        state = self.state
        had_backward_pass = bool(state.update.losses)
        if state.has_optimizer or not had_backward_pass:
            return False

        summaries_at_start = state.notes.summaries_at_start
        for name, parameter in state.models.parameters():
            if name not in summaries_at_start:
                continue
            if not np.array_equal(summarize(parameter), summaries_at_start[name]):
                return True
        return False

    def _parameters_of_loss_have_changed(self) -> bool:
        """True if the parameters behind the last loss have changed since, without any module."""
        if self.state.has_optimizer:
            return False
        for at_last_loss in self.state.notes.summaries_of_loss.values():
            if not np.array_equal(summarize(at_last_loss.parameter), at_last_loss.summary):
                return True
        return False

    def end_update_if_loss_parameters_changed(self, loss: Tensor) -> None:
        """Records the current update if parameters behind a loss have changed since the last loss.

        This covers a rank that calls no module, but functions such as `F.linear` with parameters.
        The summaries of the parameters are kept for the next loss.
        """
        state = self.state
        if state.has_optimizer:  # its step completes the update
            return

        has_called_modules = next(state.models.parameters(), None) is not None
        if has_called_modules:  # `end_update_if_parameters_changed` compares their parameters
            return

        summaries_at_last_loss = state.notes.summaries_of_loss
        summaries_at_this_loss = {}
        for parameter in _parameters_behind(loss):
            summary = SummarizedParameter(parameter, summarize(parameter))
            summaries_at_this_loss[id(parameter)] = summary

        if _some_summary_has_changed(summaries_at_last_loss, summaries_at_this_loss):
            self._record_update()
            state.end_script_if_enough()

        state.notes.summaries_of_loss = summaries_at_this_loss

    @guarded
    def record_gradient_of_write(self, address: int) -> None:
        """Records the gradient of a parameter that the script writes to by hand.

        Without an optimizer, as in `weight -= 0.1 * weight.grad`, the write is the step, and the
        gradient at that moment is the one that the step uses.

        Args:
            address: address of the values of the tensor that the script writes to.
        """
        state = self.state
        update = state.update
        had_backward_pass = bool(update.losses)
        if state.has_optimizer or not had_backward_pass:
            return

        # Usually, one parameter has this address, but others may be views of it.
        for name, parameter in state.models.parameters():
            is_written = storage_address(parameter) == address
            is_recorded = name in update.gradients  # at an earlier write of this update
            if not is_written or is_recorded or parameter.grad is None:
                continue

            gradient = copy_arrays([(name, parameter.grad)])
            update.gradients = {**update.gradients, **gradient}
            # `unclipped` differs from `gradients` if the script has clipped them. Without an
            # optimizer, clipping is not noticed.
            update.unclipped = update.gradients

    def _record_update(self) -> None:
        """Writes the current update as a foreign step, and begins the next one."""
        state = self.state
        update = state.update

        # Batches that were handed out after the last backward pass belong to the next update.
        num_batches = state.notes.num_batches_at_last_backward
        batches = update.batches[:num_batches]
        later_batches = update.batches[num_batches:]

        # Without a loader, only the inputs of the models are known.
        if not batches:
            batches = update.model_inputs

        complete = replace(
            update,
            batches=batches,
            stepped=False,  # no optimizer of this rank has made the step
            step=state.foreign_steps,  # the number of foreign steps before this one
            dtype=str(state.mode.lowest_dtype),
            parameter_sums=state.notes.summaries_at_start,
            frozen=state.frozen_parameters(),
            unwrapped_parameters=state.models.unwrapped_parameters(),
            local_gradients=self._gradients.local_gradients(),
            branch_outcomes=state.branches.pop_outcomes(),
        )
        state.foreign_steps += 1
        state.finish_update(complete, later_batches)

    @guarded
    def record_shadowed_iteration(self) -> None:
        """Records a step that the other ranks make while this rank has no samples left.

        Torch calls this on a rank that has joined (`Join`), at each step of the other ranks, and
        names it a shadowed iteration. It is not known which optimizer they step with, so an update
        without values is written for each optimizer of this rank.
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
                # Ranks must agree on these two fields. They are copied from this rank's last step,
                # so that they are not reported as a difference.
                learning_rates=state.last_update_without_results.learning_rates,
                group_options=state.last_update_without_results.group_options,
                contributes=False,
            )
            state.writer.write(missed_update)
            state.steps_of[optimizer] += 1
            # Calls of models from this update on belong to the optimizer's next step.
            state.first_update_of_next_step[optimizer] = state.update_number


def _some_summary_has_changed(
    before: Mapping[int, SummarizedParameter], now: Mapping[int, SummarizedParameter]
) -> bool:
    """True if a parameter that was summarized twice has changed. The keys are ids of parameters."""
    for parameter_id in before.keys() & now.keys():
        if not np.array_equal(before[parameter_id].summary, now[parameter_id].summary):
            return True
    return False


def _parameters_behind(loss: Tensor) -> Iterator[Tensor]:
    """Yields the parameters that a loss was computed from, but no sharded ones.

    They are found in the autograd graph: the node that accumulates the gradient of a parameter
    refers to it as `variable`.
    """
    for node in nodes_behind(loss.grad_fn):
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, Tensor) and not is_sharded(parameter):
            yield parameter
