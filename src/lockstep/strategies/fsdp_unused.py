"""Parameters of a sharded model that no rank has used keep the gradient that they had, mostly None.

Under `find_unused_parameters` every rank sends zeros for the parameters that it has not used, so
that all ranks average the same ones. A parameter that no rank has used would then have a gradient
of zeros, and to an optimizer that is a gradient: weight decay shrinks the weights, and momentum
moves them on. On one device the gradient is None, and the optimizer leaves the parameter alone. So
the ranks tell each other which parameters they have used, and the zeros of the others are dropped.

Communication: one all-reduce of a byte a parameter, once in a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from lockstep.communication import routing


class UnusedParameters:
    """Finds out which parameters were used, and drops the zeros that the others got.

    A round is what is averaged together: all backward passes of one global batch.

    Args:
        shards: the parameters that have the averaged gradients.
        whole: for each of them, the parameter that forward passes compute with.
    """

    def __init__(self, shards: Sequence[nn.Parameter], whole: Sequence[nn.Parameter]) -> None:
        self._shards = list(shards)
        self._used_here = [False] * len(self._shards)
        self._in_round = False
        self._forward_since_round = False
        self._gradients_before: list[TensorWeakRef | None] = []
        self._remember_gradients()
        for number, parameter in enumerate(whole):
            _on_gradient(parameter, self._marker(number))

    def before_forward(self) -> None:
        """To be called before each forward pass with gradients, on all ranks."""
        self._forward_since_round = True

    def before_backward(self) -> None:
        """To be called before each backward pass, as far as it goes through `world.backward`."""
        if not self._in_round:
            self._in_round = True
            self._remember_gradients()

    def before_step(self) -> None:
        """Ends a round whose backward passes were those of `loss.backward()`."""
        if self._forward_since_round:
            self.end_round()

    def end_round(self) -> None:
        """Drops the zeros, when gradients were averaged; to be called on all ranks."""
        used = torch.tensor(self._used_here, dtype=torch.uint8)
        routing.all_reduce(used, dist.ReduceOp.MAX)
        rows = zip(self._shards, self._gradients_before, used.tolist(), strict=True)
        for shard, before, used_somewhere in rows:
            gradient = shard.grad
            # Zeros that were added to an earlier gradient have left it as it was.
            was_there = before is not None and before() is gradient
            if not used_somewhere and not was_there:
                shard.grad = None
        self.forget_round()

    def forget_round(self) -> None:
        """Begins anew, where the gradients of a round were dropped."""
        self._used_here = [False] * len(self._shards)
        self._in_round = False
        self._forward_since_round = False
        self._remember_gradients()

    def _remember_gradients(self) -> None:
        """Keeps weak references: `zero_grad` must free the memory of a gradient at once."""
        gradients = [shard.grad for shard in self._shards]
        self._gradients_before = [None if g is None else TensorWeakRef(g) for g in gradients]

    def _marker(self, number: int) -> Callable[[Tensor], None]:
        def mark(parameter: Tensor) -> None:
            self._used_here[number] = True

        return mark


def _on_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Calls a hook when autograd has given a parameter a gradient, now or once it is unfrozen."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses hooks of frozen parameters
    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trains)
