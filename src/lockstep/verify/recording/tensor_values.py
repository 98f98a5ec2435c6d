"""Reduces tensors to what a record can hold: a summary, a summary of each row, a digest, or a copy.

A *summary* is two numbers that change with any value of a tensor. It stands for tensors that are
too large to record. A *row summary* is the same for each sample of a batch, so that samples can be
compared one by one. A *digest* is a hash of all bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.torch_compat import is_sharded, to_local
from lockstep.verify.tolerance import Array

NUMBERS_OF_CHANNELS = (1, 3)
"""Channels of an image: grey, or red, green and blue."""


def summarize(tensor: Tensor) -> Array:
    """Returns two numbers that stand for a tensor: a weighted sum, and the largest absolute value.

    Every position has another weight (its cosine), so the sum also changes if two values are
    swapped. NaN is treated as 0.

    Returns:
        An array of shape (2,).
    """
    values = tensor.detach().flatten().double().nan_to_num()
    positions = torch.arange(len(values), device=values.device, dtype=torch.float64)
    weighted_sum = float(values @ positions.cos())
    largest = float(values.abs().max()) if len(values) else 0.0
    return np.array([weighted_sum, largest])


def summarize_rows(values: Sequence[Tensor], count: int) -> Array:
    """Returns two numbers that stand for each sample of a batch: two weighted sums over its values.

    Args:
        values: tensors with one row, or a fixed number of successive rows, for each sample.
        count: number of samples.

    Returns:
        An array of shape (count, 2), or (0, 2) if there are no values.
    """
    # Each tensor in the shape (samples, values of one sample).
    tables = []
    for tensor in values:
        if tensor.numel():
            tables.append(tensor.detach().reshape(count, -1).double().nan_to_num())

    if not tables or count == 0:
        return np.zeros((0, 2))

    rows = torch.cat(tables, dim=1)
    # Different samples may have the same weighted sum by chance. With two sums of different
    # weights, this hardly ever happens. Cosines are used because they are easy to compute and look
    # random; the numbers 1.7 and 1 are arbitrary and make the second weights unlike the first ones.
    positions = torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype)
    first_weights = positions.cos()
    second_weights = (1.7 * positions + 1).cos()
    weights = torch.stack([first_weights, second_weights], dim=1)  # shape (positions, 2)

    return (rows @ weights).cpu().numpy()


def sample_tensors(values: object) -> tuple[int, list[Tensor]]:
    """Finds the tensors with one row for each sample, in a nest of values.

    Returns:
        The number of samples, which is the number of rows of the first tensor, and the tensors.
    """
    candidates = with_rows(values)
    if not candidates:
        return 0, []
    count = len(candidates[0])
    # A list with the boxes of each image, for example, has no row for each sample.
    of_all_samples = without_those_of_single_samples(candidates, values, count)
    return count, tensors_with_rows(of_all_samples, count)


def with_rows(values: object, num_samples: int | None = None) -> list[Tensor]:
    """Returns the tensors of a nest that have rows, which sparse tensors and single numbers lack.

    If the nest begins with a list of single images, they become the rows of one tensor.

    Args:
        values: nest of lists, tuples and dictionaries.
        num_samples: number of samples; None if it is not known.
    """
    tensors_of_nest = [t for t in tensors(values) if t.layout == torch.strided and t.dim() > 0]
    images = single_images(values, num_samples)
    if not images:
        return tensors_of_nest

    ids_of_images = {id(image) for image in images}
    others = [tensor for tensor in tensors_of_nest if id(tensor) not in ids_of_images]
    return [_stack_images(images), *others]


def single_images(values: object, num_samples: int | None = None) -> list[Tensor]:
    """Returns the images if a nest begins with a list that has one image for each sample.

    Models that detect objects take images in this way, since their sizes may differ. Each image has
    the shape (channels, height, width), and may stand beside the targets of its sample:

        ([image, image], [targets, targets])
        [{"image": image, "boxes": boxes}, {"image": image, "boxes": boxes}]

    A list of two batches of sequences, of shape (samples, time, features), looks the same if there
    are 1 or 3 samples. The images are returned only if the rest of the nest, or the number of
    samples, tells that they are images.

    Args:
        values: nest of lists, tuples and dictionaries.
        num_samples: number of samples; None if it is not known.

    Returns:
        The images; empty if the nest begins with anything else, or if it cannot be told.
    """
    images = _possible_images(values)
    if not images:
        return []

    # Known numbers tell images from batches, unless there are as many samples as channels.
    num_channels = len(images[0])
    if num_samples is not None and num_samples != len(images):
        return []
    if num_samples is not None and num_samples != num_channels:
        return images

    return images if _rest_belongs_to_images(values, images) else []


def _possible_images(values: object) -> list[Tensor]:
    """Returns the tensors that a nest begins with if, by their shapes, each may be one image."""
    # Go from the whole nest to its first entry, and to the first entry of that.
    nest = values
    is_top = True
    while True:
        entries = [entry for entry in _entries(nest) if tensors(entry)]
        if not entries:  # the nest is a single tensor, or has none
            return []

        # Entries of the whole batch are usually kinds of values, such as inputs and labels.
        may_be_samples = not is_top or all(isinstance(entry, Mapping) for entry in entries)
        first_tensors = [tensors(entry)[0] for entry in entries]
        if may_be_samples and isinstance(nest, list | tuple) and _are_images(first_tensors):
            return first_tensors

        nest = entries[0]
        is_top = False


def _rest_belongs_to_images(values: object, images: Sequence[Tensor]) -> bool:
    """True if a nest has other tensors too, and these are not of a batch of `len(images[0])` rows.

    In `([a, b], labels)`, with 3 rows in all tensors, a and b are batches of 3 samples. In
    `([a, b], [{"boxes": c}, {"boxes": d}])` they are images, even if some image has 3 boxes.
    """
    ids_of_images = {id(image) for image in images}
    num_channels = len(images[0])

    others = [t for t in tensors(values) if id(t) not in ids_of_images and t.dim() > 0]
    ids_of_targets = set()
    for dictionaries in _lists_of_dictionaries(values, len(images)):
        of_list = tensors(dictionaries)
        targets = [t for t in of_list if id(t) not in ids_of_images and t.dim() > 0]
        # Batches may stand in dictionaries too: `[{"x": a, "labels": c}, {"x": b, "labels": d}]`.
        holds_images = any(id(t) in ids_of_images for t in of_list)
        are_batches = holds_images and all(len(t) == num_channels for t in targets)
        if not are_batches:
            ids_of_targets |= {id(t) for t in targets}

    of_whole_batch = [t for t in others if id(t) not in ids_of_targets]
    return bool(others) and all(len(t) != num_channels for t in of_whole_batch)


def _lists_of_dictionaries(nest: object, length: int) -> list[object]:
    """Returns the lists and tuples in a nest that have this many entries, all dictionaries."""
    entries = _entries(nest)
    are_dictionaries = all(isinstance(entry, Mapping) for entry in entries)
    if isinstance(nest, list | tuple) and len(entries) == length and are_dictionaries:
        return [nest]

    found = []
    for entry in entries:
        found += _lists_of_dictionaries(entry, length)
    return found


def _entries(nest: object) -> list[object]:
    """Returns the entries of a list, a tuple or a dictionary; empty for anything else."""
    if isinstance(nest, Mapping):
        return list(nest.values())
    return list(nest) if isinstance(nest, list | tuple) else []


def _are_images(candidates: Sequence[Tensor]) -> bool:
    """True if each tensor may be one image: of few channels, and higher and wider than these."""
    first = candidates[0]
    num_channels = len(first) if first.dim() == 3 else 0
    if num_channels not in NUMBERS_OF_CHANNELS:
        return False

    for tensor in candidates:
        is_like_first = (tensor.dtype, tensor.device) == (first.dtype, first.device)
        if not is_like_first or tensor.layout != torch.strided or tensor.dim() != 3:
            return False
        if len(tensor) != num_channels or min(tensor.shape[1:]) <= num_channels:
            return False

    return True


def _stack_images(images: Sequence[Tensor]) -> Tensor:
    """Returns images as the rows of one tensor. Smaller images are padded to the largest size."""
    height = max(image.shape[1] for image in images)
    width = max(image.shape[2] for image in images)
    padded = []
    for image in images:
        missing_height = height - image.shape[1]
        missing_width = width - image.shape[2]
        padded.append(F.pad(image.detach(), (0, missing_width, 0, missing_height)))

    return torch.stack(padded)


def without_those_of_single_samples(
    candidates: Sequence[Tensor], values: object, num_samples: int
) -> list[Tensor]:
    """Returns the tensors that are not in a list with one entry for each sample.

    Args:
        candidates: tensors of the nest.
        values: nest of lists, tuples and dictionaries.
        num_samples: number of samples.
    """
    ids_of_single_samples = {id(t) for t in _tensors_of_single_samples(values, num_samples)}
    return [tensor for tensor in candidates if id(tensor) not in ids_of_single_samples]


def _tensors_of_single_samples(
    values: object, num_samples: int, *, is_top: bool = True
) -> list[Tensor]:
    """Returns the tensors in lists that have one entry for each sample.

    An example is a list with the boxes of each image, whose rows are boxes. With 2 images, a tensor
    of 2 boxes has as many rows as there are samples, but only by chance.

    Args:
        values: nest of lists, tuples and dictionaries.
        num_samples: number of samples.
        is_top: whether the nest is the whole batch. A batch `[images]` has one entry, but that does
            not mean that it has one sample.
    """
    entries = _entries(values)
    may_be_only_tensor = is_top and len(entries) == 1
    if isinstance(values, list | tuple) and not may_be_only_tensor:
        if _has_entry_for_each_sample(entries, num_samples):
            return tensors(values)

    found = []
    for entry in entries:
        found += _tensors_of_single_samples(entry, num_samples, is_top=False)
    return found


def _has_entry_for_each_sample(entries: Sequence[object], num_samples: int) -> bool:
    """True if a list has one entry for each sample, and not one tensor for each kind of value.

    With 2 samples, `[{"boxes": a}, {"boxes": b}]` has an entry for each sample. `[images, labels]`
    has not: both tensors have 2 rows.
    """
    if len(entries) != num_samples:
        return False
    if all(isinstance(entry, Mapping | list | tuple) for entry in entries):
        return True

    tensors_of_list = [entry for entry in entries if isinstance(entry, Tensor)]
    all_are_tensors = len(tensors_of_list) == len(entries)
    if not all_are_tensors:
        return False

    # Tensors that all have a row for each sample are kinds of values, such as images and labels.
    with_row_per_sample = tensors_with_rows(tensors_of_list, num_samples)
    are_kinds_of_values = len(with_row_per_sample) == len(tensors_of_list)
    return not are_kinds_of_values


def tensors_with_rows(values: Sequence[Tensor], count: int) -> list[Tensor]:
    """Returns the tensors that have `count` rows, without complex tensors.

    If a tensor has another number of rows, its first two dimensions are swapped first: the hidden
    state of a recurrent layer has the samples in its second dimension.
    """
    found = []
    for tensor in values:
        samples_may_be_in_second_dimension = tensor.dim() > 1 and len(tensor) != count
        if samples_may_be_in_second_dimension:
            tensor = tensor.transpose(0, 1)
        if tensor.dim() > 0 and len(tensor) == count and not tensor.is_complex():
            found.append(tensor)
    return found


def storage_address(tensor: Tensor) -> int:
    """Returns the address of a tensor's values; 0 if the tensor has no single storage."""
    if is_sharded(tensor):
        return 0
    # Raised for a tensor subclass without a storage, and for a lazy tensor.
    with suppress(RuntimeError, ValueError):
        return tensor.untyped_storage().data_ptr()
    return 0


def digest(tensor: Tensor) -> str:
    """Returns a hash of all bits of a dense tensor; for a sharded tensor, of this rank's shard."""
    # Copied, since FSDP cannot free gathered memory that numpy still refers to.
    copy = to_local(tensor).cpu().clone().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(copy.numpy().data, digest_size=8).hexdigest()


def copy_arrays(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Array]:
    """Copies tensors to numpy arrays by name; floating-point tensors become float64.

    Sharded tensors are gathered, so all ranks must call this together.

    Args:
        named: pairs of a name and a tensor. Pairs with None, such as a missing gradient, are
            skipped.
    """
    arrays = {}
    for name, tensor in named:
        if tensor is None:
            continue

        whole = tensor.detach()
        if is_sharded(whole):
            whole = whole.full_tensor()  # type: ignore[attr-defined]

        if whole.is_sparse:
            whole = whole.to_dense()

        whole = whole.cpu()
        if whole.is_floating_point():
            whole = whole.double()

        # Always copied, since FSDP cannot free gathered memory that numpy still refers to.
        arrays[name] = whole.clone(memory_format=torch.contiguous_format).numpy()

    return arrays
