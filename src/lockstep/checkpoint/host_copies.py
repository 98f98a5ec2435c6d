"""Copies of tensors in host memory, which stay as they are while the training goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.encoding import on_cpu
from lockstep.checkpoint.whole import memory_of


class HostCopies:
    """The memory for the copies of one state, used again for every save.

    Fresh memory costs more than the copying itself: each page is handed out by the kernel when it
    is first written to. (1 GB on a machine of two cores: 4.5 GB a second into fresh memory, 32 into
    memory that was used before.) For tensors on a GPU it is page-locked.
    """

    def __init__(self) -> None:
        self._gpus: set[torch.device] = set()
        """Those that copy now: one process may have spread its model over several."""
        self._buffers: list[Tensor | None] = []
        self._next = 0
        self._own: set[int] = set()

    def begin(self, states: Iterable[Any]) -> None:
        """Starts a new set of copies; the former ones are given up.

        Args:
            states: nests that hold the training's own tensors. What comes later and is none of
                these was made for the checkpoint alone, and is not copied again.
        """
        self._own = set().union(*map(memory_of, states))
        self._next = 0

    def take(self, value: Tensor) -> Tensor:
        """A tensor's values in contiguous CPU memory; complete when `finish` has returned."""
        if value.device.type == "cpu" and value.untyped_storage().data_ptr() not in self._own:
            return on_cpu(value)
        place = self._next
        self._next += 1
        if place == len(self._buffers):
            self._buffers.append(None)
        buffer = self._buffers[place]
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            self._buffers[place] = buffer = None  # gone before there is another one
            pinned = value.is_cuda and value.numel() > 0
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            self._buffers[place] = buffer
        if value.is_cuda:
            self._gpus.add(value.device)
        return buffer.copy_(value.detach(), non_blocking=value.is_cuda)

    def finish(self) -> None:
        """Returns when the copies are complete; memory that was not used again goes."""
        while self._gpus:
            torch.cuda.current_stream(self._gpus.pop()).synchronize()
        del self._buffers[self._next :]
