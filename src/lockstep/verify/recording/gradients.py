"""Records gradients: what each backward pass adds, and what the script does with them afterwards.

A *local* gradient is what one backward pass adds on this rank, before DDP averages it. It is seen
by a hook on the parameter. Gradients are also recorded before the script clips them, and after an
optimizer reduces them itself. `state.update` is the record of the current optimizer step, and
`state.notes` is what is remembered until it is complete, such as a copy of each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.distributed.torch_compat import is_sharded, own_part
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
        """Hooks the parameters of all models, to see each gradient before all others do.

        The gradient of a sharded parameter is reduced over ranks before it is seen, so those are
        left out.

        Args:
            extra_parameters: parameters that perhaps no model has.
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
        """Adds a gradient to those of the running backward pass."""
        passes = self.state.notes.gradients_of_passes
        if gradient is None:
            return
        # There is no pass if the script calls `torch.autograd.grad` before any backward pass. Of an
        # update with too many passes, no local gradients are recorded.
        if not passes or len(passes) > MAX_BACKWARD_PASSES:
            return
        gradients = passes[-1]
        if parameter_id in gradients:
            gradients[parameter_id] = gradients[parameter_id] + gradient.detach()
        else:
            gradients[parameter_id] = gradient.detach().clone()

    @guarded
    def end_backward(self) -> None:
        """A backward pass is over: notes the gradients, and whether they are this rank's own.

        They are its own if each is what the hooks have seen: the sum over all passes, or, if the
        script has set gradients to zero in between, what the last pass added. Otherwise DDP has
        averaged them.
        """
        notes = self.state.notes
        notes.gradients_after_backward = {}
        is_own = []
        for _, parameter in self.state.models.parameters():
            if parameter.grad is None or parameter.grad.is_sparse:
                continue
            gradient = own_part(parameter.grad).clone()
            notes.gradients_after_backward[id(parameter)] = gradient
            local_gradients = self._local_gradients_of(parameter)
            if local_gradients:
                accumulated = sum(local_gradients, torch.zeros_like(gradient))
                is_own.append(gradient.equal(accumulated) or gradient.equal(local_gradients[-1]))
        all_are_own = bool(is_own) and all(is_own)
        self.state.update.local_passes.append(all_are_own)
        notes.batches_at_last_backward = len(self.state.update.batches)

    def _local_gradients_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """Returns what each backward pass of the update has added to a parameter's gradient."""
        local_gradients = []
        for gradients in self.state.notes.gradients_of_passes:
            if id(parameter) in gradients:
                local_gradients.append(gradients[id(parameter)])
        return local_gradients

    def local_gradients(self) -> list[dict[str, Array]]:
        """Returns the local gradients of each backward pass; empty if there were too many."""
        passes = self.state.notes.gradients_of_passes
        if len(passes) > MAX_BACKWARD_PASSES:
            return []
        arrays = []
        for gradients in passes:
            named = []
            for name, parameter in self.state.models.parameters():
                if id(parameter) in gradients:
                    named.append((name, gradients[id(parameter)]))
            arrays.append(copy_arrays(named))
        return arrays

    # What the script does with gradients

    def factor_since_backward(self) -> float:
        """Returns the number that all gradients were multiplied by since the last backward pass.

        NaN if there is no such number. With g the gradients then and h now, as one vector each, it
        is (g·h) / (g·g) if the residual |h|² - (g·h)² / |g|² is zero.
        """
        gradients_then = self.state.notes.gradients_after_backward
        dot_product = 0.0
        squared_norm_then = 0.0
        squared_norm_now = 0.0
        for _, parameter in self.state.models.parameters():
            if parameter.grad is None:
                continue
            if id(parameter) not in gradients_then:  # the script itself has made the gradient
                return math.nan
            now = own_part(parameter.grad).double().flatten()
            then = gradients_then[id(parameter)].double().flatten()
            dot_product += float(now @ then)
            squared_norm_then += float(then @ then)
            squared_norm_now += float(now @ now)
        if not squared_norm_then:
            return math.nan
        factor = dot_product / squared_norm_then
        residual = squared_norm_now - factor * dot_product
        if residual <= MAX_RELATIVE_RESIDUAL * squared_norm_now:
            return factor
        return math.nan

    def clip(self, clip_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Takes the place of one of torch's clipping functions, which it calls.

        Args:
            clip_function: the function of torch.
            *args: of that function.
            **kwargs: of that function.
        """
        self._calls.record("clip", None)
        before = self._copy_gradients()
        notes = self.state.notes
        if not notes.gradients_before_clipping:  # of several calls, the first one counts
            notes.gradients_before_clipping = before
        norm = clip_function(*args, **kwargs)
        has_clipped = False
        for name, array in self._copy_gradients().items():
            if not np.array_equal(array, before.get(name, array)):
                has_clipped = True
        self.state.update.calls[-1].has_clipped = has_clipped
        return norm

    @guarded
    def _copy_gradients(self) -> dict[str, Array]:
        """Returns copies of the gradients that there are, by the names of their parameters."""
        return copy_arrays((name, p.grad) for name, p in self.state.models.parameters())

    @guarded
    def record_reduced(self, tensor: Any) -> None:
        """Records a gradient that an optimizer has reduced over the ranks during its step."""
        if not self.state.running_optimizers or not isinstance(tensor, Tensor):
            return
        update = self.state.update
        for name, parameter in self.state.models.parameters_with_gradient_at(storage_of(tensor)):
            reduced = copy_arrays([(name, parameter.grad)])
            update.reduced_in_step = {**update.reduced_in_step, **reduced}

    # Gradients at the step

    def record_for_step(self, parameter_ids: set[int]) -> None:
        """Records the gradients that an optimizer is about to step with, before and after clipping.

        What is only rounding is then removed from them, so that it does not become a step.

        Args:
            parameter_ids: the ids of the optimizer's parameters.
        """
        update = self.state.update
        parameters_with_gradient = {}
        for name, parameter in self.state.models.parameters():
            if id(parameter) in parameter_ids and parameter.grad is not None:
                parameters_with_gradient[name] = parameter
        update.gradients = copy_arrays((n, p.grad) for n, p in parameters_with_gradient.items())
        before_clipping = self.state.notes.gradients_before_clipping
        update.unclipped = {}
        for name, gradient in update.gradients.items():
            # A gradient that was not clipped is what it was before.
            update.unclipped[name] = before_clipping.get(name, gradient)
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
        gradients: copies of them; the largest value counts.
        parameters: whose gradients are changed.
    """
    limit = RELATIVE_ROUNDING * scale_of(gradients)
    for parameter in parameters:
        gradient = own_part(parameter.grad)
        if not gradient.is_sparse and gradient.is_floating_point():
            gradient.masked_fill_(gradient.abs() < limit, 0.0)
