"""One process on one device: the module itself, with nothing around it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from lockstep.distributed.process_group import Run
from lockstep.errors import SettingError
from lockstep.strategies.base import Plan, Strategy, Wrapped, place


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """Plain torch; the reference that all other strategies are compared with."""

    name: ClassVar[str] = "single"

    def plan(self, run: Run) -> Plan:
        """Raises SettingError on more than one process."""
        if run.topology.size > 1:
            raise SettingError(
                "strategy='single'",
                f"world size {run.topology.size}: the processes would train apart",
                "use strategy='ddp', or start one process",
            )
        return replace(super().plan(run), autotunes=True)

    def wrap(self, module: nn.Module, run: Run) -> Wrapped:
        """The module on its device."""
        return Wrapped(module=module, choices=place(module, run.device))
