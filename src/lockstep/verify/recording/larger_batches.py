"""Multiplies the batch sizes of a script's DataLoaders, for `--batch-per-process`.

A script for several processes may give its batch size for one process. To train on the same global
batches on one process, the DataLoader there gets N times the batch size, or each N batches of its
batch sampler are merged. A library may build a loader anew from the values of another one: then
the size must not be multiplied again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

MERGED_ATTRIBUTE = "_lockstep_merged"
"""Attribute of a batch sampler whose batches are merged."""


class CannotEnlargeError(Exception):
    """A DataLoader whose batches cannot be made larger."""


class EnlargedBatchSize(int):
    """A batch size that was multiplied; a loader that is built anew from another one carries it."""


def enlarge(arguments: dict[str, Any], times: int) -> None:
    """Changes the arguments of a DataLoader so that its batches are `times` as large.

    Args:
        arguments: of `DataLoader.__init__`, by name; they are changed.
        times: the factor.

    Raises:
        CannotEnlargeError: the loader has no batch size, or batches that cannot be merged.
    """
    # A batch sampler decides about the batches alone.
    if arguments.get("batch_sampler") is not None:
        try:
            arguments["batch_sampler"] = merge_batches(arguments["batch_sampler"], times)
        except TypeError as error:  # such as a generator, whose class cannot be changed
            raise CannotEnlargeError from error
        return

    batch_size = arguments.get("batch_size", 1)
    if batch_size is None:  # each item of the dataset is a whole batch
        raise CannotEnlargeError

    was_enlarged_before = isinstance(batch_size, EnlargedBatchSize)
    # Anything else than an int is refused by the DataLoader itself.
    if isinstance(batch_size, int) and not was_enlarged_before:
        arguments["batch_size"] = EnlargedBatchSize(batch_size * times)


def merge_batches(sampler: Any, times: int) -> Any:
    """Returns a batch sampler that yields each `times` batches of this one as one batch.

    A list of batches becomes another list. Any other sampler stays the same object, so that
    `set_epoch` still reaches it; its class is replaced by a subclass that merges. A sampler that
    was enlarged before is returned as it is.

    Raises:
        TypeError: the class of the sampler cannot be changed.
    """
    if _is_enlarged(sampler):
        return sampler
    if isinstance(sampler, list | tuple):
        return _MergedList(_merged(sampler, times))

    original_class: Any = type(sampler)

    # The methods of the subclass.
    def iterate(self: Any) -> Iterator[list[Any]]:
        return _merged(original_class.__iter__(self), times)

    def length(self: Any) -> int:
        batches: int = original_class.__len__(self)
        return _ceil_div(batches, times)

    attributes: dict[str, Any] = {
        "__iter__": iterate,
        "__module__": original_class.__module__,
        MERGED_ATTRIBUTE: True,
    }
    if hasattr(original_class, "__len__"):  # a stream of batches has no length
        attributes["__len__"] = length

    sampler.__class__ = type(original_class.__name__, (original_class,), attributes)
    return sampler


def _is_enlarged(sampler: Any) -> bool:
    """True if a sampler, or one that it keeps in an attribute, was enlarged before.

    Libraries such as Accelerate put a sampler of their own around that of the script.
    """
    candidates = [sampler]
    if hasattr(sampler, "__dict__"):  # a list or a generator has none
        candidates += vars(sampler).values()

    for candidate in candidates:
        if hasattr(candidate, MERGED_ATTRIBUTE):
            return True
        if isinstance(getattr(candidate, "batch_size", None), EnlargedBatchSize):
            return True

    return False


class _MergedList(list[list[Any]]):
    """A list of batches that are merged already."""

    _lockstep_merged = True  # MERGED_ATTRIBUTE


def _merged(batches: Iterable[Any], times: int) -> Iterator[list[Any]]:
    """Yields lists of indices, each with those of the next `times` batches; the last may be short.

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
