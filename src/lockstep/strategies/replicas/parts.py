"""A batch cut for the replicas of a module, and their outputs joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
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
            kind = f" of layout {leaf.layout}" if isinstance(leaf, Tensor) else ""
            raise DataError(
                f"a {type(leaf).__name__}{kind} as input of a module on {replicas} devices",
                "it holds samples, but is not a tensor that can be cut",
                "pass tensors, and pack them inside of the module's forward",
            )
        return leaf

    def look(tensor: Tensor) -> Tensor:
        if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
            refuse(tensor)
        elif _has(tensor, dim):
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


def listed(batch: Any, count: int) -> list[str]:
    """Lists and arrays without tensors that have one entry a sample, each in words."""
    if isinstance(batch, np.ndarray):
        return [f"an array of shape {batch.shape}"] if batch.shape[:1] == (count,) else []
    if isinstance(batch, Mapping):
        return [words for value in batch.values() for words in listed(value, count)]
    if not isinstance(batch, list | tuple):
        return []
    if len(batch) == count and all(isinstance(value, str | bytes | int | float) for value in batch):
        return [f"a {type(batch).__name__} of {count}"]
    return [words for value in batch for words in listed(value, count)]


def _has(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def part_of(batch: Any, dim: int, count: int, bounds: tuple[int, int], device: torch.device) -> Any:
    """The batch of one replica, on its device: of `count` samples those from begin to end."""
    begin, end = bounds

    def cut(tensor: Tensor) -> Tensor:
        if end - begin < count and _has(tensor, dim) and tensor.shape[dim] == count:
            cut_at = torch.narrow_copy if tensor.is_sparse else torch.narrow
            tensor = cut_at(tensor, dim, begin, end - begin)
        # To the CPU the next reader would not wait for a copy that does not block.
        return tensor.to(device, non_blocking=device.type == "cuda")

    return map_tensors(batch, cut)


def join(
    leaves: list[Any],
    *,
    sizes: Sequence[int],
    dim: int,
    device: torch.device,
    is_own: Callable[[Sequence[Tensor]], bool],
) -> Any:
    """What the replicas returned in one place of their outputs, as one; see `DataParallel`.

    Args:
        leaves: one a replica.
        sizes: how many samples each replica has computed.
        dim: of the samples.
        device: of the result.
        is_own: whether tensors are one parameter or buffer of the module, one a replica.

    Raises:
        UsageError: it differs between the replicas and is neither tensor nor mean.
    """
    first = leaves[0]
    mean = all(isinstance(leaf, float) for leaf in leaves) and len(set(leaves)) > 1
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        if is_own(leaves):
            return first.to(device)
        mean = _is_mean(leaves, sizes)
        if not mean and any(_has(leaf, dim) for leaf in leaves):
            return _cat(leaves, dim, device)
        leaves = [leaf.to(device) for leaf in leaves]
    if mean:
        count = sum(sizes)
        return sum(size / count * leaf for size, leaf in zip(sizes, leaves, strict=True))
    if all(_equal(leaf, leaves[0]) for leaf in leaves):
        return leaves[0]
    shown = f" of shape {tuple(first.shape)}" if isinstance(first, Tensor) else ""
    raise UsageError(
        f"a {type(first).__name__}{shown} returned by a module on {len(leaves)} devices",
        "it differs between the replicas, and nothing says how to make one of it",
        f"return tensors with one row a sample (along dimension {dim}), or floating-point means",
    )


def _is_mean(leaves: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Each one number, but not one a sample: `loss.mean()`, or `loss.mean().unsqueeze(0)`."""
    shapes = {tuple(leaf.shape) for leaf in leaves}
    number = shapes == {()} or (shapes == {(1,)} and max(sizes) > 1)
    return number and (leaves[0].is_floating_point() or leaves[0].is_complex())


def _cat(leaves: list[Tensor], dim: int, device: torch.device) -> Tensor:
    beside = set()
    for leaf in leaves:
        shape = list(leaf.shape)
        del shape[dim : dim + 1 or None]
        if leaf.shape != (0,):  # which torch joins with everything
            beside.add((leaf.dim(), *shape))
    if len(beside) > 1:
        shown = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise UsageError(
            f"tensors returned by a module on {len(leaves)} devices, joined along dimension {dim}",
            f"they have other shapes beside it: {shown}",
            "return the same shape whatever the samples are: squeeze named dimensions alone, as a "
            "part may be one sample, and pad to a length that does not depend on the part",
        )
    if device.type == "cuda" and all(leaf.is_cuda for leaf in leaves):
        # torch's own writes the parts to their places, without a second copy on the device.
        made: Tensor = gather(leaves, device, dim=dim)
        return made
    return torch.cat([leaf.to(device) for leaf in leaves], dim)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (TypeError, ValueError, RuntimeError):  # such as an array, which compares item by item
        return False
