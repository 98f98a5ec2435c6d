"""Moves batches to the device, on a GPU one batch ahead: the copy hides behind the work.

Batch t + 1 is copied while the training works on batch t. It is copied from page-locked memory,
without which a copy cannot overlap with work, on a stream of its own. That is done for batches of
dense tensors only. What other objects (graph batches, sparse tensors) hold inside cannot be marked
as used by a second stream, so they are copied on the current stream when they are needed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lockstep.batch.pytree import all_dense, map_tensors, move, pin

T = TypeVar("T")


def to_device(
    pairs: Iterable[tuple[T, Any]], device: torch.device
) -> Generator[tuple[T, Any], None, None]:
    """Yields batches on the device, in order.

    Args:
        pairs: batches, each after something that describes it, which is yielded with it.
        device: where they are moved to.
    """
    if device.type == "cuda":
        return _copy_one_ahead(pairs, device)
    return _move_when_needed(pairs, device)


def _move_when_needed(
    pairs: Iterable[tuple[T, Any]], device: torch.device
) -> Generator[tuple[T, Any], None, None]:
    """Yields batches on a device other than a GPU. Nothing is read that is not used."""
    for description, batch in pairs:
        yield description, batch if device.type == "cpu" else move(batch, device)


def _copy_one_ahead(
    pairs: Iterable[tuple[T, Any]], device: torch.device
) -> Generator[tuple[T, Any], None, None]:
    """Yields batches on a GPU, while the next one is copied.

    Args:
        pairs: batches, each after something that describes it, which is yielded with it.
        device: the GPU.
    """
    copier = _Copier(device)
    previous: tuple[T, _StartedCopy] | None = None
    for description, batch in pairs:
        if previous is None:
            previous = description, copier.start(batch)
            continue
        previous_description, previous_copy = previous
        # This waits for the copy stream, so it comes before the next copy starts there.
        previous_batch = copier.finish(previous_copy)
        previous = description, copier.start(batch)
        yield previous_description, previous_batch
    if previous is not None:
        previous_description, previous_copy = previous
        yield previous_description, copier.finish(previous_copy)


class _StartedCopy(NamedTuple):
    """A batch that is being copied to the GPU, or waits to be copied when it is needed."""

    batch: Any
    is_on_device: bool
    """True if the batch is on the device when the copy stream is done."""


class _Copier:
    """Copies batches to a GPU on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batch: Any) -> _StartedCopy:
        """Starts to copy a batch, if it has dense tensors only."""
        batch = pin(batch)
        if not all_dense(batch):
            return _StartedCopy(batch, is_on_device=False)
        with torch.cuda.stream(self._copy_stream):
            return _StartedCopy(move(batch, self._device), is_on_device=True)

    def finish(self, copy: _StartedCopy) -> Any:
        """Returns the batch on the device, ready for the current stream."""
        if not copy.is_on_device:
            return move(copy.batch, self._device)
        torch.cuda.current_stream(self._device).wait_stream(self._copy_stream)
        return map_tensors(copy.batch, self._mark_as_used)

    def _mark_as_used(self, tensor: Tensor) -> Tensor:
        """Keeps the allocator from reusing the memory before the current stream is done with it."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor
