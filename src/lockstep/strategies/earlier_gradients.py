"""Gradients that a script accumulates over several global batches, with virtual ranks.

A script may step only after several global batches, or leave a step out, and not clear the
gradients in between. What is in `parameter.grad` when a global batch begins would then count as
part of the gradient of each process's first virtual rank. So it is put aside before the first
backward pass of the global batch, and added after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch


class EarlierGradients(Extension):
    """Adds what earlier global batches have left in the gradients to that of the present one.

    Its place is after the extension that sums the gradients of virtual ranks.

    Args:
        parameters: of a module, those that the optimizer has.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._put_aside: list[tuple[nn.Parameter, Tensor]] = []

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Puts the gradients aside that are there before the first backward pass."""
        if not micro_batch.first:
            return
        self._put_aside.clear()
        for parameter in self._parameters:
            if parameter.grad is not None:
                # A copy: DDP may compute the next gradient in the same memory.
                self._put_aside.append((parameter, parameter.grad.clone()))
                parameter.grad = None

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Adds them after the last backward pass."""
        if micro_batch.last and self._put_aside:
            self._add()

    @torch.no_grad()
    def _add(self) -> None:
        """Adds what was put aside to the gradients."""
        for parameter, gradient in self._put_aside:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self._put_aside.clear()

    def clear_gradients(self) -> None:
        """Forgets the gradients of a global batch that was broken off."""
        self._put_aside.clear()
