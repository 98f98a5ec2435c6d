"""Records forward passes: what models are called with, what they return, and how they are wrapped.

A call of the outermost module is a *forward pass of a model*; modules inside of it are called while
it runs. `state.update` is the record of the current optimizer step, and `state.notes` what is
remembered until it is complete. A *summary* of a tensor is two numbers that change with any of its
values. *Marks* on a tensor tell what it was made from; all that is computed from it gets them too.
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
from lockstep.distributed.torch_compat import (
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
from lockstep.verify.recording.inputs import InputRecorder
from lockstep.verify.recording.marks import BATCH_NORM, MODEL_CALL, mark, marks_of
from lockstep.verify.recording.models import has_parameters, has_tensors
from lockstep.verify.recording.state import ForwardPass, RecorderState, guarded
from lockstep.verify.recording.tensor_values import (
    copy_arrays,
    sample_tensors,
    summarize,
    summarize_rows,
    tensors_with_rows,
)
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Forward

MAX_FORWARD_PASSES = 16
"""Forward passes that are kept until a backward pass uses them."""
MAX_RECORDED_VALUES = 65_536
"""Inputs with no more values are recorded as they are; of larger ones, summaries."""


class ForwardRecorder:
    """Records forward passes, by torch's hooks for all modules."""

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
        """Modules inside of each other whose forward passes are running."""

    # Models

    @guarded
    def add_prepared(self, module: nn.Module) -> None:
        """Adds a module that `World.prepare` has wrapped to the models."""
        self.state.models.prepared_ids.add(id(unwrap(module)))
        self._add_model(module)

    @guarded
    def add_ddp(self, wrapper: DistributedDataParallel) -> None:
        """Adds a module that DDP was put around to the models, and watches its parameters."""
        self.state.models.add_ddp(wrapper)
        self._gradients.hook_parameters()
        self.state.watch_writes()

    def _add_model(self, module: nn.Module) -> None:
        """Adds a module to the models, and watches its gradients and writes to its tensors.

        Its dropout is switched off, and it is converted to float64. This is called again with each
        forward pass: a model may have got other parameters.
        """
        self.state.mode.determinism.prepare_module(module)
        self.state.models.add(module)
        self._gradients.hook_parameters()
        # The closure of an optimizer calls the model within its step, which writes to parameters.
        if not self.state.running_optimizers:
            self.state.watch_writes()

    # The beginning of a forward pass

    @guarded
    def enter_module(self, module: nn.Module, inputs: Any) -> Any:
        """Records that a module's forward pass begins: torch calls this hook for every module.

        Of a module inside of a model, only the batch that it uses and BatchNorm are noted.

        Returns:
            The inputs of the outermost module, in float64; None leaves inputs as they are.
        """
        self._depth += 1

        # While torch traces or transforms a function, tensors have no values.
        if is_traced() or in_function_transform():
            return None

        marks = marks_of(inputs)
        self._inputs.note_use(marks.get("batch", 0))  # 0: the inputs are made from no batch
        is_model = self._depth == 1
        if is_model:  # for each model, these layers are noted anew
            self.state.notes.local_batch_norms_without_gradients = set()

        if isinstance(module, BatchNorm) and module.training:
            self._note_batch_norm(module)

        if not is_model:
            return None

        self._enter_model(module, inputs, marks)

        if not has_tensors(module):  # such as a loss function, of which nothing is in float64
            return None

        return self.state.mode.determinism.convert(inputs)

    def _enter_model(self, module: nn.Module, inputs: Any, marks: dict[str, Any]) -> None:
        """Records that a forward pass of a model begins.

        Args:
            module: the model.
            inputs: what it is called with.
            marks: those of the inputs.
        """
        is_trained = torch.is_grad_enabled() and has_parameters(module)
        # On a rank without an optimizer, the update before ends when its parameters have changed.
        # That is found out before anything of this forward pass is recorded.
        if is_trained and self._is_first_of_backward_pass():
            self._foreign_steps.record_if_parameters_changed()

        self.state.notes.running_pass = None
        self._note_wrapper(module)
        self._add_model(module)

        if is_trained:
            self._begin_training_pass(module, inputs, marks)

    def _is_first_of_backward_pass(self) -> bool:
        """True if no model was called since the last backward pass."""
        # The first model after each backward pass adds its inputs, each backward pass its loss.
        return len(self.state.update.model_inputs) == len(self.state.update.losses)

    def _note_batch_norm(self, layer: nn.Module) -> None:
        """Notes a BatchNorm layer in training mode that only sees this rank's samples."""
        # A class with a forward pass of its own, such as SyncBatchNorm, may exchange statistics.
        if type(layer).forward is not BatchNorm.forward:
            return

        # Without gradients, the layer matters only if the loss is made from the model's output:
        # then the output is marked with it.
        if torch.is_grad_enabled():
            self.state.notes.local_batch_norms.add(id(layer))
        else:
            self.state.notes.local_batch_norms_without_gradients.add(id(layer))

    def _note_wrapper(self, module: nn.Module) -> None:
        """Notes a training forward pass through DDP, or of the module that DDP is around."""
        is_training = module.training and torch.is_grad_enabled()
        if not is_training:
            return

        update = self.state.update
        # This is the outermost module that is called: if DDP is around it, DDP was not called.
        is_inside_ddp = id(module) in self.state.models.ddp_parameter_ids
        if is_inside_ddp and not update.past_wrapper_line:
            update.past_wrapper_line = user_line() or "somewhere"

        if isinstance(module, DistributedDataParallel):
            update.wrapped_passes += 1

    def _begin_training_pass(self, module: nn.Module, inputs: Any, marks: dict[str, Any]) -> None:
        """Records a call of a model with gradients.

        `state.notes.running_pass` becomes the record of this forward pass. The first pass of an
        optimizer step also records what the step begins with.

        Args:
            module: the model.
            inputs: what it is called with.
            marks: those of the inputs.
        """
        state = self.state
        update = state.update

        # The line that first calls a model that is neither in DDP nor prepared by Lockstep.
        if not state.models.is_wrapped(module) and not update.unwrapped_line:
            update.unwrapped_line = user_line() or ""

        if not update.module_tensors_before:
            update.module_tensors_before = state.models.plain_attributes()

        if not update.began_with_forward:
            self._begin_step()

        is_first_of_backward_pass = self._is_first_of_backward_pass()
        self._record_parameters_before_pass(is_first_of_backward_pass)

        if is_first_of_backward_pass:
            self._record_model_inputs(inputs)

        self._note_evaluation_mode(module)
        # What the inputs are made from, the loss is made from too. Random numbers count only if
        # they were drawn for this step.
        state.record_marks(marks, draws_before=state.step_draws.count_before)
        state.notes.running_pass = self._new_forward_pass(module, inputs)

    def _begin_step(self) -> None:
        """Records what the first training forward pass of an optimizer step finds."""
        state = self.state
        state.update.began_with_forward = True
        state.has_joined = False  # under `Join`, a rank without samples calls no model
        if state.is_first_update:
            # The outcomes of `if`s before the training are no part of a step.
            state.branches.pop_outcomes()
        state.update.rewritten_parameters = self._parameters_changed_since_last_step()

    def _record_parameters_before_pass(self, is_first_of_backward_pass: bool) -> None:
        """Records the parameters that a forward pass uses.

        Until the first backward pass of the update, these are the parameters at its start. Later
        only changes are recorded: the first ones that the script made between two backward passes.
        """
        update = self.state.update
        had_backward_pass = bool(update.losses)
        if not had_backward_pass:
            self._record_parameters_at_start()
        elif is_first_of_backward_pass and not update.changed_between_passes:
            self._record_parameters_changed_within_update()

    def _record_model_inputs(self, inputs: Any) -> None:
        """Records the inputs of the first model that is called for a backward pass."""
        state = self.state
        is_first_of_update = not state.update.model_inputs
        if is_first_of_update:
            state.notes.draws_before_forward = state.mode.draws.count
        record = describe_batch(inputs, ids=())
        if record.shape:  # there is a tensor with a row for each sample
            state.update.model_inputs.append(record)

    def _note_evaluation_mode(self, module: nn.Module) -> None:
        """Notes the parameters of those submodules of a model that are in evaluation mode."""
        evaluating_parameters = self.state.notes.evaluating_parameters
        for submodule in module.modules():
            if not submodule.training:
                for parameter in submodule.parameters(recurse=False):
                    evaluating_parameters.add(id(parameter))

    def _parameters_changed_since_last_step(self) -> dict[str, Array]:
        """Returns the parameters that are no longer what the last optimizer step left, by name."""
        models = self.state.models
        after_step = models.after_last_step
        recorded_parameters = []  # those of which `after_step` has the values
        for name, parameter in models.parameters():
            if name in after_step and not is_sharded(parameter):
                recorded_parameters.append((name, parameter))

        changed = {}
        for name, array in copy_arrays(recorded_parameters).items():
            if not np.array_equal(array, after_step[name]):
                changed[name] = array

        return changed

    def _record_parameters_at_start(self) -> None:
        """Records the parameters that the forward passes of the update begin with.

        Their summaries are kept in `state.notes`. Before the first update, `state.update.initial`
        also gets their values.
        """
        state = self.state
        summaries = state.models.whole_parameters()  # by name, of those that are not sharded
        state.notes.parameters_at_start = summaries

        # Parameters in no model have no name. Their key is the number of the optimizer that was
        # built with them, and their place in it.
        without_model = {}
        for place, parameter in state.models.parameters_of_unstepped_optimizers():
            without_model[place] = summarize(parameter)

        state.notes.parameters_without_model = without_model

        if state.is_first_update:
            whole = [(n, p) for n, p in state.models.parameters() if n in summaries]
            state.update.initial = copy_arrays(whole)

    def _record_parameters_changed_within_update(self) -> None:
        """Records the parameters that are no longer what the update's first forward pass used.

        This is called between two backward passes of one update.
        """
        at_start = self.state.notes.parameters_at_start
        changed = {}
        for name, summary in self.state.models.whole_parameters().items():
            if name in at_start and not np.array_equal(summary, at_start[name]):
                changed[name] = summary
        self.state.update.changed_between_passes = changed

    def _new_forward_pass(self, module: nn.Module, inputs: Any) -> ForwardPass | None:
        """Returns the record of a forward pass that begins; None if it has no samples.

        Counts the call in `state.notes.model_calls`, which numbers the forward passes.
        """
        notes = self.state.notes
        notes.model_calls += 1

        # The number of samples, and the inputs with one row for each.
        count, sample_inputs = sample_tensors(inputs)
        if not sample_inputs:
            return None

        first_input, *other_inputs = sample_inputs
        number_of_inputs = len([tensor for tensor in tensors(inputs) if tensor.dim() > 0])

        # With a single input, its rows may be something else than samples, such as the nodes of a
        # graph. Several inputs that all have the same number of rows leave no doubt.
        all_have_rows = len(sample_inputs) == number_of_inputs
        record = Forward(
            model=f"{type(unwrap(module)).__name__}, forward pass {notes.model_calls}",
            shape=f"{first_input.dtype} {list(first_input.shape[1:])}",
            inputs=summarize_rows([first_input], count),
            other_inputs=summarize_rows(other_inputs, count),
            rows_are_samples=all_have_rows and number_of_inputs > 1,
        )

        if 0 < first_input.numel() <= MAX_RECORDED_VALUES:
            rows = first_input.detach().double().reshape(count, -1)
            record.input_values = rows.cpu().clone().numpy()

        forward_pass = ForwardPass(record)
        if self.state.is_first_update:
            # Before the training, a script may call the model as a trial. If the first loss shows
            # that earlier calls were trials, these inputs take the place of theirs in the record.
            forward_pass.inputs = describe_batch(inputs, ids=())

        return forward_pass

    # The end of a forward pass

    @guarded
    def leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Records that a module's forward pass is over: torch calls this hook for every module."""
        self._depth -= 1

        # While torch traces or transforms a function, tensors have no values.
        if is_traced() or in_function_transform():
            return

        is_model = self._depth == 0
        if is_model and has_parameters(module):
            self._mark_output(output)

        forward_pass = self.state.notes.running_pass
        if forward_pass is None or not torch.is_grad_enabled():  # the model is not being trained
            return

        outputs = []  # the tensors in the output that a loss can be computed from
        for value in pytree.tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad and value.dim() > 0:
                outputs.append(value)

        if is_model:
            self._end_forward_pass(forward_pass, outputs)
        elif forward_pass.hidden is None:
            # The module is a part of the model. The first one whose output has a row for each
            # sample tells whether samples influence each other after it.
            with_rows = tensors_with_rows(outputs, len(forward_pass.record.inputs))
            if with_rows:
                forward_pass.hidden = with_rows[0]

    def _mark_output(self, output: Any) -> None:
        """Marks the output of a model with its line and the BatchNorm layers behind it.

        A loss that is made from the output in a later step is then known to be made from it.
        """
        # The kinds of these marks end with an id or a number, so that a loss keeps several of them.
        marks: dict[str, Any] = {}
        for layer_id in self.state.notes.local_batch_norms_without_gradients:
            marks[f"{BATCH_NORM}{layer_id}"] = layer_id
        marks[f"{MODEL_CALL}{self.state.update_number}"] = user_line() or ""
        mark(output, **marks)

    def _end_forward_pass(self, forward_pass: ForwardPass, outputs: list[Tensor]) -> None:
        """Records the outputs of a model, and hooks them to record the loss's gradient by them.

        The forward pass is added to `state.notes.forward_passes`, for the backward pass to come.
        """
        notes = self.state.notes
        notes.running_pass = None
        forward_pass.outputs = outputs
        mark(outputs, trained=self.state.update_number)
        record = forward_pass.record
        count = len(record.inputs)  # the number of samples
        with_rows = tensors_with_rows(outputs, count)

        # The rows of the input are samples if an output has one row for each of them, or the same
        # number of rows for each, such as one for each token of a text.
        if with_rows or any(_has_multiple_of_rows(tensor, count) for tensor in outputs):
            record.rows_are_samples = True

        notes.forward_passes = [*notes.forward_passes, forward_pass][-MAX_FORWARD_PASSES:]

        # Only outputs that all have a row for each sample are compared, sample by sample.
        if not outputs or len(with_rows) != len(outputs):
            return

        record.outputs = summarize_rows(with_rows, count)
        for number, tensor in enumerate(outputs, 1):
            hook = partial(self.record_output_gradient, forward_pass, number)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    @guarded
    def record_output_gradient(
        self, forward_pass: ForwardPass, number: int, gradient: Tensor | None
    ) -> None:
        """Adds the gradient of the loss by an output of a model to the record, sample by sample.

        Args:
            forward_pass: which returned the output.
            number: of the output, from 1.
            gradient: of the loss with respect to the output; None if it does not depend on it.
        """
        if gradient is None:
            return

        record = forward_pass.record
        count = len(record.inputs)

        # An array of shape (samples, 2). It is weighted by the number of the output: without that,
        # gradients of two outputs could be swapped and have the same sum.
        rows = summarize_rows(tensors_with_rows([gradient], count), count) * number
        if len(rows) == 0:
            return

        if len(record.output_gradients) == 0:
            record.output_gradients = rows
        else:  # another output, or another backward pass, has a gradient as well
            record.output_gradients = record.output_gradients + rows


def _has_multiple_of_rows(tensor: Tensor, count: int) -> bool:
    """True if the number of a tensor's rows is a multiple of the number of samples.

    Args:
        tensor: an output of a model.
        count: number of samples; 0 of an empty batch, which fits any number of rows.
    """
    return count == 0 or len(tensor) % count == 0
