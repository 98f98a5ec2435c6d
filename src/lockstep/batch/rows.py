"""How many rows a batch has, where a collate function made it of the samples that it was given.

A collate function may leave samples out (files that cannot be read) or add rows (several views of a
sample). The parts of the ranks then weigh by their rows, not by the samples that were planned. What
a batch shows is the first dimension of its tensors. It does not always show the rows: sequences may
have time first, graphs are joined along their nodes, and packing makes one row of all samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lockstep.batch.pytree import children_of, is_list_of_plain_data, lists_one_thing_for_each
from lockstep.errors import warn


class Shape(NamedTuple):
    """The first two dimensions of something in a batch; `second` is None where there is one."""

    first: int
    second: int | None


UNKNOWN = Shape(-1, -1)
"""Of something that may have one row for each sample, or one field of the batch in each place."""


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
        """The rows of a batch; None where it does not show them.

        Args:
            batch: what the collate function returned.
            planned: samples that it was given.
        """
        if batch is None:
            return 0
        shapes = list(shapes_of(batch, planned))
        if not shapes:
            return planned if children_of(batch) is None else 0
        of_vectors = {shape.first for shape in shapes if shape.second is None}
        if planned in of_vectors:
            return planned
        if UNKNOWN in shapes:
            return None
        firsts = {shape.first for shape in shapes}
        seconds = {shape.second for shape in shapes}
        if len(firsts) > 1:
            as_planned = planned in firsts or planned in seconds
            return planned if as_planned and not of_vectors else None
        (rows,) = firsts
        may_have_time_first = seconds == {planned}
        if rows == planned:
            self.first_dimension_known |= not may_have_time_first
        elif rows > 0 and may_have_time_first and not self.first_dimension_known:
            return None
        return rows

    def warn_of_rows(self, planned: int, rows: int) -> None:
        """Says once that batches have other numbers of rows than samples.

        Args:
            planned: samples of a global batch.
            rows: that all ranks together have of it.
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
        """Says once that batches do not show how many rows they have."""
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


def shapes_of(batch: Any, planned: int) -> Iterator[Shape]:
    """The first two dimensions of all that may have one row for each sample."""
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
        # Tensors of one length may be one for each sample, or the fields of a batch.
        lengths = {len(value) for value in batch if isinstance(value, Tensor) and value.dim()}
        if lengths != {0} and lists_one_thing_for_each(list(batch), planned):
            yield Shape(len(batch), None) if len(lengths) != 1 else UNKNOWN
            return
    for child in children.values():
        yield from shapes_of(child, planned)
