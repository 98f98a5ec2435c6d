"""The gradients as a backward pass has left them: has anybody written to them since?

In the middle of a global batch, and under a loss scaler, they are not yet what the step will use.
Clipping or unscaling them there gives other numbers than on a whole batch, and nothing shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.distributed.torch_compat import write_counts
from lockstep.errors import UsageError
from lockstep.extensions.checks.base import Check
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import parameters_of


class GradientVersionCheck(Check):
    """Remembers what the last backward pass has left."""

    _num_backwards = 0
    """Backward passes of the present micro-batch."""
    _marks: Sequence[tuple[nn.Parameter, int, int]] = ()
    """For each gradient its parameter, its id, and how often it was written to."""

    def begin(self, micro_batch: MicroBatch) -> None:
        """No backward pass has followed yet."""
        self._num_backwards = 0

    def after_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """The gradients wait, for further micro-batches or for the loss scaler."""
        self._num_backwards += 1
        if not self.run.step.micro_batch.closes or self.precision.scaler is not None:
            parameters, gradients = [], []
            for wrapped in self.wrapped:
                if wrapped.gradients_after_backward:  # they are written after it, too
                    continue
                for parameter in wrapped.module.parameters():
                    if parameter.grad is not None:
                        parameters.append(parameter)
                        gradients.append(parameter.grad)
            ids = map(id, gradients)
            self._marks = list(zip(parameters, ids, write_counts(gradients), strict=True))

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Raises UsageError where the gradients of earlier micro-batches were written to."""
        if self.run.step.micro_batch.opens or self._num_backwards:
            return
        if any(map(_changed, self._marks)):
            raise UsageError(
                "gradients that are written to between the micro-batches of a global batch",
                "they are those of a part of it; clipped there, by torch's clip_grad_norm_ say, "
                "they add up to something else",
                "use world.clip_grad_norm_(model, max_norm); change gradients by hand only where "
                "loader.current.last",
                code="LS406",
            )

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Raises UsageError where gradients that are still scaled were written to."""
        if not self.precision.scales(optimizer):
            return
        stepped = set(map(id, parameters_of(optimizer)))
        if any(_changed(mark) for mark in self._marks if id(mark[0]) in stepped):
            raise UsageError(
                "gradients that are written to before optimizer.step() under precision='fp16'",
                "they are still multiplied by the scale of the loss, so that clip_grad_norm_ of "
                "torch clips nearly all of them away",
                "use world.clip_grad_norm_(model, max_norm); after it (max_norm=math.inf clips "
                "nothing) they have their true size and may be changed",
                code="LS406",
            )


def _changed(mark: tuple[nn.Parameter, int, int]) -> bool:
    """Whether the parameter has another gradient now; one that was cleared has not."""
    parameter, gradient_id, write_count = mark
    gradient = parameter.grad
    if gradient is None:
        return False
    return id(gradient) != gradient_id or write_counts([gradient]) != [write_count]
