"""Removes the gradients of parameters that no rank has used, for models that are sharded by FSDP.

Under `find_unused_parameters` every rank sends zeros for the parameters that it has not used, so
that all ranks average the same parameters. A parameter that no rank has used would then have a
gradient of zeros, with which an optimizer still changes it, by weight decay or momentum. On one
device its gradient is None, and the optimizer skips it. So the ranks tell each other which
parameters they have used, and the other gradients are removed.

A *round* consists of the backward passes of one global batch, whose gradients are averaged
together. A *shard* is this rank's part of a parameter. Communication: one all-reduce in each round,
of one byte for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from lockstep.communication import routing


class UnusedParameters:
    """Finds the parameters that no rank has used in a round, and removes their gradients.

    Args:
        shards: the parameters that get the averaged gradients.
        whole_parameters: the parameters that forward passes use, in the same order.
    """

    def __init__(
        self, shards: Sequence[nn.Parameter], whole_parameters: Sequence[nn.Parameter]
    ) -> None:
        self._shards = list(shards)
        self._used_here = [False] * len(self._shards)
        """For each parameter, True if this rank has used it in the current round."""
        self._round_has_begun = False
        """True if a backward pass of the current round has run."""
        self._forward_since_round = False
        """True if a forward pass has run since the latest round ended."""
        self._gradients_before: list[TensorWeakRef | None] = []
        """A weak reference to the gradient that each shard had before the current round; None if it
        had none, as is usual."""
        self._remember_gradients()
        for index, parameter in enumerate(whole_parameters):
            _register_gradient_hook(parameter, self._make_hook(index))

    def before_forward(self) -> None:
        """Records a forward pass; called before each forward pass with gradients, on all ranks."""
        self._forward_since_round = True

    def before_backward(self) -> None:
        """Begins a round if none is under way; called before each pass of `world.backward`."""
        if not self._round_has_begun:
            self._round_has_begun = True
            self._remember_gradients()

    def before_step(self) -> None:
        """Ends the round of a loop that calls `loss.backward()` instead of `world.backward`."""
        if self._forward_since_round:
            self.end_round()

    def end_round(self) -> None:
        """Ends a *round*, the backward passes of one global batch.

        Removes the gradients of parameters that no rank has used in the round. All ranks call this
        together, after the gradients have been averaged.
        """
        used = torch.tensor(self._used_here, dtype=torch.uint8)
        routing.all_reduce(used, dist.ReduceOp.MAX)
        used_anywhere = used.tolist()
        for index, shard in enumerate(self._shards):
            if not used_anywhere[index] and not self._has_earlier_gradient(index):
                shard.grad = None

        self.forget_round()

    def _has_earlier_gradient(self, index: int) -> bool:
        """Returns True if a shard still has the gradient that it had before the round.

        The round has added zeros to an earlier gradient, which is kept. If there was none, the
        round has created a gradient of zeros.
        """
        weak_reference = self._gradients_before[index]
        gradient_before = None if weak_reference is None else weak_reference()
        return gradient_before is not None and gradient_before is self._shards[index].grad

    def forget_round(self) -> None:
        """Begins a new round. Also called if the loop has left a global batch early."""
        self._used_here = [False] * len(self._shards)
        self._round_has_begun = False
        self._forward_since_round = False
        self._remember_gradients()

    def _remember_gradients(self) -> None:
        """Remembers the present gradients of the shards.

        The references are weak, so that `zero_grad` can free the memory of a gradient at once.
        """
        self._gradients_before = []
        for shard in self._shards:
            reference = None if shard.grad is None else TensorWeakRef(shard.grad)
            self._gradients_before.append(reference)

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        """Returns a hook that notes that the parameter with this index was used."""

        def note_use(parameter: Tensor) -> None:
            self._used_here[index] = True

        return note_use


def _register_gradient_hook(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Registers a hook that torch calls when autograd has given a parameter a gradient.

    It is also registered on frozen parameters, because the user may unfreeze them later.
    """
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses hooks of frozen parameters
    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(is_trained)
