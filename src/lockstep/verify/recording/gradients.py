"""Records gradients: what each backward pass computes, and what the script does with it afterwards.

A *local* gradient is what one backward pass adds on this rank, before DDP averages it; it is seen
by a hook on the parameter. Gradients are also recorded before the script clips them, after an
optimizer has reduced them by itself, and when an optimizer steps with them. `state.update` is the
record of the current optimizer step, and `state.notes` holds what is needed until the step is
complete. For a sharded gradient, only this rank's shard is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.torch_compat import is_sharded, to_local
from lockstep.verify.recording.calls import CallRecorder
from lockstep.verify.recording.guard import guarded
from lockstep.verify.recording.state import RecorderState
from lockstep.verify.recording.tensor_values import copy_arrays, storage_address
from lockstep.verify.tolerance import Array, largest_of_all

MAX_BACKWARD_PASSES = 16
"""Updates with more backward passes are recorded without local gradients."""
MAX_RELATIVE_RESIDUAL = 1e-12
"""Relative rounding error of a squared norm, when testing whether vectors are multiples."""
RELATIVE_ROUNDING = 1e-12
"""Gradients below this fraction of the largest one are only rounding, in float64."""


class GradientRecorder:
    """Records the gradients of all parameters of the models."""

    def __init__(self, state: RecorderState, calls: CallRecorder) -> None:
        self.state = state
        self._calls = calls
        self._hooked: dict[int, Tensor] = {}
        """Parameters with a hook, by id. They are kept alive so that no id is used again."""

    # Backward passes

    def hook_parameters(self, extra_parameters: Iterable[nn.Parameter] = ()) -> None:
        """Registers a hook on each parameter, to see its gradients before DDP averages them.

        Parameters that already have the hook get no second one. Sharded parameters get none, since
        their gradients are reduced over the ranks before a hook could see them.

        Args:
            extra_parameters: further parameters, which need not belong to a model.
        """
        parameters = [parameter for _, parameter in self.state.models.parameters()]
        for parameter in (*parameters, *extra_parameters):
            if not parameter.is_leaf or not parameter.requires_grad or is_sharded(parameter):
                continue
            if id(parameter) in self._hooked:
                continue

            hook = partial(self._add_local_gradient, id(parameter))
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            # This also keeps the parameter alive, so that no other one can get its id.
            self._hooked[id(parameter)] = parameter

    @guarded
    def _add_local_gradient(self, parameter_id: int, gradient: Tensor | None) -> None:
        """Adds a gradient to the record of the running backward pass, in `state.notes`.

        This is the hook on each parameter.

        Args:
            parameter_id: id of the parameter.
            gradient: gradient that the hook is given; None if the loss does not depend on the
                parameter.
        """
        if gradient is None:
            return

        # One entry for each `backward` of the update: its gradients, by the ids of parameters. The
        # entry is appended when `backward` is called.
        gradients_of_passes = self.state.notes.gradients_of_passes

        # The update has so many backward passes that its local gradients are not recorded.
        has_too_many_passes = len(gradients_of_passes) > MAX_BACKWARD_PASSES
        if has_too_many_passes:
            return

        # If there is no entry yet, the gradient does not come from `backward`, but from
        # `torch.autograd.grad`.
        if not gradients_of_passes:
            return

        gradients = gradients_of_passes[-1]
        if parameter_id in gradients:  # a parameter that is used twice may get two gradients
            gradients[parameter_id] = gradients[parameter_id] + gradient.detach()
        else:
            gradients[parameter_id] = gradient.detach().clone()

    @guarded
    def end_backward(self) -> None:
        """Records the gradients that a backward pass has left, and whether they are still local.

        If they are not, DDP has averaged them over the ranks. Whether all are local is added to
        `state.update.local_passes`; the gradients are kept in `state.notes`.
        """
        notes = self.state.notes
        notes.gradients_after_backward = {}

        for _, parameter in self.state.models.parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                gradient = to_local(parameter.grad).clone()
                notes.gradients_after_backward[id(parameter)] = gradient

        self.state.update.local_passes.append(self._all_gradients_are_local())

        # Batches that are handed out after the last backward pass of an update belong to the next
        # update.
        notes.num_batches_at_last_backward = len(self.state.update.batches)

    def _all_gradients_are_local(self) -> bool:
        """True if the gradients after a backward pass are those that the hooks have seen.

        DDP averages them after the hooks. Gradients without a hook are skipped; if there are no
        others, the result is False.
        """
        some_is_hooked = False
        for parameter_id, gradient in self.state.notes.gradients_after_backward.items():
            gradients_of_passes = self._local_gradients_of(parameter_id)
            if not gradients_of_passes:
                continue
            some_is_hooked = True
            if not _is_local(gradient, gradients_of_passes):
                return False

        return some_is_hooked

    def _local_gradients_of(self, parameter_id: int) -> list[Tensor]:
        """Returns what each backward pass of the update added to the gradient of a parameter."""
        local_gradients = []
        for gradients in self.state.notes.gradients_of_passes:
            if parameter_id in gradients:
                local_gradients.append(gradients[parameter_id])
        return local_gradients

    def local_gradients(self) -> list[dict[str, Array]]:
        """Returns the local gradients of each backward pass of the update, by parameter name.

        The list is empty if the update has too many backward passes.
        """
        passes = self.state.notes.gradients_of_passes
        if len(passes) > MAX_BACKWARD_PASSES:
            return []

        arrays_of_passes = []
        for gradients in passes:
            named_gradients = []
            for name, parameter in self.state.models.parameters():
                if id(parameter) in gradients:
                    named_gradients.append((name, gradients[id(parameter)]))
            arrays_of_passes.append(copy_arrays(named_gradients))

        return arrays_of_passes

    # What the script does with gradients

    def factor_since_backward(self) -> float:
        """Returns the number by which all gradients were multiplied since the last backward pass.

        For example 0.5, if the script divides the gradients by 2; 1.0 if nothing has changed.

        Returns:
            The factor. NaN if there are no gradients, or if they were changed in another way than
            by multiplying all of them with one number.
        """
        # Let g be all gradients then, and h all gradients now, each as one long vector. These three
        # numbers are added up over the parameters.
        gradients_then = self.state.notes.gradients_after_backward
        dot_product = 0.0  # g·h
        squared_norm_then = 0.0  # |g|²
        squared_norm_now = 0.0  # |h|²

        for _, parameter in self.state.models.parameters():
            if parameter.grad is None:
                continue
            if id(parameter) not in gradients_then:  # the script has set this gradient by itself
                return math.nan

            now = to_local(parameter.grad).double().flatten()
            then = gradients_then[id(parameter)].double().flatten()
            dot_product += float(now @ then)
            squared_norm_then += float(then @ then)
            squared_norm_now += float(now @ now)

        if not squared_norm_then:  # there are no gradients, or all of them are zero
            return math.nan

        # The least-squares solution of h = factor * g.
        factor = dot_product / squared_norm_then

        # |h - factor*g|² = |h|² - factor*(g·h), since factor = (g·h) / |g|². It is zero up to
        # rounding if h is a multiple of g.
        squared_distance = squared_norm_now - factor * dot_product
        if squared_distance <= MAX_RELATIVE_RESIDUAL * squared_norm_now:
            return factor

        return math.nan

    def clip(self, clip_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces one of torch's clipping functions: calls the function, and records the call.

        The gradients before the first such call of an update are kept in `state.notes`.

        Args:
            clip_function: original function of torch.
            *args: positional arguments of the call.
            **kwargs: keyword arguments of the call.

        Returns:
            The return value of the original function.
        """
        call = self._calls.record("clip")

        # The dictionary in the notes is empty until the first clipping call of the update.
        before = self._copy_gradients()
        notes = self.state.notes
        is_first_call = not notes.gradients_before_clipping
        if is_first_call:
            notes.gradients_before_clipping = before

        norm = clip_function(*args, **kwargs)

        after = self._copy_gradients()
        for name in before.keys() & after.keys():
            if not np.array_equal(after[name], before[name]):
                call.has_clipped = True

        return norm

    @guarded
    def _copy_gradients(self) -> dict[str, Array]:
        """Returns copies of all gradients, by the names of parameters that have one."""
        return copy_arrays((name, p.grad) for name, p in self.state.models.parameters())

    @guarded
    def record_reduced(self, tensor: Any) -> None:
        """Records a gradient that an optimizer reduces over the ranks during its own step.

        Args:
            tensor: tensor that an all-reduce has written to. It is ignored if it is not a gradient.
        """
        is_in_step = self.state.running_steps.count() > 0
        if not is_in_step or not isinstance(tensor, Tensor):
            return

        # The tensor is a gradient if it has the same storage as the gradient of some parameter. A
        # flat tensor may hold the gradients of several parameters.
        address = storage_address(tensor)
        reduced_parameters = self.state.models.parameters_with_gradient_at(address)
        reduced = copy_arrays((name, parameter.grad) for name, parameter in reduced_parameters)
        update = self.state.update
        update.reduced_in_step = {**update.reduced_in_step, **reduced}

    # Gradients at the step

    def record_for_step(self, parameter_ids: set[int]) -> None:
        """Records the gradients that an optimizer is about to step with, before and after clipping.

        This sets `gradients` and `unclipped` of the update.

        Args:
            parameter_ids: ids of the optimizer's parameters.
        """
        update = self.state.update
        named_gradients = []
        for name, parameter in self._parameters_with_gradient(parameter_ids):
            named_gradients.append((name, parameter.grad))
        update.gradients = copy_arrays(named_gradients)

        # Gradients that were never clipped are the same in `unclipped`. The script may also have
        # clipped gradients of other optimizers, which are left out.
        unclipped = dict(update.gradients)
        for name, gradient in self.state.notes.gradients_before_clipping.items():
            if name in unclipped:
                unclipped[name] = gradient

        update.unclipped = unclipped

    def zero_rounding(self, parameter_ids: set[int]) -> None:
        """Sets values to zero, in the script's own gradients, that are nothing but rounding.

        An example is the gradient of a bias in front of a BatchNorm layer: it is zero in exact
        arithmetic. Adam normalizes gradients, so it would take a full step from the rounding error,
        in a direction that differs from run to run. The recorded gradients, which must be those of
        these parameters, are not changed.

        Args:
            parameter_ids: ids of the parameters of an optimizer that is about to step.
        """
        largest_value = largest_of_all(self.state.update.gradients)
        limit = RELATIVE_ROUNDING * largest_value
        for _, parameter in self._parameters_with_gradient(parameter_ids):
            gradient = to_local(parameter.grad)
            if not gradient.is_sparse and gradient.is_floating_point():
                gradient.masked_fill_(gradient.abs() < limit, 0.0)

    def note_dtypes(self) -> None:
        """Notes the precision of all gradients, on which the tolerance of the comparison depends.

        Gradients of other optimizers count too: a low precision anywhere in a model affects all of
        it.
        """
        for gradient in self.all_gradients():
            self.state.mode.note_dtype(gradient)

    def _parameters_with_gradient(
        self, parameter_ids: set[int]
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters with these ids that have a gradient, with their names."""
        for name, parameter in self.state.models.parameters():
            if id(parameter) in parameter_ids and parameter.grad is not None:
                yield name, parameter

    def all_gradients(self) -> Iterator[Tensor]:
        """Yields the gradients of all parameters that have one."""
        for _, parameter in self.state.models.parameters():
            if parameter.grad is not None:
                yield parameter.grad


def _is_local(gradient: Tensor, local_gradients: list[Tensor]) -> bool:
    """True if a gradient is still what this rank has computed, and not averaged over the ranks.

    For example, two backward passes add 1 and 2. Then the gradient is 3; or 2, if the script clears
    gradients between the passes. If DDP has averaged it with other ranks, it has another value.

    Args:
        gradient: gradient of a parameter after a backward pass.
        local_gradients: what each backward pass of the update has added to it on this rank.
    """
    sum_of_passes = sum(local_gradients, torch.zeros_like(gradient))
    of_last_pass = local_gradients[-1]
    return gradient.equal(sum_of_passes) or gradient.equal(of_last_pass)
