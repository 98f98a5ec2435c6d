"""Divides a batch among replicas, and joins the outputs of the replicas into one.

These are torch's `scatter` and `gather`, for parts of different sizes. A *leaf* is anything in a
batch or an output that is not a container. Tensors of samples are split along one dimension, `dim`,
and all other leaves are passed to every replica. Outputs are joined leaf by leaf: tensors of
samples are concatenated, and means are weighted by the number of samples of their replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import gather

from lockstep.batch.pytree import is_opaque, leaves, map_tensors
from lockstep.errors import DataError, UsageError
from lockstep.wording import describe_type, with_article


def count_samples(batch: Any, dim: int, num_replicas: int) -> int:
    """Returns the number of samples in a batch: the size of its tensors along `dim`.

    A tensor of size 1 there, beside larger ones, is not split, since it belongs to every sample.
    The result is 0 if there is nothing to split. With one replica nothing is split, so the sizes
    may differ, and the smallest one is returned. For example, along `dim`:

        sizes 8, 8 and 1 -> 8      sizes 8 and 4, several replicas -> an error
        sizes 1 and 1    -> 1      sizes 8 and 4, one replica      -> 4

    Raises:
        DataError: there are several replicas, and the sizes differ, or the batch has an object that
            contains samples but cannot be split.
    """
    sizes: set[int] = set()
    for leaf in leaves(batch):
        if num_replicas > 1:
            _check_can_be_split(leaf, num_replicas)
        if _is_splittable_tensor(leaf) and has_dimension(leaf, dim):
            sizes.add(leaf.shape[dim])

    # Tensors of size 1 belong to every sample, unless all have this size.
    if len(sizes) > 1:
        sizes.discard(1)
    sizes_differ = len(sizes) > 1
    if sizes_differ and num_replicas > 1:
        shown = ", ".join(str(size) for size in sorted(sizes))
        raise DataError(
            f"inputs of a module on {num_replicas} devices, cut along dimension {dim}",
            f"their sizes there are {shown}",
            "give all the same size, or size 1 where it is for every sample",
        )
    return min(sizes, default=0)


def _is_splittable_tensor(leaf: Any) -> bool:
    """Returns True for a dense or COO tensor; False for a nested one and anything else."""
    if not isinstance(leaf, Tensor):
        return False
    return not leaf.is_nested and leaf.layout in (torch.strided, torch.sparse_coo)


def _check_can_be_split(leaf: Any, num_replicas: int) -> None:
    """Raises DataError for a leaf that has samples but cannot be split, such as a graph batch."""
    if isinstance(leaf, Tensor):
        kind = f"{type(leaf).__name__} of layout {leaf.layout}"
        is_allowed = _is_splittable_tensor(leaf)
    else:
        kind = type(leaf).__name__
        # A module contains no samples, so it is passed on as a whole.
        contains_samples = is_opaque(leaf) and not isinstance(leaf, nn.Module)
        is_allowed = not contains_samples

    if not is_allowed:
        raise DataError(
            f"{with_article(kind)} as input of a module on {num_replicas} devices",
            "it holds samples, but is not a tensor that can be cut",
            "pass tensors, and pack them inside of the module's forward",
        )


def has_dimension(tensor: Tensor, dim: int) -> bool:
    """Returns True if the tensor has this dimension, which may be negative."""
    return -tensor.dim() <= dim < tensor.dim()


def scatter(
    batch: Any, dim: int, num_samples: int, begin: int, end: int, device: torch.device
) -> Any:
    """Returns one replica's part of a batch, on the device of the replica.

    Args:
        batch: the inputs of a forward pass.
        dim: the dimension of the samples.
        num_samples: the number of samples in the batch. Tensors of another size along `dim` are not
            split.
        begin: the first sample of the part.
        end: the sample after the last one of the part.
        device: the device of the replica.
    """
    part = _Part(dim, num_samples, begin, size=end - begin)
    return map_tensors(batch, lambda tensor: _take_part(tensor, part, device))


class _Part(NamedTuple):
    """One replica's part of the samples of a batch."""

    dim: int
    """The dimension of the samples."""
    num_samples: int
    """The number of samples in the whole batch."""
    begin: int
    """The first sample of the part."""
    size: int
    """The number of samples in the part."""


def _take_part(tensor: Tensor, part: _Part, device: torch.device) -> Tensor:
    """Returns a part of the samples of a tensor, on a device.

    A tensor that does not hold samples is returned as a whole.
    """
    dim = part.dim
    holds_samples = has_dimension(tensor, dim) and tensor.shape[dim] == part.num_samples
    is_cut = holds_samples and part.size < part.num_samples
    if is_cut and tensor.is_sparse:  # `narrow` makes a view, which sparse tensors do not have
        tensor = torch.narrow_copy(tensor, dim, part.begin, part.size)
    elif is_cut:
        tensor = torch.narrow(tensor, dim, part.begin, part.size)

    # A copy to the CPU must block, because nothing waits for it before the tensor is read.
    return tensor.to(device, non_blocking=device.type == "cuda")


def gather_leaf(
    leaves: list[Any],
    *,
    sizes: Sequence[int],
    dim: int,
    device: torch.device,
    state_numbers: Sequence[Mapping[int, int]],
) -> Any:
    """Joins what the replicas returned at one place of their outputs; see `DataParallel`.

    Args:
        leaves: the leaf of each replica.
        sizes: the number of samples of each replica.
        dim: the dimension of the samples.
        device: the device of the result.
        state_numbers: for each replica, a number for each of its parameters and buffers, by the
            `id` of the tensor. Copies of the same parameter have the same number, so a parameter
            that every replica returns can be recognised.

    Raises:
        UsageError: the leaves differ, and are neither tensors of samples nor means.
    """
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        if _is_same_state(leaves, state_numbers):  # a parameter that was returned as it is
            return leaves[0].to(device)
        # Means come before rows: a tensor of shape (1,) that a replica returns for several samples
        # is a mean, although it looks like one row.
        if _are_means(leaves, sizes):
            return _weighted_mean([leaf.to(device) for leaf in leaves], sizes)
        if any(has_dimension(leaf, dim) for leaf in leaves):  # rows of samples
            return _concatenate(leaves, dim, device)

        # Other tensors, such as counters, must be equal. They can only be compared on one device.
        return _the_equal_leaf([leaf.to(device) for leaf in leaves], dim)

    # Python floats are means. Equal ones are not averaged, because rounding could change them.
    are_different_floats = all(isinstance(leaf, float) for leaf in leaves) and len(set(leaves)) > 1
    if are_different_floats:
        return _weighted_mean(leaves, sizes)

    return _the_equal_leaf(leaves, dim)


def _the_equal_leaf(leaves: Sequence[Any], dim: int) -> Any:
    """Returns the leaf of the first replica, if all replicas have returned an equal one.

    Raises:
        UsageError: the leaves differ.
    """
    first = leaves[0]
    if all(_are_equal(leaf, first) for leaf in leaves):
        return first

    shape = f" of shape {tuple(first.shape)}" if isinstance(first, Tensor) else ""
    raise UsageError(
        f"{describe_type(first)}{shape} returned by a module on {len(leaves)} devices",
        "it differs between the replicas, and nothing says how to make one of it",
        f"return tensors with one row a sample (along dimension {dim}), or floating-point means",
    )


def _is_same_state(leaves: Sequence[Tensor], state_numbers: Sequence[Mapping[int, int]]) -> bool:
    """Returns True if every replica returned its copy of the same parameter or buffer.

    Args:
        leaves: the leaf of each replica.
        state_numbers: for each replica, the number of each of its parameters and buffers, by the
            `id` of the tensor. It is the same for all copies of a parameter.
    """
    numbers: set[int] = set()
    for leaf, number_of_id in zip(leaves, state_numbers, strict=True):
        number = number_of_id.get(id(leaf))
        if number is None:  # the leaf is no parameter or buffer of this replica
            return False
        numbers.add(number)

    return len(numbers) == 1


def _are_means(leaves: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Returns True if each replica returned a single number that is a mean, such as `loss.mean()`.

    A tensor of shape (1,) is a mean, for example `loss.mean().unsqueeze(0)`, unless every replica
    has a single sample; then it is a row of that sample.
    """
    shapes = {tuple(leaf.shape) for leaf in leaves}
    is_scalar = shapes == {()}
    is_vector_of_one_mean = shapes == {(1,)} and max(sizes) > 1
    if not is_scalar and not is_vector_of_one_mean:
        return False
    return leaves[0].is_floating_point() or leaves[0].is_complex()


def _weighted_mean(means: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Returns the mean over all samples, from each replica's mean over its samples."""
    num_samples = sum(sizes)
    return sum(size / num_samples * mean for size, mean in zip(sizes, means, strict=True))


def _concatenate(tensors: list[Tensor], dim: int, device: torch.device) -> Tensor:
    """Concatenates the tensors of the replicas along `dim`, on a device.

    Raises:
        UsageError: their shapes differ in other dimensions.
    """
    # The shapes of the tensors without `dim`; None for a tensor that does not have it.
    other_dimensions: set[torch.Size | None] = set()
    for tensor in tensors:
        if tensor.shape == (0,):  # torch concatenates these with tensors of any shape
            continue
        if has_dimension(tensor, dim):
            other_dimensions.add(tensor.movedim(dim, 0).shape[1:])
        else:
            other_dimensions.add(None)

    if len(other_dimensions) > 1:
        shown = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UsageError(
            f"tensors returned by a module on {len(tensors)} devices, joined along dimension {dim}",
            f"their shapes differ in the dimensions beside it: {shown}",
            "return the same shape whatever the samples are: call squeeze with a dimension, as a "
            "part may be one sample, and pad to a length that does not depend on the part",
        )

    if device.type == "cuda" and all(tensor.is_cuda for tensor in tensors):
        # torch's `gather` writes the parts directly into the result; `cat` would copy them twice.
        output: Tensor = gather(tensors, device, dim=dim)
        return output

    return torch.cat([tensor.to(device) for tensor in tensors], dim)


def _are_equal(value: Any, other: Any) -> bool:
    """Returns True if two leaves are equal; False if they differ or cannot be compared.

    Arrays, for example, cannot: `==` compares them item by item, which gives no single truth value.
    """
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value, other)
    if value is other:
        return True
    if type(value) is not type(other):
        return False

    try:
        return bool(value == other)
    except (TypeError, ValueError, RuntimeError):
        return False
