"""Tensors in shards, and states that are sharded over the ranks: storing and resharding.

A shard is a box: where in its tensor it begins, and its extents. Together the shards of a sound
tensor are the tensor, once, and any region of it can be read.

A rank stores its own shards of DTensors; rank 0 stores what all ranks have alike. What one rank has
and another has not, as under a pipeline, stands on the other on the meta device (in the state of a
module) or is left out (in that of an optimizer); the first rank that has it stores it. Whatever
strategy wrote a state, any strategy on any number of ranks reads it: each rank reads the regions
that its own shards are of.

Communication: none.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, strided
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.batch.pytree import tensors
from lockstep.distributed.torch_compat import (
    is_sharded,
    local_box,
    own_part,
    set_state_dict_metadata,
    state_dict_metadata,
)

Shape = tuple[int, ...]

_MAX_COMPARED = 5_000_000  # pairs of shards


def as_shape(value: Any) -> Shape:
    """Numbers that stand in a file as the extents or the offsets of a tensor.

    Raises:
        ValueError: no tensor has such.
    """
    sound = isinstance(value, list | tuple) and len(value) <= 64
    # Larger extents than these only take time to multiply.
    if not sound or not all(type(item) is int and 0 <= item < 2**62 for item in value):
        raise ValueError(f"a shape or a place of {str(value)[:80]}")
    return tuple(value)


def dtype_name(dtype: torch.dtype) -> str:
    """Such as `float32`."""
    return str(dtype).removeprefix("torch.")


class LazyTensor:
    """A tensor of which dtype and shape are known, and values are read only where asked for."""

    dtype: torch.dtype
    shape: Shape
    file: Path
    """Of one that is in a file."""
    part: Callable[[int, int], Tensor]
    """The elements from one index to before another, flat and on the CPU. CheckpointError: they
    cannot be read."""

    def check(self) -> None:
        """Raises CheckpointError where it is not what it should be; reads no values."""

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


class HeldTensor(LazyTensor):
    """One that is in memory, on any device, or is mapped."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)

    def part(self, begin: int, end: int) -> Tensor:
        """The elements from `begin` to before `end`, flat and on the CPU."""
        return self._tensor.resolve_conj().resolve_neg().cpu().reshape(-1)[begin:end]


class Shard(NamedTuple):
    """A part of a tensor."""

    offsets: Shape
    values: LazyTensor

    @property
    def sizes(self) -> Shape:
        """Its extents."""
        return self.values.shape


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
        for shard in self.shards:
            if (shard.offsets, shard.sizes) == (offsets, sizes):
                return shard.values.full()
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
            values = shard.values.part(first * row, last * row)
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
            return self.shards[0].values.part(begin, end)
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
            shard.values.check()


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
    if sum(shard.values.count for shard in found) != math.prod(shape) or _overlap(found):
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


def is_meta(value: object) -> bool:
    """Whether it is a tensor whose values are on another rank."""
    return isinstance(value, Tensor) and value.is_meta


def replica(tensor: Any) -> bool:
    """Whether another rank stores the same values of a DTensor; one that is plain has none."""
    return is_sharded(tensor) and any(
        placement.is_replicate() and coordinate
        for placement, coordinate in zip(
            tensor.placements, tensor.device_mesh.get_coordinate(), strict=True
        )
    )


def shards_only(state: Any) -> Any:
    """The same pytree with None for all that is no DTensor."""
    return map_leaves(lambda leaf: leaf if is_sharded(leaf) else None, state)


def stored_entries(
    state: Mapping[str, Any], held: Sequence[Collection[int | str] | None], rank: int
) -> dict[str, Any]:
    """Of a state of which each rank has a part: what this rank stores, the first that has it.

    Args:
        state: of a module, with what another rank has on the meta device; or of an optimizer, with
            an entry for each parameter that this rank has under `state`.
        held: of every rank, the keys of the entries that it has (None: all).
        rank: this one.

    Returns:
        The state with None for what another rank stores of a module, and without what another
        stores of an optimizer.
    """
    sets = [None if mine is None else frozenset(mine) for mine in held]

    def is_here(key: int | str) -> bool:
        first = (other for other, mine in enumerate(sets) if mine is None or key in mine)
        return next(first, 0) == rank

    if isinstance(state.get("state"), dict):
        own = {key: value for key, value in state["state"].items() if is_here(key)}
        return {**state, "state": own}
    found = OrderedDict((key, value if is_here(key) else None) for key, value in state.items())
    set_state_dict_metadata(found, state_dict_metadata(state))
    return found


def reshard_optimizer(state: Any, optimizer: Optimizer) -> Any:
    """An optimizer's state, sharded as its parameters are.

    What has another shape than its parameter, such as a count of steps, is not sharded.
    """
    parameters = {
        index: parameter
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=False)
        for index, parameter in zip(saved["params"], group["params"], strict=False)
    }

    def of_parameter(index: Any, entry: Any) -> Any:
        return map_leaves(lambda leaf: _in_memory(resharded(leaf, parameters.get(index))), entry)

    return {
        **state,
        "state": {index: of_parameter(index, entry) for index, entry in state["state"].items()},
    }


def in_memory(state: Any) -> Any:
    """A copy of a state that was read: without shards, and of no file that will go."""
    copies: dict[int, Any] = {}  # what is one tensor remains one

    def copied(leaf: Any) -> Any:
        if id(leaf) not in copies:
            copies[id(leaf)] = _in_memory(leaf)
        return copies[id(leaf)]

    return map_leaves(copied, state)


def _in_memory(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.full()
    plain = isinstance(value, Tensor) and not is_sharded(value) and not value.is_meta
    return value.clone() if plain else value


def resharded(value: Any, own: Any) -> Any:
    """What was read, sharded as this run's own tensor is; None: that is not known."""
    if is_meta(own):
        return own
    known = isinstance(value, Tensor | ShardedEntry)
    if not (known and is_sharded(own) and tuple(value.shape) == tuple(own.shape)):
        return value.full() if isinstance(value, ShardedEntry) else value
    from torch.distributed.tensor import DTensor  # loaded already by who made `own`

    offsets, sizes = local_box(own)
    if isinstance(value, ShardedEntry):
        local = value.region(offsets, sizes)
    else:
        box = [slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)]
        local = value[tuple(box)].clone()  # not of a mapped file, which may go
    return DTensor.from_local(
        local.to(own.device),
        own.device_mesh,
        own.placements,
        run_check=False,
        shape=own.shape,
        stride=own.stride(),
    )


def memory_of(tree: Any) -> set[int]:
    """Where the storages of the tensors in a pytree, or of this rank's shards, begin in memory."""
    plain = (t for t in tensors(tree) if t.layout is strided and not is_lazy(t))
    return {own_part(tensor).untyped_storage().data_ptr() for tensor in plain}


def view_of(tensor: Any) -> tuple[object, ...] | None:
    """What two tensors have alike if they are one view of one memory; None: it has none.

    The padded memory of a sharded parameter is never empty, so tied ones are seen on every rank.
    """
    local = own_part(tensor)
    begin = local.untyped_storage().data_ptr()
    place = begin, local.storage_offset(), local.is_conj(), local.is_neg()
    form = tensor.device, tensor.shape, tensor.stride(), tensor.dtype
    return (*place, *form) if begin else None


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same dictionaries, lists and tuples, with each value in them changed."""
    if isinstance(tree, dict):
        result: Any = tree.copy()  # of its own kind
        set_state_dict_metadata(result, state_dict_metadata(tree))
        for key, value in tree.items():
            result[key] = map_leaves(change, value)
        return result
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(change, value) for value in tree)
    return change(tree)
