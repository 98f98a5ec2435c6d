"""Moves batches to the device. On a GPU the next batch is copied while the current one is trained.

The copy runs on its own CUDA stream, from page-locked (*pinned*) memory, because other copies
cannot overlap with computation. This is only possible for batches of dense tensors. The tensors
inside of other objects (graph batches, sparse tensors) cannot be marked as used by a second stream,
so these batches are copied on the current stream when they are needed.

Pinning copies a batch within host memory. A large batch is pinned in a thread, so that the training
thread can go on. `DataLoader(pin_memory=True)` also has such a thread, but only with worker
processes; it does not support dataclasses, and pins all batches that the workers have read ahead.
Here only the next batch is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lockstep.batch.pytree import all_dense, bytes_to_pin, map_tensors, move, pin
from lockstep.distributed.streams import side_stream, take_gpu_in_this_thread

T = TypeVar("T")

MIN_BYTES_FOR_THREAD = 2**20
"""A smaller batch is pinned by the training thread: passing work to another thread and back takes
25 to 35 microseconds, about as long as copying a mebibyte (measured on a CPU)."""


def to_device(
    pairs: Iterable[tuple[T, Any]], device: torch.device
) -> Generator[tuple[T, Any], None, None]:
    """Moves batches to a device, and yields them in order.

    Args:
        pairs: pairs of a description and a batch. The description is yielded unchanged.
        device: the device.
    """
    if device.type == "cuda":
        return _copy_one_ahead(pairs, device)
    return _move_when_needed(pairs, device)


def _move_when_needed(
    pairs: Iterable[tuple[T, Any]], device: torch.device
) -> Generator[tuple[T, Any], None, None]:
    """Yields batches on a device other than a GPU; no batch is read before it is needed."""
    for description, batch in pairs:
        yield description, batch if device.type == "cpu" else move(batch, device)


def _copy_one_ahead(
    pairs: Iterable[tuple[T, Any]], device: torch.device
) -> Generator[tuple[T, Any], None, None]:
    """Yields batches on a GPU, and copies the next one while the caller uses the current one.

    Args:
        pairs: pairs of a description and a batch. The description is yielded unchanged.
        device: the GPU.
    """
    with _Copier(device) as copier:
        previous: tuple[T, _StartedCopy] | None = None
        for description, batch in pairs:
            # Start to pin and copy this batch, then let the caller use the previous one.
            pending_copy = copier.start(batch)
            if previous is not None:
                previous_description, previous_copy = previous
                yield previous_description, copier.finish(previous_copy)

            # Wait until this batch is pinned before the next one is read, because the next one may
            # reuse its memory. The copy to the GPU has then been started, and goes on.
            started_copy = pending_copy.wait_until_pinned()
            previous = (description, started_copy)

        if previous is not None:
            previous_description, previous_copy = previous
            yield previous_description, copier.finish(previous_copy)


class _StartedCopy(NamedTuple):
    """A batch that is being copied to the GPU, or waits to be copied when it is needed."""

    batch: Any
    copied_event: torch.cuda.Event | None
    """Reached when the batch is on the device; None if the batch is still in host memory."""


class _PendingCopy(NamedTuple):
    """A batch that may still have to be pinned before its copy to the GPU starts."""

    wait_until_pinned: Callable[[], _StartedCopy]
    """Waits until the batch is pinned, and returns the started copy. Raises errors of pinning."""


class _Copier:
    """Copies batches to a GPU on its own stream. On exit, this context manager ends its thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_stream = side_stream(device, "copies of batches")
        self._executor: ThreadPoolExecutor | None = None

    def __enter__(self) -> _Copier:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def start(self, batch: Any) -> _PendingCopy:
        """Starts to pin and copy a batch, in a thread if it is large."""
        if bytes_to_pin(batch) < MIN_BYTES_FOR_THREAD:
            started_copy = self._pin_and_copy(batch)
            return _PendingCopy(lambda: started_copy)  # there is nothing left to wait for

        if self._executor is None:
            self._executor = ThreadPoolExecutor(
                max_workers=1,
                thread_name_prefix="lockstep-pin",
                initializer=take_gpu_in_this_thread,
                initargs=(self._device,),
            )

        future = self._executor.submit(self._pin_and_copy, batch)
        return _PendingCopy(future.result)

    def _pin_and_copy(self, batch: Any) -> _StartedCopy:
        """Pins a batch, and starts to copy it to the GPU if it has only dense tensors."""
        pinned = pin(batch)
        if not all_dense(pinned):
            return _StartedCopy(pinned, copied_event=None)  # `finish` copies it

        with torch.cuda.stream(self._copy_stream):
            batch_on_device = move(pinned, self._device)
        copied_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied_event.record(self._copy_stream)
        return _StartedCopy(batch_on_device, copied_event)

    def finish(self, started: _StartedCopy) -> Any:
        """Returns the batch on the device; work on the current stream waits for the copy."""
        if started.copied_event is None:
            return move(started.batch, self._device)
        torch.cuda.current_stream(self._device).wait_event(started.copied_event)
        return map_tensors(started.batch, self._mark_as_used)

    def _mark_as_used(self, tensor: Tensor) -> Tensor:
        """Keeps the allocator from reusing the memory before the current stream is done with it."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor
