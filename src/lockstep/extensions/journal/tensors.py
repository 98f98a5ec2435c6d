"""The tensors of a run whose hashes go into the journal, and what this rank has of them.

Tensors that all ranks have are hashed by one rank each, so that together they hash everything once.
Of sharded tensors every rank hashes its shard; under HSDP, where several ranks have a shard, the
first of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.modules import plain_names
from lockstep.distributed.torch_compat import is_sharded, local_box, to_local
from lockstep.extensions.journal.hashing import TensorHasher, TensorPart, mixed_numbers


class NamedParameters(NamedTuple):
    """The parameters and buffers of all prepared modules."""

    trained: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    buffers: dict[str, tuple[nn.Module, str]]
    """For each buffer the module that it is registered in, and its name there: a forward pass may
    put another tensor in its place."""


def collect_tensors(modules: Sequence[nn.Module]) -> NamedParameters:
    """Returns the tensors of modules by names that are the same under every strategy."""
    found = NamedParameters({}, {}, {})
    for number, module in enumerate(modules):
        to_plain_name = plain_names(module)
        prefix = f"model{number}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            kind = found.trained if parameter.requires_grad else found.frozen
            kind[prefix + to_plain_name(name)] = parameter
        known_ids: set[int] = set()
        for module_name, part in module.named_modules():
            for name, buffer in part.named_buffers(recurse=False):
                if buffer.numel() == 0 or buffer.is_meta or id(buffer) in known_ids:
                    continue
                known_ids.add(id(buffer))
                full_name = f"{module_name}.{name}" if module_name else name
                found.buffers[prefix + to_plain_name(full_name)] = (part, name)
    return found


def owners_by_size(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Returns the rank that hashes each tensor: neighbours together, equal sizes on each rank.

    Args:
        sizes: of the tensors, in bytes.
        num_ranks: of the run.
    """
    total = max(1, sum(sizes))
    owners: list[int] = []
    size_before = 0
    for size in sizes:
        middle = size_before + size // 2
        owners.append(min(num_ranks - 1, middle * num_ranks // total))
        size_before += size
    return owners


class HashedTensors:
    """Hashes the tensors that this rank has to hash, of those that are given.

    What was found out about tensors is used again as long as the same ones are given.

    Args:
        rank: of this process.
        device: where the hashes are computed with.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._tensors: list[Tensor] = []
        """The tensors that were given last."""
        self._own_parts: list[Tensor] = []
        self._hashers: list[tuple[TensorHasher, list[int]]] = []
        """For each device that tensors are on a hasher, and which own parts it gets."""
        self.results: tuple[int, ...] = ()
        """The results that this rank has hashes of, in order."""

    def hashes(
        self, tensors: list[Tensor], results: Sequence[int], owners: Sequence[int], keys: list[str]
    ) -> Any:
        """Returns a hash for each of `results`, an attribute that this call may change.

        Args:
            tensors: whole ones or shards.
            results: for each tensor the number of the result that it belongs to, in order.
            owners: the rank that hashes each, if all ranks have it.
            keys: what tells several tensors of a result from each other; empty: nothing does.

        Returns:
            As `TensorHasher.hashes`.
        """
        is_known = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        if not is_known:
            self._prepare(tensors, results, owners, keys)
        total: Any = None
        for hasher, places in self._hashers:
            hashes = hasher.hashes([self._own_parts[place] for place in places])
            if isinstance(hashes, np.ndarray) and self._device.type != "cpu":
                hashes = torch.from_numpy(hashes).to(self._device)
            total = hashes if total is None else total + hashes
        if total is not None:
            return total
        if self._device.type == "cpu":
            return np.zeros(0, np.int64)
        return torch.zeros(0, dtype=torch.int64, device=self._device)

    def _prepare(
        self, tensors: list[Tensor], results: Sequence[int], owners: Sequence[int], keys: list[str]
    ) -> None:
        """Finds out what this rank has to hash of tensors."""
        self._tensors = tensors
        self._own_parts = []
        shards: list[tuple[int, int]] = []  # the result, and the first byte
        factors: list[int] = []
        for place, tensor in enumerate(tensors):
            if is_sharded(tensor):
                part = to_local(tensor)
                is_own, first_byte = _place_of_shard(tensor)
            else:
                part = tensor
                is_own = owners[place] == self._rank
                first_byte = 0
            if not is_own or part.numel() == 0:
                continue
            self._own_parts.append(part)
            shards.append((results[place], first_byte))
            factor = 1
            if keys:
                factor = int(mixed_numbers(zlib.crc32(keys[place].encode()), 1)[0])
            factors.append(factor)
        self.results = tuple(sorted({result for result, _ in shards}))
        place_of_result = {result: place for place, result in enumerate(self.results)}
        self._hashers = []
        for device in sorted({part.device for part in self._own_parts}, key=str):
            parts: list[TensorPart] = []
            places: list[int] = []
            for place, (result, first_byte) in enumerate(shards):
                own = self._own_parts[place]
                if own.device == device:
                    places.append(place)
                    parts.append(
                        TensorPart(
                            tuple(own.shape),
                            own.dtype,
                            place_of_result[result],
                            first_byte,
                            factors[place],
                        )
                    )
            self._hashers.append((TensorHasher(parts, len(self.results), device), places))


def _place_of_shard(tensor: Any) -> tuple[bool, int]:
    """Returns whether this rank hashes its shard of a DTensor, and the shard's first byte.

    The shards are of whole rows. Along the other dimensions of the mesh ranks have copies.
    """
    is_own = True
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate() and tensor.device_mesh.get_local_rank(dimension) != 0:
            is_own = False
    offsets, _ = local_box(tensor)
    if not offsets:  # a scalar
        return is_own, 0
    bytes_of_row = math.prod(tensor.shape[1:]) * tensor.element_size()
    return is_own, offsets[0] * bytes_of_row


def state_tensors(
    optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]
) -> tuple[list[Tensor], list[int], list[str]]:
    """Returns the tensors of the optimizers' state.

    Args:
        optimizers: the user's.
        parameters: the ones whose state it is.

    Returns:
        The tensors, for each the number of its parameter, in order, and its name in the state.
    """
    tensors: list[Tensor] = []
    numbers: list[int] = []
    keys: list[str] = []
    for number, parameter in enumerate(parameters):
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors.append(value)
                    numbers.append(number)
                    keys.append(str(key))
    return tensors, numbers, keys
