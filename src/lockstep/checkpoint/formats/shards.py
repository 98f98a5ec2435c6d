"""A tensor that is stored in shards, of which any region can be read: resharding is that.

A shard is a box: where in the tensor it begins, and its extents. Together the shards of a sound
tensor are the tensor, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

Shape = tuple[int, ...]

_MAX_COMPARED = 5_000_000  # pairs of shards


class LazyTensor:
    """A tensor of which dtype and shape are known, and values are read only where asked for."""

    dtype: torch.dtype
    shape: Shape
    part: Callable[[int, int], Tensor]
    """The elements from one index to before another, flat and on the CPU. CheckpointError: they
    cannot be read."""

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.count * self.dtype.itemsize

    def viewed(self, dtype: torch.dtype, shape: Shape) -> LazyTensor:
        """The same bytes as another tensor.

        Raises:
            ValueError: they have another number.
        """
        found: Any = replace(cast(Any, self), dtype=dtype, shape=shape)
        if found.nbytes != self.nbytes:
            raise ValueError(f"{self.nbytes} bytes for a tensor of {dtype} and shape {list(shape)}")
        return cast(LazyTensor, found)

    def full(self) -> Tensor:
        """All of it."""
        return self.part(0, self.count).reshape(self.shape)


class Source(Protocol):
    """Where the values of a shard are."""

    @property
    def file(self) -> Path:
        """What they are in."""

    def part(self, begin: int, end: int, /) -> Tensor:
        """The elements from `begin` to before `end`, flat and on the CPU."""

    def check(self) -> None:
        """Raises CheckpointError where it is not what it should be; reads no values."""


@dataclass(frozen=True)
class Shard:
    """A part of a tensor."""

    offsets: Shape
    sizes: Shape
    source: Source

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class ShardedEntry(LazyTensor):
    """A tensor in shards."""

    name: str
    dtype: torch.dtype
    shape: Shape
    shards: tuple[Shard, ...]
    """Those with elements, in the order of their offsets."""

    def region(self, offsets: Shape, sizes: Shape) -> Tensor:
        """The values of a box; at most one shard is in memory beside the result.

        Raises:
            CheckpointError: a shard cannot be read.
        """
        if not self.shape:
            return self.shards[0].source.part(0, 1).reshape(())
        for shard in self.shards:
            if (shard.offsets, shard.sizes) == (offsets, sizes):
                return shard.source.part(0, shard.count).reshape(sizes)
        result = torch.empty(sizes, dtype=self.dtype)
        for shard in self.shards:
            common = [
                (max(begin, at), min(begin + size, at + extent))
                for begin, size, at, extent in zip(
                    offsets, sizes, shard.offsets, shard.sizes, strict=True
                )
            ]
            if any(begin >= end for begin, end in common):
                continue
            row = math.prod(shard.sizes[1:])
            first, last = (row_number - shard.offsets[0] for row_number in common[0])
            values = shard.source.part(first * row, last * row)
            values = values.reshape(last - first, *shard.sizes[1:])
            inside = (slice(None), *_slices(common[1:], shard.offsets[1:]))
            result[tuple(_slices(common, offsets))].copy_(values[inside])
        return result

    def part(self, begin: int, end: int) -> Tensor:
        """The elements from `begin` to before `end`, flat and on the CPU.

        Raises:
            CheckpointError: a shard cannot be read.
        """
        if begin >= end:
            return torch.empty(0, dtype=self.dtype)
        if len(self.shards) == 1:
            return self.shards[0].source.part(begin, end)
        row = math.prod(self.shape[1:])
        low, high = begin // row, -(-end // row)
        inner = self.shape[1:]
        rows = self.region((low, *(0 for _ in inner)), (high - low, *inner)).reshape(-1)
        return rows[begin - low * row : end - low * row]

    def check(self) -> None:
        """Looks at every shard, without its values.

        Raises:
            CheckpointError: one is not what it should be.
        """
        for shard in self.shards:
            shard.source.check()


def _slices(box: list[tuple[int, int]], offsets: Shape) -> Iterator[slice]:
    """A box, seen from another box's offsets."""
    for (begin, end), at in zip(box, offsets, strict=True):
        yield slice(begin - at, end - at)


def sharded_entry(
    name: str, dtype: torch.dtype, shape: Shape, shards: Iterable[Shard]
) -> ShardedEntry:
    """A tensor of these shards.

    Raises:
        ValueError: a shard is outside of it, or they overlap or leave gaps.
    """
    found = sorted((s for s in shards if 0 not in s.sizes), key=lambda s: s.offsets)
    for shard in found:
        if not len(shard.offsets) == len(shard.sizes) == len(shape) or any(
            begin + size > extent
            for begin, size, extent in zip(shard.offsets, shard.sizes, shape, strict=True)
        ):
            raise ValueError(f"{name}: a shard is outside of its shape {list(shape)}")
    if sum(shard.count for shard in found) != math.prod(shape) or _overlap(found):
        raise ValueError(f"{name}: its shards overlap, or leave gaps")
    return ShardedEntry(name, dtype, shape, tuple(found))


def _overlap(shards: list[Shard]) -> bool:
    """Whether any two share elements; they are in the order of their offsets."""
    compared = 0
    for i, one in enumerate(shards):
        for other in shards[i + 1 :]:
            if one.offsets and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break
            compared += 1
            if compared > _MAX_COMPARED:
                raise ValueError(f"a tensor in {len(shards)} shards that cross each other")
            if all(
                a < b + size_b and b < a + size_a
                for a, size_a, b, size_b in zip(
                    one.offsets, one.sizes, other.offsets, other.sizes, strict=True
                )
            ):
                return True
    return False
