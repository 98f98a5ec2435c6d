"""Records losses when their backward passes begin: values, terms, and what they depend on.

`state.update` is the record of the current optimizer step, and `state.notes` holds what is needed
until the step is complete. *Marks* on the loss tell what it was computed from. A `ForwardPass`
holds the `outputs` of one call of a model and a `record` of its samples; a `LossCall` is a call of
one of torch's loss functions.
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
from lockstep.verify.recording.guard import guarded
from lockstep.verify.recording.loss_calls import LossCall, line_of_loss, terms_of
from lockstep.verify.recording.marks import marks_of
from lockstep.verify.recording.sample_coupling import (
    compares_samples,
    couples_samples,
    nodes_behind,
)
from lockstep.verify.recording.state import ForwardPass, RecorderState
from lockstep.verify.recording.tensor_values import summarize, summarize_rows
from lockstep.verify.run_config import MIN_STEPS
from lockstep.verify.training_record import Batch

MAX_RECORDED_FORWARD_PASSES = 256
"""Number of forward passes of an update that are recorded; the latest ones are kept."""
MAX_COUPLING_S = 1.0
"""A test for coupled samples runs several backward passes. If one test takes longer than this, each
model is tested only once."""


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
        """For each tested model, whether one sample's output depends on other samples."""
        self._coupling_is_slow = False
        """True once a test has taken longer than `MAX_COUPLING_S`."""

    @guarded
    def record_weighted(self, loss: Tensor) -> None:
        """Records the weighted loss that `World.backward` computes.

        The backward pass that follows calls `begin_backward`, which must not record the loss again.
        """
        self.state.loss_is_recorded_by_world = False  # the flag of an earlier call
        self.begin_backward(loss)
        self.state.loss_is_recorded_by_world = True

    @guarded
    def begin_backward(self, loss: Tensor) -> None:
        """Records a loss whose backward pass begins.

        The forward passes that the loss may be computed from become part of the update, and hooks
        collect the gradients of the backward pass from here on.
        """
        state = self.state

        if state.loss_is_recorded_by_world:  # by `record_weighted`, just before
            return

        state.mode.note_dtype(loss)
        self._hook_all_parameters()

        # On a rank whose parameters another rank trains, this loss may begin the next update.
        self._foreign_steps.end_update_if_loss_parameters_changed(loss)

        # Before the first loss, the script may have called the model as a trial.
        if state.is_first_update and len(state.notes.forward_passes) > 1:
            self._forget_trial_passes(loss)

        # A copy, since `_describe_loss` takes derivatives: with activation checkpointing, these
        # call modules again, which are no forward passes of the script.
        forward_passes = tuple(state.notes.forward_passes)
        self._describe_loss(loss, forward_passes)
        self._move_forward_passes_to_update(forward_passes)

        # The hooks will add the gradients of this backward pass to the last entry.
        state.notes.gradients_of_passes.append({})
        self._clear_notes_of_backward_pass()

    def _describe_loss(self, loss: Tensor, forward_passes: Sequence[ForwardPass]) -> None:
        """Records the value and the terms of a loss, and what it was computed from.

        Args:
            loss: loss whose backward pass begins.
            forward_passes: forward passes since the last backward pass.
        """
        update = self.state.update
        marks = marks_of(loss)
        self._record_origin(loss, marks)
        self._record_sample_coupling(loss, forward_passes)
        update.losses.append(self._value(loss))
        update.loss_terms.append(terms_of(loss))
        self._record_loss_calls(marks, forward_passes)

    def _hook_all_parameters(self) -> None:
        """Hooks all parameters to see their gradients, even if only an optimizer has them."""
        optimized_parameters = []
        for optimizer in self.state.models.built_optimizers:
            optimized_parameters += parameters_of(optimizer)
        self._gradients.hook_parameters(optimized_parameters)

    def _forget_trial_passes(self, loss: Tensor) -> None:
        """Removes all forward passes that the first loss does not use, if the first was a trial.

        A script may call the model for a trial before it trains, for example to print the shape of
        its output. The first loss is not computed from the outputs of this call.

        For example, the script calls the model with a trial input, then with the first batch, and
        computes the loss from the second call. Then only the second forward pass stays in
        `state.notes`, and the recorded inputs become those of the second call.
        """
        notes = self.state.notes
        loss_nodes = nodes_behind(loss.grad_fn)  # nodes of the autograd graph
        used_passes = []
        for forward_pass in notes.forward_passes:
            if any(output.grad_fn in loss_nodes for output in forward_pass.outputs):
                used_passes.append(forward_pass)

        # The loss was not computed from outputs of models, so trials cannot be recognized.
        if not used_passes:
            return

        # If the first pass is used, the training has begun with it. Unused passes that follow, such
        # as that of a teacher, are no trials.
        first_used_pass = used_passes[0]
        first_pass_was_trial = first_used_pass is not notes.forward_passes[0]
        if not first_pass_was_trial:
            return

        self._record_inputs_of(first_used_pass)
        notes.forward_passes = used_passes

    def _record_inputs_of(self, first_used_pass: ForwardPass) -> None:
        """Records the inputs of the first pass that the loss is from, in the place of a trial's.

        Inputs are recorded at the first call of a model since the last backward pass, which was the
        trial, as the last entry of `model_inputs`.
        """
        model_inputs = self.state.update.model_inputs
        if model_inputs and first_used_pass.inputs is not None:
            model_inputs[-1] = first_used_pass.inputs

    def _record_origin(self, loss: Tensor, marks: Mapping[str, Any]) -> None:
        """Records where a loss was computed, and which gathers and random draws went into it.

        Args:
            loss: loss whose backward pass begins.
            marks: marks on the loss, by kind.
        """
        state = self.state
        update = state.update
        update.loss_line = line_of_loss(loss) or user_line() or ""

        # The loss may depend on a gather that passes no gradient on, such as `all_gather`, or on a
        # gather whose input the script has detached. The first line of each in the update is kept.
        update.gather_line = update.gather_line or marks.get("gather", "")
        update.detached_gather_line = update.detached_gather_line or marks.get("detached", "")

        # All other marks. Random numbers that were drawn before the first forward pass are left
        # out, as they were recorded together with the inputs of the models.
        state.record_marks(marks, num_ignored_draws=state.notes.num_draws_before_forward)

        # Also what leaves no marks on a loss, such as draws of numpy and Python's `random`.
        state.step_draws.record(update)

    def _record_sample_coupling(self, loss: Tensor, forward_passes: Sequence[ForwardPass]) -> None:
        """Records whether samples influence each other, in the loss or in a model.

        This sets `loss_compares_samples` and `model_with_coupled_samples` of the update. Whether
        samples influence each other is a property of the script, so it is only tested in the run on
        one process, which sees whole batches.

        Args:
            loss: loss whose backward pass begins.
            forward_passes: forward passes since the last backward pass.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            return

        update = self.state.update
        num_samples = self._num_samples_of_loss()
        if not update.loss_compares_samples:
            outputs: list[Tensor] = []
            for forward_pass in forward_passes:
                outputs += forward_pass.outputs
            update.loss_compares_samples = compares_samples(loss, outputs, num_samples)

        if not update.model_with_coupled_samples:
            update.model_with_coupled_samples = self._find_model_with_coupled_samples(
                forward_passes
            )

    def _num_samples_of_loss(self) -> int:
        """Returns the number of samples in the last batch, which the loss was computed from.

        Without a loader, the inputs of the models are taken for the batch. The number is 0 if
        neither is known.
        """
        batches = self.state.update.batches or self.state.update.model_inputs
        if not batches:
            return 0
        return int(batches[-1].weights["samples"])

    def _find_model_with_coupled_samples(self, forward_passes: Sequence[ForwardPass]) -> str:
        """Returns the name of a model that couples samples, or "".

        In such a model, the output for one sample depends on other samples of the batch, as with
        BatchNorm. Each model is tested first, unless an earlier answer is still valid.
        """
        for forward_pass in forward_passes:
            self._test_coupling(forward_pass)

        for forward_pass in forward_passes:
            model = forward_pass.record.model
            if self._coupling_found_in.get(model):
                return model

        return ""

    def _test_coupling(self, forward_pass: ForwardPass) -> None:
        """Tests whether samples influence each other in a model, and stores the answer.

        The test looks at gradients of the outputs with respect to a hidden activation, since the
        inputs of a model usually have no gradients. Nothing is stored if no hidden activation has a
        row for each sample.
        """
        model = forward_pass.record.model
        hidden_activation = forward_pass.hidden_activation
        if hidden_activation is None or not self._needs_coupling_test(model):
            return

        start_time = time.monotonic()
        is_coupled = couples_samples(forward_pass.outputs, hidden_activation)
        self._coupling_found_in[model] = is_coupled

        # If a test was slow, each model is tested only once.
        if time.monotonic() - start_time > MAX_COUPLING_S:
            self._coupling_is_slow = True

    def _needs_coupling_test(self, model: str) -> bool:
        """True if a model was never tested, or if the answer may have changed.

        Once samples were found to be coupled, this remains true for the model. Otherwise, the test
        is repeated in the first steps, unless it is slow.
        """
        if model not in self._coupling_found_in:
            return True
        if self._coupling_found_in[model]:
            return False
        is_in_first_steps = self.state.update_number < MIN_STEPS
        return is_in_first_steps and not self._coupling_is_slow

    def _value(self, loss: Tensor) -> float:
        """Returns the loss as a number. The mean over an empty batch, which is NaN, becomes 0.

        The loss was computed from the latest batch that a loader has handed out, or without a
        loader from the latest inputs of a model.
        """
        value = float(loss.detach())
        if not math.isnan(value):
            return value

        update = self.state.update
        latest_is_empty = _last_is_empty(update.batches) or _last_is_empty(update.model_inputs)
        return 0.0 if latest_is_empty else value

    def _record_loss_calls(
        self, marks: Mapping[str, Any], forward_passes: Sequence[ForwardPass]
    ) -> None:
        """Records how torch's loss functions have computed a loss.

        Recorded are the numbers that these functions, or the script itself, have divided by; the
        options of the functions; and the targets of the samples.

        Args:
            marks: marks on the loss, by kind.
            forward_passes: forward passes since the last backward pass.
        """
        state = self.state
        calls = state.mode.pop_loss_calls()  # since the last backward pass

        divisors = {}

        # The script itself has divided the loss by a number, as in `loss / 4`.
        if "divisor" in marks:
            divisor, _line_of_division = marks["divisor"]
            if divisor != 0:
                divisors["divisor of the loss"] = divisor

        # To get a mean, a loss function of torch has divided a sum by the number of labels, or by
        # the sum of their class weights. If several calls make up the loss, such as one for each
        # output of a model, their numbers are added up.
        if calls:
            divisors["labels in the loss"] = sum(call.divisor for call in calls)

        state.update.loss_divisors.append(divisors)
        self._record_options(calls)

        # The samples are those of the first model. Others may be called with its outputs.
        if forward_passes:
            _record_targets(forward_passes[0], calls)

    def _record_options(self, calls: Sequence[LossCall]) -> None:
        """Records the options of loss functions, such as class weights, by name and line."""
        for call in calls:
            for option, value in call.options.items():
                if isinstance(value, Tensor | float):
                    summary = summarize(torch.as_tensor(value))
                    self.state.update.loss_options[f"{option} of {call.line}"] = summary

    def _move_forward_passes_to_update(self, forward_passes: Sequence[ForwardPass]) -> None:
        """Moves the forward passes before this backward pass from the notes to the update.

        Args:
            forward_passes: forward passes since the last backward pass.
        """
        records = [forward_pass.record for forward_pass in forward_passes]
        for record in records:
            # Drop the gradients of outputs that were recorded so far. They come from another
            # backward pass, such as that of a gradient penalty.
            no_rows = record.output_gradients[:0]
            record.output_gradients = no_rows

        update = self.state.update
        update.forwards = [*update.forwards, *records][-MAX_RECORDED_FORWARD_PASSES:]

    def _clear_notes_of_backward_pass(self) -> None:
        """Clears what the notes hold for the backward pass that begins now."""
        notes = self.state.notes
        notes.forward_passes = []
        notes.model_calls = 0
        notes.gradients_before_clipping = {}


def _last_is_empty(batches: Sequence[Batch]) -> bool:
    """True if there are batches, and the last one has no samples."""
    return bool(batches) and batches[-1].weights["samples"] == 0


def _record_targets(forward_pass: ForwardPass, calls: Sequence[LossCall]) -> None:
    """Records a summary of the targets of each sample, in the record of a forward pass.

    Every tensor of targets must have the same number of rows for each sample: 4 or 8 rows for 4
    samples, for example. With 10 rows for 4 samples it is not known which rows belong to which
    sample, and nothing is recorded.

    Args:
        forward_pass: forward pass of the model that the loss was computed from.
        calls: calls of loss functions, with their targets.
    """
    num_samples = len(forward_pass.record.inputs)
    if not num_samples:
        return

    targets = []
    for call in calls:
        # Targets such as 0, 1, 2, ... only number the samples and say nothing about them.
        if call.targets.numel() and not _are_positions(call.targets):
            targets.append(call.targets)

    if not targets:
        return

    all_have_same_rows_per_sample = all(t.dim() > 0 and len(t) % num_samples == 0 for t in targets)
    if all_have_same_rows_per_sample:
        forward_pass.record.targets = summarize_rows(targets, num_samples)


def _are_positions(targets: Tensor) -> bool:
    """True if targets only number the samples, such as 0, 1, 2, ... in a contrastive loss.

    Each target is then the position of the sample's counterpart among all outputs that the loss
    compares. That position differs between one process and several.
    """
    if targets.is_floating_point() or targets.dtype == torch.bool or targets.dim() != 1:
        return False

    num_targets = len(targets)
    if num_targets <= 2:  # two labels may be 0 and 1 by chance
        return False

    # On rank 1, the targets may be 4, 5, 6, ..., so the first one is subtracted.
    positions = torch.arange(num_targets).to(targets)
    return bool((targets - targets[0]).equal(positions))
