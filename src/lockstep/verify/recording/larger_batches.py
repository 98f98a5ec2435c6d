"""Multiplies the batch sizes of a script's DataLoaders, for `lockstep verify --batch-per-process`.

The batch size in a script may be meant for each process. For the same global batches on one
process, its DataLoaders need N times that batch size; of a batch sampler, each N batches are merged
into one. Libraries may rebuild a loader from the values of another one, so sizes that were already
multiplied are recognized and left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

MERGED_ATTRIBUTE = "_lockstep_merged"
"""Name of the attribute that marks a batch sampler whose batches are merged."""


class CannotEnlargeError(Exception):
    """Raised for a DataLoader whose batches cannot be made larger."""


class EnlargedBatchSize(int):
    """A batch size that was already multiplied. A rebuilt copy of the loader inherits it."""


def enlarge_in_place(arguments: dict[str, Any], times: int) -> None:
    """Changes the arguments of a DataLoader so that its batches become `times` as large.

    Args:
        arguments: arguments of `DataLoader.__init__` by name, which are changed in place.
        times: factor for the batch size.

    Raises:
        CannotEnlargeError: The loader has no batch size, or its batches cannot be merged.
    """
    # With a batch sampler, the batch size does not matter.
    batch_sampler = arguments.get("batch_sampler")
    if batch_sampler is not None:
        # This replaces the class of the sampler by a subclass, which is not possible for a
        # generator.
        try:
            arguments["batch_sampler"] = merge_batches(batch_sampler, times)
        except TypeError as error:
            raise CannotEnlargeError from error
        return

    batch_size = arguments.get("batch_size", 1)
    if batch_size is None:  # each item of the dataset is a whole batch
        raise CannotEnlargeError

    if isinstance(batch_size, EnlargedBatchSize):
        return

    # The DataLoader itself rejects a batch size that is not an int.
    if isinstance(batch_size, int):
        arguments["batch_size"] = EnlargedBatchSize(batch_size * times)


def merge_batches(sampler: Any, times: int) -> Any:
    """Makes a batch sampler yield larger batches, each merged from `times` of its batches.

    With `times` = 2, the batches [0, 1] and [2, 3] become [0, 1, 2, 3].

    A list of batches becomes another list. Any other sampler stays the same object, so that
    `set_epoch` still reaches it, but its class is replaced by a subclass that merges batches. A
    sampler that was already enlarged is returned unchanged.

    Raises:
        TypeError: The class of the sampler cannot be changed.
    """
    if _is_enlarged(sampler):
        return sampler
    if isinstance(sampler, list | tuple):
        return _MergedList(_merged(sampler, times))

    sampler.__class__ = _merging_subclass(type(sampler), times)
    return sampler


def _merging_subclass(original_class: Any, times: int) -> type:
    """Returns a subclass of a sampler's class that yields each `times` batches as one batch."""

    def iterate(self: Any) -> Iterator[list[Any]]:
        """Implements `__iter__` of the subclass."""
        return _merged(original_class.__iter__(self), times)

    def length(self: Any) -> int:
        """Implements `__len__` of the subclass."""
        num_batches: int = original_class.__len__(self)
        return _ceil_div(num_batches, times)

    attributes: dict[str, Any] = {
        "__iter__": iterate,
        "__module__": original_class.__module__,
        MERGED_ATTRIBUTE: True,
    }
    if hasattr(original_class, "__len__"):  # a stream of batches has no length
        attributes["__len__"] = length

    return type(original_class.__name__, (original_class,), attributes)


def _is_enlarged(sampler: Any) -> bool:
    """True if the batches of a sampler, or of a sampler that it wraps, are already merged.

    Libraries such as Accelerate wrap the script's sampler in one of their own.
    """
    candidates = [sampler]
    if hasattr(sampler, "__dict__"):  # a list or a generator has none
        candidates += vars(sampler).values()

    for candidate in candidates:
        # Either its batches are merged here, or it is a `BatchSampler` that was built from a batch
        # size that was multiplied here.
        is_merged = hasattr(candidate, MERGED_ATTRIBUTE)
        has_enlarged_size = isinstance(getattr(candidate, "batch_size", None), EnlargedBatchSize)
        if is_merged or has_enlarged_size:
            return True

    return False


class _MergedList(list[list[Any]]):
    """A list of batches that are already merged."""

    _lockstep_merged = True  # MERGED_ATTRIBUTE


def _merged(batches: Iterable[Any], times: int) -> Iterator[list[Any]]:
    """Yields lists of indices, each with the indices of the next `times` batches.

    With `times` = 2, the batches [0, 1], [2, 3], [4, 5] become [0, 1, 2, 3] and [4, 5].
    """
    iterator = iter(batches)
    while True:
        next_batches = list(islice(iterator, times))
        if not next_batches:
            return
        indices: list[Any] = []
        for batch in next_batches:
            indices += batch
        yield indices


def _ceil_div(dividend: int, divisor: int) -> int:
    """Divides and rounds up."""
    return (dividend + divisor - 1) // divisor
