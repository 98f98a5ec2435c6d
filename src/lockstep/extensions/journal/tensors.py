"""Finds the tensors whose hashes go into the journal, and hashes this rank's part of them.

A tensor that all ranks have is hashed by one of them, its *owner*, so that the ranks share the
work. Of a sharded tensor, every rank hashes its own shard. Under HSDP several ranks have the same
shard, and only the first of them hashes it. The hash of a whole tensor is the sum of the hashes of
its shards.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.modules import plain_name_function
from lockstep.extensions.journal.hashing import SpreadHasher, TensorPart, mixed_numbers
from lockstep.torch_compat import is_sharded, local_box, to_local


class NamedParameters(NamedTuple):
    """The parameters and buffers of all prepared modules."""

    trained: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    buffers: dict[str, tuple[nn.Module, str]]
    """For each buffer, the module that it is registered in and its name there. The tensor itself is
    looked up when it is needed, because a forward pass may replace it."""


def collect_tensors(modules: Sequence[nn.Module]) -> NamedParameters:
    """Returns the tensors of modules, by names that are the same under every strategy."""
    found = NamedParameters(trained={}, frozen={}, buffers={})
    for number, module in enumerate(modules):
        to_plain_name = plain_name_function(module)
        prefix = f"model{number}." if len(modules) > 1 else ""

        for name, parameter in module.named_parameters():
            group = found.trained if parameter.requires_grad else found.frozen
            group[prefix + to_plain_name(name)] = parameter

        for name, place in _places_of_buffers(module).items():
            found.buffers[prefix + to_plain_name(name)] = place
    return found


def _places_of_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Returns the buffers of a module by name: for each, its submodule and its name there.

    The place is returned, and not the tensor, because a forward pass may replace the tensor. A
    buffer that is registered twice is listed once, under its first name. Buffers without values are
    left out.
    """
    places = {}
    known_ids: set[int] = set()
    for path, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            has_values = buffer.numel() > 0 and not buffer.is_meta
            if not has_values or id(buffer) in known_ids:
                continue
            known_ids.add(id(buffer))
            full_name = f"{path}.{name}" if path else name
            places[full_name] = (submodule, name)
    return places


def owners_by_size(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Returns the rank that hashes each tensor.

    The tensors are thought of as one long array of bytes that is cut into equal parts, one for each
    rank. A tensor belongs to the rank whose part contains its middle. For example, with 2 ranks and
    sizes `[4, 2, 2]`, the owners are `[0, 1, 1]`.

    Args:
        sizes: sizes of the tensors in bytes.
        num_ranks: number of ranks of the run.
    """
    total = max(1, sum(sizes))
    owners: list[int] = []
    size_before = 0
    for size in sizes:
        middle = size_before + size // 2
        owners.append(min(num_ranks - 1, middle * num_ranks // total))
        size_before += size
    return owners


class _OwnPart(NamedTuple):
    """A tensor or shard that this rank has to hash."""

    tensor: Tensor
    entry: int
    """The journal entry that its hash is added to."""
    first_byte: int
    """The byte of the whole tensor with which it begins."""
    factor: int
    """An odd number that its hash is multiplied by."""


class EntryHashes(NamedTuple):
    """The hashes that this rank contributes to the entries of a journal."""

    entries: tuple[int, ...]
    """The numbers of the entries, in ascending order."""
    hashes: Any
    """One hash for each of them, as `SpreadHasher.hashes` returns them."""


class HashedTensors:
    """Hashes this rank's part of a list of tensors.

    The tensors are examined only once, as long as every call gets the same ones.

    Args:
        rank: rank of this process.
        device: device of the hashes that are returned.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._tensors: list[Tensor] = []
        """The tensors of the last call."""
        self._parts: list[Tensor] = []
        """What this rank hashes of them: whole tensors, and its shards of the others."""
        self._hasher = SpreadHasher([], [], 0, device)
        self._entries: tuple[int, ...] = ()
        """The journal entries to which this rank contributes a hash of them, in ascending order."""

    def hashes(
        self,
        tensors: list[Tensor],
        *,
        entry_of_tensor: Sequence[int],
        owners: Sequence[int],
        keys: Sequence[str] = (),
    ) -> EntryHashes:
        """Hashes the tensors or shards that this rank has to hash.

        If the tensors are the same objects as in the last call, the other arguments are ignored:
        they must be the same, too.

        A journal has numbered entries with one hash each, for example an entry for each parameter.
        The hashes of all tensors of an entry are added up. Example: the optimizer has two tensors
        for parameter 0 and one for parameter 1, and rank 1 owns only the last of them. With
        `entry_of_tensor=[0, 0, 1]` and `owners=[0, 0, 1]`, rank 1 returns one hash, for the entries
        `(1,)`.

        Args:
            tensors: whole tensors or DTensors.
            entry_of_tensor: for each tensor, the number of its entry; ascending.
            owners: for each tensor, the rank that hashes it if all ranks have it.
            keys: for each tensor, a name that distinguishes it from the other tensors of the same
                entry; empty if every entry has one tensor only.
        """
        are_same_number = len(tensors) == len(self._tensors)
        are_same = are_same_number and all(map(is_, tensors, self._tensors))
        if not are_same:
            self._prepare(tensors, entry_of_tensor, owners, keys)

        # `_prepare` has kept the tensors themselves, or views of their shards. So `_parts` have the
        # present values.
        return EntryHashes(self._entries, self._hasher.hashes(self._parts))

    def _prepare(
        self,
        tensors: list[Tensor],
        entry_of_tensor: Sequence[int],
        owners: Sequence[int],
        keys: Sequence[str],
    ) -> None:
        """Finds the parts that this rank has to hash, and builds their hasher.

        It takes the arguments of `hashes`. Example: four tensors belong to the entries `[1, 2, 5,
        5]`, and this rank owns all but the first.
        """
        # The comments give the values of this example.
        self._tensors = tensors
        own_parts: list[_OwnPart] = []
        for index, tensor in enumerate(tensors):
            key = keys[index] if keys else None
            part = self._own_part(tensor, entry_of_tensor[index], owners[index], key)
            if part is not None:
                own_parts.append(part)

        self._entries = tuple(sorted({part.entry for part in own_parts}))  # (2, 5)
        # The hasher numbers its hashes without gaps: {2: 0, 5: 1}
        hash_index_of_entry = {entry: index for index, entry in enumerate(self._entries)}

        descriptions = [
            TensorPart(
                shape=tuple(part.tensor.shape),
                dtype=part.tensor.dtype,
                hash_index=hash_index_of_entry[part.entry],
                first_byte=part.first_byte,
                factor=part.factor,
            )
            for part in own_parts
        ]
        self._parts = [part.tensor for part in own_parts]
        devices = [part.device for part in self._parts]
        self._hasher = SpreadHasher(descriptions, devices, len(self._entries), self._device)

    def _own_part(self, tensor: Tensor, entry: int, owner: int, key: str | None) -> _OwnPart | None:
        """Returns the part of a tensor that this rank has to hash; None if it has none.

        Args:
            tensor: a whole tensor or a DTensor.
            entry: the journal entry that its hash is added to.
            owner: the rank that hashes it if all ranks have it.
            key: its name among the tensors of the entry; None if it is the only one.
        """
        if is_sharded(tensor):
            part = to_local(tensor)
            is_own = _is_first_copy(tensor)
            first_byte = _first_byte_of_shard(tensor)
        else:
            part = tensor
            is_own = owner == self._rank
            first_byte = 0
        if not is_own or part.numel() == 0:
            return None

        # With a factor of its own for each tensor, the sum also changes if two of them are swapped.
        factor = 1 if key is None else _factor_of_key(key)
        return _OwnPart(part, entry, first_byte, factor)


def _factor_of_key(key: str) -> int:
    """Returns an odd number that looks random, and depends on the key alone."""
    index_in_sequence = zlib.crc32(key.encode())
    (factor,) = mixed_numbers(index_in_sequence, 1)
    return int(factor)


def _is_first_copy(tensor: Any) -> bool:
    """Returns True if this rank is the first of the ranks that have the same shard of a DTensor."""
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate() and tensor.device_mesh.get_local_rank(dimension) != 0:
            return False
    return True


def _first_byte_of_shard(tensor: Any) -> int:
    """Returns at which byte of a DTensor this rank's shard begins. Shards consist of whole rows."""
    offsets, _ = local_box(tensor)
    if not offsets:  # a scalar
        return 0
    bytes_of_row: int = math.prod(tensor.shape[1:]) * tensor.element_size()
    return offsets[0] * bytes_of_row


class StateTensors(NamedTuple):
    """The tensors of the optimizers' state, in the order of the parameters."""

    tensors: list[Tensor]
    parameter_indices: list[int]
    """For each tensor, the index of the parameter that it belongs to."""
    keys: list[str]
    """For each tensor, its name in the state of the parameter, for example "exp_avg"."""


def state_tensors(
    optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]
) -> StateTensors:
    """Returns the tensors that the optimizers keep for the given parameters."""
    state = StateTensors(tensors=[], parameter_indices=[], keys=[])
    for index, parameter in enumerate(parameters):
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state.tensors.append(value)
                    state.parameter_indices.append(index)
                    state.keys.append(str(key))
    return state
