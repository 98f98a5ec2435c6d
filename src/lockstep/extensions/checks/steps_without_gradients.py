"""Warns if the first steps of an optimizer have no gradient: such a training learns nothing.

Torch's optimizers pass over parameters without a gradient, so a loop that forgets `world.backward`,
or that calls `zero_grad()` between `world.backward` and `step()`, runs to its end and trains
nothing. A single optimizer may rest for a while, as that of a GAN's generator may. So the check
looks at all prepared optimizers together, and is over once any of them has a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.optim.origin import is_of_torch_or_lockstep
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule, parameters_of

STEPS_UNTIL_WARNING = 3
"""Fewer steps without a gradient are no training: scripts step once to create the state of an
optimizer, or leave out a batch whose loss is not finite."""


class StepsWithoutGradientsCheck(Check):
    """Counts the steps without a gradient since an optimizer was prepared."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._is_active = False
        """True from the preparation of an optimizer until a step has a gradient."""
        self._has_warned = False
        self._num_steps: Counter[int] = Counter()
        """The number of steps without a gradient of each optimizer, by its id."""
        self._num_backwards = 0
        """How often the script has called `world.backward` in this time."""
        self._had_gradient_before_step = False

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Begins to count anew, as a training with another optimizer begins."""
        self._is_active = not self._has_warned
        self._num_steps.clear()
        self._num_backwards = 0

    def after_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Counts a call of `world.backward`."""
        self._num_backwards += 1

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Looks for a gradient before the step: a hook of the script may clear it afterwards."""
        if self._is_active:
            self._had_gradient_before_step = _has_gradient(optimizer, modules)

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Warns, once, after the third step of an optimizer if no step had a gradient yet."""
        if not self._is_active:
            return

        # A hook of the script may have set the gradients just before the step.
        if self._had_gradient_before_step or _has_gradient(optimizer, modules):
            self._is_active = False
            return
        if not _needs_gradient(optimizer):  # its parameters may all be frozen, for example
            return

        self._num_steps[id(optimizer)] += 1
        if self._num_steps[id(optimizer)] == STEPS_UNTIL_WARNING:
            self._is_active = False
            self._has_warned = True
            self._warn(type(optimizer).__name__)

    def _warn(self, name: str) -> None:
        """Warns of steps without a gradient, and says whether `world.backward` was called.

        Args:
            name: the name of the optimizer's class.
        """
        if self._num_backwards == 0:
            cause = "world.backward was not called"
        else:
            cause = (
                "world.backward was called, but zero_grad() has cleared the gradients before the "
                "step, or the loss does not depend on these parameters"
            )
        warn(
            f"{name}.step() without a gradient",
            found=f"in the first {STEPS_UNTIL_WARNING} steps no parameter had a gradient, so "
            f"nothing was trained: {cause}",
            do="call world.backward(loss), optimizer.step() and optimizer.zero_grad() in this "
            "order",
            code="LS409",
        )


def _has_gradient(optimizer: Optimizer, modules: Sequence[nn.Module]) -> bool:
    """Returns True if any parameter of an optimizer, or of the modules that it trains, has one.

    The modules have other parameters than the optimizer if the script has replaced them since
    `world.prepare`, of which `ParameterCheck` tells.
    """
    parameters = list(parameters_of(optimizer))
    for module in modules:
        parameters += module.parameters()
    return any(parameter.grad is not None for parameter in parameters)


def _needs_gradient(optimizer: Optimizer) -> bool:
    """Returns True if a step of an optimizer does nothing without a gradient, though it should.

    That is known of the optimizers of torch and Lockstep. Others may train without gradients, as
    evolution strategies do. An optimizer with frozen parameters only, or whose parameters are all
    on other ranks, has nothing to train for the time being.
    """
    if not is_of_torch_or_lockstep(optimizer):
        return False
    return any(parameter.requires_grad for parameter in parameters_of(optimizer))
