"""A global batch under way on a rank of a pipeline: what its training loop has brought so far.

Each turn of the loop brings the inputs of one micro-batch, when it calls the model, and then its
loss, when it calls `world.backward`. An *action* (`schedule.Action`) is a forward or backward pass
of a micro-batch through a stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lockstep.session.step import StepKey
from lockstep.strategies.gradient_average import GradientAverage
from lockstep.strategies.pipeline.input_kind import Arguments, InputKind
from lockstep.strategies.pipeline.schedule import Action
from lockstep.strategies.pipeline.wire import PostedMessage


class ModelCall(NamedTuple):
    """A call of the model for one micro-batch."""

    arguments: Arguments
    kind: InputKind | None


class BoundaryTensors(NamedTuple):
    """The tensors at both ends of a stage, which the backward pass of a micro-batch needs."""

    received: list[Tensor]
    sent: list[Tensor]
    """The tensors that get a gradient."""


@dataclass
class GlobalBatch:
    """A global batch under way."""

    key: StepKey
    """Identifies the global batch."""
    num_micro_batches: int
    actions: deque[Action]
    """The actions of this rank that are not done yet, in order."""
    requires_grad: tuple[bool, ...]
    """`requires_grad` of each of the model's parameters."""
    training: bool
    """True if the model was in training mode at the beginning."""
    seed: int
    """The seed of the random numbers that its forward passes draw."""
    calls: list[ModelCall] = field(default_factory=list)
    """The calls of the model, one per micro-batch."""
    loss_backwards: list[Callable[[], None] | None] = field(default_factory=list)
    """One entry per call of `world.backward`: a function that runs the backward pass of the loss,
    or None if the loss is on another rank or its backward pass was run already."""
    boundary_tensors: dict[tuple[int, int], BoundaryTensors] = field(default_factory=dict)
    """The tensors of each forward pass that waits for its backward pass, by stage and
    micro-batch."""
    posted_gradients: dict[int, PostedMessage] = field(default_factory=dict)
    """Receives of gradients that were started ahead of time, by micro-batch."""
    average: GradientAverage | None = None
    """Averages the gradients over several pipelines; set when the last micro-batch has come."""

    def is_ready(self, action: Action) -> bool:
        """Returns True if the training loop has brought what an action needs."""
        if action.forward:
            return action.micro_batch < len(self.calls)
        return action.micro_batch < len(self.loss_backwards)
