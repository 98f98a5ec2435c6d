"""Counts the rows of a batch that a user's collate function has made.

A collate function may leave samples out (files that cannot be read) or add rows (several views of a
sample). The part of each rank is then weighted by its rows instead of by the planned samples. The
number of rows is taken from the first dimension of the batch's tensors. This does not always work:
sequences may have time as their first dimension, graphs are joined along their nodes, and packing
turns all samples into one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lockstep.batch.pytree import children_of, has_item_per_sample, is_list_of_plain_data
from lockstep.errors import warn


class Shape(NamedTuple):
    """The first two dimensions of a tensor, or of a list, in a batch."""

    first: int
    second: int | None
    """None if there is only one dimension."""


UNKNOWN_SHAPE = Shape(-1, -1)
"""The shape of a sequence whose items may be samples or fields."""


class RowCounter:
    """Counts the rows of the batches of one loader.

    Attributes:
        first_dimension_known: True once a batch has shown that the first dimension of its tensors
            is that of the rows.
    """

    def __init__(self) -> None:
        self.first_dimension_known = False
        self._warned = False

    def count(self, batch: Any, planned: int) -> int | None:
        """Returns the number of rows of a batch, or None if its tensors do not show it.

        May set `first_dimension_known`, which helps to count the rows of later batches.

        Args:
            batch: the result of the collate function.
            planned: number of samples that were passed to the collate function.
        """
        if batch is None:  # the collate function has left out all samples
            return 0

        shapes = list(shapes_in(batch, planned))
        if not shapes:
            # An empty container has no rows. Any other object is assumed to have all rows.
            is_container = children_of(batch) is not None
            return 0 if is_container else planned

        # A vector, e.g. of labels, or a list of texts is the clearest sign: one item is one row.
        lengths_of_vectors = {shape.first for shape in shapes if shape.second is None}
        if planned in lengths_of_vectors:
            return planned
        if UNKNOWN_SHAPE in shapes:
            return None

        first_dimensions = {shape.first for shape in shapes}
        second_dimensions = {shape.second for shape in shapes}

        # First case: the tensors differ in their first dimension, so some may have time first. If
        # some tensor has a dimension of the planned size, this is taken for the number of rows.
        # Vectors contradict this, because here none of them has the planned length.
        if len(first_dimensions) > 1:
            planned_is_a_dimension = planned in first_dimensions or planned in second_dimensions
            if planned_is_a_dimension and not lengths_of_vectors:
                return planned
            return None

        # Second case: all tensors have the same first dimension, which is usually that of the rows.
        # But it may be the time, if the second dimension of all tensors has the planned size.
        rows = first_dimensions.pop()
        may_have_time_first = second_dimensions == {planned}
        if rows == planned:
            if not may_have_time_first:
                self.first_dimension_known = True
            return rows

        # If both are possible, only an earlier batch can have shown that rows come first. A first
        # dimension of size 0 is always that of the rows.
        if rows > 0 and may_have_time_first and not self.first_dimension_known:
            return None
        return rows

    def warn_of_rows(self, planned: int, rows: int) -> None:
        """Warns, the first time, that a batch has more or fewer rows than it has samples.

        Args:
            planned: the number of samples of a global batch.
            rows: the number of rows that all ranks together have of it.
        """
        if self._warned:
            return

        self._warned = True
        warn(
            "a collate function that leaves samples out, or adds rows",
            found=f"a global batch of {planned} samples has {rows} rows, so each rank's part "
            "counts by the rows that it has",
            do="nothing, if the loss is a mean over rows and each row is made of one sample. If it "
            "is a mean over something else, such as tokens, say how many of these a batch has: "
            "world.loader(..., weight=...). If a row is made of several samples of its batch, the "
            "rows depend on the number of ranks, since each rank collates its own samples",
        )

    def warn_of_unknown(self, planned: int) -> None:
        """Warns, the first time, that a batch does not show how many rows it has.

        Args:
            planned: the number of samples of a global batch.
        """
        if self._warned:
            return

        # Without a number of rows, the loss of each rank's part is weighed by the number of its
        # samples.
        self._warned = True
        warn(
            "a collate function whose batches do not show how many rows they have",
            found="the first dimensions of their tensors differ from each other and from the "
            f"number of samples, on some rank; in a global batch of {planned} samples each rank's "
            "part counts by its samples",
            do="if the loss is a mean over samples, there is nothing to do; if it is a mean over "
            "something else, such as tokens or nodes, say how many of these a batch has: "
            "world.loader(..., weight=...)",
        )


def shapes_in(batch: Any, planned: int) -> Iterator[Shape]:
    """Yields the shapes of everything in a batch that may have one row for each sample.

    For 8 samples these are, for example:

        a tensor or array of shape (8, 3, 32)    Shape(8, 3)
        a list of 8 texts or numbers             Shape(8, None)
        8 tensors, one for each sample           Shape(8, None)
        8 tensors, either samples or fields      UNKNOWN_SHAPE

    Args:
        batch: the batch, or a part of it.
        planned: number of samples that were passed to the collate function.
    """
    # The shape of a tensor is given by its first two dimensions.
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim >= 2:
            yield Shape(batch.shape[0], batch.shape[1])
        elif batch.ndim == 1:
            yield Shape(batch.shape[0], None)
        return

    children = children_of(batch)
    if children is None:
        return

    if isinstance(batch, list | tuple) and batch:
        if is_list_of_plain_data(batch):
            yield Shape(len(batch), None)
            return

        if _has_one_item_per_sample(batch, planned):
            yield _shape_of_items(batch)
            return

    # The children are the fields of the batch, e.g. images and labels.
    for child in children.values():
        yield from shapes_in(child, planned)


def _shape_of_items(items: Sequence[Any]) -> Shape:
    """Returns the shape of a sequence with as many items as there are planned samples.

    With 2 planned samples:

    - tensors of the lengths 5 and 7, e.g. sentences: fields would be equally long, so these are
      samples. The shape is `Shape(2, None)`.
    - tensors of the lengths 8 and 8: 2 samples, or 2 fields of 8 rows: `UNKNOWN_SHAPE`.
    """
    are_equally_long = len(_tensor_lengths(items)) == 1
    return UNKNOWN_SHAPE if are_equally_long else Shape(len(items), None)


def _has_one_item_per_sample(sequence: Sequence[Any], planned: int) -> bool:
    """Returns True if the items of a sequence may be samples; False if they are surely fields.

    Args:
        sequence: a list or tuple of tensors or containers.
        planned: number of samples that were passed to the collate function.
    """
    # Tensors without rows are the fields of a batch without samples, even if there happen to be as
    # many fields as planned samples.
    all_tensors_are_empty = _tensor_lengths(sequence) == {0}
    if all_tensors_are_empty:
        return False
    return has_item_per_sample(list(sequence), planned)


def _tensor_lengths(sequence: Sequence[Any]) -> set[int]:
    """Returns the different lengths of the tensors in a sequence, e.g. `{7, 9}`."""
    return {len(item) for item in sequence if isinstance(item, Tensor) and item.dim()}
