"""Optimizers that step once per global batch.

The training loop runs once per micro-batch. In all but the last micro-batch of a global batch,
`step()` and `zero_grad()` do nothing, so the same loop is right with and without gradient
accumulation.

A *virtual rank* (`session.micro_batch`) is a fixed part of every global batch. If each of them
trains its own copy of the model, the optimizer steps once for each virtual rank and keeps a
separate state for each. The user's optimizer, called *inner*, holds one of these states at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.optimizer_state import load_into_torch_optimizer
from lockstep.distributed.collectives import Collectives
from lockstep.errors import UsageError, warn
from lockstep.optim.precision import Precision
from lockstep.session.delivery import cleared_gradients_error
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch, VirtualRank
from lockstep.session.step import Step, StepKey
from lockstep.strategies.base import parameters_of
from lockstep.torch_compat import answer_grad_scaler, outside_compiled_code, unscales_gradients
from lockstep.training.optimizer_kinds import explain_shard_error
from lockstep.training.optimizer_versions import OptimizerVersions
from lockstep.training.step_calls import StepCalls


class DelegatesToInner:
    """A base class for objects with all attributes of the object in their `inner`."""

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet while the object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


class GroupsOnOneDevice(NamedTuple):
    """The parameter groups that an optimizer would have on one device.

    A saved state numbers the parameters over all groups, for example 0 to 9. Under a pipeline with
    two stages, the second rank may have the parameters 5 to 9.
    """

    origins: list[list[tuple[nn.Module, str]]]
    """For each group, the prepared module of each parameter, over all ranks, and the parameter's
    name in it, which is "" if it is not known."""
    numbers_here: list[list[int]]
    """For each group, the numbers of those parameters that are on this rank."""


class PreparedOptimizer(DelegatesToInner, Optimizer):
    """The user's optimizer, which steps once per global batch.

    It shares the parameter groups and the state of the inner optimizer.

    Args:
        inner: the user's optimizer.
        step: the state of the current optimizer step.
        precision: makes the step, with the loss scaler if there is one.
        modules: the prepared modules that have the optimizer's parameters.
        collectives: the collectives of the run; None for one process.
    """

    def __init__(
        self,
        inner: Optimizer,
        step: Step,
        precision: Precision,
        modules: Sequence[nn.Module] = (),
        collectives: Collectives | None = None,
    ) -> None:
        # super().__init__() is not called, because groups, state and hooks are those of `inner`.
        self.inner = inner
        self.modules = modules
        self.step_calls = StepCalls(step)
        self.extensions = (self.step_calls, _OptimizerEvents(self))
        self._step = step
        self._precision = precision
        self._collectives = collectives

        self.stepping = False
        """True while the inner optimizer is in a step that this optimizer has called."""
        self.skipped = False
        """True if the loss scaler skipped the latest step because a gradient was infinite."""
        self.has_prepared_scheduler = False
        """True if a scheduler of this optimizer is prepared, or if the warning about one that is
        not was given."""
        self.groups_on_one_device: GroupsOnOneDevice | None = None
        """None if this rank has all parameters of the optimizer."""

        self.versions = OptimizerVersions(inner)
        """The states of virtual ranks that train copies of the model."""
        self._step_with_postponed_clearing: StepKey | None = None
        """The optimizer step in which a call of `zero_grad()` was postponed last."""
        self._learning_rates: list[Any] = []
        """The learning rates at the latest call of `step()`."""
        self._error_of_closure: Exception | None = None
        """The error that the user's closure raised last."""
        self._zero_grad_is_that_of_torch = type(inner).zero_grad is Optimizer.zero_grad

    def __repr__(self) -> str:
        return f"Prepared{self.inner!r}"

    @outside_compiled_code  # a script may compile the function that calls it
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps in the micro-batch that ends a global batch; in earlier ones it returns None.

        If each virtual rank trains its own copy of the model, it steps once for each virtual rank.

        Raises:
            UsageError: `loss.backward()` was called although the loss must be weighted, or learning
                rates changed within a global batch.
        """
        if closure is not None:
            _check_closure_sees_whole_batch(self._step.micro_batch)
        else:
            self._find_micro_batch_of_plain_backward()
            self._check_backward()

        micro_batch = self._step.micro_batch
        self._check_learning_rates()
        self.step_calls.note_call()
        if not micro_batch.closes_step:
            return None

        virtual_rank = micro_batch.virtual_rank
        if virtual_rank is not None and virtual_rank.has_own_step:
            self._put_state_of_virtual_rank_in_inner(virtual_rank)

        return self._take_step(closure, micro_batch)

    def _put_state_of_virtual_rank_in_inner(self, virtual_rank: VirtualRank) -> None:
        """Gives the inner optimizer the state of a virtual rank that trains its own copy.

        At first all virtual ranks have a common state. It is dropped when each has its own.
        """
        self.versions.put_in_optimizer(virtual_rank.number)
        self.versions.drop_common_if_unused(virtual_rank.num_on_process)

    def _find_micro_batch_of_plain_backward(self) -> None:
        """Finds out which micro-batch is trained by a script that calls `loss.backward()`.

        `World.backward` finds it out for its loss, so nothing is done after that.
        """
        called_world_backward = self._step.training_pass.num_backwards > 0
        if not called_world_backward:
            self._step.source_of_loss()  # sets `micro_batch`

    def _take_step(self, closure: Callable[[], Any] | None, micro_batch: MicroBatch) -> Any:
        """Makes the inner optimizer step, and tells the extensions before and after the step.

        Args:
            closure: the user's closure, which the inner optimizer evaluates; None without one.
            micro_batch: the micro-batch after which the optimizer steps.

        Returns:
            The return value of the inner optimizer.
        """
        extensions = self._step.extensions
        key = self._step.key  # identifies the present optimizer step
        self._step.enter_phase("optimizer")

        # Extensions get the gradients before the optimizer steps. With a closure there are no
        # gradients yet, so `_evaluate_closure` tells the extensions.
        evaluate = None
        if closure is None:
            extensions.before_step(self.inner, self.modules)
        else:
            evaluate = partial(self._evaluate_closure, closure)

        result = self._step_inner(evaluate)
        self.step_calls.note_step(key)

        # If virtual ranks train copies of the model, the optimizer steps once for each of them. The
        # global batch is trained after the step of the last one.
        global_batch_is_trained = micro_batch.last
        if global_batch_is_trained:
            self._step.mark_stepped()

        extensions.after_step(self.inner, self.modules)
        if global_batch_is_trained:
            extensions.global_batch_trained(self.modules)

        self._step.enter_phase("other")
        return result

    def _step_inner(self, evaluate: Callable[[], Any] | None) -> Any:
        """Makes the inner optimizer step, unless the loss scaler skips the step.

        Args:
            evaluate: evaluates the closure of the step; None without one.

        Returns:
            The return value of the inner optimizer.
        """
        self.stepping = True
        try:
            result, self.skipped = self._precision.step(self.inner, evaluate)
        except Exception as error:
            explained = self._explain_error_of_step(error)
            if explained is not None:
                raise explained from error
            raise
        finally:
            self.stepping = False
        return result

    def _explain_error_of_step(self, error: Exception) -> UsageError | None:
        """Returns an error with advice for an error of the inner optimizer; None without advice."""
        is_error_of_closure = error is self._error_of_closure  # of the user's code
        return None if is_error_of_closure else explain_shard_error(self.inner, error)

    def _evaluate_closure(self, closure: Callable[[], Any]) -> Any:
        """Calls the user's closure, and checks its gradients before anything is updated.

        Returns:
            The loss of the global batch, on which some optimizers base decisions.
        """
        # The optimizer may evaluate the closure more than once. `World.backward` adds its loss to
        # the loss of the global batch, so that loss is reset before each evaluation.
        self._step.training_pass.loss = 0.0
        try:
            loss = closure()
            self._check_backward()
            self._step.extensions.before_step(self.inner, self.modules)
        except Exception as error:
            # It is the user's error, which is not to be explained as one of the optimizer.
            self._error_of_closure = error
            raise

        return self._mean_over_global_batch(loss)

    def _mean_over_global_batch(self, loss: Any) -> Any:
        """Returns the mean loss over the global batch. `loss` is the mean over this rank's samples.

        The scale of a micro-batch is the number of this rank's samples, divided by that of all
        samples, times the number of ranks. For example, two ranks with 3 samples and 1 sample have
        the scales 1.5 and 0.5: the mean over the ranks of the scaled losses is the mean over all 4
        samples.
        """
        if self._collectives is None or self._collectives.single_process:
            return loss
        if not isinstance(loss, Tensor | float):  # the closure returns None, for example
            return loss

        scale = self._step.micro_batch_of_loss.scale
        has_samples = scale != 0.0
        if has_samples:
            scaled_loss = loss * scale
        else:
            scaled_loss = 0.0  # even if the loss is NaN
        return self._collectives.mean(scaled_loss)

    @outside_compiled_code
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; does nothing while a global batch is accumulating them.

        The accumulated gradients are kept for the optimizer step at the end of the global batch. If
        the loop leaves this step out, `clear_if_postponed` clears them before the next one. With 2
        micro-batches, for example:

            step(), zero_grad()   in micro-batch 0: neither does anything yet
            step(), zero_grad()   in micro-batch 1: the optimizer steps, and gradients are cleared
        """
        if self.step_calls.gradients_are_kept():
            # `clear_if_postponed` looks whether this step was made after all.
            self._step_with_postponed_clearing = self.step_calls.key_of_latest_call
            self.step_calls.note_postponed_clearing()
            return

        self.step_calls.note_clearing()
        if set_to_none and self._zero_grad_is_that_of_torch:
            # The same as in torch, without its profiling, which takes ten times as long.
            for group in self.inner.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self.inner.zero_grad(set_to_none)

    def clear_if_postponed(self) -> None:
        """Clears gradients of a global batch whose step was left out, before the next begins.

        The gradients are cleared if `zero_grad()` was postponed and the optimizer has not stepped
        since.
        """
        postponed_in = self._step_with_postponed_clearing
        if postponed_in is not None and postponed_in != self.step_calls.key_of_latest_step:
            self.inner.zero_grad()
        self._step_with_postponed_clearing = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError, as strategies only know the parameters that `prepare` was given."""
        raise UsageError(
            "optimizer.add_param_group after world.prepare",
            "gradients of parameters that came later would not be averaged over the ranks",
            "add all parameters first (frozen ones may be in it), then call world.prepare",
            code="LS303",
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the inner optimizer, in the format of torch.

        Under a pipeline the parameters have the same numbers as on one device, and only those on
        this rank have entries. With virtual ranks it is the state of the first virtual rank on this
        process.
        """
        # The inner optimizer may hold the state of another virtual rank.
        self.versions.put_first_in_optimizer()
        state: dict[str, Any] = self.inner.state_dict()
        groups = self.groups_on_one_device
        if groups is None:
            return state

        # Other ranks have some of the parameters. The inner optimizer numbers only the parameters
        # on this rank, from 0; in the result they get the numbers that they have on one device.
        global_numbers = list(chain(*groups.numbers_here))
        entries = {}
        for number_here, entry in state["state"].items():
            entries[global_numbers[number_here]] = entry

        sizes_of_groups = [len(origins) for origins in groups.origins]
        return _replace_entries(state, entries, sizes_of_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that `state_dict` returned, on this rank or on one device.

        As in torch, the state is converted to the dtypes of the parameters.
        """
        self.versions.forget_virtual_ranks()
        self.inner.load_state_dict(self._select_parameters_here(state_dict))

    def load_saved_state(
        self, state_dict: dict[str, Any], saved_dtypes: Mapping[torch.Tensor, torch.dtype]
    ) -> None:
        """Loads the state of a checkpoint in the dtypes in which it was saved.

        Args:
            state_dict: what `state_dict` returned, on this rank or on one device.
            saved_dtypes: the dtypes of the parameters when it was saved, if they are known.
        """
        self.versions.forget_virtual_ranks()
        load_into_torch_optimizer(
            self.inner, self._select_parameters_here(state_dict), saved_dtypes
        )

    def _select_parameters_here(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a state for the parameters on this rank only, numbered from 0.

        If this rank has parameter 1 of the first parameter group and parameters 3 and 4 of the
        second, `numbers_here` is `[[1], [3, 4]]`, and they get the numbers 0, 1 and 2.

        Args:
            state_dict: the state for all parameters, numbered as on one device. If this rank has
                all parameters, it is returned unchanged.
        """
        groups = self.groups_on_one_device
        if groups is None:
            return state_dict

        saved_entries = state_dict["state"]
        global_numbers = list(chain(*groups.numbers_here))
        entries = {}
        for number_here, global_number in enumerate(global_numbers):
            if global_number in saved_entries:
                entries[number_here] = saved_entries[global_number]

        num_parameters_here = [len(numbers) for numbers in groups.numbers_here]
        return _replace_entries(state_dict, entries, num_parameters_here)

    @property
    def partial(self) -> bool:
        """True if other ranks have parameters that are not on this rank."""
        return self.groups_on_one_device is not None

    def check_gradients_are_there(self) -> None:
        """Raises UsageError if gradients were cleared in the middle of a global batch."""
        if self.step_calls.key_of_latest_call != self._step.key:
            return  # gradients only accumulate once `step()` was called in a micro-batch
        if all(parameter.grad is None for parameter in parameters_of(self.inner)):
            raise cleared_gradients_error()

    def _divides_by_scale_itself(self) -> bool:
        """Answers whether the inner optimizer divides the gradients by the scale of a GradScaler.

        A GradScaler of the user's own reads this as the attribute `_step_supports_amp_scaling` in
        `scaler.step(optimizer)`. If it is True, as of torch's fused optimizers, the GradScaler
        leaves the division to the optimizer.

        Raises:
            UsageError: `scaler.step(optimizer)` was called before the last micro-batch of a global
                batch.
        """
        self._refuse_own_scaler_before_last_micro_batch()
        return unscales_gradients(self.inner)

    def _refuse_own_scaler_before_last_micro_batch(self) -> None:
        """Raises UsageError if a GradScaler of the user's own steps within a global batch.

        Each call of `scaler.step(optimizer)` divides all gradients that have accumulated: with 2
        micro-batches, the gradients of the first one would be divided by the scale twice.
        """
        if not self._step.micro_batch.last:
            raise UsageError(
                "a GradScaler of your own with micro-batches",
                "it divides the gradients by its scale at each of them, so it divides those of "
                "earlier micro-batches again",
                "use lockstep.init(precision='fp16') instead, or leave micro_batch_size out",
                code="LS406",
            )

    def _check_backward(self) -> None:
        """Raises UsageError if `loss.backward()` was called although the loss must be weighted."""
        training_pass = self._step.training_pass
        micro_batch = training_pass.micro_batch
        called_world_backward = training_pass.num_backwards > 0
        if called_world_backward:
            return

        # `plain` means that every rank has the factor 1: an unweighted loss gives the same
        # gradients. Under fp16 the loss is also multiplied by the scale of the loss scaler.
        needs_no_factor = micro_batch.plain and self._precision.scaler is None
        if needs_no_factor:
            return

        # First case: the loop calls `step()` late. It had called `World.backward` for the previous
        # batch, and has fetched another one before the optimizer stepped.
        is_step_for_previous_batch = training_pass.step_left_out
        if is_step_for_previous_batch:
            raise UsageError(
                "optimizer.step() after another batch was fetched",
                "no backward pass has followed that batch, and the one before has not been "
                "stepped for: the step would take the weights of the wrong batch",
                "call optimizer.step() before the next batch is fetched; num_workers= and "
                "prefetch_factor= of the loader read ahead without a change to the loop",
            )

        # Second case: the loop calls neither `World.backward` nor `loss.backward()`, or clears the
        # gradients before the step.
        if all(parameter.grad is None for parameter in parameters_of(self.inner)):
            raise UsageError(
                "optimizer.step() without a gradient",
                "world.backward was not called for this batch, and no parameter of the optimizer "
                "has a gradient",
                "call world.backward(loss), optimizer.step() and optimizer.zero_grad() in this "
                "order",
            )

        # Third case: the loop calls `loss.backward()`, or sets the gradients itself. Say why that
        # is not enough.
        if micro_batch.plain:
            reason = f"the precision is {self._precision.name}, whose loss is scaled"
            code = None
        else:
            reason = (
                f"this rank's part is {micro_batch.local_rows} of {micro_batch.global_samples} "
                "samples, so its mean counts as much as others only when weighted"
            )
            code = "LS206"

        raise UsageError(
            "optimizer.step() without world.backward for this batch",
            reason,
            "call world.backward(loss), which weighs the loss exactly, in place of loss.backward() "
            "or torch.autograd.grad",
            code=code,
        )

    def _check_learning_rates(self) -> None:
        """Warns of schedulers that are not prepared and step in the training loop.

        Such a scheduler is recognised by a learning rate that has changed since the latest call of
        `step()`.

        Raises:
            UsageError: the learning rate has changed between the micro-batches of a global batch.
        """
        rates_before = self._learning_rates
        rates = [group["lr"] for group in self.inner.param_groups if "lr" in group]
        self._learning_rates = rates
        if self.step_calls.key_of_latest_call is None:
            return  # this is the first call of `step()`

        # A rate that is a tensor is changed in place, so no difference is seen here.
        if rates == rates_before:
            return

        training_pass, global_batch, _ = self._step.key
        training_pass_before, global_batch_before, _ = self.step_calls.key_of_latest_call
        if training_pass is not training_pass_before:
            return  # a scheduler may step between two epochs without being prepared

        old = _format_rates(rates_before)
        new = _format_rates(rates)
        if global_batch == global_batch_before and not self._step.micro_batch.first:
            raise UsageError(
                "a learning rate that changes between the micro-batches of a global batch",
                f"it was {old} and is {new}: a step once per micro-batch",
                "give the scheduler to world.prepare too: it then steps once per global batch",
                code="LS401",
            )

        if not self._step.in_training_loop or self.has_prepared_scheduler:
            return

        # The rate may have been set by hand instead. Torch's schedulers are recognised because they
        # set another method `step` on the optimizer object.
        is_driven_by_scheduler = "step" in vars(self.inner) or "step" in vars(self)
        if is_driven_by_scheduler:
            self.has_prepared_scheduler = True  # warn only once
            warn(
                "a learning-rate scheduler that steps in the training loop and is not prepared",
                found=f"the rate went from {old} to {new}; with micro-batches it would step once "
                "for each of them",
                do="give it to world.prepare too: it then steps once per global batch",
                code="LS401",
            )


answer_grad_scaler(PreparedOptimizer, PreparedOptimizer._divides_by_scale_itself)


class _OptimizerEvents(Extension):
    """Tells a prepared optimizer about the events of global batches."""

    def __init__(self, optimizer: PreparedOptimizer) -> None:
        self._optimizer = optimizer

    def begin(self, micro_batch: MicroBatch) -> None:
        """Clears gradients that are left from a global batch without an optimizer step."""
        if micro_batch.opens_step:
            self._optimizer.clear_if_postponed()

    def clear_gradients(self) -> None:
        """Clears the gradients of a global batch that the loop has left early."""
        self._optimizer.inner.zero_grad()


def _format_rates(rates: Sequence[Any]) -> str:
    return ", ".join(f"{float(rate):g}" for rate in rates)


def _check_closure_sees_whole_batch(micro_batch: MicroBatch) -> None:
    """Raises UsageError if a closure would be evaluated on only a part of the samples of a step."""
    # Under DiLoCo each virtual rank has its own step. Otherwise one step is for all virtual ranks,
    # which are computed one after the other, and the closure would only see one of them.
    has_virtual_rank = micro_batch.virtual_rank is not None
    if has_virtual_rank and not micro_batch.has_own_step:
        raise UsageError(
            "optimizer.step(closure) with virtual_ranks",
            "the closure would be evaluated on the part of one virtual rank",
            "leave virtual_ranks out, or use an optimizer without closures",
        )

    # Global batches are divided by `micro_batch_size`. With shares "auto" the first one is divided,
    # too: its first samples serve to measure the speeds.
    is_whole_global_batch = micro_batch.first and micro_batch.last
    if not is_whole_global_batch:
        raise UsageError(
            "optimizer.step(closure) with micro-batches",
            "the closure would be evaluated on a part of the global batch",
            "leave micro_batch_size out, and if shares are 'auto', give numbers instead; or call "
            "optimizer.step() without a closure",
        )


def _replace_entries(
    state: dict[str, Any], entries: dict[int, Any], sizes_of_groups: Sequence[int]
) -> dict[str, Any]:
    """Returns an optimizer's state with new entries and other numbers of parameters in the groups.

    In the state, parameters are numbered over all groups: with 2 and 1 parameters in two groups,
    the groups have the parameters `[0, 1]` and `[2]`.

    Args:
        state: what an optimizer's `state_dict` returned; it is not changed.
        entries: the new state of each parameter, by the number of the parameter.
        sizes_of_groups: the new number of parameters in each group.
    """
    groups = []
    next_number = 0
    # The state may come from an optimizer with another number of groups. Then only the groups that
    # both have are kept.
    for group, count in zip(state["param_groups"], sizes_of_groups, strict=False):
        numbers = list(range(next_number, next_number + count))
        groups.append({**group, "params": numbers})
        next_number += count
    return {**state, "state": entries, "param_groups": groups}
