"""Records gradients: what each backward pass adds, and what the script does with them afterwards.

A *local* gradient is what one backward pass adds on this rank, before DDP averages it. It is seen
by a hook on the parameter. `state.update` is the record of the current optimizer step, and
`state.notes` what is remembered until it is complete. The *own part* of a sharded gradient is that
of this rank; of any other gradient, it is the whole. Gradients are also recorded before the script
clips them, and after an optimizer reduces them itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.distributed.torch_compat import is_sharded, to_local
from lockstep.verify.recording.calls import CallRecorder
from lockstep.verify.recording.state import RecorderState, guarded
from lockstep.verify.recording.tensor_values import copy_arrays, storage_of
from lockstep.verify.tolerance import Array, scale_of

MAX_BACKWARD_PASSES = 16
"""Updates with more backward passes are recorded without local gradients."""
MAX_RELATIVE_RESIDUAL = 1e-12
"""What may be left of a squared norm where one vector is a multiple of another."""
RELATIVE_ROUNDING = 1e-12
"""In float64, gradients below this share of the largest one are rounding."""


class GradientRecorder:
    """Records the gradients of all parameters of the models."""

    def __init__(self, state: RecorderState, calls: CallRecorder) -> None:
        self.state = state
        self._calls = calls
        self._hooked: dict[int, Tensor] = {}
        """Parameters with a hook, by their ids; they are kept so that no id is used again."""

    # Backward passes

    def hook_parameters(self, extra_parameters: Iterable[nn.Parameter] = ()) -> None:
        """Hooks the parameters of all models, to see each gradient before DDP averages it.

        The gradient of a sharded parameter is reduced over ranks before a hook sees it, so those
        parameters are left out. A parameter that has its hook already gets no second one.

        Args:
            extra_parameters: further parameters, which are perhaps in no model.
        """
        parameters = [parameter for _, parameter in self.state.models.parameters()]
        for parameter in (*parameters, *extra_parameters):
            if not parameter.is_leaf or not parameter.requires_grad or is_sharded(parameter):
                continue
            if id(parameter) not in self._hooked:
                hook = partial(self._add_local_gradient, id(parameter))
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]
                self._hooked[id(parameter)] = parameter

    @guarded
    def _add_local_gradient(self, parameter_id: int, gradient: Tensor | None) -> None:
        """Adds a gradient to those of the running backward pass, in `state.notes`.

        This is the hook of each parameter.

        Args:
            parameter_id: the id of the parameter.
            gradient: None if the loss does not depend on it.
        """
        if gradient is None:
            return

        # For each backward pass of the update, its gradients by the ids of parameters.
        passes = self.state.notes.gradients_of_passes
        # There is no pass if the script calls `torch.autograd.grad` before any backward pass. Of an
        # update with too many passes, no local gradients are recorded.
        if not passes or len(passes) > MAX_BACKWARD_PASSES:
            return

        gradients = passes[-1]
        if parameter_id in gradients:  # a parameter that is used twice may get two gradients
            gradients[parameter_id] = gradients[parameter_id] + gradient.detach()
        else:
            gradients[parameter_id] = gradient.detach().clone()

    @guarded
    def end_backward(self) -> None:
        """Notes the gradients that a backward pass has left, and whether they are local.

        They are local if each is what the hooks have seen in this update: the sum over all passes.
        If the script sets gradients to zero between the passes, it is what the last pass added.
        Gradients that are neither were averaged by DDP. The answer is added to `local_passes` of
        the update. The gradients, and the number of batches so far, are kept in `state.notes`.
        """
        notes = self.state.notes
        notes.gradients_after_backward = {}
        are_local = []  # for each gradient that the hooks have seen
        for _, parameter in self.state.models.parameters():
            if parameter.grad is None or parameter.grad.is_sparse:
                continue
            gradient = to_local(parameter.grad).clone()
            notes.gradients_after_backward[id(parameter)] = gradient
            local_gradients = self._local_gradients_of(parameter)
            if local_gradients:
                accumulated = sum(local_gradients, torch.zeros_like(gradient))
                are_local.append(gradient.equal(accumulated) or gradient.equal(local_gradients[-1]))

        all_are_local = bool(are_local) and all(are_local)
        self.state.update.local_passes.append(all_are_local)
        notes.batches_at_last_backward = len(self.state.update.batches)

    def _local_gradients_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """Returns what each backward pass of the update has added to a parameter's gradient."""
        local_gradients = []
        for gradients in self.state.notes.gradients_of_passes:
            if id(parameter) in gradients:
                local_gradients.append(gradients[id(parameter)])
        return local_gradients

    def local_gradients(self) -> list[dict[str, Array]]:
        """Returns the local gradients of each backward pass, by the names of parameters.

        Empty if there were too many passes.
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
        """Returns the number that all gradients were multiplied by since the last backward pass.

        With g the gradients then and h now, each as one vector, it is the factor (g·h) / |g|² that
        brings factor * g nearest to h. The squared distance that is left is
        |h - factor * g|² = |h|² - factor * (g·h). If it is not zero, or g is zero, there is no such
        number, and the result is NaN.
        """
        gradients_then = self.state.notes.gradients_after_backward
        dot_product = 0.0  # g·h, added up over the parameters
        squared_norm_then = 0.0  # |g|²
        squared_norm_now = 0.0  # |h|²

        for _, parameter in self.state.models.parameters():
            if parameter.grad is None:
                continue
            if id(parameter) not in gradients_then:  # the script itself has made the gradient
                return math.nan

            now = to_local(parameter.grad).double().flatten()  # of a shard, this rank's values
            then = gradients_then[id(parameter)].double().flatten()
            dot_product += float(now @ then)
            squared_norm_then += float(then @ then)
            squared_norm_now += float(now @ now)

        if not squared_norm_then:
            return math.nan

        factor = dot_product / squared_norm_then
        residual = squared_norm_now - factor * dot_product  # zero up to rounding
        if residual <= MAX_RELATIVE_RESIDUAL * squared_norm_now:
            return factor

        return math.nan

    def clip(self, clip_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Takes the place of one of torch's clipping functions: calls and records it.

        The gradients before the first such call of an update are kept in `state.notes`.

        Args:
            clip_function: the function of torch.
            *args: of that function.
            **kwargs: of that function.

        Returns:
            What the function of torch returns.
        """
        call = self._calls.record("clip", None)
        before = self._copy_gradients()
        notes = self.state.notes
        if not notes.gradients_before_clipping:  # of several calls, the first one counts
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
        """Adds to the update a gradient that an optimizer has reduced over ranks during its step.

        Args:
            tensor: what an all-reduce has written to; perhaps no gradient.
        """
        is_in_step = bool(self.state.running_optimizers)
        if not is_in_step or not isinstance(tensor, Tensor):
            return

        update = self.state.update
        # If the tensor is a gradient, it lies at the address of some parameter's gradient.
        for name, parameter in self.state.models.parameters_with_gradient_at(storage_of(tensor)):
            reduced = copy_arrays([(name, parameter.grad)])
            update.reduced_in_step = {**update.reduced_in_step, **reduced}

    # Gradients at the step

    def record_for_step(self, parameter_ids: set[int]) -> None:
        """Records the gradients that an optimizer is about to step with, before and after clipping.

        Sets `gradients` and `unclipped` of the update, and notes the precision of the gradients.
        Then those of the script's own gradients that are only rounding are set to zero: Adam would
        make a step of full size from them.

        Args:
            parameter_ids: the ids of the optimizer's parameters.
        """
        update = self.state.update
        parameters_with_gradient = {}
        for name, parameter in self.state.models.parameters():
            if id(parameter) in parameter_ids and parameter.grad is not None:
                parameters_with_gradient[name] = parameter

        update.gradients = copy_arrays((n, p.grad) for n, p in parameters_with_gradient.items())
        # Where no clipping was seen, `unclipped` is the same as `gradients`.
        unclipped = dict(update.gradients)
        for name, gradient in self.state.notes.gradients_before_clipping.items():
            is_of_this_optimizer = name in unclipped
            if is_of_this_optimizer:
                unclipped[name] = gradient

        update.unclipped = unclipped
        _zero_rounding(update.gradients, parameters_with_gradient.values())

        for gradient_tensor in self.all_gradients():
            self.state.mode.note_dtype(gradient_tensor)

    def all_gradients(self) -> Iterator[Tensor]:
        """Yields the gradients of all parameters that have one."""
        for _, parameter in self.state.models.parameters():
            if parameter.grad is not None:
                yield parameter.grad


def _zero_rounding(gradients: Mapping[str, Array], parameters: Iterable[nn.Parameter]) -> None:
    """Sets gradients to zero that are only rounding.

    The gradient of a bias before a BatchNorm is zero up to rounding, and Adam makes a step of full
    size from it, in a direction that differs from run to run.

    Args:
        gradients: copies of them, by name.
        parameters: whose gradients are changed.
    """
    limit = RELATIVE_ROUNDING * scale_of(gradients)  # a share of the largest absolute value
    for parameter in parameters:
        gradient = to_local(parameter.grad)
        if not gradient.is_sparse and gradient.is_floating_point():
            gradient.masked_fill_(gradient.abs() < limit, 0.0)
