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

    For example, a batch of 2 samples may have images of shape (2, 3, 32, 32), labels of shape (2,),
    and a list with the boxes of each image, of shapes (3, 4) and (2, 4). The result is 2 and the
    images and labels: the rows of the last tensor are boxes, although there are 2 of them.

    Returns:
        The number of samples, which is the number of rows of the first tensor, and the tensors.
    """
    all_tensors = tensors_with_any_rows(values)
    if not all_tensors:
        return 0, []
    num_samples = len(all_tensors[0])
    of_whole_batch = without_tensors_of_single_samples(all_tensors, values, num_samples)
    return num_samples, tensors_with_row_per_sample(of_whole_batch, num_samples)


def tensors_with_any_rows(values: object, num_samples: int | None = None) -> list[Tensor]:
    """Returns the tensors of a nest that have rows, which sparse tensors and single numbers lack.

    If the nest begins with a list of single images, they become the rows of one tensor:
    `([image, image], labels)` gives a tensor of shape (2, channels, height, width), and the labels.

    Args:
        values: nest of lists, tuples and dictionaries.
        num_samples: number of samples; None if it is not known.
    """
    all_tensors = [t for t in tensors(values) if t.layout == torch.strided and t.dim() > 0]
    images = single_images(values, num_samples)
    if not images:
        return all_tensors

    ids_of_images = {id(image) for image in images}
    other_tensors = [tensor for tensor in all_tensors if id(tensor) not in ids_of_images]
    return [_stack_images(images), *other_tensors]


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
    candidates = _possible_images(values)
    if not candidates:
        return []

    if num_samples is not None:
        has_image_for_each_sample = len(candidates) == num_samples
        if not has_image_for_each_sample:
            return []
        # Images begin with their channels, and batches with their samples: with 8 samples, a tensor
        # of shape (3, 224, 224) can only be an image.
        may_be_batches = len(candidates[0]) == num_samples
        if not may_be_batches:
            return candidates

    return candidates if _rest_shows_images(values, candidates) else []


def _possible_images(nest: object, *, is_whole_batch: bool = True) -> list[Tensor]:
    """Returns the tensors that a nest begins with if, by their shapes, each may be one image.

    `([image, image], labels)` and `[{"image": image}, {"image": image}]` begin with two images.

    Args:
        nest: nest of lists, tuples and dictionaries.
        is_whole_batch: whether the nest is the whole batch, and not an entry of it.
    """
    entries = [entry for entry in _entries(nest) if tensors(entry)]
    if not entries:  # the nest is a single tensor, or has none
        return []

    is_list = isinstance(nest, list | tuple)
    if is_list and _may_be_samples(entries, are_whole_batch=is_whole_batch):
        first_tensors = [tensors(entry)[0] for entry in entries]
        if _may_be_images(first_tensors):
            return first_tensors

    return _possible_images(entries[0], is_whole_batch=False)


def _may_be_samples(entries: Sequence[object], *, are_whole_batch: bool) -> bool:
    """True if each entry of a list may be one sample.

    The entries of a whole batch are usually different kinds of values, as in `[inputs, labels]`.
    Only if all are dictionaries, such as `{"image": image}`, each of them may be a sample.
    """
    are_dictionaries = all(isinstance(entry, Mapping) for entry in entries)
    return are_dictionaries or not are_whole_batch


def _rest_shows_images(values: object, candidates: Sequence[Tensor]) -> bool:
    """True if the other tensors of a nest show that its first tensors are images, and not batches.

    In `([a, b], labels)`, with 3 rows in all tensors, a and b are batches of 3 samples. In
    `([a, b], [{"boxes": c}, {"boxes": d}])` they are images, even if some image has 3 boxes.

    Args:
        values: nest of lists, tuples and dictionaries.
        candidates: the tensors that the nest begins with, all with the same number of rows.
    """
    other_tensors = _tensors_beside(candidates, values)
    ids_of_targets = _ids_of_targets(values, candidates)

    # If the candidates are batches, then so is a tensor with as many rows, such as the labels.
    # A target of one image, such as its boxes, has this number of rows only by chance.
    for tensor in other_tensors:
        has_as_many_rows = len(tensor) == len(candidates[0])
        is_target_of_one_image = id(tensor) in ids_of_targets
        if has_as_many_rows and not is_target_of_one_image:
            return False

    return bool(other_tensors)


def _tensors_beside(candidates: Sequence[Tensor], nest: object) -> list[Tensor]:
    """Returns the tensors in a nest that have rows and are none of the candidates."""
    ids_of_candidates = {id(tensor) for tensor in candidates}
    return [t for t in tensors(nest) if id(t) not in ids_of_candidates and t.dim() > 0]


def _ids_of_targets(values: object, candidates: Sequence[Tensor]) -> set[int]:
    """Returns the ids of tensors that belong to one image each, such as its boxes.

    They stand in a list with a dictionary for each image. For images a and b, the targets are c and
    d in both of these:

        ([a, b], [{"boxes": c}, {"boxes": d}])
        [{"image": a, "boxes": c}, {"image": b, "boxes": d}]

    Args:
        values: nest of lists, tuples and dictionaries.
        candidates: the tensors that the nest begins with, which may be images.
    """
    ids_of_candidates = {id(tensor) for tensor in candidates}
    num_rows = len(candidates[0])
    ids_of_targets: set[int] = set()
    for dictionaries in _lists_of_dictionaries(values, len(candidates)):
        targets = _tensors_beside(candidates, dictionaries)

        # In the second form, if all tensors have 3 rows, a and b may also be batches of 3 samples,
        # and c and d their labels. Then these are not taken for targets of one image.
        holds_candidates = any(id(t) in ids_of_candidates for t in tensors(dictionaries))
        may_be_labels = holds_candidates and all(len(t) == num_rows for t in targets)
        if not may_be_labels:
            ids_of_targets |= {id(t) for t in targets}

    return ids_of_targets


def _lists_of_dictionaries(nest: object, length: int) -> list[object]:
    """Returns the lists and tuples in a nest that have this many entries, all dictionaries.

    For `(images, [{"boxes": a}, {"boxes": b}])` and a length of 2, it is the list of boxes.
    """
    entries = _entries(nest)  # empty for a tensor or a number
    if isinstance(nest, list | tuple) and len(entries) == length:
        if all(isinstance(entry, Mapping) for entry in entries):
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


def _may_be_images(candidates: Sequence[Tensor]) -> bool:
    """True if each tensor may be an image, all with the same channels, dtype and device."""
    if not all(_may_be_image(tensor) for tensor in candidates):
        return False
    kinds_of_images = set()
    for image in candidates:
        num_channels = image.shape[0]
        kinds_of_images.add((num_channels, image.dtype, image.device))
    return len(kinds_of_images) == 1


def _may_be_image(tensor: Tensor) -> bool:
    """True if a tensor may be an image of shape (channels, height, width).

    It is grey or coloured, and higher and wider than its number of channels.
    """
    if tensor.layout != torch.strided or tensor.dim() != 3:
        return False
    channels, height, width = tensor.shape
    return channels in NUMBERS_OF_CHANNELS and min(height, width) > channels


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


def without_tensors_of_single_samples(
    tensors_of_nest: Sequence[Tensor], nest: object, num_samples: int
) -> list[Tensor]:
    """Returns the tensors that are not in a list with one entry for each sample.

    In such a list, each tensor belongs to one sample, such as the boxes in its image.

    Args:
        tensors_of_nest: the tensors to choose from.
        nest: nest of lists, tuples and dictionaries.
        num_samples: number of samples.
    """
    ids_of_single_samples = {id(t) for t in _tensors_of_single_samples(nest, num_samples)}
    return [tensor for tensor in tensors_of_nest if id(tensor) not in ids_of_single_samples]


def _tensors_of_single_samples(
    nest: object, num_samples: int, *, is_whole_batch: bool = True
) -> list[Tensor]:
    """Returns the tensors in lists that have one entry for each sample.

    With 2 samples, these are a and b in `(images, [{"boxes": a}, {"boxes": b}])`. Their rows are
    boxes, and not samples.

    Args:
        nest: nest of lists, tuples and dictionaries.
        num_samples: number of samples.
        is_whole_batch: whether the nest is the whole batch, and not an entry of it.
    """
    entries = _entries(nest)
    # The only entry of a batch `[images]` holds all samples, even if it is a batch of one sample.
    is_batch_of_one_field = is_whole_batch and len(entries) == 1
    if isinstance(nest, list | tuple) and not is_batch_of_one_field:
        if _has_entry_for_each_sample(entries, num_samples):
            return tensors(nest)

    found = []
    for entry in entries:
        found += _tensors_of_single_samples(entry, num_samples, is_whole_batch=False)
    return found


def _has_entry_for_each_sample(entries: Sequence[object], num_samples: int) -> bool:
    """True if a list has one entry for each sample, and not one tensor for each kind of value.

    With 2 samples, these have an entry for each sample:

        [{"boxes": a}, {"boxes": b}]
        [boxes of shape (3, 4), boxes of shape (5, 4)]

    `[images, labels]` has not, if both tensors have 2 rows.
    """
    if len(entries) != num_samples:
        return False
    if all(isinstance(entry, Mapping | list | tuple) for entry in entries):
        return True

    tensors_of_list = [entry for entry in entries if isinstance(entry, Tensor)]
    if len(tensors_of_list) < len(entries):  # some entry is a number, for example
        return False

    with_row_per_sample = tensors_with_row_per_sample(tensors_of_list, num_samples)
    all_have_row_per_sample = len(with_row_per_sample) == len(tensors_of_list)
    return not all_have_row_per_sample  # unlike in `[images, labels]`


def tensors_with_row_per_sample(values: Sequence[Tensor], num_samples: int) -> list[Tensor]:
    """Returns the tensors that have `num_samples` rows, without complex tensors.

    If a tensor has another number of rows, its first two dimensions are swapped first: the hidden
    state of a recurrent layer has the samples in its second dimension.
    """
    found = []
    for tensor in values:
        samples_may_be_in_second_dimension = tensor.dim() > 1 and len(tensor) != num_samples
        if samples_may_be_in_second_dimension:
            tensor = tensor.transpose(0, 1)
        if tensor.dim() > 0 and len(tensor) == num_samples and not tensor.is_complex():
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
