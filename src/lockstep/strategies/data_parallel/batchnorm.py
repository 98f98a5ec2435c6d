"""BatchNorm over the samples of all replicas of one forward pass, in one process.

The replicas meet at every layer (`meeting`). There the mean and the variance of all their samples
are computed, in two passes over what lies where: only C numbers a replica travel between devices.
All of it is plain differentiable torch, so that autograd gives the gradient through the statistics
(Ioffe and Szegedy, "Batch Normalization", arXiv 1502.03167, section 3) for uneven parts as well.

`sync_batchnorm` does the same over processes, by collectives. A backward pass on the CPU runs in
one thread, whatever the forward pass ran in, so replicas cannot meet there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.distributed.torch_compat import BatchNorm
from lockstep.errors import DataError, UsageError
from lockstep.strategies import sync_batchnorm
from lockstep.strategies.data_parallel.threads import place
from lockstep.strategies.sync_batchnorm import SyncBatchNorm, _Moments


class ReplicaBatchNorm(SyncBatchNorm):
    """A SyncBatchNorm that meets the other replicas of its forward pass instead of other ranks.

    Where it runs outside of several replicas it is torch's own BatchNorm, bit for bit. Wherever it
    would take statistics of its batch, which is in training mode and where it tracks no running
    statistics, they are those of the samples of all replicas. The first replica's layer updates
    its running statistics.
    """

    _name: str
    _met = False
    """Whether the last forward pass took statistics over several replicas."""

    @property
    def meets(self) -> bool:
        """Whether the present mode takes statistics of the batch."""
        return self.training or self.running_mean is None

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `x`, (N, C) or (N, C, ...), by the statistics of all replicas' samples."""
        here = place()
        if here is None or not self.meets:
            self._check_not_recomputed()
            return BatchNorm.forward(self, x)
        self._met = True
        self._check_input_dim(x)
        output: Tensor = here.exchange(self._name, _Brought(self, x), _normalise)
        return output

    def _check_not_recomputed(self) -> None:
        # Private: torch's own checkpointing asks the same function. -1: not in a backward pass.
        if torch._C._current_graph_task_id() == -1:
            self._met = False
        elif self._met and self.meets:
            raise UsageError(
                "activation checkpointing of a block with BatchNorm under strategy 'dp'",
                f"{self._name!r} takes statistics over all replicas, and in the backward pass each "
                "block is computed again alone",
                "checkpoint blocks without BatchNorm, use strategy='ddp', or give each replica "
                "statistics of its own with sync_batchnorm=False",
            )


class ReplicaBatchNorm1d(ReplicaBatchNorm, nn.BatchNorm1d):
    """Still an `nn.BatchNorm1d`: a script that freezes these goes on finding it."""


class ReplicaBatchNorm2d(ReplicaBatchNorm, nn.BatchNorm2d):
    """Still an `nn.BatchNorm2d`."""


class ReplicaBatchNorm3d(ReplicaBatchNorm, nn.BatchNorm3d):
    """Still an `nn.BatchNorm3d`."""


_KINDS = (ReplicaBatchNorm1d, ReplicaBatchNorm2d, ReplicaBatchNorm3d)


class _Brought(NamedTuple):
    """By one replica."""

    layer: ReplicaBatchNorm
    x: Tensor


def _normalise(brought: Sequence[_Brought]) -> list[Tensor]:
    """The outputs of all replicas; the first one's layer updates its running statistics."""
    first, device = brought[0].layer, brought[0].x.device
    dtype = torch.promote_types(brought[0].x.dtype, torch.float32)
    dims = [d for d in range(brought[0].x.dim()) if d != 1]
    total = sum(x.numel() for _, x in brought) // first.num_features
    if total == 1:
        raise DataError(
            f"batch normalisation over a batch on {len(brought)} replicas",
            "Expected more than 1 value per channel when training, and all replicas together have "
            "1",
            "use a larger batch, drop a last batch of one sample, or call .eval()",
        )
    mean = sum_on(device, [x.sum(dims, dtype=dtype) for _, x in brought]) / total
    deviations = [x - _per_channel(mean, x) for _, x in brought]
    variance = sum_on(device, [d.square().sum(dims) for d in deviations]) / total
    if first.training and first.track_running_stats:
        count = torch.tensor(total, dtype=torch.float64, device=device)
        first._update_running_stats(_Moments(mean.detach(), variance.detach(), count, None))
    scale = (variance + first.eps).rsqrt()
    outputs = []
    for (layer, x), deviation in zip(brought, deviations, strict=True):
        own = scale.to(x.device) if layer.weight is None else scale.to(x.device) * layer.weight
        output = deviation * _per_channel(own, x)
        if layer.bias is not None:
            output = output + _per_channel(layer.bias, x)
        outputs.append(output.to(x.dtype))
    return outputs


def sum_on(device: torch.device, parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape that lie on several devices, on `device`."""
    return torch.stack([part.to(device) for part in parts]).sum(0)


def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.to(x.device).view(1, -1, *[1] * (x.dim() - 2))


def convert(module: nn.Module) -> tuple[list[str], list[str]]:
    """Turns every torch BatchNorm and SyncBatchNorm in `module` into a ReplicaBatchNorm, in place.

    Returns:
        The names of the layers that meet now, and of those left alone because they have a forward
        of their own (see `sync_batchnorm.convert`).
    """
    left = sync_batchnorm.convert(module).left
    names = []
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm):
            before = layer._original.layer_class if layer._original else SyncBatchNorm
            kinds = (k for k in _KINDS if issubclass(before, k.__bases__[1]))
            layer.__class__ = next(kinds, ReplicaBatchNorm)
            layer._name = name
            names.append(name)
    return names, list(left)
