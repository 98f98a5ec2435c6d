"""The base class of checks: extensions that raise an error or warn if a training goes wrong.

A check that reads a value on a GPU makes the host wait for the GPU. `LateValue` looks at it later.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lockstep.distributed.process_group import Run
from lockstep.distributed.streams import start_copy_to_host
from lockstep.optim.precision import Precision
from lockstep.session.extension import Extension
from lockstep.strategies.base import PreparedModule


class Check(Extension):
    """Looks at a training in every run and changes nothing.

    Args:
        run: the run of this process.
        precision: the precision of the forward passes and the loss.
        wrapped: all modules that `world.prepare` has wrapped; the collection may still grow.
    """

    def __init__(
        self, run: Run, precision: Precision, wrapped: Collection[PreparedModule] = ()
    ) -> None:
        self.run = run
        self.precision = precision
        self.wrapped = wrapped


class LateValue:
    """A number on a GPU that a check looks at once it has arrived on the host.

    A check takes the value of an earlier step, then puts that of the present one. If the earlier
    one has not arrived, `put` leaves the new one out: some steps are not looked at, and the host
    never waits for the GPU.
    """

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event, int] | None = None
        """The copy on the host, the event of its arrival, and its step."""

    @property
    def is_pending(self) -> bool:
        """True if a value was put and not taken yet; then there is no need to compute another."""
        return self._pending is not None

    def put(self, tensor: Tensor, step: int) -> None:
        """Starts to copy a value to the host, unless another one is still on its way.

        Args:
            tensor: one number, on a GPU.
            step: the optimizer step that it belongs to, from 1.
        """
        if not self.is_pending:
            on_host, arrival = start_copy_to_host(tensor.detach().reshape(()))
            self._pending = (on_host, arrival, step)

    def take(self, *, wait: bool = False) -> tuple[float, int] | None:
        """Returns the value that was put and its step, once; None if there is none, or not yet.

        Args:
            wait: True to wait until it has arrived, at the end of a run or before it is saved.
        """
        if self._pending is None:
            return None

        on_host, arrival, step = self._pending  # `arrival` is the CUDA event after the copy
        if wait:
            arrival.synchronize()
        elif not arrival.query():  # type: ignore[no-untyped-call]
            return None

        self._pending = None
        return on_host.item(), step
