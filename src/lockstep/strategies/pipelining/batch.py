"""A global batch under way on a rank of a pipeline: what its training loop has brought so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lockstep.runtime.step import Pass
from lockstep.strategies.pipelining.order import Action
from lockstep.strategies.pipelining.shapes import Arguments
from lockstep.strategies.pipelining.wire import Expected


@dataclass
class Batch:
    """A global batch under way."""

    of: tuple[Pass, int]
    """Tells it from others."""
    pieces: int
    """Its micro-batches."""
    actions: tuple[Action, ...]
    flags: tuple[bool, ...]
    """Which of the model's parameters are trained."""
    training: bool
    """Whether the model was in training mode at the beginning."""
    seed: int
    next: int = 0
    """The first action that is not done."""
    inputs: list[Arguments] = field(default_factory=list)
    kinds: list[Any] = field(default_factory=list)
    losses: list[Callable[[], None]] = field(default_factory=list)
    """The backward passes of losses, of the micro-batches that `world.backward` was called for."""
    kept: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    """By stage and micro-batch: what came in, and what went out and gets a gradient."""
    expected: dict[int, list[Expected]] = field(default_factory=dict)
    """Gradients that were asked for, by micro-batch."""

    def has(self, action: Action) -> bool:
        """Whether the training loop has brought what it needs."""
        return action.micro_batch < len(self.inputs if action.forward else self.losses)
