"""Are the parameters that are trained still those that were prepared?

Strategies hang their hooks on the parameters that they find in `prepare`. What is trained later is
found by looking at the module now and then: no parameter may be new, another object, unfrozen, or
of another type or device.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import nn

from lockstep.checkpoint.modules import plain_names
from lockstep.errors import UsageError, some, warn


class _Kept(NamedTuple):
    parameter: weakref.ref[nn.Parameter]
    trained: bool
    """Or may be."""
    dtype: torch.dtype
    device: torch.device


class ParameterGuard:
    """The parameters of a prepared module, as they were then.

    Args:
        module: as the strategy has wrapped it.
        alone: the run has one process, where such a change does no harm yet.
        may_unfreeze: the strategy averages what is trained later, too.
    """

    def __init__(self, module: nn.Module, *, alone: bool, may_unfreeze: bool = False) -> None:
        self._module = weakref.ref(module)
        self._alone = alone
        self._said = False
        self._plain = plain_names(module)
        self._names = {self._plain(name) for name, _ in module.named_parameters()}
        self._kept = {
            id(p): _Kept(weakref.ref(p), p.requires_grad or may_unfreeze, p.dtype, p.device)
            for p in module.parameters()
        }

    def check(self) -> None:
        """Compares with what is there now; warns once on one process.

        Raises:
            UsageError: a parameter that is trained has changed, and there are several processes.
        """
        if self._said:
            return
        module = self._module()
        changed = [] if module is None else self._changes(module)
        if not changed:
            return
        self._said = True
        shown = some(changed)
        was_set = "parameters added, replaced, unfrozen or moved after world.prepare"
        do = "change the model first, then call world.prepare"
        if self._alone:
            found = f"{shown}; with several processes their gradients would not be averaged"
            warn(was_set, found, do, code="LS303")
        else:
            found = f"{shown}; their gradients are not averaged over the ranks"
            raise UsageError(was_set, found, do, code="LS303")

    def _changes(self, module: nn.Module) -> list[str]:
        found = []
        for full_name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            name = self._plain(full_name)
            kept = self._kept.get(id(parameter))
            if kept is None or kept.parameter() is not parameter:
                found.append(f"{name} {'replaced' if name in self._names else 'added'}")
            elif not kept.trained:
                found.append(f"{name} unfrozen")
            elif parameter.dtype != kept.dtype:
                found.append(f"{name} now {parameter.dtype}, was {kept.dtype}")
            elif parameter.device != kept.device:
                found.append(f"{name} now on {parameter.device}, was on {kept.device}")
        return found
