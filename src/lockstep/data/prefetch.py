"""Moves batches to the device one ahead, on a stream of its own: copies hide behind work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.data.nest import map_tensors, move, pin


def to_device(batches: Iterator[Any], device: torch.device, *, pin_memory: bool) -> Iterator[Any]:
    """The batches on the device, in order; on CUDA each copy is started one batch early.

    Args:
        batches: from the loader, on the CPU.
        device: where they are needed.
        pin_memory: page-lock batches first, without which a copy cannot overlap with anything.
    """
    if device.type != "cuda":
        # Nothing to hide: no look-ahead, so nothing is read that is not used.
        return (batch if device.type == "cpu" else move(batch, device) for batch in batches)
    return _one_ahead(batches, device, pin_memory)


def _one_ahead(batches: Iterator[Any], device: torch.device, pin_memory: bool) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start() -> Any:
        batch = next(batches)
        if pin_memory:
            batch = pin(batch)
        with torch.cuda.stream(stream):
            return move(batch, device)

    def used_here(tensor: Tensor) -> Tensor:
        # The allocator must not hand the memory out again before this stream is done with it.
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    try:
        ahead = start()
    except StopIteration:
        return
    while True:
        torch.cuda.current_stream(device).wait_stream(stream)
        ready = map_tensors(ahead, used_here)
        try:
            ahead = start()
        except StopIteration:
            yield ready
            return
        yield ready
