"""Are the parameters that are trained still those that were prepared?

Strategies hang their hooks on the parameters that they find in `prepare`. What is trained later is
found by looking at the module now and then: no parameter may be new, another object, unfrozen, or
of another type or device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.modules import plain_names
from lockstep.distributed.process_group import Run
from lockstep.errors import some, warn_of
from lockstep.guards.base import Guard
from lockstep.optim.precision import Precision
from lockstep.step import check_due
from lockstep.strategies.base import Wrapped, parameters_changed


class ParameterGuard(Guard):
    """Compares prepared modules with what they were, in the first steps and now and then."""

    def __init__(self, run: Run, precision: Precision) -> None:
        super().__init__(run, precision)
        self._parameters: dict[int, _Parameters] = {}
        """Of each module, by its id."""
        self._warned = False

    def prepared(self, wrapped: Wrapped) -> None:
        """The parameters are to stay as they are now."""
        self._parameters[id(wrapped.module)] = _Parameters(wrapped)

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Compares; on one process, where such a change does no harm yet, it warns once.

        Raises:
            UsageError: a parameter that is trained has changed, and there are several processes.
        """
        step = self.run.step
        first = step.running.number == 1  # an epoch may begin otherwise
        if self._warned or not (first or check_due(step.number + 1)):
            return
        changed = [change for m in modules for change in self._parameters[id(m)].changes()]
        if not changed:
            return
        if not self.run.collectives.alone:
            raise parameters_changed(
                f"{some(changed)}; their gradients are not averaged over the ranks"
            )
        self._warned = True
        warn_of(
            parameters_changed(
                f"{some(changed)}; with several processes their gradients would not be averaged"
            )
        )


class _Parameter(NamedTuple):
    parameter: weakref.ref[nn.Parameter]
    trained: bool
    """Or may be."""
    dtype: torch.dtype
    device: torch.device


class _Parameters:
    """Those of a prepared module, as they were then."""

    def __init__(self, wrapped: Wrapped) -> None:
        module = wrapped.module
        self._module = weakref.ref(module)
        self._plain = plain_names(module)
        self._names = {self._plain(name) for name, _ in module.named_parameters()}
        self._before = {
            id(p): _Parameter(
                weakref.ref(p), p.requires_grad or wrapped.may_unfreeze, p.dtype, p.device
            )
            for p in module.parameters()
        }

    def changes(self) -> list[str]:
        """In words, of those that are trained."""
        module = self._module()
        found: list[str] = []
        for full_name, parameter in module.named_parameters() if module is not None else ():
            if not parameter.requires_grad:
                continue
            name = self._plain(full_name)
            before = self._before.get(id(parameter))
            if before is None or before.parameter() is not parameter:
                found.append(f"{name} {'replaced' if name in self._names else 'added'}")
            elif not before.trained:
                found.append(f"{name} unfrozen")
            elif parameter.dtype != before.dtype:
                found.append(f"{name} now {parameter.dtype}, was {before.dtype}")
            elif parameter.device != before.device:
                found.append(f"{name} now on {parameter.device}, was on {before.device}")
        return found
