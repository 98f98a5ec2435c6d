"""Supports gradient accumulation over several global batches in runs with virtual ranks.

A *virtual rank* computes a fixed part of every global batch; its gradient must be kept apart from
those of the others. A script may step only after several global batches without clearing the
gradients in between. When a global batch begins, `parameter.grad` then holds the gradients of
earlier ones, which would be taken for a part of the first virtual rank's gradient. So they are
stored elsewhere before the first backward pass of a global batch, and added after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch


class EarlierGradients(Extension):
    """Keeps the gradients of earlier global batches apart while a global batch is computed.

    It must come after the extension that sums the gradients of virtual ranks.

    Args:
        parameters: the parameters of a module that the optimizer holds.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._stored: list[tuple[nn.Parameter, Tensor]] = []

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Puts the gradients of earlier global batches away before the first backward pass of one.

        `backward_ended` adds them again after the last backward pass of the global batch.

        Args:
            weighted_loss: not needed here; all extensions get it.
            micro_batch: the micro-batch that the loss comes from.
        """
        if not micro_batch.first:
            return
        self._stored.clear()
        for parameter in self._parameters:
            if parameter.grad is not None:
                # A copy: DDP may compute the next gradient in the same memory.
                self._stored.append((parameter, parameter.grad.clone()))
                parameter.grad = None

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Adds the stored gradients after the last backward pass of a global batch."""
        if micro_batch.last and self._stored:
            self._add_stored()

    @torch.no_grad()
    def _add_stored(self) -> None:
        """Adds the stored gradients to those of this global batch."""
        for parameter, gradient in self._stored:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

        self._stored.clear()

    def clear_gradients(self) -> None:
        """Drops the stored gradients when the loop was left in the middle of a global batch."""
        self._stored.clear()
