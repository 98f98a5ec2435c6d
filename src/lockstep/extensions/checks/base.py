"""The base of a check: an extension that raises an error where a training goes wrong."""

from __future__ import annotations

from collections.abc import Collection

from lockstep.distributed.process_group import Run
from lockstep.optim.precision import Precision
from lockstep.session.extension import Extension
from lockstep.strategies.base import PreparedModule


class Check(Extension):
    """Looks at a training in every run, changes nothing, and raises where it goes wrong.

    Args:
        run: of this process.
        precision: of the forward passes and the loss.
        wrapped: all that `world.prepare` has wrapped; the collection may still grow.
    """

    def __init__(
        self, run: Run, precision: Precision, wrapped: Collection[PreparedModule] = ()
    ) -> None:
        self.run = run
        self.precision = precision
        self.wrapped = wrapped
