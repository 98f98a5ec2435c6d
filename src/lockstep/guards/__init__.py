"""The checks that are always on: one file each, and one line in `GUARDS`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from lockstep.distributed.process_group import Run
from lockstep.guards.base import Guard
from lockstep.guards.coverage import CoverageGuard
from lockstep.guards.evaluation import EvaluationGuard
from lockstep.guards.gradients import GradientVersionGuard
from lockstep.guards.loss import LossGuard
from lockstep.guards.parameters import ParameterGuard
from lockstep.guards.preparation import PreparationGuard
from lockstep.guards.replicas import ReplicaGuard
from lockstep.guards.unit_order import UnitOrderGuard
from lockstep.optim.precision import Precision
from lockstep.strategies.base import Wrapped

GUARDS: tuple[type[Guard], ...] = (
    LossGuard,
    GradientVersionGuard,
    UnitOrderGuard,
    ParameterGuard,
    ReplicaGuard,
    CoverageGuard,
    EvaluationGuard,
    PreparationGuard,
)


class Guards(Guard):
    """All guards of a run; each is told, in the order above, what it has a method for."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[Wrapped]) -> None:
        super().__init__(run, precision, wrapped)
        guards = [guard(run, precision, wrapped) for guard in GUARDS]
        for event, nothing in vars(Guard).items():
            if not event.startswith("_"):
                told = [guard for guard in guards if getattr(type(guard), event) is not nothing]
                setattr(self, event, partial(_call, [getattr(guard, event) for guard in told]))


def _call(methods: Sequence[Callable[..., None]], *args: Any) -> None:
    for method in methods:
        method(*args)
