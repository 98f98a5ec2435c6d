"""Records losses when their backward passes begin: values, terms, divisors, and their origin.

`state.update` is the record of the current optimizer step, and `state.notes` is what is remembered
until it is complete. *Marks* on the loss tell what it was made from: all that is computed from a
marked tensor gets its marks. A `ForwardPass` since the last backward pass has the `record` of its
samples and the `outputs` of the model; a `LossCall` is a call of one of torch's loss functions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.base import parameters_of
from lockstep.user_code import user_line
from lockstep.verify.recording.foreign_steps import ForeignStepRecorder
from lockstep.verify.recording.gradients import GradientRecorder
from lockstep.verify.recording.loss_calls import LossCall, line_of_loss, terms_of
from lockstep.verify.recording.marks import marks_of
from lockstep.verify.recording.sample_coupling import (
    compares_samples,
    couples_samples,
    nodes_behind,
)
from lockstep.verify.recording.state import ForwardPass, RecorderState, guarded
from lockstep.verify.recording.tensor_values import summarize, summarize_rows
from lockstep.verify.run_config import MIN_STEPS

MAX_RECORDED_FORWARD_PASSES = 256
"""The latest forward passes of an update are recorded, so many at most."""
MAX_COUPLING_S = 1.0
"""Looking for coupled samples takes several backward passes. Where it takes longer than this, each
model is looked at once."""


class LossRecorder:
    """Records the loss of each backward pass."""

    def __init__(
        self,
        state: RecorderState,
        gradients: GradientRecorder,
        foreign_steps: ForeignStepRecorder,
    ) -> None:
        self.state = state
        self._gradients = gradients
        self._foreign_steps = foreign_steps
        self._coupling_found_in: dict[str, bool] = {}
        """By model that was tested, whether one sample's output depends on other samples."""
        self._coupling_is_slow = False
        """True once such a test has taken longer than `MAX_COUPLING_S`."""

    @guarded
    def record_weighted(self, loss: Tensor) -> None:
        """Records a loss that `World.backward` was given, which is weighted.

        Its backward pass follows and calls `begin_backward`, which must not record it again.
        """
        self.state.loss_is_weighted = False
        self.begin_backward(loss)
        self.state.loss_is_weighted = True

    @guarded
    def begin_backward(self, loss: Tensor) -> None:
        """Records a loss whose backward pass begins.

        The forward passes that it may be made from become part of the update, and the gradients of
        the backward pass are noted from here on.
        """
        state = self.state
        if state.loss_is_weighted:  # `World.backward` has recorded it before
            return

        state.mode.note_dtype(loss)
        self._hook_all_parameters()

        # This may write the update that ended before this loss. From here on, `state.update` is the
        # one that the loss belongs to.
        self._foreign_steps.record_if_loss_parameters_changed(loss)

        if state.is_first_update and len(state.notes.forward_passes) > 1:
            self._forget_trial_passes(loss)

        # The list is read once: looking for coupled samples below differentiates the loss, and so
        # may call checkpointed parts of the model again, which would be added to it.
        forward_passes = state.notes.forward_passes
        marks = marks_of(loss)
        self._record_origin(loss, marks)
        self._record_sample_coupling(loss, forward_passes)
        state.update.losses.append(self._value(loss))
        state.update.loss_terms.append(terms_of(loss))
        state.notes.gradients_of_passes.append({})  # hooks on the parameters fill it in
        self._record_loss_calls(marks, forward_passes)
        self._end_forward_passes(forward_passes)

    def _hook_all_parameters(self) -> None:
        """Hooks all parameters, to see their gradients; also those that only an optimizer has."""
        optimized_parameters = []
        for optimizer in self.state.models.built_optimizers:
            optimized_parameters += parameters_of(optimizer)
        self._gradients.hook_parameters(optimized_parameters)

    def _forget_trial_passes(self, loss: Tensor) -> None:
        """Forgets forward passes that the first loss is not made from.

        A script may call the model before training, say to print the shape of its output. If the
        first call was such a trial, its inputs are replaced by those of the first other call.
        """
        notes = self.state.notes
        loss_nodes = nodes_behind(loss.grad_fn)  # of the autograd graph
        used_passes = []
        for forward_pass in notes.forward_passes:
            if any(output.grad_fn in loss_nodes for output in forward_pass.outputs):
                used_passes.append(forward_pass)

        # No pass is used if the loss is made from something else than outputs of models.
        if not used_passes:
            return

        first_was_no_trial = used_passes[0] is notes.forward_passes[0]
        if first_was_no_trial:
            return

        # The last of `model_inputs` is that of the first call since the last backward pass.
        model_inputs = self.state.update.model_inputs
        if model_inputs and used_passes[0].inputs is not None:
            model_inputs[-1] = used_passes[0].inputs

        notes.forward_passes = used_passes

    def _record_origin(self, loss: Tensor, marks: Mapping[str, Any]) -> None:
        """Records where a loss was made, and the exchanges and draws that it is made from.

        Args:
            loss: whose backward pass begins.
            marks: those on the loss, by kind: what it is made from.
        """
        state = self.state
        update = state.update
        update.loss_line = line_of_loss(loss) or user_line() or ""

        # The line of an all-gather that the loss is made from without its gradient. Of several
        # backward passes, the first that has such a line counts.
        if not update.gather_line:
            update.gather_line = marks.get("gather", "")

        if not update.detached_gather_line:
            update.detached_gather_line = marks.get("detached", "")

        # Random numbers that the inputs of models are made from are recorded with the inputs. Here
        # those count that were drawn since the update's first forward pass began.
        state.record_marks(marks, draws_before=state.notes.draws_before_forward)
        state.step_draws.record(update)

    def _record_sample_coupling(self, loss: Tensor, forward_passes: Sequence[ForwardPass]) -> None:
        """Records whether the loss, or a model, lets samples influence each other.

        It sets `loss_compares_samples` and `coupling_model` of the update. This is a property of
        the script, so the run on one process, with whole batches, is enough to know it.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            return

        update = self.state.update
        samples = 0  # in the batch that the loss is made from
        batches = update.batches or update.model_inputs
        if batches:
            samples = int(batches[-1].weights["samples"])

        if not update.loss_compares_samples:
            outputs: list[Tensor] = []
            for forward_pass in forward_passes:
                outputs += forward_pass.outputs
            update.loss_compares_samples = compares_samples(loss, outputs, samples)

        if not update.coupling_model:
            update.coupling_model = self._coupling_model(forward_passes)

    def _coupling_model(self, forward_passes: Sequence[ForwardPass]) -> str:
        """Returns a model whose output for one sample depends on other samples; empty if none does.

        A model in which samples were found to be coupled stays such a model. The others are tested
        again in the first steps, unless a test is slow.
        """
        for forward_pass in forward_passes:
            model = forward_pass.record.model

            if forward_pass.hidden is None:  # no part of the model has a row for each sample
                continue
            if not self._needs_coupling_test(model):
                continue

            begun = time.monotonic()
            self._coupling_found_in[model] = couples_samples(
                forward_pass.outputs, forward_pass.hidden
            )

            if time.monotonic() - begun > MAX_COUPLING_S:
                self._coupling_is_slow = True

        for forward_pass in forward_passes:
            model = forward_pass.record.model
            if self._coupling_found_in.get(model):
                return model

        return ""

    def _needs_coupling_test(self, model: str) -> bool:
        """True if a model was not tested before, or may give another answer than before."""
        if model not in self._coupling_found_in:
            return True
        if self._coupling_found_in[model]:
            return False
        is_in_first_steps = self.state.update_number < MIN_STEPS
        return is_in_first_steps and not self._coupling_is_slow

    def _value(self, loss: Tensor) -> float:
        """Returns the loss as a number; 0 for the mean over no samples, which is NaN."""
        value = float(loss.detach())
        if not math.isnan(value):
            return value

        # The loss is made from the last batch, and from the inputs of the last model call. Both are
        # lists of one `Batch`, or empty if there is none.
        update = self.state.update
        last_batch = update.batches[-1:]
        last_inputs = update.model_inputs[-1:]
        for batch in (*last_batch, *last_inputs):
            num_samples = batch.weights["samples"]  # one of the counts of a batch
            if num_samples == 0:
                return 0.0

        return value

    def _record_loss_calls(
        self, marks: Mapping[str, Any], forward_passes: Sequence[ForwardPass]
    ) -> None:
        """Records what the loss may have been divided by, and the targets of its samples.

        The arguments of torch's loss functions go to `loss_options` of the update.

        Args:
            marks: those on the loss, by kind.
            forward_passes: since the last backward pass.
        """
        state = self.state
        calls = state.mode.pop_loss_calls()  # since the last backward pass
        divisors = {}
        if "divisor" in marks:
            divisor, _line = marks["divisor"]
            if divisor != 0:
                divisors["divisor of the loss"] = divisor

        if calls:
            divisors["labels in the loss"] = sum(call.weight for call in calls)

        state.update.loss_divisors.append(divisors)

        for call in calls:
            for option, value in call.options.items():
                if isinstance(value, Tensor | float):
                    summary = summarize(torch.as_tensor(value))
                    state.update.loss_options[f"{option} of {call.line}"] = summary

        if forward_passes:
            _record_targets(forward_passes[0], calls)

    def _end_forward_passes(self, forward_passes: Sequence[ForwardPass]) -> None:
        """Adds the forward passes before this backward pass to the update.

        In `state.notes`, the forward passes and the clipped gradients are cleared for the next one.
        """
        notes = self.state.notes
        records = [forward_pass.record for forward_pass in forward_passes]
        for record in records:
            # Hooks on the outputs fill in the gradients during the backward pass that begins now.
            # Rows that are there already are of something else than the loss, such as a penalty
            # that the script has differentiated. `[:0]` is an array without rows.
            record.output_gradients = record.output_gradients[:0]

        update = self.state.update
        update.forwards = [*update.forwards, *records][-MAX_RECORDED_FORWARD_PASSES:]
        notes.forward_passes = []
        notes.model_calls = 0
        notes.gradients_before_clipping = {}


def _record_targets(forward_pass: ForwardPass, calls: Sequence[LossCall]) -> None:
    """Sets the targets of a forward pass: two numbers for each sample.

    Nothing is recorded unless all targets have one row, or an equal number of rows, for each
    sample.

    Args:
        forward_pass: of the model whose outputs became the loss.
        calls: the calls of loss functions with their targets.
    """
    num_samples = len(forward_pass.record.inputs)
    if not num_samples:
        return

    targets = []
    for call in calls:
        # Targets that only number the samples say nothing about them.
        if call.targets.numel() and not _are_positions(call.targets):
            targets.append(call.targets)

    if not targets:
        return

    for tensor in targets:
        if tensor.dim() == 0 or len(tensor) % num_samples != 0:
            return

    forward_pass.record.targets = summarize_rows(targets, num_samples)


def _are_positions(targets: Tensor) -> bool:
    """True if targets only number the samples, as in a contrastive loss: 0, 1, 2, ...

    Such a target is the place of a sample's output among all outputs that the loss compares. On a
    rank that gathers outputs, or compares only its own, this place is not that of one process.
    """
    if targets.is_floating_point() or targets.dtype == torch.bool or targets.dim() != 1:
        return False

    count = len(targets)
    if count <= 2:  # labels may be 0 and 1 by chance
        return False

    # On rank 1 they may be 4, 5, 6, ...: the first one is subtracted.
    positions = torch.arange(count).to(targets)
    return bool((targets - targets[0]).equal(positions))
