"""BatchNorm over the samples of all replicas of a `DataParallel` module.

The replicas meet at every BatchNorm layer (`parallel_apply.ReplicaBarrier`). One of them computes
the mean and the variance of all replicas' samples, in two passes over the inputs on their devices,
so that only C numbers per replica (C is the number of channels) are sent between devices. All of
this is plain differentiable torch, so autograd computes the gradient through the statistics (Ioffe
and Szegedy, "Batch Normalization", arXiv 1502.03167, section 3), even for parts of different sizes.

`strategies.sync_batchnorm` does the same over processes, by collectives. Replicas could not meet in
its backward pass, because on the CPU that runs in a single thread, whichever threads ran the
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.strategies import sync_batchnorm
from lockstep.strategies.data_parallel.parallel_apply import current_replica
from lockstep.strategies.sync_batchnorm import BatchNormNames, per_channel
from lockstep.torch_compat import BatchNorm, in_backward_pass


class BatchNormOverReplicas:
    """The `forward` of a BatchNorm layer with statistics over the samples of all replicas.

    With one replica, or in a mode without statistics of the batch, it is torch's own BatchNorm, bit
    for bit. The layer of the first replica updates its running statistics.
    """

    def __init__(self, layer: BatchNorm, name: str) -> None:
        self.layer: Any = layer
        self.name = name

    @property
    def uses_batch_statistics(self) -> bool:
        """True if the layer, in its present mode, normalises by statistics of the batch."""
        return self.layer.training or self.layer.running_mean is None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises `x`, (N, C) or (N, C, ...), by the statistics of all replicas' samples.

        Raises:
            UsageError: activation checkpointing computes the layer again in a backward pass.
        """
        layer = self.layer
        replica = current_replica.get()  # None if replicas do not run in parallel
        if replica is None or not self.uses_batch_statistics:
            # This layer runs alone: in a forward pass that does not need the other replicas, or in
            # a backward pass, in which activation checkpointing runs the forward pass again.
            if in_backward_pass():
                self._check_can_run_alone_again()
            else:
                layer.last_forward_met_replicas = False
            return BatchNorm.forward(layer, x)

        layer.last_forward_met_replicas = True
        sync_batchnorm.check_input(layer, x, self.name)
        output: Tensor = replica.barrier.meet(
            replica.position, self.name, (layer, x), normalise_over_replicas
        )
        return output

    def _check_can_run_alone_again(self) -> None:
        """Raises UsageError if the latest forward pass took statistics over all replicas.

        Called when activation checkpointing runs the layer again, alone, in the backward pass. It
        expects the result of the forward pass, which cannot be computed without the other replicas.
        """
        if self.uses_batch_statistics and self.layer.last_forward_met_replicas:
            raise UsageError(
                "activation checkpointing of a block with BatchNorm under strategy 'dp'",
                f"{self.name!r} takes statistics over all replicas, and in the backward pass "
                "each block is computed again alone",
                "checkpoint blocks without BatchNorm, use strategy='ddp', or give each replica "
                "statistics of its own with sync_batchnorm=False",
            )


def synchronise_batchnorm(module: nn.Module) -> BatchNormNames:
    """Makes BatchNorm layers in a module take their statistics from the samples of all replicas.

    As in `sync_batchnorm.convert`, layers with their own forward are left unchanged. A module may
    come here twice: its layers then have a `BatchNormOverReplicas` as their own forward already.

    Returns:
        The names of the layers that were converted, and of those that were not.
    """
    names = BatchNormNames([], [])
    for name, part in module.named_modules():
        if not isinstance(part, BatchNorm):
            continue

        layer: Any = part
        is_sync_batchnorm = isinstance(layer, sync_batchnorm.SyncBatchNorm)
        is_of_torch = is_sync_batchnorm or sync_batchnorm.has_no_method_of_user(layer)
        was_converted = isinstance(vars(layer).get("forward"), BatchNormOverReplicas)
        if is_of_torch:
            layer.forward = BatchNormOverReplicas(layer, name)
            layer.last_forward_met_replicas = False  # True after a forward pass with all replicas
            names.converted.append(name)
        elif was_converted:  # an earlier call has given the layer its forward
            names.converted.append(name)
        else:  # the user's class has its own forward
            names.left_alone.append(name)

    return names


def normalise_over_replicas(inputs: Sequence[tuple[Any, Tensor]]) -> list[Tensor]:
    """Normalises the inputs of all replicas by the statistics of all their samples.

    Args:
        inputs: for each replica, its copy of the layer and the input of the layer. The layer of the
            first replica updates its running statistics.

    Returns:
        The outputs of the replicas.

    Raises:
        DataError: there is only one value per channel.
    """
    first_layer, first_x = inputs[0]
    home = first_x.device  # the device of the statistics
    dims = sync_batchnorm.all_but_channels(first_x)
    dtype = sync_batchnorm.statistics_dtype(first_x)

    # The number n of values per channel on all replicas.
    num_values = sum(x.numel() for _, x in inputs) // first_layer.num_features
    if num_values == 1:
        raise sync_batchnorm.one_value_error(
            f"batch normalisation over a batch on {len(inputs)} replicas",
            "all replicas together have 1",
        )

    # mean = sum(x) / n, variance = sum((x - mean) ** 2) / n, over the replicas: both (C,). They are
    # part of autograd's graph, so gradients come back through them.
    sums = [x.sum(dims, dtype=dtype) for _, x in inputs]
    mean = _sum_on(home, sums) / num_values
    deviations = [x - per_channel(mean, x) for _, x in inputs]
    squares = [deviation.square().sum(dims) for deviation in deviations]
    variance = _sum_on(home, squares) / num_values

    if first_layer.training and first_layer.track_running_stats:
        # A kernel fills this tensor. `torch.tensor(number)` would be copied to the GPU and wait.
        total = torch.full((), num_values, dtype=torch.float64, device=home)
        sync_batchnorm.update_running_stats(first_layer, mean.detach(), variance.detach(), total)

    inverse_std = (variance + first_layer.eps).rsqrt()

    # output = (x - mean) / sqrt(variance + eps) * weight + bias
    outputs: list[Tensor] = []
    for (layer, x), deviation in zip(inputs, deviations, strict=True):
        scale = inverse_std.to(x.device)
        if layer.weight is not None:
            scale = scale * layer.weight
        output = deviation * per_channel(scale, x)
        if layer.bias is not None:
            output = output + per_channel(layer.bias, x)
        outputs.append(output.to(x.dtype))

    return outputs


def _sum_on(device: torch.device, summands: Sequence[Tensor]) -> Tensor:
    """Returns the sum of tensors on several devices, on the given device."""
    return torch.stack([summand.to(device) for summand in summands]).sum(0)
