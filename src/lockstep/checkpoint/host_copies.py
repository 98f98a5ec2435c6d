"""Host memory for the copies of a state, used again for every save.

The copies of a save are numbered. A copy uses the *buffer* of the copy with the same number in the
previous save, if its shape and dtype fit.

Fresh memory costs more than the copying itself, because the kernel hands out each page when it is
first written to. (1 GB on a machine of two cores: 4.5 GB a second into fresh memory, 32 into memory
that was used before.) For tensors on a GPU the memory is page-locked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.encoding import on_cpu
from lockstep.checkpoint.sharding import storage_addresses


class HostCopies:
    """Copies tensors to host memory.

    A save calls `begin`, then `copy` for each tensor, then `finish`.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        """The memory of each copy, by the number of the copy."""
        self._next_number = 0
        """The number of the next copy of this save, from 0."""
        self._addresses_in_use: set[int] = set()
        """The addresses of the storages that the training goes on to change."""
        self._copying_gpus: set[torch.device] = set()
        """The GPUs with copies that may not be complete yet. A model may be on several."""

    def begin(self, states: Iterable[Any]) -> None:
        """Starts a new set of copies. The memory of the former copies will be overwritten.

        Args:
            states: pytrees with the training's own tensors. Any other tensor was made for the
                checkpoint alone, so it is not copied again.
        """
        self._addresses_in_use = set()
        for state in states:
            self._addresses_in_use |= storage_addresses(state)
        self._next_number = 0

    def copy(self, value: Tensor) -> Tensor:
        """Returns the values of a tensor in contiguous CPU memory.

        The values of a GPU tensor are complete only after `finish`.
        """
        if value.device.type == "cpu":
            address = value.untyped_storage().data_ptr()
            if address not in self._addresses_in_use:
                # It was made for the checkpoint alone, so nobody changes it.
                return on_cpu(value)
        number = self._next_number
        self._next_number += 1
        # The buffer of the copy with this number in the previous save.
        buffer = self._buffers.pop(number, None)
        fits = buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype
        if buffer is None or not fits:
            buffer = None  # frees its memory before new memory is asked for
            pinned = value.is_cuda and value.numel() > 0
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        self._buffers[number] = buffer
        if value.is_cuda:
            self._copying_gpus.add(value.device)
        return buffer.copy_(value.detach(), non_blocking=value.is_cuda)

    def finish(self) -> None:
        """Waits until all copies are complete, and frees memory that this save has not used."""
        for gpu in self._copying_gpus:
            torch.cuda.current_stream(gpu).synchronize()
        self._copying_gpus.clear()
        self._buffers = {number: self._buffers[number] for number in range(self._next_number)}
