"""A batch cut for the replicas of a module, and their outputs joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import gather

from lockstep.data.nest import map_tensors
from lockstep.errors import DataError, UsageError


def samples(batch: Any, dim: int, replicas: int) -> int:
    """How many samples a batch has: the size along `dim` of the tensors that are cut.

    0 where there are none to cut. Size 1 beside larger ones is for every sample.

    Raises:
        DataError: there are several replicas, and sizes that differ or a container of samples that
            is no tensor.
    """
    found: set[int] = set()

    def refuse(leaf: Any) -> Any:
        if replicas > 1 and not isinstance(leaf, nn.Module):
            raise DataError(
                f"a {type(leaf).__name__} as input of a module on {replicas} devices",
                "it holds samples, but is not a tensor that can be cut",
                "pass tensors, and pack them inside of the module's forward",
            )
        return leaf

    def look(tensor: Tensor) -> Tensor:
        if _has(tensor, dim):
            found.add(tensor.shape[dim])
        return tensor

    map_tensors(batch, look, refuse)
    counts = sorted(found - {1} or found)
    if len(counts) > 1 and replicas > 1:
        raise DataError(
            f"inputs of a module on {replicas} devices, cut along dimension {dim}",
            f"their sizes there are {', '.join(map(str, counts))}",
            "give all the same size, or size 1 where it is for every sample",
        )
    return counts[0] if counts else 0


def _has(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def part_of(batch: Any, dim: int, count: int, bounds: tuple[int, int], device: torch.device) -> Any:
    """The batch of one replica, on its device: of `count` samples those from begin to end."""
    begin, end = bounds

    def cut(tensor: Tensor) -> Tensor:
        if end - begin < count and _has(tensor, dim) and tensor.shape[dim] == count:
            tensor = tensor.narrow(dim, begin, end - begin)
        return tensor.to(device, non_blocking=True)

    return map_tensors(batch, cut)


def join(leaves: list[Any], *, weights: Sequence[float], dim: int, device: torch.device) -> Any:
    """What the replicas returned in one place of their outputs, as one; see `DataParallel`.

    Args:
        leaves: one a replica.
        weights: which part of all samples each replica has computed.
        dim: of the samples.
        device: of the result.

    Raises:
        UsageError: it differs between the replicas and is neither tensor nor mean.
    """
    first = leaves[0]
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        if _has(first, dim):
            return _cat(leaves, dim, device)
        leaves = [leaf.to(device) for leaf in leaves]
        if first.dim() == 0 and (first.is_floating_point() or first.is_complex()):
            return sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True))
    elif all(isinstance(leaf, float) for leaf in leaves):
        return sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True))
    if all(_equal(leaf, leaves[0]) for leaf in leaves):
        return leaves[0]
    shown = f" of shape {tuple(first.shape)}" if isinstance(first, Tensor) else ""
    raise UsageError(
        f"a {type(first).__name__}{shown} returned by a module on {len(leaves)} devices",
        "it differs between the replicas, and nothing says how to make one of it",
        f"return tensors with one row a sample (along dimension {dim}), or floating-point means",
    )


def _cat(tensors: list[Tensor], dim: int, device: torch.device) -> Tensor:
    if device.type == "cuda" and all(tensor.is_cuda for tensor in tensors):
        # torch's own writes the parts to their places, without a second copy on the device.
        made: Tensor = gather(tensors, device, dim=dim)
        return made
    return torch.cat([tensor.to(device) for tensor in tensors], dim)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (TypeError, ValueError, RuntimeError):  # such as an array, which compares item by item
        return False
