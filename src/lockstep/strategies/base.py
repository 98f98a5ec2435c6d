"""The interface of a strategy: how a module is spread over the ranks.

A strategy is a frozen set of options. `World` calls, in this order and on every rank:

1. `check(run)`: once, when the run is joined.
2. `wrap(module, run)`: once for every module given to `prepare`; returns what the user calls, with
   the reasons of what was chosen.
3. `before_step(module, optimizer)`: before each real step of an optimizer that holds parameters of
   the module, which is the one that `wrap` returned.
4. `after_step(module)`: after it.
5. `release(module)`: when the run is left.

3 and 4 may communicate: every rank takes the same steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import nn
from torch.optim import Optimizer

from lockstep.runtime.choice import Choice
from lockstep.runtime.run import Run


class Wrapped(NamedTuple):
    """A module as the user calls it, and what was chosen on the way."""

    module: nn.Module
    choices: list[Choice]


class Strategy(ABC):
    """How modules are spread over the ranks."""

    name: ClassVar[str]

    @abstractmethod
    def check(self, run: Run) -> None:
        """Raises SettingError where the run cannot use this strategy."""

    @abstractmethod
    def wrap(self, module: nn.Module, run: Run) -> Wrapped:
        """The module, on its device, as the user calls it."""

    @abstractmethod
    def before_step(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Raises UsageError where the gradients are not those of the global batch."""

    @abstractmethod
    def after_step(self, module: nn.Module) -> None:
        """Raises RanksDifferError where the ranks have parted."""

    @abstractmethod
    def release(self, module: nn.Module) -> None:
        """Lets go of the process group; the module can still evaluate."""
