"""The checks that are always on: one file each, and one line in `GUARDS`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from lockstep.distributed.process_group import Run
from lockstep.extensions.checks.base import Guard
from lockstep.extensions.checks.coverage import CoverageGuard
from lockstep.extensions.checks.evaluation import EvaluationGuard
from lockstep.extensions.checks.gradients import GradientVersionGuard
from lockstep.extensions.checks.loss import LossGuard
from lockstep.extensions.checks.parameters import ParameterGuard
from lockstep.extensions.checks.preparation import PreparationGuard
from lockstep.extensions.checks.replicas import ReplicaGuard
from lockstep.extensions.checks.unit_order import UnitOrderGuard
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
