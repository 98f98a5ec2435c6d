"""Which optimizers are in their `step` right now."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

from torch.optim import Optimizer


class _RunningStep(NamedTuple):
    """An optimizer whose `step` is running."""

    optimizer: Optimizer
    frame: FrameType
    """The frame of the call stack in which the step runs."""


class RunningSteps:
    """The optimizers whose `step` is running: two, if one has called another one."""

    def __init__(self) -> None:
        self._running: list[_RunningStep] = []

    def begin(self, optimizer: Optimizer) -> None:
        """Records that a step begins. Called by torch's hook before the step."""
        self._drop_failed()
        self._running.append(_RunningStep(optimizer, _frame_of_step()))

    def end(self, optimizer: Optimizer) -> None:
        """Records that a step has ended, and with it those that it has called."""
        while self._running:
            ended = self._running.pop()
            if ended.optimizer is optimizer:
                return

    def count(self) -> int:
        """Returns how many optimizers are in their step."""
        self._drop_failed()
        return len(self._running)

    def _drop_failed(self) -> None:
        """Drops steps that have ended by an exception, which torch does not tell its hooks.

        A script may catch the exception and train on. Such a step is recognized by its frame, which
        is no longer on the call stack.
        """
        if not self._running:
            return

        frames_on_stack = set()
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frames_on_stack.add(frame)
            frame = frame.f_back

        self._running = [step for step in self._running if step.frame in frames_on_stack]


def _frame_of_step() -> FrameType:
    """Returns the frame in which torch calls the hooks of an optimizer step, and the step itself.

    Without such a frame it is the outermost one, which stays on the call stack.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        if frame.f_globals.get("__name__") == "torch.optim.optimizer":
            break
        frame = frame.f_back
    return frame
