"""Averages gradients over ranks by hand, where no wrapper of torch does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.process_group import carrier_device
from lockstep.errors import UsageError

_BUCKET_BYTES = 25 * 2**20


def average_gradients(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, ranks: int
) -> None:
    """Replaces every gradient by its mean over the ranks of a group.

    A gradient that a rank has not got counts as zero where another has it, and stays away where
    nobody has it. Communication: one byte a parameter, then one all-reduce a bucket of 25 MiB.

    Args:
        parameters: the same on all ranks, in the same order.
        group: the ranks.
        ranks: how many.

    Raises:
        UsageError: a gradient is sparse.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return
    has = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
    dist.all_reduce(has, dist.ReduceOp.MAX, group)
    if any(p.grad is not None and p.grad.layout != torch.strided for p in trained):
        raise UsageError(
            "an average of sparse gradients over pipelines side by side",
            "a layer was built with sparse=True",
            "leave sparse=True out, or use one pipeline: Pipeline(stages=<world size>)",
        )
    with torch.no_grad():
        for parameter, somewhere in zip(trained, has.tolist(), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in trained if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            carried = flat.to(carrier_device(flat.device, group))
            dist.all_reduce(carried, group=group)
            flat = carried.div_(ranks).to(flat.device)
            parts = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, each of one dtype and device."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        alike = bucket and (gradient.dtype, gradient.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or size >= _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket
