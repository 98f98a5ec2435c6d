"""Are the parameters that are trained still those that were prepared?

Strategies hang their hooks on the parameters that they find in `prepare`. What is trained later is
found by looking at the module now and then: no parameter may be new, another object, unfrozen, or
of another type or device.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.checkpoint.modules import plain_names
from lockstep.distributed.process_group import Run
from lockstep.errors import warn_about
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.session.step import check_due
from lockstep.strategies.base import PreparedModule, changed_parameters_error
from lockstep.wording import join_first

_Before = tuple[bool, torch.dtype, torch.device]
"""Whether a parameter was, or may be, trained, and what it was."""


class ParameterCheck(Check):
    """Compares prepared modules with what they were, in the first steps and now and then."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._before: dict[int, tuple[set[str], MutableMapping[Tensor, _Before]]] = {}
        """For each module, by its id, the names of its parameters and what they were."""
        self._warned = False

    def module_prepared(self, wrapped: PreparedModule) -> None:
        """The parameters are to stay as they are now."""
        module = wrapped.module
        plain = plain_names(module)
        before: MutableMapping[Tensor, _Before] = WeakTensorKeyDictionary()
        for p in module.parameters():
            before[p] = p.requires_grad or wrapped.may_unfreeze, p.dtype, p.device
        self._before[id(module)] = {plain(name) for name, _ in module.named_parameters()}, before

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Compares; on one process, where such a change does no harm yet, it warns once.

        Raises:
            UsageError: a parameter that is trained has changed, and there are several processes.
        """
        step = self.run.step
        first = step.training_pass.number == 1  # an epoch may begin otherwise
        if self._warned or not (first or check_due(step.number + 1)):
            return
        changed = [change for module in modules for change in self._changes(module)]
        if not changed:
            return
        effect = "their gradients are not averaged over the ranks"
        if not self.run.collectives.single_process:
            raise changed_parameters_error(f"{join_first(changed)}; {effect}")
        self._warned = True
        effect = "with several processes their gradients would not be averaged"
        warn_about(changed_parameters_error(f"{join_first(changed)}; {effect}"))

    def _changes(self, module: nn.Module) -> list[str]:
        """In words, of the parameters that are trained."""
        names, before = self._before[id(module)]
        plain = plain_names(module)
        found: list[str] = []
        for full_name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            name = plain(full_name)
            if parameter not in before:
                found.append(f"{name} {'replaced' if name in names else 'added'}")
                continue
            trained, dtype, device = before[parameter]
            if not trained:
                found.append(f"{name} unfrozen")
            elif parameter.dtype != dtype:
                found.append(f"{name} now {parameter.dtype}, was {dtype}")
            elif parameter.device != device:
                found.append(f"{name} now on {parameter.device}, was on {device}")
        return found
