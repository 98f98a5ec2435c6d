"""Counts the rows of a batch that a user's collate function has made.

A collate function may leave samples out (files that cannot be read) or add rows (several views of a
sample). The parts of the ranks then weigh by their rows, not by the samples that were planned. The
rows are counted by the first dimensions of the batch's tensors. These do not always show the rows:
sequences may have time first, graphs are joined along their nodes, and packing makes one row of all
samples.
"""

from __future__ import annotations

from collections.abc import Iterator
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
"""Stands for a sequence that may have one item for each sample, or one for each field."""


class RowCounter:
    """Counts the rows of the batches of one loader.

    Attributes:
        first_dimension_known: True once a batch had its rows, and nothing else, in the first
            dimension of its tensors.
    """

    def __init__(self) -> None:
        self.first_dimension_known = False
        self._warned = False

    def count(self, batch: Any, planned: int) -> int | None:
        """Returns the number of rows of a batch; None if it does not show it.

        Args:
            batch: what the collate function returned.
            planned: the number of samples that the collate function was given.
        """
        if batch is None:  # the collate function left out all samples
            return 0
        shapes = list(shapes_in(batch, planned))
        if not shapes:
            # An empty container has no rows. Any other object does not show them.
            is_container = children_of(batch) is not None
            return 0 if is_container else planned
        # A vector, of labels say, or a list of texts is the clearest sign: it has an item a row.
        lengths_of_vectors = {shape.first for shape in shapes if shape.second is None}
        if planned in lengths_of_vectors:
            return planned
        if UNKNOWN_SHAPE in shapes:
            return None
        # Otherwise all tensors should have as many rows, in the first dimension.
        first_dimensions = {shape.first for shape in shapes}
        second_dimensions = {shape.second for shape in shapes}
        if len(first_dimensions) > 1:
            # Some tensors have time first, say. If the planned number is among the dimensions, and
            # no vector has another one, no sample was left out.
            has_planned = planned in first_dimensions or planned in second_dimensions
            return planned if has_planned and not lengths_of_vectors else None
        rows = first_dimensions.pop()
        # Tensors of shape (time, samples) look like tensors with as many rows as time steps.
        may_have_time_first = second_dimensions == {planned}
        if rows == planned:
            if not may_have_time_first:
                self.first_dimension_known = True
            return rows
        if rows > 0 and may_have_time_first and not self.first_dimension_known:
            return None
        return rows

    def warn_of_rows(self, planned: int, rows: int) -> None:
        """Warns once that batches have other numbers of rows than samples.

        Args:
            planned: the number of samples of a global batch.
            rows: the number of rows that all ranks together have of it.
        """
        if self._warned:
            return
        self._warned = True
        warn(
            "a collate function that leaves samples out, or adds rows",
            f"a global batch of {planned} samples has {rows} rows, so each rank's part counts by "
            "the rows that it has",
            "nothing, if the loss is a mean over rows and a sample's rows do not depend on the "
            "other samples of its batch, of which each rank has others; for a mean over something "
            "else, such as tokens, say how much of that a batch has: world.loader(..., weight=...)",
        )

    def warn_of_unknown(self, planned: int) -> None:
        """Warns once that batches do not show how many rows they have."""
        if self._warned:
            return
        self._warned = True
        warn(
            "a collate function whose batches do not show how many rows they have",
            "the first dimensions of their tensors differ from each other and from the number of "
            f"samples, on some rank; in a global batch of {planned} samples each rank's part "
            "counts by its samples",
            "nothing, where the loss is a mean over samples; if it is a mean over something else, "
            "such as tokens or nodes, say how much of that a batch has: "
            "world.loader(..., weight=...)",
        )


def shapes_in(batch: Any, planned: int) -> Iterator[Shape]:
    """Yields the shapes of everything in a batch that may have one row for each sample.

    Args:
        batch: the batch, or a part of it.
        planned: the number of samples that the collate function was given.
    """
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim:
            yield Shape(batch.shape[0], batch.shape[1] if batch.ndim > 1 else None)
        return
    children = children_of(batch)
    if children is None:
        return
    if isinstance(batch, list | tuple) and batch:
        if is_list_of_plain_data(batch):
            yield Shape(len(batch), None)
            return
        lengths = {len(value) for value in batch if isinstance(value, Tensor) and value.dim()}
        all_are_empty = lengths == {0}
        if not all_are_empty and has_item_per_sample(list(batch), planned):
            # Tensors of one length may be one for each sample, or the fields of a batch.
            have_one_length = len(lengths) == 1
            yield UNKNOWN_SHAPE if have_one_length else Shape(len(batch), None)
            return
    for child in children.values():
        yield from shapes_in(child, planned)
