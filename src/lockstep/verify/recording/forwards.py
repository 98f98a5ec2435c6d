"""Records the forward passes of a script: the inputs and outputs of its models, and their wrappers.

A call of an outermost module is a *forward pass of a model*; the hooks below also see the modules
that are called inside of it. `state.update` is the record of the current optimizer step, and
`state.notes` holds what is needed until the step is complete. A *summary* of a tensor is two
numbers that change with any of its values. *Marks* on a tensor tell what it was computed from. A
*foreign step* changes the parameters of this rank, but is made by another rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.batch.pytree import tensors
from lockstep.checkpoint.modules import unwrap
from lockstep.torch_compat import (
    BatchNorm,
    in_function_transform,
    is_sharded,
    pytree,
)
from lockstep.user_code import user_line
from lockstep.verify.recording.batches import describe_batch
from lockstep.verify.recording.foreign_steps import ForeignStepRecorder
from lockstep.verify.recording.function_mode import is_traced
from lockstep.verify.recording.gradients import GradientRecorder
from lockstep.verify.recording.guard import guarded
from lockstep.verify.recording.inputs import InputRecorder
from lockstep.verify.recording.marks import BATCH_NORM, MODEL_CALL, mark, marks_of
from lockstep.verify.recording.models import has_parameters, has_tensors
from lockstep.verify.recording.state import ForwardPass, RecorderState
from lockstep.verify.recording.tensor_values import (
    copy_arrays,
    sample_tensors,
    single_images,
    summarize,
    summarize_rows,
    tensors_with_row_per_sample,
)
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Batch, Forward

MAX_FORWARD_PASSES = 16
"""Number of forward passes that are kept until a backward pass uses them."""
MAX_RECORDED_VALUES = 65_536
"""Larger inputs are recorded as summaries only, and not as values."""


class ForwardRecorder:
    """Records forward passes, through torch's global module hooks."""

    def __init__(
        self,
        state: RecorderState,
        inputs: InputRecorder,
        gradients: GradientRecorder,
        foreign_steps: ForeignStepRecorder,
    ) -> None:
        self.state = state
        self._inputs = inputs
        self._gradients = gradients
        self._foreign_steps = foreign_steps
        self._depth = 0
        """Number of nested modules whose forward passes are running."""

    # Models

    @guarded
    def add_prepared(self, module: nn.Module) -> None:
        """Adds a module that `World.prepare` has wrapped to the recorded models."""
        self.state.models.prepared_ids.add(id(unwrap(module)))
        self._add_model(module)

    @guarded
    def add_ddp(self, wrapper: DistributedDataParallel) -> None:
        """Adds a module that was wrapped with DDP to the recorded models."""
        self.state.models.add_ddp(wrapper)
        self._gradients.hook_parameters()
        self.state.watch_writes_from_now()

    def _add_model(self, module: nn.Module) -> None:
        """Adds a module to the recorded models, and watches its parameters and buffers.

        This is repeated in every forward pass, because a model may have new parameters by then.
        """
        # Switch off its dropout and, if the run computes in float64, convert it to float64.
        self.state.mode.determinism.prepare_module(module)
        self.state.models.add(module)
        self._gradients.hook_parameters()

        # Writes of the script are watched from here on. But if a closure calls the model during an
        # optimizer's step, then the optimizer writes next.
        is_inside_step = self.state.running_steps.count() > 0
        if not is_inside_step:
            self.state.watch_writes_from_now()

    # The beginning of a forward pass

    @guarded
    def enter_module(self, module: nn.Module, inputs: Any) -> Any:
        """Records the start of a module's forward pass. Torch calls this hook for every module.

        For a module inside of a model, only two things are recorded: which batch it uses, and
        whether it is a BatchNorm layer.

        Args:
            module: module that is called.
            inputs: positional arguments of the call.

        Returns:
            The inputs converted to float64, for an outermost module; None leaves the inputs
            unchanged.
        """
        self._depth += 1  # `leave_module` subtracts 1 again
        is_model = self._depth == 1

        # While torch traces or transforms a function, tensors have no values.
        if is_traced() or in_function_transform():
            return None

        marks = marks_of(inputs)
        batch_number = marks.get("batch", 0)  # 0 if the inputs were made from no batch
        self._inputs.mark_used(batch_number)

        if is_model:
            self._enter_model(module, inputs, marks)

        is_trained_batch_norm = isinstance(module, BatchNorm) and module.training
        if is_trained_batch_norm:
            self._note_batch_norm(module)

        return self._converted_inputs(module, inputs) if is_model else None

    def _converted_inputs(self, model: nn.Module, inputs: Any) -> Any:
        """Returns the inputs of a model, converted like the model itself.

        Returns None for a module without tensors, such as a loss function, which was not converted.
        """
        if not has_tensors(model):
            return None
        return self.state.mode.determinism.convert(inputs)

    def _enter_model(self, module: nn.Module, inputs: Any, marks: dict[str, Any]) -> None:
        """Records the start of a model's forward pass.

        Args:
            module: the model.
            inputs: positional arguments of the call.
            marks: marks of the inputs, by kind.
        """
        is_trained = torch.is_grad_enabled() and has_parameters(module)
        if is_trained:
            self._end_update_if_another_rank_has_stepped()

        self._forget_last_call_of_model()
        self._note_wrapper(module)
        self._add_model(module)

        if is_trained:
            self._begin_training_pass(module, inputs, marks)

    def _forget_last_call_of_model(self) -> None:
        """Clears what the notes hold only while a model is called."""
        self.state.notes.running_pass = None
        self.state.notes.local_batch_norms_without_gradients = set()

    def _end_update_if_another_rank_has_stepped(self) -> None:
        """Ends the current update before a forward pass, if a foreign step has completed it.

        The order is: backward pass, foreign step (this rank's optimizers do not make it, but its
        parameters change), forward pass. The forward pass belongs to the next update.
        """
        if self._is_first_after_backward_pass():
            self._foreign_steps.end_update_if_parameters_changed()

    def _is_first_after_backward_pass(self) -> bool:
        """True if no model has been called since the last backward pass."""
        # Each first call of a model adds its inputs, and each backward pass then adds its loss.
        return len(self.state.update.model_inputs) == len(self.state.update.losses)

    def _note_batch_norm(self, layer: nn.Module) -> None:
        """Records a BatchNorm layer whose statistics cover only the samples of this rank."""
        # A subclass with its own forward pass, such as SyncBatchNorm, may exchange statistics.
        if type(layer).forward is not BatchNorm.forward:
            return

        if torch.is_grad_enabled():
            self.state.notes.local_batch_norms.add(id(layer))
        else:
            # A model that is called without gradients, such as a teacher, only matters if its
            # output goes into a loss. So these layers are kept apart: `_mark_output` marks the
            # output with them, and they count once a loss has the marks.
            self.state.notes.local_batch_norms_without_gradients.add(id(layer))

    def _note_wrapper(self, module: nn.Module) -> None:
        """Records whether a training forward pass goes through DDP, or bypasses it."""
        is_training = module.training and torch.is_grad_enabled()
        if not is_training:
            return

        update = self.state.update
        # The script should call the DDP wrapper. If it goes past the wrapper and calls the module
        # inside, the gradients are not averaged. The first line with such a call is recorded.
        is_inside_ddp = self.state.models.is_inside_ddp(module)
        if is_inside_ddp and not update.line_that_bypassed_wrapper:
            update.line_that_bypassed_wrapper = user_line() or "somewhere"

        if isinstance(module, DistributedDataParallel):
            update.wrapped_passes += 1

    def _begin_training_pass(self, module: nn.Module, inputs: Any, marks: dict[str, Any]) -> None:
        """Records a call of a model with gradients enabled.

        The record of the forward pass is kept as `state.notes.running_pass` until the call ends.

        Args:
            module: the model.
            inputs: positional arguments of the call.
            marks: marks of the inputs, by kind.
        """
        state = self.state
        is_first_of_update = not state.update.began_with_forward
        if is_first_of_update:
            self._begin_step()

        self._note_line_of_unwrapped_model(module)
        self._note_evaluation_mode(module)
        self._record_tensors_before_pass()

        # Of several models that are called before one backward pass, only the inputs of the first
        # one are recorded.
        if self._is_first_after_backward_pass():
            self._count_draws_before_forward()
            self._record_model_inputs(inputs)

        # What the inputs were computed from goes into the loss, too.
        num_draws_of_earlier_steps = state.step_draws.num_draws_before_step
        state.record_marks(marks, num_ignored_draws=num_draws_of_earlier_steps)
        state.notes.running_pass = self._new_forward_pass(module, inputs)

    def _note_line_of_unwrapped_model(self, module: nn.Module) -> None:
        """Records the first line that calls a model which neither DDP nor Lockstep has wrapped.

        With several ranks, this may be a mistake.
        """
        is_unwrapped = not self.state.models.is_wrapped(module)
        if is_unwrapped and not self.state.update.unwrapped_line:
            self.state.update.unwrapped_line = user_line() or ""

    def _begin_step(self) -> None:
        """Records the state of the run at the first training forward pass of an optimizer step."""
        state = self.state
        state.update.began_with_forward = True

        # A rank without samples has joined (`torch.distributed.algorithms.Join`). This rank calls a
        # model, so it has samples (again).
        state.has_joined = False

        # Forget the outcomes of `if` statements before the training, which belong to no step.
        if state.is_first_update:
            state.branches.pop_outcomes()

        # The script may write to parameters between two steps, for example to average them.
        state.update.rewritten_parameters = self._parameters_changed_since_last_step()

    def _record_tensors_before_pass(self) -> None:
        """Records the parameters, and the plain attributes of modules, that a forward pass uses.

        Before the first backward pass of the update, all parameters are recorded. They should stay
        the same until the step. So after each backward pass, only the parameters that the script
        has changed are recorded.
        """
        update = self.state.update
        if not update.module_tensors_before:  # recorded once in an update
            update.module_tensors_before = self.state.models.plain_attributes()

        had_backward_pass = bool(update.losses)
        if not had_backward_pass:
            self._record_parameters_at_start()
        elif self._is_first_after_backward_pass() and not update.changed_between_passes:
            self._record_parameters_changed_within_update()

    def _count_draws_before_forward(self) -> None:
        """Counts the random draws before the first forward pass of the update.

        Random numbers that are drawn later may go into the loss without being inputs of a model, so
        `losses` records them.
        """
        is_first_forward_of_update = not self.state.update.model_inputs
        if is_first_forward_of_update:
            self.state.notes.num_draws_before_forward = self.state.mode.draws.num_draws

    def _record_model_inputs(self, inputs: Any) -> None:
        """Adds the inputs of a model to `model_inputs` of the update, if they have rows.

        Called once for each backward pass, with the inputs of the first model that is called before
        it. So `model_inputs` usually gets one entry for each backward pass of the update.

        Args:
            inputs: positional arguments of the call.
        """
        # `shape` describes the rows of the tensors, such as "torch.float32 [3, 32, 32]". It is an
        # empty text if no tensor has rows.
        record = describe_batch(inputs, ids=())  # the indices of the samples are not known
        has_rows = bool(record.shape)
        if has_rows:
            self.state.update.model_inputs.append(record)

    def _note_evaluation_mode(self, module: nn.Module) -> None:
        """Records the parameters of a model's submodules that are in evaluation mode."""
        evaluating_parameters = self.state.notes.evaluating_parameters
        for submodule in module.modules():
            if not submodule.training:
                for parameter in submodule.parameters(recurse=False):
                    evaluating_parameters.add(id(parameter))

    def _parameters_changed_since_last_step(self) -> dict[str, Array]:
        """Returns the parameters that have changed since the last optimizer step, by name.

        Sharded parameters are left out. To compare them, all ranks would have to gather them, but
        only some ranks may call a model at this point.
        """
        models = self.state.models
        values_after_step = models.after_last_step
        parameters_to_compare = []
        for name, parameter in models.parameters():
            if name in values_after_step and not is_sharded(parameter):
                parameters_to_compare.append((name, parameter))

        changed = {}
        for name, current_values in copy_arrays(parameters_to_compare).items():
            if not np.array_equal(current_values, values_after_step[name]):
                changed[name] = current_values

        return changed

    def _record_parameters_at_start(self) -> None:
        """Records the parameters that the forward passes of the update start with.

        Their summaries are kept in `state.notes`. Before the first update, their values are
        recorded too, in `state.update.initial`.
        """
        state = self.state
        state.notes.summaries_at_start = state.models.summaries_of_parameters()
        state.notes.summaries_without_name = self._summaries_of_parameters_without_name()
        if state.is_first_update:
            state.update.initial = self._values_of_parameters()

    def _summaries_of_parameters_without_name(self) -> dict[tuple[int, int], Array]:
        """Returns the summaries of parameters that no model has, but an optimizer before its steps.

        Until the optimizer steps, they have no name. So the key is a pair: (0, 2) for the third
        parameter of the first optimizer.
        """
        summaries = {}
        for key, parameter in self.state.models.parameters_of_unstepped_optimizers():
            summaries[key] = summarize(parameter)
        return summaries

    def _values_of_parameters(self) -> dict[str, Array]:
        """Returns copies of the parameters, by name, without sharded parameters."""
        unsharded_parameters = []
        for name, parameter in self.state.models.parameters():
            if not is_sharded(parameter):
                unsharded_parameters.append((name, parameter))
        return copy_arrays(unsharded_parameters)

    def _record_parameters_changed_within_update(self) -> None:
        """Records the parameters that have changed since the first forward pass of the update.

        Called between two backward passes of one update, when parameters should stay the same. They
        are recorded by their summaries, two numbers for each.
        """
        summaries_at_start = self.state.notes.summaries_at_start
        changed = {}
        for name, summary in self.state.models.summaries_of_parameters().items():
            existed_at_start = name in summaries_at_start
            if existed_at_start and not np.array_equal(summary, summaries_at_start[name]):
                changed[name] = summary

        self.state.update.changed_between_passes = changed

    def _new_forward_pass(self, module: nn.Module, inputs: Any) -> ForwardPass | None:
        """Creates the record of a forward pass that begins, and counts the call in `model_calls`.

        Args:
            module: the model.
            inputs: positional arguments of the call.

        Returns:
            The record, or None if no input has rows for samples.
        """
        notes = self.state.notes
        notes.model_calls += 1

        # Inputs with one row for each sample.
        num_samples, sample_inputs = sample_tensors(inputs)
        if not sample_inputs:
            return None

        first_input, *other_inputs = sample_inputs
        record = Forward(
            model=f"{type(unwrap(module)).__name__}, forward pass {notes.model_calls}",
            shape=f"{first_input.dtype} {list(first_input.shape[1:])}",
            inputs=summarize_rows([first_input], num_samples),
            other_inputs=summarize_rows(other_inputs, num_samples),
            rows_are_samples=_rows_are_certainly_samples(inputs, sample_inputs),
        )

        is_small_enough = 0 < first_input.numel() <= MAX_RECORDED_VALUES
        if is_small_enough:
            record.input_values = _values_by_sample(first_input, num_samples)

        return ForwardPass(record, inputs=self._inputs_until_first_loss(inputs))

    def _inputs_until_first_loss(self, inputs: Any) -> Batch | None:
        """Returns the record of a model's inputs in the first update, and None in later ones.

        The first calls of a model may be a trial, for example to print the shape of the output. The
        first loss will show which calls it was computed from. Until then, all inputs are kept.
        """
        if not self.state.is_first_update:
            return None
        return describe_batch(inputs, ids=())  # the indices of the samples are not known

    # The end of a forward pass

    @guarded
    def leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Records the end of a module's forward pass. Torch calls this hook for every module."""
        self._depth -= 1

        # While torch traces or transforms a function, tensors have no values.
        if is_traced() or in_function_transform():
            return

        # Any model with parameters marks its output, even one that is not trained, such as a
        # teacher whose output goes into the loss.
        is_model = self._depth == 0
        if is_model and has_parameters(module):
            self._mark_output(output)

        # The forward pass of the model, even if `module` is only a part of the model. None if the
        # model is not trained, or if its inputs have no samples.
        forward_pass_of_model = self.state.notes.running_pass
        if forward_pass_of_model is None or not torch.is_grad_enabled():
            return

        outputs = _outputs_with_gradients(output)
        if is_model:
            self._end_forward_pass(forward_pass_of_model, outputs)
        else:
            self._keep_hidden_activation(forward_pass_of_model, outputs)

    def _keep_hidden_activation(self, forward_pass: ForwardPass, outputs: list[Tensor]) -> None:
        """Keeps the first hidden activation in a model that has a row for each sample.

        With it, `losses` tests whether samples influence each other in the rest of the model.

        Args:
            forward_pass: record of the model's forward pass, which is still running.
            outputs: output tensors of a module inside of the model.
        """
        if forward_pass.hidden_activation is not None:
            return
        with_rows = tensors_with_row_per_sample(outputs, len(forward_pass.record.inputs))
        if with_rows:
            forward_pass.hidden_activation = with_rows[0]

    def _mark_output(self, output: Any) -> None:
        """Marks the output of a model with the line of the call and its BatchNorm layers.

        If a loss is computed from this output in a later step, the marks on the loss tell so.
        """
        # The kind of each mark ends with an id or a number, so that a loss can have several marks.
        marks: dict[str, Any] = {}
        for layer_id in self.state.notes.local_batch_norms_without_gradients:
            marks[f"{BATCH_NORM}{layer_id}"] = layer_id
        marks[f"{MODEL_CALL}{self.state.update_number}"] = user_line() or ""
        mark(output, **marks)

    def _end_forward_pass(self, forward_pass: ForwardPass, outputs: list[Tensor]) -> None:
        """Records the outputs of a model, and hooks them to record their gradients later.

        The forward pass is kept in `state.notes.forward_passes` until the next backward pass.

        Args:
            forward_pass: record of the forward pass, which is completed.
            outputs: output tensors of the model that a loss can be computed from.
        """
        notes = self.state.notes
        notes.running_pass = None
        forward_pass.outputs = outputs

        # The mark "trained" is for outputs of a model in training. Everything that is computed from
        # them inherits the mark.
        mark(outputs, trained=self.state.update_number)

        # Only the latest forward passes are kept.
        notes.forward_passes = [*notes.forward_passes, forward_pass][-MAX_FORWARD_PASSES:]

        record = forward_pass.record
        num_rows = len(record.inputs)
        with_row_per_input_row = tensors_with_row_per_sample(outputs, num_rows)

        # The rows of the inputs may be something else than samples, such as the nodes of a graph.
        # If some output has rows for each of them, they are samples.
        if with_row_per_input_row or _some_has_several_rows_each(outputs, num_rows):
            record.rows_are_samples = True

        # Outputs are compared sample by sample only if each of them has a row for each sample.
        if len(with_row_per_input_row) == len(outputs):
            record.outputs = summarize_rows(with_row_per_input_row, num_rows)
            self._hook_outputs(forward_pass)

    def _hook_outputs(self, forward_pass: ForwardPass) -> None:
        """Hooks each output of a forward pass, so that its gradient is recorded."""
        for output_number, tensor in enumerate(forward_pass.outputs, 1):
            hook = partial(self.record_output_gradient, forward_pass, output_number)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    @guarded
    def record_output_gradient(
        self, forward_pass: ForwardPass, output_number: int, gradient: Tensor | None
    ) -> None:
        """Records the gradient of the loss with respect to a model's output, sample by sample.

        This is a hook on each output. Gradients of several outputs, or of several backward passes,
        are added up.

        Args:
            forward_pass: forward pass that returned the output.
            output_number: number of the output, from 1.
            gradient: gradient of the loss with respect to the output; None if the loss does not
                depend on it.
        """
        if gradient is None:
            return

        record = forward_pass.record
        num_samples = len(record.inputs)

        # A gradient without one row for each sample is not recorded.
        has_row_per_sample = bool(tensors_with_row_per_sample([gradient], num_samples))
        if not has_row_per_sample:
            return

        summaries = summarize_rows([gradient], num_samples)  # shape (samples, 2)
        if len(summaries) == 0:  # a batch without samples
            return

        # Weighted by the number of the output. Otherwise, the sum would stay the same if the
        # gradients of two outputs were swapped.
        weighted_rows = summaries * output_number
        if len(record.output_gradients) == 0:
            record.output_gradients = weighted_rows
        else:
            record.output_gradients = record.output_gradients + weighted_rows


def _rows_are_certainly_samples(inputs: Any, sample_inputs: list[Tensor]) -> bool:
    """True if a model has several inputs with the same number of rows, or a list of single images.

    The rows of a single input may be something else than samples, such as the nodes of a graph.

    Args:
        inputs: all inputs of the model.
        sample_inputs: the inputs that have as many rows as the first one.
    """
    if single_images(inputs):
        return True

    inputs_with_rows = [tensor for tensor in tensors(inputs) if tensor.dim() > 0]
    has_several_inputs = len(inputs_with_rows) > 1
    return has_several_inputs and len(sample_inputs) == len(inputs_with_rows)


def _values_by_sample(tensor: Tensor, num_samples: int) -> Array:
    """Returns a copy of all values of a tensor, in the shape (samples, values of one sample)."""
    rows = tensor.detach().double().reshape(num_samples, -1)
    return rows.cpu().clone().numpy()


def _some_has_several_rows_each(outputs: list[Tensor], num_rows: int) -> bool:
    """True if some output of a model has the same number of rows for each row of the inputs.

    For 8 rows of the inputs, an output may have the shape (40, 10), with a row for each of 5
    tokens. Also true if the inputs have no rows.

    Args:
        outputs: output tensors of the model.
        num_rows: number of rows of the inputs.
    """
    return any(num_rows == 0 or len(output) % num_rows == 0 for output in outputs)


def _outputs_with_gradients(output: Any) -> list[Tensor]:
    """Returns the tensors in the output of a module that a loss can be computed from."""
    outputs = []
    for value in pytree.tree_leaves(output):
        if isinstance(value, Tensor) and value.requires_grad and value.dim() > 0:
            outputs.append(value)
    return outputs
