"""Records the steps of optimizers: what a step starts from, and what it leaves behind.

An *update* is one optimizer step with everything that led to it. `state.update` is the record of
the current update, and `state.notes` holds what is needed until it is complete. Before the step,
the gradients and options are recorded; after it, the parameters and buffers. Then the update is
written. `state.models` yields the tensors of all models with their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import parameters_of
from lockstep.torch_compat import in_backward_pass, is_sharded
from lockstep.user_code import user_line
from lockstep.verify.recording.gradients import GradientRecorder
from lockstep.verify.recording.guard import guarded
from lockstep.verify.recording.inputs import InputRecorder
from lockstep.verify.recording.marks import marks_of
from lockstep.verify.recording.state import RecorderState
from lockstep.verify.recording.tensor_values import copy_arrays, summarize
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Batch

FIELDS_OF_BACKWARD_PASSES = (
    "batches",
    "losses",
    "local_gradients",
    "loss_terms",
    "loss_line",
    "model_inputs",
    "forwards",
    "loss_compares_samples",
    "loss_divisors",
    "loss_options",
    "model_with_coupled_samples",
    "module_tensors_before",
    "batch_statistics",
    "local_passes",
    "gradient_hook_line",
    "changed_between_passes",
    "loss_draws",
    "drawn_digests",
    "scalar_statistics",
    "random_streams",
    "gather_line",
    "detached_gather_line",
    "unwrapped_line",
    "line_that_bypassed_wrapper",
    "wrapped_passes",
)
"""Fields of an update that describe its backward passes. If several optimizers step after the same
backward passes, each of their updates gets a copy."""


class ParameterGroup(dict[str, Any]):
    """A parameter group of an optimizer that remembers which line last set its learning rate."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group)
        self.line = user_line() or ""

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets an option. For the learning rate, also remembers the line of the script."""
        super().__setitem__(key, value)
        if key == "lr":
            self.line = user_line() or ""


class OptimizerRecorder:
    """Records steps, through torch's global optimizer hooks."""

    def __init__(
        self, state: RecorderState, inputs: InputRecorder, gradients: GradientRecorder
    ) -> None:
        self.state = state
        self.prepared_by_lockstep: set[Optimizer] = set()
        """Optimizers that `World.prepare` has wrapped."""
        self._inputs = inputs
        self._gradients = gradients
        self._batches_for_next_update: list[Batch] = []
        """Batches that loaders have handed out ahead, before the step of the current update."""

    # Before the step

    @guarded
    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Records what a step starts from. Torch calls this hook before every `optimizer.step()`.

        If an optimizer calls another one, as ZeRO does, only the outer step is recorded. The script
        is ended here if enough steps are recorded.

        Args:
            optimizer: optimizer that steps.
            args: positional arguments of `step`, including the optimizer itself.
            kwargs: keyword arguments of `step`.

        Returns:
            Changed arguments for `step`, if there is a closure: since a closure computes the
            gradients, it is replaced by one that also records them. Otherwise None, which keeps the
            arguments.
        """
        state = self.state
        state.running_steps.begin(optimizer)
        is_outermost = state.running_steps.count() == 1
        if not is_outermost:
            return None

        # The step itself writes to all parameters, so no writes are watched until it has ended.
        state.mode.writes.watched_addresses = frozenset()

        if optimizer not in state.steps_of:
            state.steps_of[optimizer] = 0
            state.models.stepped_optimizers.append(optimizer)

        self._end_script_if_enough(optimizer)

        has_closure = any(callable(value) for value in (*args[1:], *kwargs.values()))
        if has_closure:
            return self._with_recording_closures(optimizer, args, kwargs)

        self._record_step_inputs(optimizer)
        return None

    def _with_recording_closures(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of `step`, in which closures also record the gradients.

        See `before_step` for the arguments. Those that are no closures stay as they are.
        """
        optimizer_itself, *other_args = args
        recording_args = [self._recording_if_closure(value, optimizer) for value in other_args]
        recording_kwargs = {}
        for name, value in kwargs.items():
            recording_kwargs[name] = self._recording_if_closure(value, optimizer)

        return (optimizer_itself, *recording_args), recording_kwargs

    def _end_script_if_enough(self, optimizer: Optimizer) -> None:
        """Ends the script if the optimizer with the most steps has made enough of them.

        Two optimizers may step in turn. If 5 steps are enough, and the first optimizer has made 5
        and the second one 4, then the second one still makes its step. The script is ended when the
        first one is about to make its 6th.

        Args:
            optimizer: optimizer that is about to step.
        """
        has_most_steps = self.state.steps_of[optimizer] == max(self.state.steps_of.values())
        if has_most_steps:
            self.state.end_script_if_enough()

    def _recording_if_closure(self, argument: Any, optimizer: Optimizer) -> Any:
        """Wraps an argument of `step` if it is a closure; returns other arguments unchanged.

        Some optimizers take further arguments, or call the closure by another name. So whatever can
        be called is taken for the closure.

        Args:
            argument: an argument of `step`.
            optimizer: optimizer that steps.

        Returns:
            A closure that calls the script's closure, and records the gradients that it computes.
        """
        if not callable(argument):
            return argument

        closure: Callable[[], Any] = argument

        def recording_closure() -> Any:
            loss = closure()
            self._record_step_inputs(optimizer)
            return loss

        return recording_closure

    @guarded
    def _record_step_inputs(self, optimizer: Optimizer) -> None:
        """Records everything that a step starts from, once the gradients are computed.

        If they are computed by a closure that is given to `step`, such as by LBFGS, it may be
        called several times in one step. Only its first call is recorded.
        """
        state = self.state
        if state.notes.step_inputs_recorded:
            return

        state.notes.step_inputs_recorded = True

        # Two optimizers may step after one backward pass, which was recorded in the update of the
        # first one.
        self._copy_backward_passes_of_last_update()
        self._record_parameters()
        self._record_other_tensors(optimizer)

        parameter_ids = {id(parameter) for parameter in parameters_of(optimizer)}
        self._record_gradients(parameter_ids)

        # How the models and the optimizer are set up.
        self._record_wrapping_of_models()
        self._record_preparation(optimizer, parameter_ids)
        self._record_optimizer(optimizer)
        if in_backward_pass():
            state.update.step_line_in_backward = user_line() or ""

        # Lines of the script whose results should not be in the gradients.
        state.update.earlier_outputs_line = self._line_of_earlier_outputs(optimizer)
        state.update.gradient_draw_line = self._line_of_draw_in_gradients()

        # Batches that loaders have handed out ahead belong to the next update.
        self._batches_for_next_update = self._inputs.end_update()

    def _record_gradients(self, parameter_ids: set[int]) -> None:
        """Records the gradients that the step uses, and sets those to 0 that are mere rounding.

        Args:
            parameter_ids: ids of the optimizer's parameters.
        """
        # The factor by which the script has scaled all gradients since the backward pass, such as
        # 1 / world_size. It is read first, since `zero_rounding` changes the gradients.
        factor_of_script = self._gradients.factor_since_backward()
        self.state.update.gradient_factor = factor_of_script

        self._gradients.record_for_step(parameter_ids)
        self._gradients.zero_rounding(parameter_ids)
        self._gradients.note_dtypes()

    def _copy_backward_passes_of_last_update(self) -> None:
        """Copies the backward passes from the last update, if this update had none of its own.

        Each optimizer step ends an update. If two optimizers step after one backward pass, the
        backward pass belongs to both updates.
        """
        state = self.state
        last_update = state.last_update_without_results  # without the parameters after its step

        # Each backward pass has recorded a loss.
        has_own_backward_pass = bool(state.update.losses)
        last_update_has_backward_pass = bool(last_update.losses)
        if has_own_backward_pass or not last_update_has_backward_pass:
            return

        fields = {name: getattr(last_update, name) for name in FIELDS_OF_BACKWARD_PASSES}
        state.update = replace(state.update, **fields)

    def _record_parameters(self) -> None:
        """Records the parameters before the step.

        Parameters of models were recorded at the first forward pass of the update already, and keep
        the values that they had then. Parameters that only this optimizer has are recorded now.
        """
        state = self.state
        update = state.update

        # The values themselves are only recorded before the first step.
        is_before_first_step = not any(state.steps_of.values())
        if is_before_first_step:
            named_parameters = state.models.parameters()
            unrecorded = [(name, p) for name, p in named_parameters if name not in update.initial]
            update.initial = {**update.initial, **copy_arrays(unrecorded)}

        # Before every step, two numbers for each parameter are recorded.
        update.parameter_sums = state.models.summaries_of_parameters(
            known_summaries=state.notes.summaries_at_start
        )

        # A parameter that no model has gets its name at the first step of its optimizer. Those
        # without a name were summarized at the first forward pass of the update.
        update.unstepped_sums = state.notes.summaries_without_name

    def _record_other_tensors(self, optimizer: Optimizer) -> None:
        """Records the optimizer's state and plain attributes of modules, as they are now.

        Plain attributes are tensors that are neither parameters nor buffers. Also records which
        parameters are not trained, and which belong to modules that were called in evaluation mode.
        """
        state = self.state
        update = state.update
        named_parameters = list(state.models.parameters())

        update.module_tensors = state.models.plain_attributes()
        update.frozen = state.frozen_parameters()
        evaluating_ids = state.notes.evaluating_parameters
        update.in_eval_mode = [name for name, p in named_parameters if id(p) in evaluating_ids]
        update.optimizer_state = _summarize_state(optimizer, named_parameters)

    def _record_wrapping_of_models(self) -> None:
        """Records how the models are wrapped, and which BatchNorm layers are not synchronized.

        A process group of DDP is incomplete if it lacks some ranks of the run.
        """
        models = self.state.models
        update = self.state.update
        update.unknown_to_ddp = models.parameters_unknown_to_ddp()
        update.unwrapped_parameters = models.unwrapped_parameters()
        update.ranks_of_incomplete_ddp_group = models.ranks_of_incomplete_ddp_group
        update.comm_hook_line = models.comm_hook_line

        local_batch_norms = self.state.notes.local_batch_norms
        update.local_norm_layers = []
        for name, module in models.modules():
            if id(module) in local_batch_norms:
                update.local_norm_layers.append(name)

    def _record_preparation(self, optimizer: Optimizer, parameter_ids: set[int]) -> None:
        """Records whether the script prepares its model with Lockstep, but not the optimizer.

        Args:
            optimizer: optimizer that steps.
            parameter_ids: ids of the optimizer's parameters.
        """
        model_is_prepared = self.state.models.has_prepared(parameter_ids)
        optimizer_is_prepared = optimizer in self.prepared_by_lockstep
        is_forgotten = model_is_prepared and not optimizer_is_prepared
        self.state.update.optimizer_unprepared = is_forgotten

    def _record_optimizer(self, optimizer: Optimizer) -> None:
        """Records the options of each parameter group, and the lines that set its learning rate."""
        update = self.state.update
        update.group_options = [_options_of(group) for group in optimizer.param_groups]
        groups_with_rate = [group for group in optimizer.param_groups if "lr" in group]
        update.learning_rates = [float(group["lr"]) for group in groups_with_rate]
        update.learning_rate_lines = [getattr(group, "line", "") for group in groups_with_rate]

    def _line_of_earlier_outputs(self, optimizer: Optimizer) -> str:
        """Returns the line that called a model in an earlier step, if the loss depends on the call.

        For example, a script may compute the loss from outputs that it has kept from the last step.
        If the optimizer made its last step at the end of update 4, calls of models in the updates 0
        to 4 are earlier ones, and those from update 5 on belong to this step. The result is empty
        if the loss was only computed from calls in this step.

        Args:
            optimizer: optimizer that steps.
        """
        first_update_of_this_step = self.state.first_update_of_next_step.get(optimizer, 0)
        for number_of_update, line_of_call in self.state.notes.model_calls_behind_loss.items():
            if number_of_update < first_update_of_this_step:
                return line_of_call

        return ""

    def _line_of_draw_in_gradients(self) -> str:
        """Returns the line that drew random numbers from which gradients were computed.

        For example, a script may add noise to the gradients. The result is empty if it does not.
        """
        # The marks of tensors tell what they were computed from; "draw" is the last draw.
        marks = marks_of(list(self._gradients.all_gradients()))
        if "draw" not in marks:
            return ""

        # The draws of the process are numbered from 1. If there were 7 draws before this step,
        # `num_draws_before_step` is 7, and draw 8 is the first one of this step.
        number_of_draw, line_of_draw, _digest = marks["draw"]
        was_drawn_for_this_step = number_of_draw > self.state.step_draws.num_draws_before_step
        return str(line_of_draw) if was_drawn_for_this_step else ""

    # After the step

    @guarded
    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Records the result of a step, writes the update, and begins the next one.

        Torch calls this hook for every optimizer, even for one that is called by another optimizer.
        """
        state = self.state
        state.running_steps.end(optimizer)
        is_outermost = state.running_steps.count() == 0
        if not is_outermost:
            return

        self._record_identity(optimizer)
        self._record_local_gradients()

        # The lowest precision of all losses and gradients so far. It decides on the tolerance.
        state.update.dtype = str(state.mode.lowest_dtype)

        # If another optimizer steps next, without a backward pass of its own, it gets the backward
        # passes of this update, but not the results of this step.
        state.last_update_without_results = replace(state.update)
        self._record_step_results(optimizer)
        self._finish_update(optimizer)

        # Random numbers drawn from here on belong to the next step.
        state.step_draws.forget_draws_so_far()

    def _record_local_gradients(self) -> None:
        """Records what each backward pass of this update has added to the gradients.

        An update without a backward pass keeps what `_copy_backward_passes_of_last_update` has
        copied.
        """
        local_gradients = self._gradients.local_gradients()
        if local_gradients:
            self.state.update.local_gradients = local_gradients

    def _finish_update(self, optimizer: Optimizer) -> None:
        """Writes the complete update, begins the next one, and counts a complete step."""
        state = self.state
        replica = state.micro_batch.virtual_rank_number if state.trains_replicas else None
        next_update_number = state.finish_update(
            state.update, self._batches_for_next_update, replica
        )

        # Each model call is recorded with the number of its update. The number tells the next step
        # of this optimizer whether a call was made in an earlier step.
        state.first_update_of_next_step[optimizer] = next_update_number

        if self._step_is_complete():
            state.steps_of[optimizer] += 1

    def _step_is_complete(self) -> bool:
        """True if the call of `optimizer.step()` that has just ended completes a training step.

        Usually each call is one step. With DiLoCo, a process may train several replicas of the
        model in turn, each with a `step()` call of its own. With 2 replicas, the second call
        completes the step.
        """
        if not self.state.trains_replicas:
            return True

        # The replicas share the global batch. Its last micro-batch is that of the last replica.
        return self.state.micro_batch.last

    def _record_step_results(self, optimizer: Optimizer) -> None:
        """Records parameters and buffers after a step.

        Also records what the script did since the last update: which lines have written to these
        tensors, and the outcomes of its `if` and `while` statements.
        """
        state = self.state
        update = state.update

        parameter_ids = {id(parameter) for parameter in parameters_of(optimizer)}
        stepped_parameters = []
        for name, parameter in state.models.parameters():
            if id(parameter) in parameter_ids:
                stepped_parameters.append((name, parameter))
        update.parameters = copy_arrays(stepped_parameters)
        update.buffers = copy_arrays(state.models.buffers())

        # Kept to see whether the script changes parameters before the next forward pass.
        state.models.after_last_step.update(update.parameters)

        update.branch_outcomes = state.branches.pop_outcomes()
        self._record_write_stacks()

    def _record_write_stacks(self) -> None:
        """Records the call stack of the last write to each parameter and buffer, by name.

        From here on, writes to the parameters and buffers that exist now are watched.
        """
        # A write is recognized by the address of the tensor's values.
        stack_by_address = self.state.mode.writes.pop_stacks()
        address_by_name = self.state.watch_writes_from_now()

        write_stacks = {}
        for name, address in address_by_name.items():
            if address in stack_by_address:
                write_stacks[name] = stack_by_address[address]
        self.state.update.write_stacks = write_stacks

    def _record_identity(self, optimizer: Optimizer) -> None:
        """Records which optimizer has stepped, its parameters, and the number of its step.

        An optimizer has two numbers: by the order of first steps, and by the order of construction.
        """
        state = self.state
        update = state.update
        in_order_of_first_steps = list(state.steps_of)
        update.optimizer = in_order_of_first_steps.index(optimizer)
        update.optimizer_class = type(optimizer).__name__
        update.step = state.steps_of[optimizer]

        in_order_of_construction = state.models.built_optimizers
        if optimizer in in_order_of_construction:
            update.construction_index = in_order_of_construction.index(optimizer)

        update.optimizer_parameters = state.models.names_of(parameters_of(optimizer))


def _summarize_state(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Array]:
    """Returns three numbers for each tensor in an optimizer's state, by name.

    The numbers are a weighted sum, the largest absolute value, and the number of values. A name is,
    for example, "Net/weight/exp_avg".
    """
    numbers_by_name = {}
    for name, parameter in named_parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and not is_sharded(value):
                weighted_sum, largest = summarize(value)
                numbers = np.array([weighted_sum, largest, value.numel()])
                numbers_by_name[f"{name}/{key}"] = numbers
    return numbers_by_name


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numeric options of a parameter group, without its learning rate.

    The entry "parameters" is the number of parameters in the group.
    """
    options = {}
    for name, value in group.items():
        if name not in ("lr", "initial_lr") and isinstance(value, bool | int | float | tuple):
            options[name] = value
    options["parameters"] = len(group["params"])
    return options
