"""Lets a script clear gradients by hand while a sharded model has whole parameters.

Between a forward and a backward pass, parameters of the model are *whole* ones, in the place of the
shards. The gradients that the optimizer has used are at the shards. So a script that clears
gradients there by `parameter.grad = None` would clear nothing, or the gradients of earlier
micro-batches of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.session.delivery import cleared_gradients_error
from lockstep.torch_compat import write_count


class _ShownGradient(NamedTuple):
    """The gradient of a shard, which is shown at the whole parameter."""

    shard: nn.Parameter
    whole: nn.Parameter
    gradient: Tensor
    """The gradient of the shard."""
    shown_tensor: Tensor
    """What the whole parameter has as its gradient: that of the shard, or a stand-in."""
    write_count: int
    """How often `shown_tensor` had been written to when it was shown."""

    def hide(self) -> None:
        """Hides the gradient, and clears it at the shard if the script has cleared it here."""
        is_still_there = self.whole.grad is self.shown_tensor
        if is_still_there:
            self.whole.grad = None
        if self.shard.grad is not self.gradient:
            return  # cleared at the shard, by the optimizer's `zero_grad`

        if not is_still_there:
            self.shard.grad = None
        elif self._stand_in_was_zeroed():
            self.gradient.zero_()

    def _stand_in_was_zeroed(self) -> bool:
        """Returns True if the script has called `zero_` of a stand-in, not of the gradient."""
        is_stand_in = self.shown_tensor is not self.gradient
        return is_stand_in and write_count(self.shown_tensor) > self.write_count


class ShownGradients:
    """Shows the gradients of shards at the whole parameters between a forward and a backward pass.

    They are hidden again before the backward pass, which would add to them. What the script has
    cleared in the meantime is cleared at the shard, too.

    A limit: `torch.autograd.grad` through the model, as for a gradient penalty, is a backward pass.
    Gradients that the script clears by hand between it and the backward pass of the loss are not
    cleared at the shards; those that it clears by `zero_grad` are.

    Args:
        shards: the shards of the parameters that are whole after a forward pass.
        whole_parameters: these whole parameters, in the same order.
    """

    def __init__(
        self, shards: Sequence[nn.Parameter], whole_parameters: Sequence[nn.Parameter]
    ) -> None:
        self._pairs = list(zip(shards, whole_parameters, strict=True))
        self._shown: list[_ShownGradient] = []
        self._accumulated: nn.Parameter | None = None
        """A whole parameter that had a gradient of earlier micro-batches after the forward pass."""

    def show(self, *, accumulates_in_whole: bool) -> None:
        """Shows the gradients; called after each forward pass with gradients.

        Args:
            accumulates_in_whole: True if whole parameters may have gradients of earlier
                micro-batches. Then those of the shards are not shown, and a script that clears
                gradients is refused.
        """
        if accumulates_in_whole:
            with_gradient = (whole for _, whole in self._pairs if whole.grad is not None)
            self._accumulated = next(with_gradient, None)
            return

        for shard, whole in self._pairs:
            gradient = shard.grad
            if gradient is not None and whole.grad is None:
                tensor = _as_gradient_of(whole, gradient)
                whole.grad = tensor
                self._shown.append(
                    _ShownGradient(shard, whole, gradient, tensor, write_count(tensor))
                )

    def forget_accumulated(self) -> None:
        """Lets the script clear gradients of earlier micro-batches, which nothing will add to."""
        self._accumulated = None

    def hide(self) -> None:
        """Hides the gradients, and clears those that the script has cleared.

        Raises:
            UsageError: the script has cleared gradients of earlier micro-batches.
        """
        accumulated = self._accumulated
        self._accumulated = None
        if accumulated is not None and accumulated.grad is None:
            raise cleared_gradients_error()

        for shown in self._shown:
            shown.hide()
        self._shown.clear()


def _as_gradient_of(whole: nn.Parameter, gradient: Tensor) -> Tensor:
    """Returns the gradient of a shard, or a stand-in if it cannot be that of the whole parameter.

    Units that are computed in half precision have gradients in fp32, and offloaded shards have them
    on the CPU. The stand-in is NaN, takes no memory and can be written to by `zero_` alone.
    """
    # Since torch 2.15, units in half precision take gradients in fp32 at the whole parameters, too.
    # Older versions of torch may not know `grad_dtype`.
    dtype = getattr(whole, "grad_dtype", None) or whole.dtype
    if gradient.dtype == dtype and gradient.device == whole.device:
        return gradient
    return whole.new_full((), torch.nan, dtype=dtype).expand(whole.shape)
