"""Moves batches to the device one ahead, on a stream of its own: copies hide behind work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.data.nest import all_dense, map_tensors, move, pin


def to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the device, in order; on CUDA each copy is started one batch early.

    It is started from page-locked memory, without which a copy cannot overlap with anything.
    """
    if device.type != "cuda":
        # Nothing to hide: no look-ahead, so nothing is read that is not used.
        return (batch if device.type == "cpu" else move(batch, device) for batch in batches)
    return _one_ahead(batches, device)


def _one_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copies batch t + 1 while batch t is worked on.

    Only batches of dense tensors: what graph batches, sparse tensors and the like hold inside
    cannot be marked as used by a second stream, so they are copied on the present one when needed.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start() -> tuple[Any, bool]:
        batch = pin(next(batches))
        if not all_dense(batch):
            return batch, False
        with torch.cuda.stream(stream):
            return move(batch, device), True

    def used_here(tensor: Tensor) -> Tensor:
        # The allocator must not hand the memory out again before this stream is done with it.
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    try:
        ahead, moved = start()
    except StopIteration:
        return
    while True:
        if moved:
            torch.cuda.current_stream(device).wait_stream(stream)
            ready = map_tensors(ahead, used_here)
        else:
            ready = move(ahead, device)
        try:
            ahead, moved = start()
        except StopIteration:
            yield ready
            return
        yield ready
