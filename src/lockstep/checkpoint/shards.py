"""Tensors that are stored in shards: finding a region of one in the shards that overlap it.

A box is a rectangular region of a tensor: its offsets (where it begins in each dimension) and its
sizes. A shard is a box with its values. The shards of a tensor fill it without overlap, so any
region of the tensor can be read, whatever boxes it was stored in.
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
        """Reads a region. At most one shard is in memory besides the result.

        Args:
            offsets: where the region begins in each dimension.
            sizes: the extent of the region in each dimension.

        Raises:
            CheckpointError: a shard cannot be read.
        """
        for shard in self.shards:
            if shard.offsets == offsets and shard.sizes == sizes:
                return shard.values.read()  # the usual case: as many ranks as when it was saved
        result = torch.empty(sizes, dtype=self.dtype)
        for shard in self.shards:
            common = intersect(Box(offsets, sizes), Box(shard.offsets, shard.sizes))
            if common is not None:
                result[slices_of(common, offsets)].copy_(_read_part_of_shard(shard, common))
        return result

    def read_range(self, begin: int, end: int) -> Tensor:
        """Returns the elements from `begin` to before `end`, flattened and on the CPU.

        Raises:
            CheckpointError: a shard cannot be read.
        """
        if begin >= end:
            return torch.empty(0, dtype=self.dtype)
        if len(self.shards) == 1:
            return self.shards[0].values.read_range(begin, end)
        # Read the box of all rows, of the first dimension, that have some of these elements.
        row_shape = self.shape[1:]
        row_numel = math.prod(row_shape)
        first_row = begin // row_numel
        last_row = (end - 1) // row_numel
        offsets = (first_row, *(0 for _ in row_shape))
        sizes = (last_row + 1 - first_row, *row_shape)
        elements = self.read_box(offsets, sizes).reshape(-1)
        numel_before = first_row * row_numel  # elements of the whole tensor before those read
        return elements[begin - numel_before : end - numel_before]

    def check(self) -> None:
        """Checks every shard without reading its values.

        Raises:
            CheckpointError: a file does not have the shard.
        """
        for shard in self.shards:
            shard.values.check()


def _read_part_of_shard(shard: Shard, box: Box) -> Tensor:
    """Reads a region that lies inside a shard.

    Only the rows of the shard (along its first dimension) are read that have elements of it.

    Args:
        shard: the shard, with at least one dimension.
        box: the region, with offsets in the whole tensor.
    """
    rows, *other_slices = slices_of(box, shard.offsets)
    row_shape = shard.sizes[1:]
    row_numel = math.prod(row_shape)
    flat = shard.values.read_range(rows.start * row_numel, rows.stop * row_numel)
    read_rows = flat.reshape(rows.stop - rows.start, *row_shape)
    return read_rows[(slice(None), *other_slices)]


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the region that two boxes of one tensor have in common, or None."""
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
    """Returns the slices, one for each dimension, that select a box in a part of its tensor.

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
    """Returns the tensor that consists of these shards.

    Raises:
        ValueError: a shard is outside of the tensor, or the shards overlap or leave gaps.
    """
    # Shards without elements may be anywhere. If the sizes of the others add up to that of the
    # tensor, and none overlap, they leave no gaps.
    with_elements = [shard for shard in shards if 0 not in shard.sizes]
    with_elements.sort(key=lambda shard: shard.offsets)
    for shard in with_elements:
        if not is_inside(shard, shape):
            raise ValueError(f"{name}: a shard is outside of its shape {list(shape)}")
    num_elements = sum(shard.values.num_elements for shard in with_elements)
    if num_elements != math.prod(shape) or any_overlap(with_elements):
        raise ValueError(f"{name}: its shards overlap, or leave gaps")
    return TensorInShards(name, dtype, shape, tuple(with_elements))


def is_inside(shard: Shard, shape: Shape) -> bool:
    """Returns True if a shard has the dimensions of this shape, and does not reach beyond it."""
    if len(shard.offsets) != len(shape) or len(shard.sizes) != len(shape):
        return False
    for offset, size, extent in zip(shard.offsets, shard.sizes, shape, strict=True):
        if offset + size > extent:
            return False
    return True


def any_overlap(shards: list[Shard]) -> bool:
    """Returns True if any two shards share elements.

    Args:
        shards: the shards in the order of their offsets, each with at least one element.

    Raises:
        ValueError: too many pairs would have to be compared. That happens only to shards that
            cross each other in ways that no program writes.
    """
    num_compared = 0
    for number, shard in enumerate(shards):
        for later in shards[number + 1 :]:
            # The offsets are sorted: from here on all shards begin in rows after this one's last.
            # (A shard without dimensions has no rows.)
            if shard.offsets and later.offsets[0] >= shard.offsets[0] + shard.sizes[0]:
                break
            num_compared += 1
            if num_compared > MAX_COMPARED_PAIRS_OF_SHARDS:
                raise ValueError(f"a tensor in {len(shards)} shards that cross each other")
            if intersect(Box(shard.offsets, shard.sizes), Box(later.offsets, later.sizes)):
                return True
    return False
