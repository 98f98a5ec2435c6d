"""Provides the host memory into which states are copied, and uses it again for every save.

Allocating memory costs more than the copying itself, because the kernel provides each page when it
is first written to. (1 GB on a machine of two cores: 4.5 GB a second into new memory, 32 into
memory that was used before.) For tensors on a GPU the memory is *pinned* (page-locked), which costs
still more.

The copies of a save are packed into a few large *chunks*. Torch rounds each allocation of pinned
memory up to a power of two, so separate allocations could double the memory that a save takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.batch.indices import ceil_div
from lockstep.checkpoint.encoding import on_cpu
from lockstep.checkpoint.sharding import storage_addresses

FIRST_CHUNK_BYTES = 2**20
MAX_CHUNK_BYTES = 2**28
"""Chunks double in size up to this, so that a small model pins little and a large one has few. Only
a larger tensor gets a larger chunk."""
ALIGNMENT_BYTES = 64


class HostCopies:
    """Copies tensors to host memory.

    A save calls `begin`, then `copy` for each tensor, then `finish`.
    """

    def __init__(self) -> None:
        self._memory = _ReusedMemory(pinned=False)
        self._pinned_memory = _ReusedMemory(pinned=True)
        self._addresses_of_training: set[int] = set()
        """The addresses of the storages that the training will change while the copies are
        written."""
        self._copying_gpus: set[torch.device] = set()
        """The GPUs with copies that may not be complete yet. A model may be on several."""

    def begin(self, states: Iterable[Any]) -> None:
        """Starts a new set of copies. The memory of the former copies will be overwritten.

        Args:
            states: pytrees with the training's own tensors. A tensor that is not in them was made
                only for the checkpoint, so it need not be copied.
        """
        self._addresses_of_training = set()
        for state in states:
            self._addresses_of_training |= storage_addresses(state)
        self._memory.begin()
        self._pinned_memory.begin()

    def copy(self, value: Tensor) -> Tensor:
        """Returns the values of a tensor in contiguous CPU memory that the training never changes.

        The values of a GPU tensor are complete only after `finish`.
        """
        if value.is_cuda:
            self._copying_gpus.add(value.device)
            buffer = self._pinned_memory.take(value.shape, value.dtype)
            return buffer.copy_(value.detach(), non_blocking=True)

        is_made_for_checkpoint = (
            value.device.type == "cpu"
            and value.untyped_storage().data_ptr() not in self._addresses_of_training
        )
        if is_made_for_checkpoint:
            # Nothing will change it, so it is only copied if necessary, e.g. if it is not
            # contiguous.
            return on_cpu(value)

        buffer = self._memory.take(value.shape, value.dtype)
        return buffer.copy_(value.detach())

    def finish(self) -> None:
        """Waits until all copies are complete, and frees the memory that this save has not used."""
        for gpu in self._copying_gpus:
            torch.cuda.current_stream(gpu).synchronize()
        self._copying_gpus.clear()
        self._memory.free_unused()
        self._pinned_memory.free_unused()


class _Chunk:
    """A block of memory into which tensors are packed one after the other."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()
        self.num_bytes = num_bytes
        self.num_used = 0
        """How many of the bytes are in use, counted from the beginning."""


class _ReusedMemory:
    """Memory for the tensors of a save, which is used again for the next save.

    If the next save has tensors of the same sizes in the same order, they get the same memory.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._chunks: list[_Chunk] = []

    def begin(self) -> None:
        """Hands out all memory again, from the beginning."""
        for chunk in self._chunks:
            chunk.num_used = 0

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns a contiguous tensor that shares no memory with the others of this save."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)

        num_bytes = count * dtype.itemsize
        chunk = self._chunk_with_room(num_bytes)

        # `encode`, which gets the tensor next, clones every tensor that is only a part of its
        # storage. So this is no slice of a large tensor: `frombuffer` makes a storage of just the
        # bytes that the tensor fills.
        flat = torch.frombuffer(chunk.memory, dtype=dtype, count=count, offset=chunk.num_used)
        chunk.num_used += ceil_div(num_bytes, ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return flat.view(shape)

    def _chunk_with_room(self, num_bytes: int) -> _Chunk:
        """Returns the first chunk with enough room for `num_bytes`, or a new chunk."""
        for chunk in self._chunks:
            num_free = chunk.num_bytes - chunk.num_used
            if num_free >= num_bytes:
                return chunk

        # 1 MB, 2 MB, 4 MB, ... up to MAX_CHUNK_BYTES.
        next_size = FIRST_CHUNK_BYTES * 2 ** len(self._chunks)
        chunk_bytes = min(next_size, MAX_CHUNK_BYTES)
        # A larger tensor gets a chunk of the next power of two. Torch would allocate as much
        # anyway, and other tensors can use the rest.
        while chunk_bytes < num_bytes:
            chunk_bytes *= 2

        chunk = _Chunk(chunk_bytes, self._pinned)
        self._chunks.append(chunk)
        return chunk

    def free_unused(self) -> None:
        """Frees the chunks that hold no tensor of this save."""
        self._chunks = [chunk for chunk in self._chunks if chunk.num_used > 0]
