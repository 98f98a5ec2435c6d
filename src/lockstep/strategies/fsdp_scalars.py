"""Trains parameters without dimensions (*scalars*) in a model that is sharded by FSDP.

A scalar, such as CLIP's `logit_scale`, cannot be cut into shards. `fully_shard` leaves it out
(`ignored_params`), so every rank keeps the whole parameter, its whole gradient and its optimizer
state, as under DDP. Torch does not average the gradients of such parameters; the classes here do.

Communication: one small all-reduce of all scalar gradients in each global batch, and one that tells
which scalars any rank has used. A scalar that no rank has used keeps the gradient None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.communication import routing
from lockstep.session.delivery import cleared_gradients_error
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step
from lockstep.strategies.bit_sums import gradient_bit_sums
from lockstep.strategies.gradient_average import average_gradients
from lockstep.strategies.replication import make_buckets
from lockstep.strategies.virtual_ranks import Gradients, VirtualRankGradients, VirtualRankTree


def find_scalars(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a module that have no dimensions, by name."""
    scalars: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            scalars[name] = parameter
    return scalars


class AveragedScalars(Extension):
    """Averages the gradients of scalars over the ranks, in a run without virtual ranks.

    Args:
        root: the sharded model.
        scalars: its parameters without dimensions.
        step: the state of the current optimizer step.
    """

    def __init__(self, root: nn.Module, scalars: Sequence[nn.Parameter], step: Step) -> None:
        self._root = root
        self._scalars = list(scalars)
        self._step = step
        self._forward_since_average = False
        """True if a forward pass with gradients has run since the gradients were averaged."""
        self._had_gradient: list[bool] = []
        """For each scalar, True if it had a gradient after the latest micro-batch of a global batch
        that is not complete yet; empty if there was no such micro-batch."""
        root.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        """Records a forward pass with gradients, which all ranks make together."""
        if torch.is_grad_enabled():
            self._forward_since_average = True

    def begin(self, micro_batch: MicroBatch) -> None:
        """Forgets the gradients of a global batch that the loop has left early."""
        if micro_batch.first:
            self._had_gradient = []

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Raises UsageError if the script has cleared gradients within a global batch.

        The gradients of shards would still be there, because torch keeps them elsewhere.
        """
        for had_gradient, scalar in zip(self._had_gradient, self._scalars, strict=False):
            if had_gradient and scalar.grad is None:
                raise cleared_gradients_error()

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Averages the gradients after the last micro-batch of a global batch."""
        if self._step.micro_batch.last:
            self._average()
        else:
            self._had_gradient = [scalar.grad is not None for scalar in self._scalars]

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Averages the gradients of a loop that calls `loss.backward()`, not `world.backward`."""
        if self._root in modules and self._forward_since_average:
            self._average()

    def _average(self) -> None:
        """Replaces the gradients of scalars by their means over all ranks."""
        average_gradients(self._scalars)
        self._forward_since_average = False
        self._had_gradient = []


class SummedScalars(VirtualRankGradients):
    """Sums the gradients of scalars over virtual ranks, in the order of their tree.

    Args:
        scalars: the parameters without dimensions, by name.
        tree: the summation order of the run.
        step: the state of the current optimizer step.
    """

    def __init__(
        self, scalars: Mapping[str, nn.Parameter], tree: VirtualRankTree, step: Step
    ) -> None:
        super().__init__(list(scalars.values()), tree, step)
        self._scalars = dict(scalars)

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Completes the sum after the last backward pass of a global batch."""
        super().backward_ended(micro_batch)
        if self._step.micro_batch.last:
            self._move_gradients_to_sums(self._step.micro_batch)
            self._sum_over_processes(self._step.micro_batch)

    def gradient_bits(self) -> dict[str, Tensor]:
        """Returns sums over the bits of the gradients of the virtual rank that has just ended."""
        gradients: dict[str, Tensor] = {}
        for name, scalar in self._scalars.items():
            if scalar.grad is not None:
                gradients[name] = scalar.grad
        return dict(zip(gradients, gradient_bit_sums(gradients.values()), strict=True))

    @torch.no_grad()
    def _sum_over_processes(self, micro_batch: MicroBatch) -> None:
        """Writes the mean gradient of all virtual ranks to the scalars, on every process."""
        partial_sums = list(self._partial_sums)
        self._partial_sums.clear()
        is_used = self._find_used(partial_sums)

        sums = self.tree.sums(micro_batch.global_samples)
        scale = 1.0 / self.tree.num_virtual_ranks
        for scalars in make_buckets(self._parameters, attrgetter("device", "dtype")):
            indices = [self._index_in_module[id(scalar)] for scalar in scalars]
            partial_sums_of_bucket: list[Tensor] = []
            for gradients in partial_sums:  # one for each scalar of the module, or None
                gradients_in_bucket = [gradients[index] for index in indices]
                partial_sums_of_bucket.append(_stack(gradients_in_bucket, scalars[0]))

            means = torch.empty(len(scalars), dtype=scalars[0].dtype, device=scalars[0].device)
            wait = sums.start(partial_sums_of_bucket, total=means, scale=scale)
            wait()
            for index, scalar, mean in zip(indices, scalars, means, strict=True):
                scalar.grad = mean.clone() if is_used[index] else None

    def _find_used(self, partial_sums: Sequence[Gradients]) -> list[bool]:
        """Returns, for each scalar, True if any virtual rank has used it; on any process."""
        used_here: list[bool] = []
        for index in range(len(self._parameters)):
            used_here.append(any(partial_sum[index] is not None for partial_sum in partial_sums))

        used = torch.tensor(used_here, dtype=torch.uint8)
        routing.all_reduce(used, dist.ReduceOp.MAX)
        return [bool(flag) for flag in used.tolist()]


def _stack(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Returns the gradients of scalars as a vector. A missing gradient counts as zero.

    Args:
        gradients: the gradients.
        like: a tensor with the dtype and the device of the vector.
    """
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.stack([zero if gradient is None else gradient for gradient in gradients])
