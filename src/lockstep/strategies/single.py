"""One process on one device: the module itself, with nothing around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from lockstep.distributed.process_group import Run
from lockstep.errors import SettingError
from lockstep.strategies.base import Strategy, Wrapped, place


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """Plain torch; the reference that all other strategies are compared with."""

    name: ClassVar[str] = "single"
    autotunes: ClassVar[bool] = True

    def check(self, run: Run) -> None:
        """Raises SettingError on more than one process."""
        if run.topology.size > 1:
            raise SettingError(
                "strategy='single'",
                f"world size {run.topology.size}: the processes would train apart",
                "use strategy='ddp', or start one process",
            )

    def wrap(self, module: nn.Module, run: Run) -> Wrapped:
        """The module on its device."""
        return Wrapped(module, place(module, run.device))

    def before_step(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Nothing can differ."""

    def after_step(self, module: nn.Module) -> None:
        """Nothing can differ."""

    def release(self, module: nn.Module) -> None:
        """Nothing is held."""
