"""Reads any region of a tensor that is stored in shards.

A *box* is a rectangular region of a tensor, given by its offsets (where it starts in each
dimension) and its sizes. A *shard* is a box together with its values. The shards of a tensor cover
it without overlapping, so any region can be put together from the shards that overlap it, whatever
number of ranks has stored them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint.lazy_tensor import LazyTensor, Shape

MAX_COMPARED_PAIRS_OF_SHARDS = 5_000_000
"""A damaged file could otherwise keep `any_overlap` busy for hours."""


class Box(NamedTuple):
    """A region of a tensor."""

    offsets: Shape
    sizes: Shape


class Shard(NamedTuple):
    """A region of a tensor with its values."""

    offsets: Shape
    values: LazyTensor

    @property
    def sizes(self) -> Shape:
        """The extent of the region in each dimension."""
        return self.values.shape


@dataclass(frozen=True)
class TensorInShards(LazyTensor):
    """A tensor that is stored in shards."""

    name: str
    dtype: torch.dtype
    shape: Shape
    shards: tuple[Shard, ...]
    """The shards that have elements, in the order of their offsets."""

    def read_box(self, offsets: Shape, sizes: Shape) -> Tensor:
        """Reads a region of the tensor. Holds at most one shard in memory besides the result.

        Args:
            offsets: where the region starts in each dimension.
            sizes: the extent of the region in each dimension.

        Raises:
            CheckpointError: a shard cannot be read.
        """
        # The usual case: there are as many ranks as when the tensor was saved.
        for shard in self.shards:
            if shard.offsets == offsets and shard.sizes == sizes:
                return shard.values.read()

        result = torch.empty(sizes, dtype=self.dtype)
        for shard in self.shards:
            common = intersect(Box(offsets, sizes), Box(shard.offsets, shard.sizes))
            if common is not None:
                slices_in_result = slices_of(common, offsets)  # relative to the region
                result[slices_in_result].copy_(_read_part_of_shard(shard, common))
        return result

    def read_range(self, begin: int, end: int) -> Tensor:
        """Reads the elements from `begin` to before `end` of the flattened tensor, on the CPU.

        Raises:
            CheckpointError: a shard cannot be read.
        """
        if begin >= end:
            return torch.empty(0, dtype=self.dtype)
        if len(self.shards) == 1:
            return self.shards[0].values.read_range(begin, end)

        # A shard is a box, so whole rows (along the first dimension) are read. Example: for the
        # elements 7 to 14 of a tensor of shape (10, 4) these are the rows 1 to 3.
        row_shape = self.shape[1:]
        row_numel = math.prod(row_shape)
        first_row = begin // row_numel
        last_row = (end - 1) // row_numel
        offsets = (first_row, *(0 for _ in row_shape))
        sizes = (last_row + 1 - first_row, *row_shape)
        elements = self.read_box(offsets, sizes).reshape(-1)

        first_element = first_row * row_numel  # its number in the whole tensor
        return elements[begin - first_element : end - first_element]

    def check(self) -> None:
        """Checks that every shard is in its file, without reading the values.

        Raises:
            CheckpointError: a shard is not in its file.
        """
        for shard in self.shards:
            shard.values.check()


def _read_part_of_shard(shard: Shard, box: Box) -> Tensor:
    """Reads a region that lies inside a shard.

    A file can only be read in ranges of elements. So all rows of the shard (along its first
    dimension) that overlap the region are read, and the other dimensions are cut afterwards.

    Args:
        shard: the shard, which has at least one dimension.
        box: the region, with offsets in the whole tensor.
    """
    rows, *other_slices = slices_of(box, shard.offsets)
    row_shape = shard.sizes[1:]
    row_numel = math.prod(row_shape)

    flat = shard.values.read_range(rows.start * row_numel, rows.stop * row_numel)
    read_rows = flat.reshape(rows.stop - rows.start, *row_shape)
    return read_rows[(slice(None), *other_slices)]


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the common region of two boxes of one tensor, or None if they do not overlap."""
    offsets = []
    sizes = []
    dimensions = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    for a_begin, a_size, b_begin, b_size in dimensions:
        begin = max(a_begin, b_begin)
        end = min(a_begin + a_size, b_begin + b_size)
        if begin >= end:
            return None
        offsets.append(begin)
        sizes.append(end - begin)
    return Box(tuple(offsets), tuple(sizes))


def slices_of(box: Box, origin: Shape) -> tuple[slice, ...]:
    """Returns the slices, one for each dimension, that select a box within a part of its tensor.

    Example: the box with offset 5 and size 2 is `slice(1, 3)` in a part that starts at 4.

    Args:
        box: a region, with offsets in the whole tensor.
        origin: the offsets of the part in the whole tensor.
    """
    slices = []
    for offset, size, start in zip(box.offsets, box.sizes, origin, strict=True):
        slices.append(slice(offset - start, offset - start + size))
    return tuple(slices)


def join_shards(
    name: str, dtype: torch.dtype, shape: Shape, shards: Iterable[Shard]
) -> TensorInShards:
    """Joins shards to a tensor, after checking that they cover it without overlapping.

    Raises:
        ValueError: a shard is outside of the tensor, or the shards overlap or leave gaps.
    """
    # Shards without elements may be anywhere.
    with_elements = [shard for shard in shards if 0 not in shard.sizes]
    with_elements.sort(key=lambda shard: shard.offsets)
    for shard in with_elements:
        if not is_inside(shard, shape):
            raise ValueError(f"{name}: a shard is outside of its shape {list(shape)}")

    # Shards that do not overlap leave no gaps if they have as many elements as the tensor.
    num_elements = sum(shard.values.num_elements for shard in with_elements)
    if num_elements != math.prod(shape) or any_overlap(with_elements):
        raise ValueError(f"{name}: its shards overlap, or leave gaps")
    return TensorInShards(name, dtype, shape, tuple(with_elements))


def is_inside(shard: Shard, shape: Shape) -> bool:
    """Returns True if a shard has as many dimensions as `shape`, and does not reach beyond it.

    Offsets and sizes are never negative.
    """
    if len(shard.offsets) != len(shape) or len(shard.sizes) != len(shape):
        return False

    for offset, size, extent in zip(shard.offsets, shard.sizes, shape, strict=True):
        if offset + size > extent:
            return False
    return True


def any_overlap(shards: list[Shard]) -> bool:
    """Returns True if any two shards have elements in common.

    A shard is compared only with shards that begin in its rows. Example: two shards side by side
    in the rows 0, 1 and 2, and one in the rows 3, 4 and 5. Only the first two are compared.

    Args:
        shards: the shards sorted by their offsets, each with at least one element.

    Raises:
        ValueError: too many pairs would have to be compared. This happens only with shards that
            cross each other in ways that no program writes.
    """
    if len(shards) < 2:
        return False

    has_no_dimensions = not shards[0].offsets
    if has_no_dimensions:
        return True  # such a tensor has one element, which every shard contains

    num_compared = 0
    for index, shard in enumerate(shards):
        end_of_rows = shard.offsets[0] + shard.sizes[0]
        for later in shards[index + 1 :]:
            if later.offsets[0] >= end_of_rows:
                break  # all shards after `later` begin there or below, as they are sorted

            num_compared += 1
            if num_compared > MAX_COMPARED_PAIRS_OF_SHARDS:
                raise ValueError(f"a tensor in {len(shards)} shards that cross each other")
            if intersect(Box(shard.offsets, shard.sizes), Box(later.offsets, later.sizes)):
                return True
    return False
