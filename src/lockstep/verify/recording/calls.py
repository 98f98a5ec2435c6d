"""Records the script's calls that matter for gradients: collectives, clipping, schedules, seeds.

`state.update` is the record of the current optimizer step; each call is added to its `calls`.
`state.notes` is what is remembered until the step, and `state.mode` sees every call of torch's
functions. *Marks* on a tensor tell what it was made from: all that is computed from a marked tensor
gets the mark too. See `marks`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.user_code import user_line
from lockstep.verify.recording.marks import mark, marks_of, unmark
from lockstep.verify.recording.state import RecorderState, guarded
from lockstep.verify.recording.tensor_values import storage_of
from lockstep.verify.training_record import ScriptCall

CHANGED_GRADIENT_RTOL = 1e-6
"""A gradient that differs by less is what the backward passes have left."""


class CallRecorder:
    """Records calls of functions that `patches` watches."""

    def __init__(self, state: RecorderState) -> None:
        self.state = state

    @guarded
    def record(
        self, name: str, tensor: Any, output: Any = None, value: float | None = None
    ) -> ScriptCall:
        """Records that the script calls a function.

        The record is added to `state.update.calls`. Tensors may lose or get marks.

        Args:
            name: of the function, such as "all_reduce" or "clip".
            tensor: its input; of a function without one, None.
            output: tensors that it fills without a gradient.
            value: a number that it was given.

        Returns:
            The record.
        """
        state = self.state
        call = ScriptCall(
            name=name,
            line=user_line() or "",
            passes_before=len(state.update.losses),  # one loss for each backward pass
            value=value,
            in_step=bool(state.running_optimizers),
        )
        state.update.calls.append(call)

        if isinstance(tensor, Tensor):
            self._describe_input(call, tensor)
            # Many collectives write their result to their input, as an all-reduce does: it is no
            # longer made from this rank's samples alone.
            unmark(tensor)
            state.mode.writes.note_write(tensor, by_hand=False)

        # The output carries no gradient. Inside of an autograd function of the script's that is no
        # mistake, since the function's own `backward` computes the gradient.
        if output is not None and not call.in_function:
            _mark_lost_gradient(call, output)

        return call

    def _describe_input(self, call: ScriptCall, tensor: Tensor) -> None:
        """Fills in what the input of a call tells: its origin, and whose gradient it is."""
        call.carries_gradient = tensor.requires_grad and torch.is_grad_enabled()
        # The output of a model in training has this mark, and all that is computed from it.
        call.uses_model_output = "trained" in marks_of(tensor)
        call.in_function = _is_inside_autograd_function()

        # If the input is a gradient, it lies at the address of some parameter's gradient. Several
        # gradients may lie in one buffer, as those of DDP do: the first parameter is named.
        owners = self.state.models.parameters_with_gradient_at(storage_of(tensor))
        first_owner = next(owners, None)
        if first_owner is not None:
            name, parameter = first_owner
            call.gradient_of = name
            call.gradient_changed = self._is_changed_gradient(id(parameter), tensor)

    def _is_changed_gradient(self, parameter_id: int, gradient: Tensor) -> bool:
        """True if a gradient is no longer what the backward passes of this update added up to.

        Args:
            parameter_id: the id of the parameter with this gradient.
            gradient: as it is now.
        """
        local_gradients = []  # what each backward pass has added
        for gradients in self.state.notes.gradients_of_passes:
            if parameter_id in gradients:
                local_gradients.append(gradients[parameter_id])

        # In a lower precision than float64, rounding alone changes a gradient by more.
        if not local_gradients or self.state.mode.lowest_dtype != torch.float64:
            return False

        accumulated = torch.stack(local_gradients).sum(0)
        return not torch.allclose(gradient, accumulated, rtol=CHANGED_GRADIENT_RTOL, atol=0.0)

    @guarded
    def end_collective(
        self, calls: Sequence[ScriptCall], result: Any, *, loses_gradient: bool
    ) -> None:
        """Marks the result of a collective of `World`, which is over.

        The result is of all ranks, so it loses the marks of values that this rank computed alone.

        Args:
            calls: the records of it, one for each tensor that was exchanged.
            result: what it returns.
            loses_gradient: the result carries no gradient.
        """
        for tensor in tensors(result):
            unmark(tensor)
        if loses_gradient:
            for call in calls:
                _mark_lost_gradient(call, result)

    @guarded
    def record_seed(self, seed: int) -> None:
        """Records a call of `torch.manual_seed` before the first update."""
        if not self.state.is_first_update:
            return
        line = user_line()
        if line:
            self.state.update.seeds[line] = int(seed)

    @guarded
    def record_hook(self, line: str) -> None:
        """Records that a hook of the script's has changed the gradient of a parameter."""
        self.state.update.gradient_hook_line = line


def _mark_lost_gradient(call: ScriptCall, result: Any) -> None:
    """Marks what was gathered from outputs of a model without their gradient.

    The mark `gather` means that the gather has lost the gradient, `detached` that the script had
    detached the tensor before.
    """
    if call.carries_gradient:
        mark(result, gather=call.line)
    elif call.uses_model_output:
        mark(result, detached=call.line)


def _is_inside_autograd_function() -> bool:
    """True in the forward pass of a `torch.autograd.Function` of the script's.

    What is gathered there needs no gradient: the function's own `backward` computes it.
    """
    forward_codes = set()  # the code objects of all functions `forward`
    for function in _all_subclasses(torch.autograd.Function):
        if hasattr(function.forward, "__code__"):  # a function of Python's, not a built-in one
            forward_codes.add(function.forward.__code__)

    # Is one of them on the stack of calls that led here?
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in forward_codes:
            return True
        frame = frame.f_back

    return False


def _all_subclasses(base: type) -> list[Any]:
    """Returns the subclasses of a class, and those of its subclasses."""
    direct: list[Any] = base.__subclasses__()
    subclasses = list(direct)
    for subclass in direct:
        subclasses += _all_subclasses(subclass)
    return subclasses
