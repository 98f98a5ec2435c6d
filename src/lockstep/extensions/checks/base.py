"""The interface of a guard: a check that is always on, told of what happens in a training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.distributed.process_group import Run
from lockstep.optim.precision import Precision
from lockstep.strategies.base import Wrapped


class Guard:
    """Looks on at a training, changes nothing, and raises where it goes wrong.

    A method that is not overridden is not called. All may communicate but
    `before_backward`, `after_backward` and `settle`: every rank takes the same steps.

    Args:
        run: this process's part in the run.
        precision: of the forward passes and the loss.
        wrapped: all that `world.prepare` has wrapped so far; it grows.
    """

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[Wrapped] = ()) -> None:
        self.run = run
        self.precision = precision
        self.wrapped = wrapped

    def prepared(self, wrapped: Wrapped) -> None:
        """`world.prepare` has wrapped a module."""

    def optimizer_prepared(self, optimizer: Optimizer) -> None:
        """`world.prepare` has made this optimizer of the user's."""

    def before_backward(self, loss: Any) -> None:
        """`world.backward` was given a loss, which is not weighted yet."""

    def after_backward(self, loss: Any) -> None:
        """The backward pass of that loss is through."""

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """An optimizer is about to step for a global batch; modules hold its parameters."""

    def after_step(self) -> None:
        """It has stepped."""

    def settle(self) -> None:
        """The state is about to be saved, or the run has ended well: nothing may stay unsaid."""
