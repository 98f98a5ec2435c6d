"""Records the calls in a script that can change gradients: collectives, clipping, and schedulers.

`state.update` is the record of the current optimizer step, and each call is added to its `calls`.
`state.notes` holds what is needed until the step is complete. A *mark* on a tensor tells what the
tensor was computed from; everything computed from a marked tensor gets the mark too (see `marks`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.user_code import user_line
from lockstep.verify.recording.guard import guarded
from lockstep.verify.recording.marks import mark, marks_of, remove_local_marks
from lockstep.verify.recording.state import RecorderState
from lockstep.verify.recording.tensor_values import storage_address
from lockstep.verify.training_record import ScriptCall

CHANGED_GRADIENT_RTOL = 1e-6
"""A gradient that differs by less is still the one that the backward passes computed."""


class CallRecorder:
    """Records calls of the functions that `patches` has replaced."""

    def __init__(self, state: RecorderState) -> None:
        self.state = state

    @guarded
    def record(self, name: str, *, value: float | None = None) -> ScriptCall:
        """Records that the script calls a function, and returns the record.

        The record is added to `state.update.calls`.

        Args:
            name: name of the function, such as "all_reduce" or "clip".
            value: number that the function was given, such as a scheduler's metric.
        """
        state = self.state
        call = ScriptCall(
            name=name,
            line=user_line() or "",
            num_passes_before=len(state.update.losses),  # one loss for each backward pass
            value=value,
            in_step=state.running_steps.count() > 0,
        )
        state.update.calls.append(call)
        return call

    @guarded
    def record_collective(self, name: str, tensor: Any, gathered: Any = None) -> ScriptCall:
        """Records that the script calls a collective, and returns the record.

        Args:
            name: name of the collective, such as "all_reduce".
            tensor: input of the collective. Only its call is recorded if the input is not a tensor.
            gathered: tensors that an all-gather fills with the inputs of all ranks; None for any
                other collective.
        """
        call = self.record(name)
        if isinstance(tensor, Tensor):
            call.in_autograd_function = _is_inside_autograd_function()
            self._describe_input(call, tensor)
            self._note_overwritten_input(tensor)

        # If the script computes a loss from gathered tensors, no gradient flows back through the
        # gather to the model. This is a mistake, except in the `forward` of a
        # `torch.autograd.Function`: the function's own `backward` computes the gradient.
        if gathered is not None and not call.in_autograd_function:
            _mark_lost_gradient(call, gathered)

        return call

    def _note_overwritten_input(self, tensor: Tensor) -> None:
        """Records that a collective may have written its result to its input, as `all_reduce` does.

        Then the tensor is no longer made from the samples of this rank alone, so marks that say so
        are removed.
        """
        remove_local_marks(tensor)
        # Only writes by hand, such as `weight -= 0.1 * weight.grad`, may be an optimizer step.
        self.state.mode.writes.note_write(tensor, by_hand=False)

    def _describe_input(self, call: ScriptCall, tensor: Tensor) -> None:
        """Records whether the input of a call comes from a model, and whether it is a gradient.

        Args:
            call: record of the call, whose fields are set.
            tensor: input of the call.
        """
        # Whether a gradient could flow back through the call to this input. (This says nothing
        # about whether the input itself is a gradient.)
        call.carries_gradient = tensor.requires_grad and torch.is_grad_enabled()

        # The mark "trained" is on each output of a model in training, and on everything that is
        # computed from it.
        call.uses_model_output = "trained" in marks_of(tensor)

        # The input is a gradient if it has the same storage as the gradient of some parameter. A
        # bucket of DDP holds the gradients of several parameters; the first one is recorded.
        owners = self.state.models.parameters_with_gradient_at(storage_address(tensor))
        first_owner = next(owners, None)
        if first_owner is not None:
            name, parameter = first_owner
            call.gradient_of = name
            call.gradient_changed = self._has_changed_since_backward(id(parameter), tensor)

    def _has_changed_since_backward(self, parameter_id: int, gradient: Tensor) -> bool:
        """True if a gradient is no longer the sum of what the backward passes of this update added.

        Args:
            parameter_id: id of the parameter that the gradient belongs to.
            gradient: current value of the gradient.
        """
        # In a lower precision than float64, rounding alone would change a gradient.
        if self.state.mode.lowest_dtype != torch.float64:
            return False

        # The gradients that each backward pass added.
        local_gradients = []
        for gradients in self.state.notes.gradients_of_passes:
            if parameter_id in gradients:
                local_gradients.append(gradients[parameter_id])

        if not local_gradients:
            return False

        accumulated = torch.stack(local_gradients).sum(0)
        return not torch.allclose(gradient, accumulated, rtol=CHANGED_GRADIENT_RTOL, atol=0.0)

    @guarded
    def end_collective(
        self, calls: Sequence[ScriptCall], result: Any, *, loses_gradient: bool
    ) -> None:
        """Updates the marks on the result of a collective of `World`.

        The result combines values of all ranks, so it loses local marks: those that stand for
        values of this rank alone. With `loses_gradient`, it gets a mark for that, with the line of
        the call.

        Args:
            calls: records of the collective, one for each exchanged tensor.
            result: return value of the collective.
            loses_gradient: whether no gradient flows from the result to the input.
        """
        for tensor in tensors(result):
            remove_local_marks(tensor)

        # Every tensor of the result gets the marks of all calls: it is not known which call it
        # comes from.
        if loses_gradient:
            for call in calls:
                _mark_lost_gradient(call, result)

    @guarded
    def record_seed(self, seed: int) -> None:
        """Records a call of `torch.manual_seed`, if it comes before the first update."""
        if not self.state.is_first_update:
            return
        line = user_line()
        if line:
            self.state.update.seeds[line] = int(seed)

    @guarded
    def record_hook(self, line: str) -> None:
        """Records that a hook of the script has changed the gradient of a parameter.

        Args:
            line: line of the script that registered the hook.
        """
        self.state.update.gradient_hook_line = line


def _mark_lost_gradient(call: ScriptCall, result: Any) -> None:
    """Marks a gathered tensor that passes no gradient on to the model outputs it was gathered from.

    The mark is `gather` if the gather itself stops the gradient, and `detached` if the script had
    detached the outputs before.
    """
    if call.carries_gradient:
        mark(result, gather=call.line)
    elif call.uses_model_output:
        mark(result, detached=call.line)


def _is_inside_autograd_function() -> bool:
    """True if the caller runs in the `forward` of a `torch.autograd.Function` of the script."""
    # The code objects of the `forward` methods of all autograd functions written in Python.
    forward_codes = set()
    for function in _all_subclasses(torch.autograd.Function):
        if hasattr(function.forward, "__code__"):
            forward_codes.add(function.forward.__code__)

    # Walk up the call stack, to see whether one of them is running.
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in forward_codes:
            return True
        frame = frame.f_back

    return False


def _all_subclasses(base: type) -> list[Any]:
    """Returns the direct and indirect subclasses of a class."""
    direct: list[Any] = base.__subclasses__()
    subclasses = list(direct)
    for subclass in direct:
        subclasses += _all_subclasses(subclass)
    return subclasses
