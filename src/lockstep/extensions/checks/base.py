"""The base class of checks: extensions that raise an error or warn if a training goes wrong."""

from __future__ import annotations

from collections.abc import Collection

from lockstep.distributed.process_group import Run
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
