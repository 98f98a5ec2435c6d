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
    batch_size = arguments.get("batch_size", 1)
    if arguments.get("batch_sampler") is not None:
        try:
            arguments["batch_sampler"] = merge_batches(arguments["batch_sampler"], times)
        except TypeError as error:  # such as a generator, whose class cannot be changed
            raise CannotEnlargeError from error
    elif batch_size is None:  # each item of the dataset is a whole batch
        raise CannotEnlargeError
    elif isinstance(batch_size, int) and not isinstance(batch_size, EnlargedBatchSize):
        arguments["batch_size"] = EnlargedBatchSize(batch_size * times)


def merge_batches(sampler: Any, times: int) -> Any:
    """Returns a batch sampler that yields each `times` batches of this one as one batch.

    A list of batches becomes another list. Any other sampler stays the same object, so that
    `set_epoch` still reaches it, and gets a class that is derived from its own.

    Raises:
        TypeError: the class of the sampler cannot be changed.
    """
    if _is_enlarged(sampler):
        return sampler
    if isinstance(sampler, list | tuple):
        return _MergedList(_merged(sampler, times))

    original_class: Any = type(sampler)

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
    if hasattr(original_class, "__len__"):
        attributes["__len__"] = length
    sampler.__class__ = type(original_class.__name__, (original_class,), attributes)
    return sampler


def _is_enlarged(sampler: Any) -> bool:
    """True if a sampler, or one that it keeps in an attribute, was enlarged before.

    Libraries such as Accelerate put a sampler of their own around that of the script.
    """
    parts = [sampler]
    if hasattr(sampler, "__dict__"):
        parts += vars(sampler).values()
    for part in parts:
        if hasattr(part, MERGED_ATTRIBUTE):
            return True
        if isinstance(getattr(part, "batch_size", None), EnlargedBatchSize):
            return True
    return False


class _MergedList(list[list[Any]]):
    """A list of batches that are merged already."""

    _lockstep_merged = True  # MERGED_ATTRIBUTE


def _merged(batches: Iterable[Any], times: int) -> Iterator[list[Any]]:
    """Yields lists of indices, each with those of the next `times` batches."""
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
