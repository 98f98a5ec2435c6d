"""The state of a global batch that a rank of a pipeline is computing.

Each turn of the training loop brings one micro-batch: first its inputs, when the loop calls the
model, and then its loss, when the loop calls `world.backward`. An *action* (`schedule.Action`) is a
forward or backward pass of one micro-batch through one stage.
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
    """One call of the model, for one micro-batch."""

    arguments: Arguments
    kind: InputKind | None


class BoundaryTensors(NamedTuple):
    """The tensors at both ends of a stage, which the backward pass of a micro-batch needs."""

    received: list[Tensor]
    """The tensors that came from the previous stage."""
    sent: list[Tensor]
    """Those tensors that were sent to the next stage which need a gradient."""


@dataclass
class GlobalBatch:
    """A global batch that is being computed."""

    key: StepKey
    """Identifies the optimizer step that the global batch belongs to."""
    num_micro_batches: int
    actions: deque[Action]
    """The remaining actions of this rank, in order."""
    requires_grad: tuple[bool, ...]
    """`requires_grad` of each of the model's parameters."""
    training: bool
    """True if the model was in training mode when the global batch began."""
    seed: int
    """The random seed of its forward passes."""
    calls: list[ModelCall] = field(default_factory=list)
    """The calls of the model so far, one for each micro-batch."""
    backward_of_given_losses: list[Callable[[], None] | None] = field(default_factory=list)
    """One entry for each call of `world.backward`: a function that runs the backward pass of the
    loss. None if the loss is on another rank, or if its backward pass was run already."""
    boundary_tensors: dict[tuple[int, int], BoundaryTensors] = field(default_factory=dict)
    """For each forward pass without its backward pass, the tensors at both ends of the stage, by
    stage and micro-batch."""
    posted_gradients: dict[int, PostedMessage] = field(default_factory=dict)
    """Messages with gradients whose receives were started early, by micro-batch."""
    gradient_averaging: GradientAverage | None = None
    """Averages the gradients over several pipelines; set by the loss of the last micro-batch."""

    @property
    def num_losses_given(self) -> int:
        """How many micro-batches have got their loss: those from 0 to this number - 1."""
        return len(self.backward_of_given_losses)

    def give_loss(self, run_backward: Callable[[], None] | None) -> int:
        """Adds the loss of the next micro-batch, and returns the number of the micro-batch.

        Args:
            run_backward: runs the backward pass of the loss; None if the loss is on another rank.
        """
        self.backward_of_given_losses.append(run_backward)
        return self.num_losses_given - 1

    def take_backward(self, micro_batch: int) -> Callable[[], None] | None:
        """Returns the function of a micro-batch, and forgets it: it holds the graph of the loss."""
        run_backward = self.backward_of_given_losses[micro_batch]
        self.backward_of_given_losses[micro_batch] = None
        return run_backward

    def is_ready(self, action: Action) -> bool:
        """Returns True if the training loop has brought what an action needs.

        A forward pass needs the call of the model for its micro-batch, a backward pass needs the
        loss.
        """
        if action.forward:
            return action.micro_batch < len(self.calls)
        return action.micro_batch < self.num_losses_given
